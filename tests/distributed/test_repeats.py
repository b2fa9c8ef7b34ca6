"""Repeated calls skip the checks and plans of the first one, and find what a first call finds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.distributed import ContextParallel
from flashtile.testing import generator
from flashtile.testing.wires import ThreadWire, run_ranks

LENGTHS = (5, 1, 12, 7)  # unequal rows on the ranks
WAYS = [
    {"ulysses": 1, "stages": 1, "head_groups": 1},
    {"ulysses": 1, "stages": 2, "head_groups": 2},
    {"ulysses": 2},
]
OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"window_size": (3, 2), "softcap": 5.0},
    {"dropout_p": 0.3, "causal": True},
]


def drawn(seed: int, rows: int, batch: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = generator(seed)
    q, k, v, dout = (torch.randn(*batch, rows, heads, 8, generator=g) for heads in (4, 2, 2, 4))
    return q, k, v, dout


def results(parallel: ContextParallel, layout: Any, x: tuple[Tensor, ...], options: Any) -> Any:
    q, k, v = leaves = [t.clone().requires_grad_() for t in x[:3]]
    parallel.generator = torch.Generator().manual_seed(3)
    out, lse = parallel.attention(q, k, v, layout, return_lse=True, **options)
    return (
        out,
        lse,
        *torch.autograd.grad((out, lse.nan_to_num(neginf=0.0).sum()), leaves, (x[3], None)),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_repeated_calls(way: dict[str, Any], is_packed: bool, options: dict[str, Any]) -> None:
    def made(wire: ThreadWire) -> tuple[ContextParallel, Any]:
        parallel = ContextParallel.over(wire, **way)
        if not is_packed:
            return parallel, parallel.layout(seq_len=13, batch=2, grain=1)
        ends = torch.tensor([0, *LENGTHS]).cumsum(0)
        return parallel, parallel.layout(cu_seqlens=ends, grain=1)

    def one_rank(wire: ThreadWire) -> None:
        parallel, layout = made(wire)
        batch = () if is_packed else (2,)
        for seed in range(3):
            x = drawn(seed * 10 + wire.rank, layout.local_tokens, batch)
            found = results(parallel, layout, x, options)
            wanted = results(*made(wire), x, options)
            assert all(map(torch.equal, found, wanted))
        assert layout.repeats._cell.cache_info().currsize == 1

    run_ranks(2, one_rank)


def test_what_decides_a_call_is_part_of_its_kind() -> None:
    """Autocast, other tensors, forced backends and the caller's settings."""

    def one_rank(wire: ThreadWire) -> None:
        parallel = ContextParallel.over(wire)
        layout = parallel.layout(seq_len=16)
        q, k, v, _ = drawn(wire.rank, layout.local_tokens, (1,))
        first = layout.attend(q, k, v)
        with torch.autocast("cpu", torch.bfloat16):
            assert layout.attend(q, k, v).dtype == torch.bfloat16
        sink = torch.zeros(4)
        assert not torch.equal(layout.attend(q, k, v, sink=sink), first)
        assert torch.equal(layout.attend(q, k, v), first)
        with pytest.raises(NotImplementedError, match="triton"):
            layout.attend(q, k, v, backend="triton")
        with pytest.raises(ValueError, match="k: got shape"):
            layout.attend(q, k[:, 1:], v)
        parallel.reserved_processors = -1
        with pytest.raises(ValueError, match="reserved_processors: got -1"):
            layout.attend(q, k, v)
        parallel.reserved_processors = 0
        with flashtile.backend("triton"), pytest.raises(NotImplementedError, match="triton"):
            layout.attend(q, k, v)

    run_ranks(2, one_rank)


def test_a_layout_belongs_to_one_context() -> None:
    """In a call like an earlier one of the layout's own context, too."""

    def one_rank(wire: ThreadWire) -> None:
        own, other = ContextParallel.over(wire), ContextParallel.over(wire)
        layout = own.layout(seq_len=16)
        q, k, v, _ = drawn(wire.rank, layout.local_tokens, (1,))
        for _ in range(2):
            own.attention(q, k, v, layout)
            with pytest.raises(ValueError, match="layout: got one of another ContextParallel"):
                other.attention(q, k, v, layout)

    run_ranks(2, one_rank)


def test_no_tensor_of_a_call_is_kept() -> None:
    def one_rank(wire: ThreadWire) -> None:
        parallel = ContextParallel.over(wire)
        layout = parallel.layout(seq_len=16)
        for seed in range(2):
            q, k, v, _ = drawn(seed, layout.local_tokens, (1,))
            known = [weakref.ref(x) for x in (q, k, v)]
            layout.attend(q, k, v)
            del q, k, v
            gc.collect()
            assert [ref() for ref in known] == [None] * 3

    run_ranks(2, one_rank)
