"""Ops next to attention in Triton's interpreter: later calls launch again what an earlier one has
prepared, with their own tensors and numbers.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_repeated_ops.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    # Triton decides at import whether to interpret.
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.call.layouts import Packed
from flashtile.gpu import launch_cache
from flashtile.gpu.launch import Launch
from flashtile.ops.gather.kernel import gather_pages
from flashtile.ops.merge.kernel import merge_parts
from flashtile.ops.quantize import Rotary, quantize_on_gpu
from flashtile.ops.quantize.formula import Recipe
from flashtile.ops.rotary.kernel import rotate
from flashtile.quantize.tensors import rows_of
from flashtile.testing import cu_seqlens, generator, normal, packed_qkv, qkv, rotary_tables

from .interpreted_repeats import repeat_interpreted

Results = tuple[Tensor | None, ...]
pytestmark = pytest.mark.usefixtures("poisoned_buffers")


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every new launch; later calls like it repeat the launch."""
    return repeat_interpreted(monkeypatch)


def rotated(seed: int, offset: int | None = None, in_place: bool = False) -> Results:
    """At offsets that differ, from a tensor or one number."""
    g = generator(seed)
    x = normal(g, 3, 4, 2, 20)
    out = x if in_place else torch.empty_like(x)
    offsets = torch.tensor([seed % 5, 0, 7]) if offset is None else None
    rotate(x, out, *rotary_tables(17, 16), offsets, offset or 0, None, True, False)
    return (out,)


def rotated_packed(seed: int) -> Results:
    x = normal(generator(seed), 9, 2, 20)
    out = torch.empty_like(x)
    starts = cu_seqlens([seed % 4, 5, 4 - seed % 4])
    rotate(x, out, *rotary_tables(17, 16), None, 0, starts, False, True)
    return (out,)


def merged(seed: int) -> Results:
    g = generator(seed)
    return merge_parts(normal(g, 5, 2, 3, 4, 20), 4 * normal(g, 5, 2, 3, 4), torch.float32)


def gathered(seed: int) -> Results:
    g = generator(seed)
    cache = [normal(g, 6, 4, 2, dim) for dim in (20, 7)]
    table = torch.randperm(6, generator=g).view(2, 3).int()
    k, v = gather_pages(*cache, table, torch.tensor([8, 4], dtype=torch.int32))
    return k[0, :8], v[0, :8], k[1, :4], v[1, :4]  # the other pages are not written


def quantized(seed: int, scales: str = "block") -> Results:
    given = qkv(generator(seed), B=1, M=5, N=9, Hq=2, Hk=1, D=16, dtype=torch.float16)
    return quantize_on_gpu(*given, Recipe(scales), *rows_of(*given[:2], None), None, **ONE)


def quantized_packed(seed: int) -> Results:
    lengths = [7 - seed % 3, 0, 3 + seed % 3]
    given = packed_qkv(generator(seed), lengths, lengths, D=16, dtype=torch.float16)
    layout = Packed(cu_seqlens(lengths), cu_seqlens(lengths), 8, 8)
    rotary = Rotary(*rotary_tables(8, 16, torch.float16), False)
    return quantize_on_gpu(*given, Recipe(), *rows_of(*given[:2], layout), rotary, **ONE)[
        :3
    ]  # the scales of blocks past the end of a sequence are not written


ONE: dict[str, Any] = {"multiprocessors": 1}
OPS: dict[str, tuple[Callable[..., Results], int]] = {  # with the number of launches
    "rotary": (rotated, 1),
    "rotary in place": (lambda seed: rotated(seed, in_place=True), 1),
    "packed rotary": (rotated_packed, 1),
    "merge": (merged, 1),
    "gather": (gathered, 1),
    "quantize": (quantized, 1),
    "quantize in two passes": (lambda seed: quantized(seed, "head"), 2),
    "packed quantize": (quantized_packed, 1),
}


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_uses_the_new_tensors(name: str, repeats: list[Launch], seed: int) -> None:
    op, launches = OPS[name]
    for step in range(4):
        got = op(seed + step)
        assert len(repeats) == launches
    assert all(isinstance(x, launch_cache.PreparedCall) for x in launch_cache._prepared.values())
    launch_cache._prepared.clear()
    launch_cache._compiled.clear()
    wanted = op(seed + 3)
    assert len(repeats) == 2 * launches
    for x, y in zip(got, wanted, strict=True):
        assert (x is None and y is None) or equal_bits(x, y)


def equal_bits(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether two tensors hold the same bits."""
    assert x is not None and y is not None
    return torch.equal(*(t.contiguous().view(torch.uint8) for t in (x, y)))


def test_positions_that_grow_share_a_kernel(repeats: list[Launch], seed: int) -> None:
    """Steps of decoding rotate by one number, which no kernel is compiled for."""
    got = [rotated(seed, offset) for offset in range(6)]
    assert len(repeats) == 1
    for offset, (x,) in enumerate(got):
        launch_cache._prepared.clear()
        launch_cache._compiled.clear()
        assert torch.equal(x, rotated(seed, offset)[0])


def test_in_place_and_into_another_tensor_are_kernels_of_their_own(
    repeats: list[Launch], seed: int
) -> None:
    """Only one of them writes the features that are not rotated."""
    for in_place in (True, False, True, False, True, False):
        (out,) = rotated(seed, in_place=in_place)
        assert torch.equal(out[..., 16:], normal(generator(seed), 3, 4, 2, 20)[..., 16:])
    assert len(repeats) == 2
