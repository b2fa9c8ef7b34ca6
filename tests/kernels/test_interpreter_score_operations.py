"""The operations of score functions and their derivatives, as the kernels compute them.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_score_operations.py
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl

from flashtile.gpu.score_source import GRADIENT, SCORE, function_of, source_of
from flashtile.score_mod import derivative, described

N = 128
SHARE = torch.tensor(0.7)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "round": lambda s, j: s.round() + s * s,
    "round to a decimal": lambda s, j: s.round(decimals=1) + s,
    "trunc": lambda s, j: s.trunc() - s.frac(),
    "rounded integers": lambda s, j: s + j.round() + j.trunc(),
    "lerp": lambda s, j: torch.lerp(s, s * s, 0.3) + torch.lerp(s, -s, s.sigmoid()),
    "addcmul": lambda s, j: torch.addcmul(s, s.tanh(), s, value=0.5),
    "tan": lambda s, j: (s / 4).tan(),
    "sinh and cosh": lambda s, j: s.sinh() * s.cosh(),
    "atan": lambda s, j: s.atan(),
    "atan2": lambda s, j: torch.atan2(s, s.cos()) + torch.atan2(s * 0 + 1, j - 64.0),
    "asin and acos": lambda s, j: (s / 9).asin() + 2 * (s / 9).acos(),
    "asinh": lambda s, j: s.asinh(),
    "acosh": lambda s, j: (s.abs() + 1.5).acosh(),
    "atanh": lambda s, j: (s / 9).atanh(),
    "log10": lambda s, j: (s.abs() + 1).log10(),
    "erfc": lambda s, j: s.erfc(),
    "hypot": lambda s, j: torch.hypot(s, s - 3),
    "fmod": lambda s, j: torch.fmod(s, 0.7) + torch.fmod(j - 64, 5),
    "quotients to 0": lambda s, j: (
        torch.div(s, 0.3, rounding_mode="trunc") + torch.div(j - 64, 5, rounding_mode="trunc")
    ),
    "fmax and fmin": lambda s, j: torch.fmax(s, s.log()) - torch.fmin(1 - s * s, s),
    "powers": lambda s, j: s**5 + (s.abs() + 1) ** -2 + (s.abs() + 1) ** -0.5,
    "powers of a number": lambda s, j: 2.0 ** (-j / 8) + 0.3**s,
    "powers of an integer": lambda s, j: s - (j - 64) ** 2 / 512 + (j - 64) ** 7 / 1e12,
    "gelu": lambda s, j: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "threshold": lambda s, j: F.threshold(s, 0.1, 2.0),
    "logit": lambda s, j: s.sigmoid().logit(0.01),
    "logaddexp": lambda s, j: torch.logaddexp(s, 1 - s),
    "infinities": lambda s, j: s.log().nan_to_num(0.5) + torch.where((1 / j).isinf(), 1.0, s),
    "angles": lambda s, j: s.deg2rad() + s.rad2deg(),
}


@triton.jit
def numbers_kernel(out_ptr, s_ptr, g_ptr, function: tl.constexpr, IS_GRADIENT: tl.constexpr):
    j = tl.arange(0, 128)[None, :]
    s = tl.load(s_ptr + j)
    if IS_GRADIENT:
        found = function(s, 0, 0, 0, j, None, tl.load(g_ptr + j), None, None)
    else:
        found = function(s, 0, 0, 0, j, None, None, None)
    tl.store(out_ptr + j, found)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_and_their_derivatives(name: str) -> None:
    s = torch.linspace(-8, 8, N)
    s[40:48] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, -0.49999997])
    g, j = torch.linspace(1, 2, N), torch.arange(N)
    leaf = s.double().requires_grad_()
    wanted = FUNCTIONS[name](leaf, j)
    (gradient,) = torch.autograd.grad(wanted, leaf, g.double())
    text = described(
        lambda s, b, h, i, j: FUNCTIONS[name](s, j), torch.float32, torch.device("cpu")
    ).program
    of_score = derivative(text, torch.float32, of_captured=False)
    for kind, program, want in ((SCORE, text, wanted), (GRADIENT, of_score, gradient)):
        out = torch.full((N,), torch.nan)
        function = function_of(source_of(program, kind))
        numbers_kernel[(1,)](out, s, g, function, kind == GRADIENT)
        torch.testing.assert_close(out.double(), want.detach(), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda s: torch.atan2(s * 0.0, s),
        lambda s: torch.atan2(torch.full_like(s, 0.0), s),
        lambda s: s.acosh(),
    ],
    ids=["atan2", "atan2 of zeros", "acosh"],
)
def test_numbers_without_a_value_are_nan(function: Callable[[Tensor], Tensor]) -> None:
    s = torch.linspace(-8, 8, N)
    s[:3] = torch.tensor([torch.nan, -1e10, -2e5])
    text = described(lambda s, b, h, i, j: function(s), torch.float32, torch.device("cpu")).program
    out = torch.full((N,), 7.0)
    numbers_kernel[(1,)](out, s, s, function_of(source_of(text, SCORE)), False)
    assert torch.equal(out.isnan(), function(s).isnan())
