"""`flashtile.integrations.xformers`: code that imports xformers runs on flashtile."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from functools import partial
from typing import Any, NamedTuple
from unittest import TestCase

import pytest
import torch
import torch.nn.functional as F
from rounded_results import judge_client, judge_with_gradients
from torch import nn

from flashtile.integrations import xformers as door
from flashtile.integrations import xformers_attn_bias as masks
from flashtile.integrations import xformers_ops as ops
from flashtile.integrations.flash_attn_modules import XFORMERS
from flashtile.testing import attention_reference, call_failures, output_failures

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xformers") is not None, reason="xformers is installed here"
)

FAR = 10**6
TOP_LEFT, BOTTOM_RIGHT = "top left", "bottom right"


class Case(NamedTuple):
    """A mask, and which keys it shows by xFormers' definition.

    Attributes:
        q: the number of queries of each block.
        keys: the indices of the keys of each block.
        N: the number of all keys.
    """

    mask: Any
    q: list[int]
    keys: list[list[int]]
    N: int
    left: int = FAR
    right: int = FAR
    corner: str = BOTTOM_RIGHT

    def visible(self) -> torch.Tensor:
        """Bool (queries, keys), one by one."""
        visible = torch.zeros(sum(self.q), self.N, dtype=torch.bool)
        row = 0
        for m, keys in zip(self.q, self.keys, strict=True):
            shift = 0 if self.corner == TOP_LEFT else len(keys) - m
            for i in range(m):
                for j, key in enumerate(keys):
                    visible[row, key] = i + shift - self.left <= j <= i + shift + self.right
                row += 1
        return visible


def runs(starts: list[int], lengths: list[int]) -> list[list[int]]:
    return [list(range(a, a + n)) for a, n in zip(starts, lengths, strict=True)]


def dense(mask: Any, M: int, N: int, *window: Any) -> Case:
    return Case(mask, [M], runs([0], [N]), N, *window)


def packed(mask: Any, *window: Any) -> Case:
    q = mask.q_seqinfo.seqlen_py
    starts = mask.k_seqinfo.seqstart_py
    return Case(mask, q, runs(starts[:-1], mask.k_seqinfo.seqlen_py), starts[-1], *window)


def in_pages(mask: Any, starts: list[int], lengths: list[int], *window: Any) -> Case:
    size = mask.page_size
    keys = [
        [int(row[key // size]) * size + key % size for key in run]
        for row, run in zip(mask.block_tables, runs(starts, lengths), strict=True)
    ]
    return Case(mask, mask.q_seqinfo.seqlen_py, keys, PAGES * size, *window)


PAGES = 7
TABLE = torch.tensor([[2, 0, 6], [5, 1, 3], [4, 4, 4]], dtype=torch.int32)
BLOCKS = masks.BlockDiagonalMask.from_seqlens([5, 0, 33, 7], [9, 4, 33, 1])
SQUARE = masks.BlockDiagonalMask.from_seqlens([5, 0, 33, 1])
WIDE = masks.BlockDiagonalMask.from_seqlens([5, 0, 33, 1], [17, 3, 40, 1])
CAUSAL, WITHIN = (FAR, 0), (3, 0)
PADDED = ([3, 0, 6], 11, [5, 2, 11])
GAPPY = ([3, 0, 6], [2, 9, 4, 25], [7, 5, 12])  # blocks that overlap
PAGED_GAPPY = ([3, 0, 6], [1, 0, 2], [7, 3, 4], TABLE, 4)

CASES = {
    "LowerTriangularMask square": dense(masks.LowerTriangularMask(), 37, 37, *CAUSAL),
    "LowerTriangularMask wide": dense(masks.LowerTriangularMask(), 9, 37, *CAUSAL, TOP_LEFT),
    "LowerTriangularMask tall": dense(masks.LowerTriangularMask(), 37, 9, *CAUSAL, TOP_LEFT),
    "LowerTriangularMask by one": dense(masks.LowerTriangularMask(), 8, 9, *CAUSAL, TOP_LEFT),
    "LowerTriangularMask no keys": dense(masks.LowerTriangularMask(), 8, 0, *CAUSAL, TOP_LEFT),
    "LowerTriangularFromBottomRightMask": dense(
        masks.LowerTriangularFromBottomRightMask(), 9, 37, *CAUSAL
    ),
    "LowerTriangularFromBottomRightMask tall": dense(  # some see no key
        masks.LowerTriangularFromBottomRightMask(), 12, 5, *CAUSAL
    ),
    "LowerTriangularFromBottomRightLocalAttentionMask": dense(
        masks.LowerTriangularFromBottomRightMask().make_local_attention(4), 20, 37, *WITHIN
    ),
    "LocalAttentionFromBottomRightMask": dense(
        masks.LocalAttentionFromBottomRightMask(2, 5), 20, 37, 2, 5
    ),
    "LocalAttentionFromBottomRightMask diagonal": dense(
        masks.LocalAttentionFromBottomRightMask(0, 0), 5, 7, 0, 0
    ),
    "BlockDiagonalMask": packed(BLOCKS),
    "BlockDiagonalCausalMask": packed(BLOCKS.make_causal(), *CAUSAL, TOP_LEFT),
    "BlockDiagonalCausalMask square": packed(SQUARE.make_causal(), *CAUSAL),
    "BlockDiagonalCausalFromBottomRightMask": packed(WIDE.make_causal_from_bottomright(), *CAUSAL),
    "BlockDiagonalCausalLocalAttentionMask": packed(
        WIDE.make_local_attention(4), *WITHIN, TOP_LEFT
    ),
    "BlockDiagonalCausalLocalAttentionMask square": packed(SQUARE.make_local_attention(4), *WITHIN),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": packed(
        WIDE.make_local_attention_from_bottomright(4), *WITHIN
    ),
    "BlockDiagonalPaddedKeysMask": packed(masks.BlockDiagonalPaddedKeysMask.from_seqlens(*PADDED)),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": packed(
        masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(*PADDED), *CAUSAL
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": packed(
        masks.BlockDiagonalPaddedKeysMask.from_seqlens(*PADDED).make_local_attention(2, 1), 2, 1
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": packed(
        masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
            *PADDED, window_size=4
        ),
        *WITHIN,
    ),
    "BlockDiagonalGappyKeysMask": packed(masks.BlockDiagonalGappyKeysMask.from_seqlens(*GAPPY)),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": packed(
        masks.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(*GAPPY), *CAUSAL
    ),
    "PagedBlockDiagonalPaddedKeysMask": in_pages(
        masks.PagedBlockDiagonalPaddedKeysMask.from_seqlens([3, 0, 6], [5, 2, 4], TABLE, 4),
        [0, 0, 0],
        [5, 2, 4],
    ),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": in_pages(
        masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            [3, 0, 4], 12, [5, 2, 4]
        ).make_paged(TABLE, 4, masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask),
        [0, 0, 0],
        [5, 2, 4],
        *CAUSAL,
    ),
    "PagedBlockDiagonalGappyKeysMask": in_pages(
        masks.PagedBlockDiagonalGappyKeysMask.from_seqlens(*PAGED_GAPPY), *PAGED_GAPPY[1:3]
    ),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": in_pages(
        masks.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            [3, 0, 4], [1, 12, 25, 36], [7, 3, 4]
        ).make_paged(TABLE, 4, 12, masks.PagedBlockDiagonalCausalWithOffsetGappyKeysMask),
        [1, 0, 1],
        [7, 3, 4],
        *CAUSAL,
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture
def installed():
    with door.install():
        yield


def inputs(case: Case, dtype: torch.dtype, heads: int = 3, kv_heads: int = 3):
    M = sum(case.q)
    return {
        "q": torch.randn(1, M, heads, 8, dtype=dtype),
        "k": torch.randn(1, case.N, kv_heads, 8, dtype=dtype),
        "v": torch.randn(1, case.N, kv_heads, 12, dtype=dtype),
    }


def reference_of(visible):
    """`reference` of `call_failures` for a mask (queries, keys)."""
    return lambda x, **how: attention_reference(x["q"], x["k"], x["v"], block_mask=visible, **how)


def test_every_class_has_a_case():
    public = {
        name
        for name, x in vars(masks).items()
        if isinstance(x, type) and issubclass(x, masks.AttentionBias) and not name.startswith("_")
    }
    assert {type(case.mask).__name__ for case in CASES.values()} == public - {
        "AttentionBias",
        "LowerTriangularMaskWithTensorBias",
    }


@every_case
def test_materialize(case):
    visible = case.visible()
    got = case.mask.materialize((2, *visible.shape), torch.float16)
    assert got.dtype == torch.float16
    assert torch.equal(got, torch.zeros(2, *visible.shape).masked_fill(~visible, -torch.inf).half())
    moved = case.mask.to("cpu")
    assert type(moved) is type(case.mask)
    assert torch.equal(moved.materialize(visible.shape) == 0, visible)


@every_case
def test_results_are_those_of_the_materialized_mask(case, seed):
    visible = case.mask.materialize((sum(case.q), case.N)) == 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        leaves = inputs(case, dtype)
        assert not call_failures(
            lambda x: ops.memory_efficient_attention(x["q"], x["k"], x["v"], case.mask),
            reference_of(visible),
            leaves,
            seed=seed,
            dtype=dtype,
        )


class ByHand(torch.autograd.Function):
    """Attention through the functions that record no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        out, lse = ops.memory_efficient_attention_forward_requires_grad(q, k, v, mask)
        ctx.mask = mask
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        back = ops.memory_efficient_attention_backward
        return *back(dout, out, lse, q, k, v, ctx.mask), None


@every_case
def test_forward_and_backward_by_hand(case, seed):
    assert not call_failures(
        lambda x: ByHand.apply(x["q"], x["k"], x["v"], case.mask),
        reference_of(case.visible()),
        inputs(case, torch.float32),
        seed=seed,
        dtype=torch.float32,
        through=("out",),
    )


@pytest.mark.gpu
@every_case
def test_on_a_gpu(case, seed):
    """Inputs are there; the mask may be elsewhere."""

    def call(x):
        q, k, v = (x[name].cuda() for name in "qkv")
        return ops.memory_efficient_attention(q, k, v, case.mask).cpu()

    leaves = inputs(case, torch.float16)
    reference = reference_of(case.visible())
    assert not call_failures(call, reference, leaves, seed=seed, dtype=torch.float16)


@every_case
def test_no_mask_is_made_in_memory(case):
    x = inputs(case, torch.float32)
    _, arguments = case.mask.to("cpu").call(x["q"], x["k"], x["v"])
    tensors = [
        t
        for given in arguments.values()
        for t in (given if type(given) is masks.Spans else [given])
    ]
    numbers = [t.numel() for t in tensors if isinstance(t, torch.Tensor)]
    assert max(numbers, default=0) <= max(sum(case.q), case.N, TABLE.numel())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["LowerTriangularMask wide", "BlockDiagonalCausalMask"])
def test_groups_of_heads(name, shared, seed):
    """5-D inputs; heads of a group may share expanded keys, whose gradient is then the sum."""
    case, G, H = CASES[name], 2, 3
    leaves = inputs(case, torch.float32, G * H, G if shared else G * H)

    def call(x):
        query = x["q"].unflatten(2, (G, H))
        key, value = (x[n].unflatten(2, (G, -1)).expand(-1, -1, G, H, -1) for n in ("k", "v"))
        return ops.memory_efficient_attention(query, key, value, case.mask).flatten(2, 3)

    reference = reference_of(case.visible())
    assert not call_failures(call, reference, leaves, seed=seed, dtype=torch.float32)


def test_one_head_for_all_queries_of_4d_inputs(seed):
    q = torch.randn(2, 5, 4, 8)
    k = torch.randn(2, 7, 1, 8, requires_grad=True)
    shared = ops.memory_efficient_attention(q, k.expand(-1, -1, 4, -1), k.expand(-1, -1, 4, -1))
    copied = ops.memory_efficient_attention(q, *[k.repeat(1, 1, 4, 1)] * 2)
    torch.testing.assert_close(shared, copied)
    leaf = k.detach().expand(-1, -1, 4, -1).requires_grad_()  # its own gradient is asked for
    ops.memory_efficient_attention(q, leaf, leaf).sum().backward()
    assert (leaf.grad != 0).all()


@pytest.mark.parametrize("shape", ["BMK", "BMHK", "BMGHK"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_tensor_as_bias_has_a_gradient(shape, causal, seed):
    B, M, N, heads = 2, 9, 13, {"BMK": (), "BMHK": (4,), "BMGHK": (2, 2)}[shape]
    q, k, v = (torch.randn(B, n, *heads, 8) for n in (M, N, N))
    bias = torch.randn(B, *heads, M, N)
    visible = torch.ones(M, N).tril() > 0 if causal else torch.ones(M, N) > 0

    def call(x):
        attn_bias = masks.LowerTriangularMask().add_bias(x["bias"]) if causal else x["bias"]
        out = ops.memory_efficient_attention(x["q"], x["k"], x["v"], attn_bias)
        return out.reshape(B, M, -1, 8)

    def reference(x, **how):
        q, k, v = (x[n].reshape(B, x[n].shape[1], -1, 8) for n in "qkv")
        bias = x["bias"].reshape(B, -1, M, N)
        return attention_reference(q, k, v, bias=bias, block_mask=visible, **how)

    leaves = {"q": q, "k": k, "v": v, "bias": bias}
    assert not call_failures(call, reference, leaves, seed=seed, dtype=torch.float32)
    mask = masks.LowerTriangularMaskWithTensorBias(bias).to("cpu")
    assert mask.to("meta")._bias.device.type == "meta"
    wanted = bias.masked_fill(~(torch.ones(M, N).tril() > 0), -torch.inf)
    assert torch.equal(mask.materialize(bias.shape), wanted)


@pytest.mark.parametrize(
    "shape", [(2, 2, 1), (2, 1, 3), (1, 2, 3), (2, 1, 1), (2, 3), (2, 1), (3,), ()]
)
def test_a_bias_of_5d_inputs_broadcasts(shape, seed):
    """As tensors do: a 4-D one counts groups and heads, also where the batch is as large."""
    B, G, H, M, N = 2, 2, 3, 5, 7
    q, k, v = (torch.randn(B, n, G, H, 8) for n in (M, N, N))
    leaves = {"q": q, "k": k, "v": v, "bias": torch.randn(*shape, M, N)}

    def call(x):
        out = ops.memory_efficient_attention(x["q"], x["k"], x["v"], x["bias"])
        return out.flatten(2, 3)

    def reference(x, **how):
        bias = x["bias"].expand(B, G, H, M, N).flatten(1, 2)
        return attention_reference(*(x[n].flatten(2, 3) for n in "qkv"), bias=bias, **how)

    assert not call_failures(call, reference, leaves, seed=seed, dtype=torch.float32)


def test_scale_dropout_and_dtype_of_the_result(seed):
    q, k, v = (torch.randn(1, 300, 2, 8, dtype=torch.float16) for _ in range(3))
    out = ops.memory_efficient_attention(q, k, v, scale=0.3, output_dtype=torch.float32)
    assert out.dtype == torch.float32
    reference = partial(attention_reference, q, k, v, softmax_scale=0.3)
    assert not output_failures({"out": out}, reference, q.dtype)
    ones = torch.ones_like(v)
    kept = ops.memory_efficient_attention_forward(q, k, ones, p=0.25)
    assert kept.float().std() > 0 and abs(kept.float().mean() - 1) < 0.02
    assert not ops.memory_efficient_attention_forward(q.requires_grad_(), k, v).requires_grad
    for function in (
        ops.memory_efficient_attention_forward_requires_grad,
        ops.memory_efficient_attention_partial,
    ):
        with pytest.raises(NotImplementedError, match=r"p: got 0\.25"):
            function(q, k, v, p=0.25)


@pytest.mark.parametrize("heads", [(3,), (2, 3)])
@pytest.mark.parametrize("as_list", [False, True])
def test_parts_of_the_keys_are_merged(heads, as_list, seed):
    q, k, v = (torch.randn(2, n, *heads, 8, dtype=torch.bfloat16) for n in (5, 12, 12))
    parts = [ops.memory_efficient_attention_partial(q, k[:, i::3], v[:, i::3]) for i in range(3)]
    assert parts[0][0].dtype == torch.float32
    outs, lses = zip(*parts, strict=True)
    splits = (outs, lses) if as_list else (torch.stack(outs), torch.stack(lses))
    out, lse = ops.merge_attentions(*splits, output_dtype=torch.float32)
    assert lse.shape == (2, *heads, 5)
    reference = partial(attention_reference, *(x.flatten(2, -2) for x in (q, k, v)))
    results = {"out": out.flatten(2, -2), "lse": lse.flatten(1, -2)}
    assert not output_failures(results, reference, q.dtype)
    assert ops.merge_attentions(*splits, write_lse=False)[1] is None


def test_lists_of_batches_are_joined_and_split():
    """Each tensor of a list may hold several sequences, and queries and keys may differ."""
    queries = [torch.randn(b, m, 2, 8) for b, m in ((1, 3), (3, 2), (2, 0), (1, 5))]
    keys = [torch.randn(b, n, 2, 8) for b, n in ((1, 4), (3, 1), (2, 2), (1, 5))]
    mask, q = masks.BlockDiagonalMask.from_tensor_list(queries)
    assert all(map(torch.equal, mask.to("cpu").split(q), queries))
    mask, q, k, v = masks.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys, keys)
    assert torch.equal(k, v)
    assert all(map(torch.equal, mask.split_queries(q), queries))
    assert all(map(torch.equal, mask.make_causal().split_kv(k), keys))
    out = mask.split_queries(ops.memory_efficient_attention(q, k, v, mask))
    for mine, x, y in zip(out, queries, keys, strict=True):
        torch.testing.assert_close(mine, ops.memory_efficient_attention(x, y, y))
    with pytest.raises(ValueError, match="want split_queries"):
        mask.split(q)
    with pytest.raises(ValueError, match=r"tensor: got shape .* want \(1, 14, \.\.\.\)"):
        mask.split_queries(k)


def test_lengths_change_in_place():
    """As a CUDA graph needs it: in the same tensors, up to the longest length."""
    mask = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 2], 9, [4, 6])
    other = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 2], 9, [6, 2])
    held = mask.q_seqinfo.seqstart, mask.k_seqinfo.seqlen
    mask.q_seqinfo.from_seqlens_inplace([1, 2])
    mask.k_seqinfo.from_seqlens_padded_inplace([6, 2])
    assert held == (mask.q_seqinfo.seqstart, mask.k_seqinfo.seqlen)
    assert [x.tolist() for x in held] == [[0, 1, 3], [6, 2]]
    assert torch.equal(mask.materialize((3, 18)), other.materialize((3, 18)))
    assert (mask.q_seqinfo.min_seqlen, mask.k_seqinfo.min_seqlen) == (1, 2)
    moved = mask.to("meta")
    mask.k_seqinfo.from_seqlens_padded_inplace([3, 5])
    assert (moved.k_seqinfo.seqlen_py, moved.k_seqinfo.min_seqlen) == ([6, 2], 2)
    message = "got 2 sequences, the longest 7; want 2 of at most 6 tokens"
    with pytest.raises(ValueError, match=message):
        mask.k_seqinfo.from_seqlens_padded_inplace([7, 2])


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        (masks.PagedBlockDiagonalPaddedKeysMask, ([3, 0, 6], [5, 2, 4])),
        (masks.PagedBlockDiagonalGappyKeysMask, PAGED_GAPPY[:3]),
    ],
)
def test_lengths_are_where_the_pages_are(kind, lengths):
    """By default; and a mask of which only the pages are elsewhere moves."""
    made = kind.from_seqlens(*lengths, TABLE.to("meta"), 4)
    moved = kind.from_seqlens(*lengths, TABLE, 4, device="meta").to("meta")
    for mask in (made, moved):
        parts = mask.q_seqinfo.seqstart, mask.k_seqinfo.seqlen, mask.block_tables
        assert all(x.device.type == "meta" for x in parts)
    assert moved.to("meta") is moved


class OwnMask(masks.LowerTriangularMask):
    """A mask of a user, who knows what it hides."""


QUERY = torch.randn(2, 3, 2, 8)
WRONG = {
    "want all 3-D": (ValueError, lambda: ops.memory_efficient_attention(QUERY, QUERY[0], QUERY)),
    "query: got batch 2": (
        ValueError,
        lambda: ops.memory_efficient_attention(*[QUERY] * 3, SQUARE),
    ),
    "attn_bias: got OwnMask": (
        NotImplementedError,
        lambda: ops.memory_efficient_attention(*[QUERY] * 3, OwnMask()),
    ),
    "bias: got": (TypeError, lambda: ops.memory_efficient_attention(*[QUERY] * 3, [0.0])),
    "k: got dtype": (
        TypeError,
        lambda: ops.memory_efficient_attention(QUERY, QUERY.int(), QUERY.int()),
    ),
    "attn_bias: got shape": (
        ValueError,
        lambda: ops.memory_efficient_attention(*[QUERY[:, :, None]] * 3, torch.zeros(2, 2, 3, 3)),
    ),
    "got 1 keys for 7 queries, want at least as many keys as queries": (
        ValueError,
        lambda: BLOCKS.make_causal_from_bottomright(),
    ),
    "some of 33 queries": (
        RuntimeError,
        lambda: masks.BlockDiagonalMask.from_seqlens([33], [9]).make_local_attention(4),
    ),
    "_window_size: got 0": (ValueError, lambda: SQUARE.make_local_attention(0)),
    "window_left: got -1": (ValueError, lambda: masks.LocalAttentionFromBottomRightMask(-1, 1)),
    "want at most 3, the padding": (
        ValueError,
        lambda: masks.BlockDiagonalPaddedKeysMask.from_seqlens([1], 3, [4]),
    ),
    "got 1 blocks of queries and 2 of keys, want equal numbers": (
        ValueError,
        lambda: masks.BlockDiagonalMask.from_seqlens([1], [1, 2]),
    ),
    "divisible by the page size": (
        ValueError,
        lambda: CASES["BlockDiagonalGappyKeysMask"].mask.make_paged(
            TABLE, 4, 9, masks.PagedBlockDiagonalGappyKeysMask
        ),
    ),
    "kv_seqstarts: got": (
        ValueError,
        lambda: CASES["BlockDiagonalGappyKeysMask"].mask.make_paged(
            TABLE, 4, 12, masks.PagedBlockDiagonalGappyKeysMask
        ),
    ),
    "shape: got 3 queries": (ValueError, lambda: SQUARE.materialize((3, 3))),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    kind, call = WRONG[message]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "M", "N"),
    [
        (None, 5, 9),
        (masks.LowerTriangularMask(), 9, 9),
        (masks.LowerTriangularMask(), 5, 9),
        (SQUARE, 39, 39),
        (BLOCKS.make_causal(), 45, 47),
    ],
)
def test_one_compiled_graph(mask, M, N):
    q, k, v = (torch.randn(1, n, 2, 8, requires_grad=True) for n in (M, N, N))

    def attend(q, k, v):
        return ops.memory_efficient_attention(q, k, v, mask)

    def gradients(function):
        return torch.autograd.grad(function(q, k, v).square().sum(), (q, k, v))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled), gradients(attend), strict=True):
        torch.testing.assert_close(got, want)


def test_operators_are_hints(installed):
    import xformers.ops as xops
    from xformers.ops.fmha import cutlass

    assert issubclass(cutlass.FwOp, xops.fmha.AttentionFwOpBase)
    pair = xops.MemoryEfficientAttentionFlashAttentionOp
    assert pair == (xops.fmha.flash.FwOp, xops.fmha.flash.BwOp)
    q = torch.randn(1, 3, 2, 8)
    with TestCase().assertLogs("flashtile.hints") as hints:
        out = xops.memory_efficient_attention(q, q, q, op=pair)
        assert torch.equal(out, xops.memory_efficient_attention_forward(q, q, q))
    (message,) = hints.output
    assert "memory_efficient_attention: ignored op=" in message and "flash.FwOp" in message


# The door


def loaded():
    return {name: x for name, x in sys.modules.items() if name.startswith("xformers")}


def test_imports_as_programs_write_them():
    before = list(sys.meta_path)
    installation = door.install()
    try:
        import xformers
        import xformers.ops as xops

        assert importlib.metadata.version("xformers") == xformers.__version__ == XFORMERS.version
        for name in XFORMERS.modules:
            assert importlib.util.find_spec(name) is not None
            importlib.import_module(name)
        # Submodules are attributes without an import of their own.
        assert xops.fmha.attn_bias.LowerTriangularMask is xops.LowerTriangularMask
        from xformers.ops import (
            SwiGLU,
            fmha,
            memory_efficient_attention,
            unbind,
        )
        from xformers.ops.fmha import BlockDiagonalMask

        assert fmha.memory_efficient_attention is memory_efficient_attention
        assert BlockDiagonalMask is masks.BlockDiagonalMask
        assert callable(SwiGLU) and callable(unbind)
        with pytest.raises(ImportError, match=r"flashtile has no xformers\.components"):
            importlib.import_module("xformers.components")
        with pytest.raises(
            AttributeError, match=r"xformers\.ops\.RMSNorm.* use torch\.nn\.RMSNorm"
        ):
            _ = xops.RMSNorm
        with door.install():  # blocks nest
            assert importlib.import_module("xformers.ops") is xops
        assert importlib.import_module("xformers.ops") is xops
    finally:
        installation.uninstall()
        installation.uninstall()
    assert not loaded() and sys.meta_path == before
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("xformers.ops")


def test_beside_flash_attn():
    from flashtile.integrations import flash_attn

    with door.install(), flash_attn.install():
        importlib.import_module("flash_attn")
        importlib.import_module("xformers.ops")
    assert not loaded()


def test_a_real_xformers_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path), loaded()
    with pytest.raises(RuntimeError, match=r"the real one is installed .*uninstall it first"):
        door.install()
    assert (list(sys.meta_path), loaded()) == before
    monkeypatch.setitem(sys.modules, "xformers", types.ModuleType("xformers"))
    with pytest.raises(RuntimeError, match="the real one is imported"):
        door.install()


# Programs


class MemEffAttention(nn.Module):
    """DINOv2's attention, and that of its base class."""

    def __init__(self, dim, heads):
        super().__init__()
        self.num_heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def plain(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x, attn_bias=None):
        from xformers.ops import memory_efficient_attention, unbind

        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = unbind(qkv, 2)
        x = memory_efficient_attention(q, k, v, attn_bias=attn_bias)
        return self.proj(x.reshape([B, N, C]))


def test_dinov2_nested_lists_equal_its_plain_path(installed, seed):
    """As its block calls it: crops of several sizes, of which stochastic depth keeps some."""
    from xformers.ops import fmha, index_select_cat, scaled_index_add

    layer, gamma = MemEffAttention(24, 3), torch.randn(24)
    crops = [torch.randn(3, 17, 24), torch.randn(4, 5, 24)]
    kept = [torch.tensor([2, 0]), torch.tensor([1, 2, 3])]

    def program():
        sizes = [len(brange) for brange in kept]
        seqlens = [x.shape[1] for n, x in zip(sizes, crops, strict=True) for _ in range(n)]
        attn_bias = fmha.BlockDiagonalMask.from_seqlens(seqlens)
        attn_bias._batch_sizes = sizes
        flat = index_select_cat([x.flatten(1) for x in crops], kept)
        residuals = attn_bias.split(layer(flat.view(1, -1, 24), attn_bias=attn_bias))
        for x, brange, residual in zip(crops, kept, residuals, strict=True):
            yield scaled_index_add(x.clone(), brange, residual, scaling=gamma, alpha=1.5)

    def plain(dtype):
        copy = MemEffAttention(24, 3).to(dtype)
        copy.load_state_dict(layer.state_dict())
        outs = [x.to(dtype, copy=True) for x in crops]
        for x, brange in zip(outs, kept, strict=True):
            x[brange] += 1.5 * gamma.to(dtype) * copy.plain(x[brange])
        return dict(zip("ab", outs, strict=True))

    judge_client(dict(zip("ab", program(), strict=True)), plain, seed)


def test_trellis_sparse_attention_equals_its_plain_path(installed, seed):
    """TRELLIS's branch for xformers: packed queries, and keys of other lengths."""
    import xformers.ops as xops

    q_seqlen, kv_seqlen = [7, 1, 20], [3, 8, 20]
    q = torch.randn(sum(q_seqlen), 2, 8, requires_grad=True)
    kv = torch.randn(sum(kv_seqlen), 2, 2, 8, requires_grad=True)

    def program(q, kv):
        k, v = kv.unbind(dim=1)
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        mask = xops.fmha.BlockDiagonalMask.from_seqlens(q_seqlen, kv_seqlen)
        return xops.memory_efficient_attention(q, k, v, mask)[0]

    def plain(q, kv):
        parts = zip(q.split(q_seqlen), kv.split(kv_seqlen), strict=True)
        made = []
        for x, y in parts:
            k, v = y.unbind(dim=1)
            one = (z.transpose(0, 1)[None] for z in (x, k, v))
            made.append(F.scaled_dot_product_attention(*one)[0].transpose(0, 1))
        return torch.cat(made)

    judge_with_gradients(program(q, kv), plain, (q, kv), seed)


@pytest.mark.parametrize("packs", [True, False])
def test_swiglu_as_dinov2_subclasses_it(packs, installed):
    from xformers.ops import SwiGLU, SwiGLUEagerOp, swiglu

    class SwiGLUFFNFused(SwiGLU):
        def __init__(self, in_features, hidden_features):
            super().__init__(
                in_features=in_features,
                hidden_features=(int(hidden_features * 2 / 3) + 7) // 8 * 8,
                out_features=in_features,
                bias=True,
                _pack_weights=packs,
            )

    layer, x = SwiGLUFFNFused(12, 30), torch.randn(2, 5, 12)
    first = ["w12"] if packs else ["w1", "w2"]
    assert [name.split(".")[0] for name in layer.state_dict()][::2] == [*first, "w3"]
    w = (layer.w12.weight if packs else torch.cat((layer.w1.weight, layer.w2.weight))).split(24)
    b = (layer.w12.bias if packs else torch.cat((layer.w1.bias, layer.w2.bias))).split(24)
    hidden = F.silu(F.linear(x, w[0], b[0])) * F.linear(x, w[1], b[1])
    want = F.linear(hidden, layer.w3.weight, layer.w3.bias)
    torch.testing.assert_close(layer(x), want)
    with TestCase().assertLogs("flashtile.hints") as hints:
        third = layer.w3.weight, layer.w3.bias
        torch.testing.assert_close(
            swiglu(x, w[0], b[0], w[1], b[1], *third, op=SwiGLUEagerOp), want
        )
    assert "swiglu: ignored op=" in hints.output[-1]
