"""Repeated calls skip the checks and plans of the first one, and find what a first call finds."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.backends import cpu
from flashtile.distributed import ContextParallel, collectives, executor
from flashtile.testing import generator
from flashtile.testing.wires import ThreadCommunicator, run_ranks

pytestmark = pytest.mark.slow

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
    gradients = torch.autograd.grad((out, lse.nan_to_num(neginf=0.0).sum()), leaves, (x[3], None))
    used = layout.tokens[0] // max(layout.sequences, 1)  # rows of padding follow
    for rows in (out, *gradients):
        assert not rows.narrow(-3, used, layout.local_tokens - used).count_nonzero()
    assert lse[..., used:].isneginf().all()
    return out, lse, *gradients


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", [(), (1,), (2,)], ids=["packed", "one", "two"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_repeated_calls(way: dict[str, Any], batch: tuple[int, ...], options: Any) -> None:
    def made(comm: ThreadCommunicator) -> tuple[ContextParallel, Any]:
        parallel = ContextParallel.over(comm, **way)
        if batch:
            return parallel, parallel.layout(seq_len=13, batch=batch[0], grain=1)
        ends = torch.tensor([0, *LENGTHS]).cumsum(0)
        return parallel, parallel.layout(cu_seqlens=ends, grain=1)

    def one_rank(comm: ThreadCommunicator) -> None:
        parallel, layout = made(comm)
        for seed in range(3):
            x = drawn(seed * 10 + comm.rank, layout.local_tokens, batch)
            found = results(parallel, layout, x, options)
            wanted = results(*made(comm), x, options)
            assert all(map(torch.equal, found, wanted))
        assert layout.plans._cell.cache_info().currsize == 1

    run_ranks(2, one_rank)


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("batch", [(), (1,)], ids=["packed", "one"])
def test_calls_in_which_nothing_travels(
    batch: tuple[int, ...], has_gaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend gets the rank's own keys, and writes beside the padding of the output."""
    seen: list[tuple[int, int]] = []  # where the keys and the output are

    def forward(problem: Any, operands: Any, into: Any = None) -> Any:
        seen.append((operands.k.data_ptr(), into[0].data_ptr()))
        return cpu.forward(problem, operands, into)

    recording = SimpleNamespace(**{**vars(cpu), "forward": forward})
    monkeypatch.setattr(executor.dispatch, "BACKENDS", {"cpu": recording})

    def one_rank(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm, **WAYS[0])

        def layout() -> Any:
            if batch:
                return parallel.layout(seq_len=20, way="contiguous", grain=4)
            return parallel.layout([0, 12, 20], way="contiguous", grain=4)

        options: Any = {"window_size": (0, 0)}
        kept = layout()
        for seed in range(3):
            q, k, v, dout = drawn(seed * 10 + comm.rank, kept.local_tokens, batch)
            if has_gaps:
                k, v = torch.stack((k, v), -2).unbind(-2)
            found = results(parallel, kept, (q, k, v, dout), options)
            wanted = results(parallel, layout(), (q, k, v, dout), options)
            assert all(map(torch.equal, found, wanted))
            with torch.no_grad():
                out = kept.attend(q, k, v, **options)
            assert torch.equal(out, found[0])
            # The first call without gradients is a kind of its own.
            assert seed == 0 or has_gaps or (k.data_ptr(), out.data_ptr()) in seen

    run_ranks(2, one_rank)


def test_results_are_freed_at_once() -> None:
    """No cycle keeps them until Python collects garbage."""

    def one_rank(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout([0, 7, 12], grain=1)
        for _ in range(3):
            q, k, v, _ = drawn(3, layout.local_tokens, ())
            out = layout.attend(q.requires_grad_(), k, v)
            known = [weakref.ref(x) for x in (out, out.grad_fn, q)]
            gc.disable()
            try:
                del q, out
                assert [ref() for ref in known] == [None] * 3
            finally:
                gc.enable()

    run_ranks(2, one_rank)


def test_what_a_layout_remembers_is_bounded_and_can_be_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not what the ranks have compared: one rank alone may empty its caches."""
    monkeypatch.setattr(collectives, "MOST_SIGNATURES", 3)

    def one_rank(comm: ThreadCommunicator) -> list[int]:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=16)
        q, k, v, _ = drawn(comm.rank, layout.local_tokens, (1,))
        notes = []
        for softcap in (1.0, 2.0, 2.0, 3.0, 1.0, 4.0, 1.0):
            layout.attend(q, k, v, softcap=softcap)
            if comm.rank == 0:
                flashtile.clear_caches()
            notes.append(comm.notes)
        if comm.rank == 0:
            assert layout.plans._cell.cache_info().currsize == 0
        return notes

    # The fourth kind drops the first one, which the ranks then compare again.
    assert run_ranks(2, one_rank) == [[1, 2, 2, 3, 3, 4, 5]] * 2


def test_what_decides_a_call_is_part_of_its_kind() -> None:
    """Autocast, other tensors, forced backends and the caller's settings."""

    def one_rank(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=16)
        q, k, v, _ = drawn(comm.rank, layout.local_tokens, (1,))
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


def test_numbers_in_tensors_are_read_in_every_call() -> None:
    def one_rank(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=16)
        q, k, v, _ = drawn(comm.rank, layout.local_tokens, (1,))
        for window in ((2, 0), (7, 0), (2, 3)):
            found = layout.attend(q, k, v, window_size=torch.tensor(window))
            assert torch.equal(found, layout.attend(q, k, v, window_size=window))

    run_ranks(2, one_rank)


def test_ranks_compare_a_call_under_autocast() -> None:
    """It sends other bytes than the same call without autocast, which they have compared."""

    def one_rank(comm: ThreadCommunicator) -> list[int]:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=16)
        q, k, v, _ = drawn(comm.rank, layout.local_tokens, (1,))
        notes = []
        for dtype in (None, torch.bfloat16, torch.bfloat16, torch.float16, None):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                layout.attend(q, k, v)
            notes.append(comm.notes)
        return notes

    assert run_ranks(2, one_rank) == [[1, 2, 2, 3, 3]] * 2


def test_a_layout_belongs_to_one_context() -> None:
    """In a call like an earlier one of the layout's own context, too."""

    def one_rank(comm: ThreadCommunicator) -> None:
        own, other = ContextParallel.over(comm), ContextParallel.over(comm)
        layout = own.layout(seq_len=16)
        q, k, v, _ = drawn(comm.rank, layout.local_tokens, (1,))
        for _ in range(2):
            own.attention(q, k, v, layout)
            with pytest.raises(ValueError, match="layout: got one of another ContextParallel"):
                other.attention(q, k, v, layout)

    run_ranks(2, one_rank)


def test_no_tensor_of_a_call_is_kept() -> None:
    def one_rank(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=16)
        for seed in range(2):
            q, k, v, _ = drawn(seed, layout.local_tokens, (1,))
            known = [weakref.ref(x) for x in (q, k, v)]
            layout.attend(q, k, v)
            del q, k, v
            gc.collect()
            assert [ref() for ref in known] == [None] * 3

    run_ranks(2, one_rank)
