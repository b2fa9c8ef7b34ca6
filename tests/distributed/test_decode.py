"""Decoding with a cache over ranks is `attention_with_kvcache` of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import STEPS_OPTIONS, CacheCase, compare, compare_repeated_steps
from torch import Tensor

import flashtile
from flashtile.distributed import ContextParallel, decode
from flashtile.distributed.decode import BlockCyclic
from flashtile.masks import Positions
from flashtile.testing.wires import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("block", "ranks"), [(1, 3), (4, 1), (5, 2), (64, 4)])
def test_block_cyclic_positions_are_those_of_runs(block: int, ranks: int) -> None:
    length = 3 * block * ranks + block // 2 + 1
    for rank in range(ranks):
        blocks = BlockCyclic(block, ranks, rank)
        own = [p for p in range(length) if p // block % ranks == rank]
        runs = Positions.of([(p, p + 1) for p in own])
        assert [blocks.at(row) for row in range(len(own))] == own
        assert [blocks.row(p) for p in own] == list(range(len(own)))
        below = [runs.below(p) for p in range(length)]
        assert [blocks.below(p) for p in range(length)] == below
        assert blocks.below(torch.arange(length)).tolist() == below
        for start in range(0, length, 3):
            spans = [range(*span) for span in blocks.spans(start, length)]
            assert [p for span in spans for p in span] == [p for p in own if p >= start]
            assert all(p // block == span[0] // block for span in spans for p in span)
    for rows in range(2 * block):
        most = blocks.tokens_in(rows)
        assert blocks.most_rows(most) <= rows < blocks.most_rows(most + 1)


@pytest.mark.parametrize("has_int", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_ranks_decode_what_one_process_does(seed: int, has_int: bool) -> None:
    case = CacheCase(seed, ranks=[1, 2, 3, 4][seed % 4], has_int=has_int)
    compare(case, run_ranks(case.ranks, lambda w: case.on_rank(ContextParallel.over(w))))


@pytest.mark.parametrize("as_int", [False, True])
def test_a_step_like_an_earlier_one_is_not_prepared_again(
    as_int: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another length nor other tensors of the same kind are another step; an option is."""
    described = []
    describe = decode.describe
    monkeypatch.setattr(decode, "describe", lambda *a: described.append(a) or describe(*a))

    def one_rank(comm: Any) -> None:
        parallel = ContextParallel.over(comm)
        caches = torch.zeros(2, 1, 32, 2, 8)
        for length in range(20):
            q, k, v = torch.randn(3, 1, 1, 2, 8)
            lengths = length if as_int else torch.tensor([length], dtype=torch.int32)
            parallel.decode(q, *caches, k, v, cache_seqlens=lengths, block=4, causal=True)
        assert (len(described), comm.notes) == (1, 1)
        given: dict[str, Any] = {"cache_seqlens": 20, "block": 4, "causal": True}
        parallel.decode(q, *caches, k, v, **given, softcap=1.0)
        assert (len(described), comm.notes) == (2, 2)
        parallel.decode(q, *caches, k, v, **given, softcap=2.0)
        assert (len(described), comm.notes) == (3, 3)
        flashtile.clear_caches()  # which a rank may do alone
        parallel.decode(q, *caches, k, v, **given, softcap=2.0)
        assert (len(described), comm.notes) == (4, 3)

    run_ranks(1, one_rank)


@pytest.mark.parametrize("has_int", [False, True])
@pytest.mark.parametrize("options", STEPS_OPTIONS)
def test_a_repeated_step_has_the_bits_of_a_first_one(
    options: dict[str, Any], has_int: bool
) -> None:
    run_ranks(3, lambda comm: compare_repeated_steps(comm, options, has_int, "cpu"))


def test_a_repeated_step_heeds_what_surrounds_it() -> None:
    """A backend that is forced later, and a cache that has become too small."""

    def one_rank(comm: Any) -> None:
        parallel = ContextParallel.over(comm)
        q, caches = torch.zeros(1, 1, 2, 8), torch.zeros(2, 1, 32, 2, 8)
        parallel.decode(q, *caches, cache_seqlens=30)
        with (
            flashtile.backend("triton"),
            pytest.raises(NotImplementedError, match="'triton' cannot"),
        ):
            parallel.decode(q, *caches, cache_seqlens=30)
        with pytest.raises(ValueError, match="at most 16 tokens of a sequence on a rank"):
            parallel.decode(q, *caches[:, :, :16], cache_seqlens=30)

    run_ranks(1, one_rank)


def test_what_no_backend_can_run_is_not_written() -> None:
    def one_rank(comm: Any) -> None:
        parallel = ContextParallel.over(comm)
        x, caches = torch.ones(1, 1, 2, 8), torch.zeros(2, 1, 32, 2, 8)
        with pytest.raises(NotImplementedError, match="'triton' cannot"):
            parallel.decode(x, *caches, x, x, cache_seqlens=3, backend="triton")
        assert not caches.any()

    run_ranks(2, one_rank)


@pytest.mark.parametrize(
    ("packed", "lengths"),
    [(False, [41, 41]), (True, [0, 37, 5, 90]), (True, [3])],  # 3 tokens: ranks without any
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_prefill_is_dealt_out_and_decoded(packed: bool, lengths: list[int], ranks: int) -> None:
    g = torch.Generator().manual_seed(7)
    shape = (sum(lengths),) if packed else (2, 41)
    k, v = (torch.randn(*shape, 2, D, generator=g, dtype=torch.float64) for D in (8, 12))
    q = torch.randn(len(lengths), 2, 4, 8, generator=g, dtype=torch.float64)
    new = [torch.randn(len(lengths), 2, 2, D, generator=g).double() for D in (8, 12)]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    before = torch.tensor(lengths, dtype=torch.int32)

    def one_rank(comm: Any) -> Tensor:
        parallel = ContextParallel.over(comm)
        options = {"cu_seqlens": ends} if packed else {"seq_len": 41, "batch": 2}
        layout = parallel.layout(**options, grain=4)
        caches = parallel.deal(layout.shard(k), layout.shard(v), layout, block=8, capacity=96)
        assert comm.messages < ranks  # keys and values travel together
        return parallel.decode(q, *caches, *new, cache_seqlens=before, block=8, causal=True)

    want = []
    for b, length in enumerate(lengths):
        rows = slice(ends[b], ends[b + 1]) if packed else b
        past = [torch.cat([x[rows], y[b]])[None] for x, y in zip((k, v), new, strict=True)]
        assert past[0].shape[1] == length + 2
        want.append(flashtile.attention(q[b : b + 1], *past, causal=True))
    for out in run_ranks(ranks, one_rank):
        torch.testing.assert_close(out, torch.cat(want), rtol=1e-9, atol=1e-10)


def call(parallel: ContextParallel, **changes: Any) -> Tensor:
    x = torch.zeros(2, 1, 2, 8)
    given: dict[str, Any] = {"q": x, "k": x, "v": x, "cache_seqlens": 3, "block": 2}
    given |= {"k_cache": torch.zeros(2, 3, 2, 8), "v_cache": torch.zeros(2, 3, 2, 8)}
    return parallel.decode(**given | changes)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"cache_seqlens": 5}, ValueError, "at most 3 tokens of a sequence on a rank"),
        ({"cache_seqlens": torch.tensor([-1, 0]).int()}, ValueError, "at least 0"),
        ({"cache_seqlens": torch.zeros(3).int()}, ValueError, "cache_seqlens"),
        ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens"),
        ({"block": 0}, ValueError, "block: got 0"),
        ({"block": [2]}, TypeError, "rank 0: block: got list"),
        ({"q": None}, TypeError, "rank 0: q: got NoneType"),
        ({"backend": "nothing"}, ValueError, "rank 0: backend: got 'nothing', want one of"),
        ({"k": None}, ValueError, "k: got None"),
        ({"k": torch.zeros(2, 1, 1, 8)}, ValueError, "k: got"),
        ({"page_table": torch.zeros(2, 1).int()}, TypeError, "page_table"),
        ({"dropout_p": 0.5}, TypeError, "dropout_p"),
        (
            {"q": torch.zeros(2, 1, 2, 8, device="meta"), "alibi_slopes": torch.ones(2)},
            NotImplementedError,
            "alibi_slopes: got a cache over ranks on meta",
        ),
        ({"k_cache": torch.zeros(2, 3, 2, 8).to(torch.float8_e4m3fn)}, NotImplementedError, "fl"),
    ],
)
def test_what_decoding_refuses_is_not_written(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    def one_rank(comm: Any) -> None:
        parallel = ContextParallel.over(comm)
        call(parallel)  # an agreed call does not make a later one right
        for k_cache in [changes.get("k_cache", torch.zeros(2, 3, 2, 8))]:
            before = k_cache.clone().float()
            with pytest.raises(error, match=match):
                call(parallel, **changes | {"k_cache": k_cache})
            assert torch.equal(k_cache.float(), before)

    run_ranks(2, one_rank)


def test_ranks_that_disagree_raise_the_same_error() -> None:
    def one_rank(comm: Any) -> None:
        with pytest.raises(ValueError, match="the ranks disagree on cache_seqlens"):
            call(ContextParallel.over(comm), cache_seqlens=1 + comm.rank)

    run_ranks(2, one_rank)


def test_a_cache_that_is_too_small_on_one_rank_is_refused_on_all() -> None:
    """Also if an earlier step had larger ones."""

    def one_rank(comm: Any) -> None:
        parallel = ContextParallel.over(comm)
        call(parallel, k_cache=torch.zeros(2, 9, 2, 8), v_cache=torch.zeros(2, 9, 2, 8))
        small = torch.zeros(2, 3 - comm.rank, 2, 8)
        with pytest.raises(ValueError, match=r"rank 1: cache_seqlens: got .* at most 2 tokens"):
            call(parallel, k_cache=small, v_cache=small.clone(), cache_seqlens=4)

    run_ranks(2, one_rank)


def test_a_capacity_that_is_too_small_is_refused() -> None:
    def one_rank(comm: Any) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=32)
        x = torch.zeros(1, layout.local_tokens, 2, 8)
        with pytest.raises(ValueError, match="capacity: got 15 rows, want at least 16"):
            parallel.deal(x, x, layout, block=4, capacity=15)

    run_ranks(2, one_rank)


def test_autocast_takes_the_dtype_of_the_cache() -> None:
    def one_rank(comm: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(ContextParallel.over(comm))

    assert run_ranks(2, one_rank)[0].dtype == torch.float32


def test_partial_results_travel_in_float32() -> None:
    q, k_cache, v_cache = (torch.randn(1, n, 2, 8).bfloat16() for n in (3, 16, 16))

    def one_rank(comm: Any) -> None:
        parallel = ContextParallel.over(comm)
        out = parallel.decode(q, k_cache, v_cache, cache_seqlens=20, block=4)
        assert out.dtype == torch.bfloat16
        assert comm.sent_bytes == 4 * 3 * 2 * (8 + 1)  # queries, heads, features and the statistic

    run_ranks(2, one_rank)
