"""Ranks that disagree, and ranks that refuse: all raise the same error, none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashtile import BlockMask
from flashtile.distributed import ContextParallel, executor
from flashtile.testing.wires import ThreadCommunicator, run_ranks


def errors(ranks: int, call: Callable[[ContextParallel, int], Any]) -> list[str]:
    """What each rank raises."""

    def run(comm: ThreadCommunicator) -> str:
        try:
            call(ContextParallel.over(comm), comm.rank)
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return run_ranks(ranks, run, timeout=10)


def attend(context: ContextParallel, layout: Any, **options: Any) -> None:
    x = torch.randn(1, layout.local_tokens, 2, 8)
    context.attention(x, x, x, layout, **options)


def test_different_documents() -> None:
    def call(context: ContextParallel, rank: int) -> None:
        lengths = [0, 16, 32, 48] if rank == 2 else [0, 32, 48]
        layout = context.layout(lengths, grain=4)
        x = torch.randn(layout.local_tokens, 2, 8)
        context.attention(x, x, x, layout, causal=True)

    found = errors(3, call)
    assert set(found) == {
        "ValueError: context parallel: the ranks disagree on documents: ranks 0, 1 have 2; rank 2 "
        "has 3"
    }


def test_different_options() -> None:
    found = errors(2, lambda c, rank: attend(c, c.layout(seq_len=32), causal=rank == 0))
    assert len(set(found)) == 1
    assert "the ranks disagree on options" in found[0]
    assert "rank 0 has" in found[0]


@pytest.mark.parametrize(
    "masks",
    [
        [BlockMask.from_tiles(torch.eye(4), (size, size)) for size in (16, 32)],
        [BlockMask.from_tiles(torch.ones(shape), (16, 16)) for shape in ((4, 6), (6, 4))],
    ],
    ids=["sizes", "shapes"],
)
def test_block_masks_of_the_same_kinds_in_other_tiles(masks: list[BlockMask]) -> None:
    def call(context: ContextParallel, rank: int) -> None:
        layout = context.layout(seq_len=64, grain=32, way="contiguous")
        attend(context, layout, block_mask=masks[rank])

    found = errors(2, call)
    assert len(set(found)) == 1
    assert "the ranks disagree on the block mask: rank 0 has" in found[0]


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_different_lengths_in_use(name: str) -> None:
    """Of whichever of many documents."""

    def call(context: ContextParallel, rank: int) -> None:
        layout = context.layout([16 * n for n in range(11)], grain=4, way="zigzag")
        x = torch.randn(layout.local_tokens, 2, 8)
        used = torch.full((10,), 16)
        used[9] -= rank
        context.attention(x, x, x, layout, **{name: used})

    found = errors(2, call)
    assert len(set(found)) == 1
    assert "the ranks disagree on numbers of tokens in use: rank 0 has" in found[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, "ValueError: context parallel: rank 1: softcap: got -1.0"),
        ({"is_causal": True}, "TypeError: context parallel: rank 1: "),
        ({"sink": torch.zeros(3)}, "ValueError: context parallel: rank 1: sink: got shape (3,)"),
        (
            {"alibi_slopes": [0.5, 0.5]},
            "TypeError: context parallel: rank 1: alibi_slopes: got list, want a torch.Tensor",
        ),
        (
            {"seqused_k": torch.zeros(1, dtype=torch.int32, device="meta")},
            "ValueError: context parallel: rank 1: seqused_k: got device meta, want cpu",
        ),
        (
            {"block_mask": BlockMask.from_tiles(torch.ones(1, 1), (32, 32)).to("meta")},
            "ValueError: context parallel: rank 1: block_mask: got device meta, want cpu",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s * {}["a key of its own"]},
            "RuntimeError: context parallel: rank 1: KeyError: 'a key of its own'",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s.no_such_name},
            "RuntimeError: context parallel: rank 1: AttributeError: 'Tensor' object has no",
        ),
    ],
)
def test_one_rank_refuses(options: dict[str, Any], message: str) -> None:
    def call(context: ContextParallel, rank: int) -> None:
        attend(context, context.layout(seq_len=32), **(options if rank == 1 else {}))

    found = errors(3, call)
    assert len(set(found)) == 1
    assert found[0].startswith(message)


def test_a_negative_number_of_reserved_processors() -> None:
    def call(context: ContextParallel, rank: int) -> None:
        context.reserved_processors = -rank
        attend(context, context.layout(seq_len=32))

    assert set(errors(2, call)) == {
        "ValueError: context parallel: rank 1: reserved_processors: got -1, want 0 or more"
    }


def test_a_tensor_of_another_length() -> None:
    def call(context: ContextParallel, rank: int) -> None:
        layout = context.layout(seq_len=32)
        x = torch.randn(1, layout.local_tokens + rank, 2, 8)
        context.attention(x, x, x, layout)

    assert set(errors(2, call)) == {
        "ValueError: context parallel: rank 1: q: got shape (1, 17, 2, 8), want (1, 16, heads, "
        "head_dim) in this layout"
    }


def test_float8_is_refused() -> None:
    def call(context: ContextParallel, rank: int) -> None:
        layout = context.layout(seq_len=32)
        x = torch.zeros(1, layout.local_tokens, 2, 16, dtype=torch.float8_e4m3fn)
        context.attention(x, x, x, layout)

    assert all(
        "NotImplementedError: context parallel: rank 0: q, k, v: got" in e for e in errors(2, call)
    )


def test_in_debug_mode_every_call_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here two calls of known kinds that exchange the same bytes, in another order."""
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)

    def call(context: ContextParallel, rank: int) -> None:
        layout = context.layout(seq_len=32)
        for softcap in (1.0, 2.0, 1.0, 2.0):
            attend(context, layout, softcap=softcap)
        attend(context, layout, softcap=1.0 if rank == 2 else 2.0)

    (found,) = set(errors(3, call))
    assert found.startswith("ValueError: context parallel: the ranks disagree on options: ranks 0,")


def test_in_debug_mode_every_step_of_decoding_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)

    def call(context: ContextParallel, rank: int) -> None:
        q, k, v = torch.randn(3, 1, 64, 2, 8)
        for length in (40, 41, 42 + rank):
            context.decode(q[:, :1], k, v, cache_seqlens=length)

    (found,) = set(errors(2, call))
    assert found.startswith("ValueError: context parallel: the ranks disagree on cache_seqlens")


def test_an_equal_call_sends_no_records() -> None:
    def run(comm: ThreadCommunicator) -> list[int]:
        context = ContextParallel.over(comm)
        layout = context.layout(seq_len=32)
        sent = []
        for _ in range(3):
            attend(context, layout, causal=True)
            sent.append(comm.notes)
        return sent

    for sent in run_ranks(2, run):
        assert sent == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ulysses": 3}, "ulysses: got 3, want a divisor of 4 ranks or 'auto'"),
        ({"stages": 5}, "stages: got 5, want 1 to 4 or 'auto'"),
        ({"ulysses": 2, "stages": 3}, "stages: got 3, want 1 to 2 or 'auto'"),
        ({"head_groups": 0}, "head_groups: got 0, want at least 1"),
    ],
)
def test_numbers_that_do_not_fit_the_group(options: dict[str, int], message: str) -> None:
    def run(comm: ThreadCommunicator) -> str:
        with pytest.raises(ValueError, match="got") as caught:
            ContextParallel.over(comm, **options)
        return str(caught.value)

    assert set(run_ranks(4, run)) == {message}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "want either cu_seqlens or seq_len"),
        ({"cu_seqlens": [0, 4], "seq_len": 4}, "want either cu_seqlens or seq_len"),
        ({"cu_seqlens": [0, 4, 2]}, "cu_seqlens: got"),
        ({"cu_seqlens": [1, 4]}, "cu_seqlens: got"),
        (
            {"cu_seqlens": [0, 4], "cu_seqlens_k": [0, 2, 4]},
            "cu_seqlens_k: got 2 documents, want 1",
        ),
        ({"seq_len": 8, "way": "ring"}, "way: got 'ring', want 'auto'"),
        ({"seq_len": -8}, "seq_len: got -8"),
    ],
)
def test_layouts_check_their_arguments(arguments: dict[str, Any], message: str) -> None:
    def run(comm: ThreadCommunicator) -> str:
        with pytest.raises(ValueError, match=r"want|got") as caught:
            ContextParallel.over(comm).layout(**arguments)
        return str(caught.value)

    assert all(message in found for found in run_ranks(2, run))


def test_a_backend_that_only_some_ranks_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits, also not the one with a whole document."""

    def select(problem: Any, name: str | None) -> str:
        if problem.runs and problem.options.alibi_needs_grad:
            raise NotImplementedError("no backend can run this call")
        return "cpu"

    monkeypatch.setattr(executor.dispatch, "select", select)

    def call(context: ContextParallel, rank: int) -> None:
        layout = context.layout([0, 32, 96], way="contiguous", grain=16)
        assert layout.queries.documents(0) == [0]
        x = torch.randn(layout.local_tokens, 2, 8)
        for slopes in (torch.rand(2), torch.rand(2, requires_grad=True)):
            with torch.no_grad():
                context.attention(x, x, x, layout, alibi_slopes=slopes, causal=True)
        context.attention(x, x, x, layout, alibi_slopes=slopes, causal=True)

    found = errors(3, call)
    assert set(found) == {
        "NotImplementedError: context parallel: rank 0: no backend can run this call"
    }
