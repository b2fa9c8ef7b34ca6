"""`ContextParallel` over threads: every option gives what one process gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case, compare
from torch.nn.attention.flex_attention import create_block_mask

import flashtile
from flashtile import BlockMask
from flashtile.call import dispatch
from flashtile.distributed import ContextParallel, Mask, compile, executor
from flashtile.distributed.arguments import OPTIONS, Arguments
from flashtile.distributed.partition import TileMap
from flashtile.problem import AttentionProblem
from flashtile.testing import generator, normal
from flashtile.testing.wires import ThreadCommunicator, run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(40))
def test_ranks_compute_what_one_process_does(seed: int) -> None:
    case = Case(seed)
    results = run_ranks(
        case.ranks,
        lambda comm: case.on_rank(
            ContextParallel.over(comm, ulysses=case.ulysses, stages=case.stages)
        ),
    )
    compare(case, results)


WAYS = {  # ranks, and how they exchange keys
    "gather": (3, {"ulysses": 1, "stages": 1}),
    "stages": (3, {"ulysses": 1, "stages": 3}),
    "ulysses": (3, {"ulysses": 3, "stages": 1}),
    "2d": (4, {"ulysses": 2, "stages": 2}),
}
SCALARS = ("softmax_scale", "deterministic", "num_splits", "pack_gqa", "sm_margin")
TAKEN = [name for name in OPTIONS if name not in SCALARS]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", TAKEN)
def test_every_option_in_every_way(option: str, way: str) -> None:
    ranks, numbers = WAYS[way]
    for seed in range(3):
        case = Case(seed, ranks, wanted=option)
        results = run_ranks(
            ranks, lambda comm, case=case: case.on_rank(ContextParallel.over(comm, **numbers))
        )
        compare(case, results)


@pytest.mark.parametrize("option", TAKEN)
def test_every_option_with_heads_in_turns(option: str) -> None:
    """Each step has the second or the first half of the heads."""
    cases = (Case(seed, 2, wanted=option) for seed in range(99))
    case = next(x for x in cases if x.leaves["k"].shape[-2] % 2 == 0 and x.dout.numel() > 1000)
    numbers = {"ulysses": 1, "stages": 2, "head_groups": 2}
    compare(case, run_ranks(2, lambda comm: case.on_rank(ContextParallel.over(comm, **numbers))))


def test_which_statistics_ranks_have() -> None:
    """All ask for the same ones, outside of graphs."""

    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=64)
        x = torch.randn(1, layout.local_tokens, 2, 8)
        with pytest.raises(ValueError, match="return_stats: got 'sum', want some of"):
            parallel.attention(x, x, x, layout, return_stats=["sum"])
        with pytest.raises(NotImplementedError, match="return_stats: context parallelism has none"):
            compile.attend(Arguments((x, x, x), layout, {"return_stats": ("entropy",)}))
        names = ("max_logit", "entropy")[: 1 + comm.rank]
        with pytest.raises(ValueError, match="the ranks disagree on return_stats"):
            parallel.attention(x, x, x, layout, return_stats=names)
        _, found = parallel.attention(x, x, x, layout, return_stats=("column_sum",))
        assert found.max_logit is None and found.entropy is None
        torch.testing.assert_close(layout.unshard(found.column_sum, 2).sum(), torch.tensor(128.0))

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("attn_mask", torch.ones(1, 1, 1, 8) > 0, "attn_mask: got packed documents"),
        ("key_padding_mask", torch.ones(1, 8) > 0, "key_padding_mask: got packed documents"),
    ],
)
def test_packed_documents_have_no_masks_of_a_batch(
    option: str, value: torch.Tensor, message: str
) -> None:
    def run(comm: ThreadCommunicator) -> str:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout([0, 8])
        x = torch.randn(layout.local_tokens, 2, 8)
        with pytest.raises(NotImplementedError, match="got") as caught:
            parallel.attention(x, x, x, layout, **{option: value})
        return str(caught.value)

    assert all(message in found for found in run_ranks(2, run))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"block_mask": BlockMask.from_tiles(torch.ones(2, 2), (32, 32))},
            "ValueError: block_mask: got tiles of (32, 32) and a layout with a piece that begins "
            "at token 48; pass the mask in `masks` of the layout",
        ),
        (
            {"block_mask": BlockMask.from_tiles(torch.ones(2, 2), (16, 16))},
            "ValueError: block_mask: got a mask for 32 queries and 32 keys, want at least 64",
        ),
        (
            {"block_mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 64, 64, "cpu")},
            "NotImplementedError: block_mask: got a mask of FlexAttention, want BlockMask.from",
        ),
        (
            {"q_descale": torch.ones(1, 2)},
            "NotImplementedError: q_descale: context parallelism does not have this option",
        ),
        (
            {"batch_invariant": True},
            "NotImplementedError: batch_invariant: context parallelism does not have this option",
        ),
        (
            {"key_blocks": torch.zeros(1, 1, 4, 1, dtype=torch.int32), "block_size": (16, 16)},
            "NotImplementedError: key_blocks: context parallelism does not have this option",
        ),
        (
            {"key_index": torch.zeros(1, 32, 1, 1, dtype=torch.int32)},
            "NotImplementedError: key_index: context parallelism does not have this option",
        ),
    ],
)
def test_what_is_not_supported_is_named(options: dict[str, Any], message: str) -> None:
    def run(comm: ThreadCommunicator) -> str:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=64, grain=16)
        x = torch.randn(1, layout.local_tokens, 2, 8)
        with pytest.raises((NotImplementedError, ValueError)) as caught:
            parallel.attention(x, x, x, layout, **options)
        return f"{type(caught.value).__name__}: {caught.value}"

    for found in run_ranks(2, run):
        assert message in found.replace("context parallel: rank 0: ", "")


def test_every_option_is_in_the_manual_or_refused() -> None:
    """A new option of attention does not reach the ranks unless somebody has thought about it."""
    table = (Path(__file__).parents[2] / "docs" / "context-parallel-options.md").read_text()
    assert [name for name in OPTIONS if f"`{name}" not in table] == []


def test_no_call_is_batch_invariant() -> None:
    def run(comm: ThreadCommunicator) -> str:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=64, grain=16)
        x = torch.randn(1, layout.local_tokens, 2, 8)
        parallel.attention(x, x, x, layout)
        try:
            with flashtile.batch_invariant():
                parallel.attention(x, x, x, layout)
        except NotImplementedError as error:
            return str(error)
        return ""

    for message in run_ranks(2, run):
        assert message.startswith("batch_invariant: context parallelism")


def test_a_changed_block_mask_is_read_again() -> None:
    mask = BlockMask.from_tiles(torch.eye(4), (8, 8))
    before = TileMap.of(mask)
    assert TileMap.of(mask) is before
    mask.kinds[0, 0, 3, 0] = 1
    assert TileMap.of(mask).columns[0][3] == (0, 3)
    mask.kinds.numpy()[0, 0, 3, 1] = 1
    assert TileMap.of(mask).columns[0][3] == (0, 1, 3)
    mask.kinds.data[0, 0, 3, 2] = 1
    assert TileMap.of(mask).columns[0][3] == (0, 1, 2, 3)


def test_a_batch_is_balanced_by_the_tiles_of_all_its_sequences() -> None:
    kinds = torch.zeros(2, 1, 8, 8)
    kinds[0, 0, 0] = kinds[1, 0, 1] = 1  # all work is in the first two tiles of rows
    masks = [Mask(block_mask=BlockMask.from_tiles(kinds, (16, 16)))]

    def run(comm: ThreadCommunicator) -> int:
        layout = ContextParallel.over(comm).layout(
            batch=2, seq_len=128, masks=masks, way="documents", grain=16
        )
        return sum(bool((layout.positions == 16 * n).any()) for n in (0, 1))

    assert run_ranks(2, run) == [1, 1]


@pytest.mark.parametrize("seq_len", [2, 9])
@pytest.mark.parametrize("has_rows", [True, False])
def test_a_rank_with_one_row_of_a_bias(seq_len: int, has_rows: bool) -> None:
    """Some ranks, or all, have one query, or none: the row of a bias is not that of all queries."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, seq_len, 2, 8, generator=g) for _ in range(3))
    bias = torch.randn(1, 2, seq_len if has_rows else 1, seq_len, generator=g)

    def run(comm: ThreadCommunicator) -> torch.Tensor:
        parallel = ContextParallel.over(comm, ulysses=2, stages=1)
        layout = parallel.layout(seq_len=seq_len, way="contiguous", grain=1 if seq_len == 2 else 8)
        shards = (layout.shard(x) for x in (q, k, v))
        mine = layout.shard(bias, 2) if has_rows else bias
        return layout.unshard(parallel.attention(*shards, layout, bias=mine))

    for whole in run_ranks(4, run):
        torch.testing.assert_close(whole, flashtile.attention(q, k, v, bias=bias))


@pytest.mark.parametrize("ranks", [1, 3])
def test_slopes_for_each_of_no_documents(ranks: int) -> None:
    def run(comm: ThreadCommunicator) -> torch.Size:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout([0])
        x = torch.zeros(layout.local_tokens, 2, 8)
        slopes = torch.zeros(0, 2, requires_grad=True)
        out = parallel.attention(x, x, x, layout, alibi_slopes=slopes)
        out.sum().backward()
        assert slopes.grad is not None
        return out.shape

    assert set(run_ranks(ranks, run)) == {torch.Size((0, 2, 8))}


@pytest.mark.parametrize(
    ("options", "stages", "count"),
    [
        ({"window_size": (20, 0)}, 1, 3),
        ({"window_size": (20, 0)}, 3, 3),  # of own keys
        ({"window_size": (20, 9)}, 1, 1),  # the last rank, whose keys end where its queries end
        ({"window_size": (20, 9)}, 3, 3),
        ({"causal": True}, 1, 3),
        ({"causal": True}, 3, 3),
        ({}, 1, 3),
        ({}, 3, 9),
        ({"attention_chunk": 30, "causal": True}, 1, 1),  # the first rank, where chunks begin at 0
        ({"attention_chunk": 30, "causal": True}, 3, 1),
    ],
    ids=str,
)
def test_one_sequence_in_one_piece_is_a_dense_batch(
    options: dict[str, Any], stages: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for dense batches are faster; results are the same. `count` calls are dense."""
    layouts: list[str] = []

    def recording(backend: Any) -> Any:
        def forward(problem: AttentionProblem, *given: Any) -> Any:
            layouts.append(problem.layout)
            return backend.forward(problem, *given)

        # Triton's is looked up where it is called: Triton may be missing.
        return SimpleNamespace(forward=forward, backward=lambda *given: backend.backward(*given))

    backends = {name: recording(backend) for name, backend in dispatch.BACKENDS.items()}
    patched = SimpleNamespace(**vars(dispatch) | {"BACKENDS": backends})
    monkeypatch.setattr(executor, "dispatch", patched)
    g = generator(2)
    q, k, v, dout = (normal(g, 1, 96, heads, 16) for heads in (4, 2, 2, 4))

    def on_rank(comm: ThreadCommunicator) -> list[torch.Tensor]:
        parallel = ContextParallel.over(comm, ulysses=1, stages=stages)
        layout = parallel.layout(seq_len=96, way="contiguous", grain=8)
        leaves = [layout.shard(x).requires_grad_() for x in (q, k, v)]
        for _ in range(2):  # the second call is like the first
            out = parallel.attention(*leaves, layout, **options)
            found = torch.autograd.grad(out, leaves, layout.shard(dout))
        return [layout.unshard(x) for x in (out, *found)]

    results = run_ranks(3, on_rank)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = flashtile.attention(*leaves, **options)
    want = want, *torch.autograd.grad(want, leaves, dout)
    for found in results:
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    assert layouts.count("dense") == 2 * count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_keep_no_memory_of_fetched_keys(dtype: torch.dtype) -> None:
    def on_rank(comm: ThreadCommunicator) -> list[int]:
        layout = ContextParallel.over(comm, ulysses=1, stages=1).layout(
            seq_len=96, way="contiguous", grain=8
        )
        q, k, v = (torch.randn(1, layout.local_tokens, 2, 16, dtype=dtype) for _ in range(3))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = layout.context.attention(*leaves, layout, causal=True)
        found = torch.autograd.grad(out.float().sum(), leaves)
        return [x.untyped_storage().nbytes() - x.nbytes for x in found]

    assert run_ranks(3, on_rank) == [[0, 0, 0]] * 3
