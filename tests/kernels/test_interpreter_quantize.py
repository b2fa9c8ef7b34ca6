"""The kernel that quantises, in Triton's interpreter on the CPU, against the formula.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_quantize.py

In float16: the interpreter's products of bfloat16 are wrong.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    # Triton decides at import whether to interpret.
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)

from flashtile.call.layouts import Packed
from flashtile.ops.quantize import Rotary, quantize_on_gpu
from flashtile.ops.quantize.formula import Quantized, Recipe
from flashtile.quantize.tensors import quantized, rows_of
from flashtile.testing import cu_seqlens, generator, packed_qkv, qkv, rotary_tables, strided

F16 = torch.float16


def compare(given: Any, recipe: Recipe, layout: Packed | None = None, rotary: Any = None) -> None:
    """Equal up to sums in another order, which may change a few roundings. Rotated and smoothed
    values are rounded to float16 in between."""
    step = 2**-9 if rotary is None and not recipe.smooth_k else 448 * torch.finfo(F16).eps
    got = quantize_on_gpu(*given, recipe, *rows_of(*given[:2], layout), rotary, multiprocessors=1)
    wanted = quantized(*given, recipe, layout, rotary)
    for name in Quantized._fields[:6]:
        x, y = getattr(got, name), getattr(wanted, name)
        assert x.shape == y.shape
        if name.endswith("descale"):
            assert torch.equal(x, y), name
            continue
        if layout is not None:  # rows after the last sequence are not compared
            end = (layout.cu_seqlens_q if name == "q" else layout.cu_seqlens_k)[-1]
            x, y = x[:end], y[:end]
        assert torch.equal(x.float().isnan(), y.float().isnan()), name
        x, y = x.float().nan_to_num(), y.float().nan_to_num()
        # Where rounding reaches the next power of two, the interpreter forgets the exponent.
        kept = (y.frexp().mantissa.abs() != 0.5) & (x.frexp().mantissa.abs() != 0.5)
        x, y = x[kept], y[kept]
        assert ((x - y).abs() <= y.abs() / 8 + step).all(), name
        assert (x == y).double().mean() > 0.95, name
    assert got.v.stride() == wanted.v.stride()


FEW = {"B": 2, "M": 70, "N": 140, "Hq": 2, "Hk": 1, "dtype": F16}


@pytest.mark.parametrize(
    ("head_dim", "scales"), [(16, "head"), (64, "block"), (80, "tensor"), (80, "block")]
)
def test_scales(head_dim: int, scales: str, seed: int):
    given = qkv(generator(seed), **FEW, D=head_dim)
    given[1][:, 128:] *= 100
    compare(given, Recipe(scales))


@pytest.mark.parametrize(
    "recipe",
    [Recipe(hadamard=False), Recipe(hadamard_v=True, seed=3), Recipe(smooth_k=True, scales="head")],
    ids=str,
)
def test_recipes(recipe: Recipe, seed: int):
    given = qkv(generator(seed), **FEW, D=64, Dv=32)
    compare([strided(x, "sliced") for x in given], recipe)


@pytest.mark.parametrize("head_dim", [96, 128, 192, 256])
def test_more_than_one_tile(head_dim: int, seed: int):
    """Of 64 columns, which the rotation mixes in pairs at 128 and in fours at 256."""
    given = qkv(generator(seed), B=1, M=70, N=140, Hq=1, Hk=1, D=head_dim, dtype=F16)
    compare(given, Recipe(hadamard_v=True))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 32])
def test_rotary(rotary_dim: int, interleaved: bool, seed: int):
    tables = rotary_tables(140, rotary_dim, F16)
    given = qkv(generator(seed), **FEW, D=32)
    compare(given, Recipe(), rotary=Rotary(*tables, interleaved))


@pytest.mark.parametrize("scales", ["head", "block"])
def test_packed(scales: str, seed: int):
    lengths_q, lengths_k = [70, 0, 1, 67], [130, 40, 0, 135]
    given = packed_qkv(generator(seed), [*lengths_q, 5], [*lengths_k, 5], D=32, dtype=F16)
    layout = Packed(cu_seqlens(lengths_q), cu_seqlens(lengths_k), 140, 300)
    rotary = Rotary(*rotary_tables(300, 32, F16), False)
    compare(given, Recipe(scales), layout, rotary)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_count_for_no_scale(bad: float, seed: int):
    """Only the scales, because the interpreter has no NaN in float8."""
    q, k, v = qkv(generator(seed), **FEW, D=32)
    q[0, 3, 1, 5], k[1, 130, 0, 0], v[0, 7, 0, 31] = bad, bad, bad
    got = quantize_on_gpu(q, k, v, Recipe(), *rows_of(q, k, None), None, multiprocessors=1)
    wanted = quantized(q, k, v, Recipe(), None)
    assert all(map(torch.equal, got[3:6], wanted[3:6]))


def test_zeros_and_extremes(seed: int):
    q, k, v = (torch.zeros_like(x) for x in qkv(generator(seed), **FEW, D=32))
    k[:, :128] = 2.0**-24  # the smallest float16
    v[:, 0] = 65504.0
    v[:, 128] = 448.0
    compare((q, k, v), Recipe(hadamard=False))
