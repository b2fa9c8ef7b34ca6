"""ALiBi slopes in 16 bits, in Triton's interpreter: the kernels compute with them in float32.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_slopes.py
"""

from __future__ import annotations

import os

import pytest
import torch

from flashtile.backends import triton as backend
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem
from flashtile.testing import attention_reference, generator, normal, qkv

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")


def test_slopes_in_16_bits_are_not_rounded_again():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, generator=g).half() for n in (40, 300, 300))
    k[:, 60:] = 0
    slopes = torch.tensor([0.3, 0.07]).half()
    operands, options = describe((q, k * 20, v), Dense(), {"alibi_slopes": slopes})
    problem = AttentionProblem.of(operands, options._replace(backend="triton"))
    problem = problem._replace(device_type="cuda", capability=(8, 0))
    _, lse = backend.forward(problem, operands)
    truth = attention_reference(q, k * 20, v, alibi_slopes=slopes)
    torch.testing.assert_close(lse.double(), truth.lse, rtol=1e-6, atol=1e-6)


def test_gradients_alone_for_another_backend(seed: int):
    g = generator(seed)
    q, k, v = qkv(g, B=1, M=40, N=70, Hq=2, Hk=1, D=16, Dv=16, dtype=torch.float16)
    read = {
        "alibi_slopes": normal(g, 2),
        "relative_bias": normal(g, 2, 21),
        "bias": normal(g, 1, 2, 1, 70),
    }
    given = {name: x.requires_grad_() for name, x in read.items()}
    operands, options = describe((q, k, v), Dense(), {**given, "sink": normal(g, 2)})
    problem = AttentionProblem.of(operands, options._replace(backend="hopper"))
    problem = problem._replace(device_type="cuda", capability=(9, 0))
    with torch.no_grad():
        out, lse = backend.forward(problem, operands)
        call = problem, operands, out, lse, normal(g, *out.shape, dtype=out.dtype), None
        alone, whole = backend.gradients_of_scores(*call), backend.backward(*call)
    assert alone[:3] == (None, None, None)
    for name in ("dbias", "dalibi_slopes", "drelative_bias"):
        assert torch.equal(getattr(alone, name), getattr(whole, name)), name
