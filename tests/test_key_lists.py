"""Lists of keys, or of blocks of keys, that queries or blocks of them see, against dense masks."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch._functorch.config
from bad_calls import refuse
from conformance.harness import OPTIONS, Sizes, compare
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile import BlockMask, Spans
from flashtile.testing import (
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    dense_from_tiles,
    generator,
    normal,
)

DRAWS = int(os.environ.get("FLASHTILE_DRAWS", "50"))
# (1, 1): as `key_index`.
BLOCK_SIZES = ((8, 8), (1, 4), (16, 5), (3, 7), (64, 64), (2, 1), (1, 1), (1, 16))
OTHERS = (
    {},
    {"causal": True},
    {"window_size": (9, 3)},
    {"causal": True, "softcap": 2.0},
    {"attention_chunk": 11},
)


def draw_lists(d: random.Random, tiles: int, columns: int) -> Tensor:
    """(tiles, top) int32: distinct columns in any order, with -1 in between."""
    top = d.randint(1, columns + 1)
    lists = []
    for _ in range(tiles):
        listed = d.sample(range(columns), d.randint(0, min(top, columns)))
        listed += [-1] * (top - len(listed))
        d.shuffle(listed)
        lists.append(listed)
    return torch.tensor(lists, dtype=torch.int32).view(tiles, top)


def as_kinds(lists: Tensor, columns: int) -> Tensor:
    """Bool (..., columns) of lists (..., top): which columns they have."""
    return (lists[..., None] == torch.arange(columns)).any(-2)


def seen(lists: Tensor, block_size: tuple[int, int], s: Sizes) -> Tensor:
    """The dense mask (B or 1, Hq, M, N) of lists (B or 1, Hk or 1, blocks, top)."""
    dense = dense_from_tiles(as_kinds(lists, -(-s.N // block_size[1])), block_size, s.M, s.N)
    return dense.expand(-1, s.Hk, -1, -1).repeat_interleave(s.Hq // s.Hk, 1)


class Call:
    """A random call: dense, padded or packed sequences, whose lists all have a first size of 1 when
    packed."""

    def __init__(self, seed: int) -> None:
        d, g = random.Random(seed), generator(seed)
        self.dtype = d.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
        Hq, Hk = d.choice(((4, 2), (3, 3), (4, 1)))
        B, M, N = d.randint(1, 3), d.randint(1, 40), d.randint(1, 60)
        self.s = s = Sizes(B=B, M=M, N=N, Hq=Hq, Hk=Hk, D=d.choice((8, 16, 40)))
        block_size = d.choice(BLOCK_SIZES)
        rows, columns = -(-M // block_size[0]), -(-N // block_size[1])
        self.shared = dict(d.choice(OTHERS))
        for name in d.sample(("sink", "bias", "alibi", "score function"), 2):
            if d.random() < 0.25:
                self.shared |= OPTIONS[name](g, s, self.dtype)
        self.is_packed = d.random() < 0.4
        heads = d.choice((1, Hk))
        self.lengths_q = [d.randint(0, M) for _ in range(B - 1)] + [M]
        self.lengths_k = [d.randint(0, N) for _ in range(B - 1)] + [N]
        batch = B if self.is_packed else d.choice((1, B))
        lists = draw_lists(d, batch * heads * rows, columns).view(batch, heads, rows, -1)
        self.dense = seen(lists, block_size, s)
        if self.is_packed:
            counts = [-(-length // block_size[0]) for length in self.lengths_q]
            lists = torch.cat([x[:, :n] for x, n in zip(lists, counts, strict=True)], 1)[None]
        self.options: dict[str, Any] = {"key_blocks": lists, "block_size": block_size}
        if block_size == (1, 1):
            self.options = {"key_index": lists.transpose(1, 2)}
        M, N = (sum(self.lengths_q), sum(self.lengths_k)) if self.is_packed else (M, N)
        lead = () if self.is_packed else (B,)
        sizes = {"q": (M, Hq), "k": (N, Hk), "v": (N, Hk)}
        self.leaves = {n: normal(g, *lead, *x, s.D, dtype=self.dtype) for n, x in sizes.items()}

    def check(self, seed: int, backend: str) -> None:
        """Compare the outputs and gradients with the float64 reference by the rule."""
        leaves = self.leaves | {n: self.shared[n] for n in ("sink", "bias") if n in self.shared}
        shared = {n: x for n, x in self.shared.items() if n not in leaves}
        function, reference = flashtile.attention, attention_reference
        if self.is_packed:
            function, reference = flashtile.attention_varlen, attention_varlen_reference
            shared |= {
                "cu_seqlens_q": cu_seqlens(self.lengths_q),
                "cu_seqlens_k": cu_seqlens(self.lengths_k),
                "max_seqlen_q": self.s.M,
                "max_seqlen_k": self.s.N,
            }
        compare(
            lambda x: function(**x, **shared, **self.options, return_lse=True, backend=backend),
            lambda x, **how: reference(**x, **shared, block_mask=self.dense, **how),
            leaves,
            seed=seed,
        )


@pytest.mark.usefixtures("poisoned_buffers")
@pytest.mark.parametrize("draw", range(DRAWS))
def test_random_calls(draw: int, backend: str, seed: int):
    Call(seed).check(seed, backend)


SMALL = Sizes(B=2, M=19, N=27)
BLOCKS = {"block_size": (8, 4)}


def small_lists(seed: int, heads: int = 2, top: int = 3) -> Tensor:
    d = random.Random(seed)
    listed = [d.sample(range(7), top) for _ in range(2 * heads * 3)]
    return torch.tensor(listed, dtype=torch.int32).view(2, heads, 3, top)


def small_call(seed: int) -> dict[str, Any]:
    g, s = generator(seed), SMALL
    shapes = {"q": (s.M, s.Hq), "k": (s.N, s.Hk), "v": (s.N, s.Hk)}
    return {n: normal(g, s.B, *shape, s.D) for n, shape in shapes.items()}


def as_mask(lists: Tensor) -> BlockMask:
    """The block mask that the lists of a small call mean."""
    kinds = as_kinds(lists, 7).repeat_interleave(SMALL.Hq // lists.shape[1], 1)
    return BlockMask.from_tiles(kinds, (8, 4))


def small_index(seed: int, heads: int = 2, top: int = 5) -> Tensor:
    d = random.Random(seed)
    listed = [d.sample(range(27), top) for _ in range(2 * 19 * heads)]
    return torch.tensor(listed, dtype=torch.int32).view(2, 19, heads, top)


def index_as_mask(index: Tensor) -> BlockMask:
    kinds = as_kinds(index.transpose(1, 2), 27)
    return BlockMask.from_tiles(kinds.repeat_interleave(SMALL.Hq // index.shape[2], 1), (1, 1))


def test_keys_of_a_cache_and_of_padded_queries(seed: int):
    call, index = {n: x.double() for n, x in small_call(seed).items()}, small_index(seed)
    used = {"seqused_q": torch.tensor([19, 3]).int(), "seqused_k": torch.tensor([5, 27]).int()}
    mask = index_as_mask(index)
    got = flashtile.attention_varlen(**call, **used, key_index=index, causal=True)
    torch.testing.assert_close(
        got, flashtile.attention(**call, **used, block_mask=mask, causal=True)
    )
    caches = call["q"], call["k"], call["v"]
    lengths = {"cache_seqlens": torch.tensor([27, 20]).int()}
    got = flashtile.attention_with_kvcache(*caches, **lengths, key_index=index)
    torch.testing.assert_close(
        got, flashtile.attention_with_kvcache(*caches, **lengths, block_mask=mask)
    )


def test_of_a_cache(seed: int):
    call, lists, lengths = small_call(seed), small_lists(seed), torch.tensor([27, 20]).int()
    given = call["q"], call["k"], call["v"]
    shared = {"cache_seqlens": lengths, "causal": True}
    got = flashtile.attention_with_kvcache(*given, **shared, key_blocks=lists, **BLOCKS)
    want = flashtile.attention_with_kvcache(*given, **shared, block_mask=as_mask(lists))
    assert torch.equal(got, want)


def test_of_padded_queries(seed: int):
    call, lists = small_call(seed), small_lists(seed)
    used = {"seqused_q": torch.tensor([19, 3]).int(), "seqused_k": torch.tensor([5, 27]).int()}
    got = flashtile.attention_varlen(**call, **used, key_blocks=lists, **BLOCKS)
    want = flashtile.attention(**call, **used, block_mask=as_mask(lists))
    assert torch.equal(got, want)
    got = flashtile.attention_varlen(**call, **used, key_blocks=lists[:1], **BLOCKS)
    want = flashtile.attention(**call, **used, block_mask=as_mask(lists[:1]))
    assert torch.equal(got, want)


def test_unchecked_values_are_defined(seed: int, monkeypatch: pytest.MonkeyPatch):
    """An index out of range lists nothing, a block counts once, and lists that are missing are
    empty."""
    monkeypatch.setenv("FLASHTILE_CHECK", "0")
    call, lists = small_call(seed), small_lists(seed)
    far = torch.tensor([-5, 7, 2**31 - 1, -(2**31)]).int().expand(2, 2, 3, 4)
    got = flashtile.attention(**call, key_blocks=torch.cat((lists, far, lists), -1), **BLOCKS)
    assert torch.equal(got, flashtile.attention(**call, key_blocks=lists, **BLOCKS))
    index = small_index(seed)
    far = torch.tensor([-5, 27, 2**31 - 1, -(2**31)]).int().expand(2, 19, 2, 4)
    got = flashtile.attention(**call, key_index=torch.cat((index, far, index), -1))
    assert torch.equal(got, flashtile.attention(**call, key_index=index))
    starts = {"cu_seqlens_q": cu_seqlens([19, 19]), "cu_seqlens_k": cu_seqlens([27, 27])}
    packed = {n: x.flatten(0, 1) for n, x in call.items()}
    few = torch.cat((*lists[:, :, :2].unbind(0),), 1)[None]  # 4 of 6
    got = flashtile.attention_varlen(**packed, **starts, key_blocks=few, **BLOCKS)
    assert got[19 + 8 :].eq(0).all() and got[: 19 + 8].ne(0).all()


EMPTY = Spans(*(torch.zeros(1, 1, 19, 1, dtype=torch.int32) for _ in range(2)))
BAD = {
    "out of range": ("key_blocks", {"key_blocks": small_lists(0) + 5}),
    "below -1": ("key_blocks", {"key_blocks": small_lists(0) - 2}),
    "twice": ("key_blocks", {"key_blocks": torch.ones(2, 2, 3, 2).int()}),
    "int64": ("key_blocks", {"key_blocks": small_lists(0).long()}),
    "query heads": ("key_blocks", {"key_blocks": small_lists(0).repeat_interleave(2, 1)}),
    "too few lists": ("key_blocks", {"key_blocks": small_lists(0)[:, :, :2]}),
    "no batch": ("key_blocks", {"key_blocks": small_lists(0)[0]}),
    "a list": ("key_blocks", {"key_blocks": [[0, 1]]}),
    "no block size": ("block_size", {"block_size": None}),
    "a block size of one number": ("block_size", {"block_size": (8,)}),
    "an empty block": ("block_size", {"block_size": (8, 0)}),
    "no lists": ("key_blocks", {"key_blocks": None}),
    "a block mask": ("block_mask", {"block_mask": as_mask(small_lists(0))}),
    "both": ("key_index", {"key_index": small_index(0)}),
}
BAD_INDEX = {
    "out of range": small_index(0) + 23,
    "below -1": small_index(0) - 2,
    "twice": torch.ones(2, 19, 2, 2).int(),
    "int64": small_index(0).long(),
    "query heads": small_index(0).repeat_interleave(2, 2),
    "too few lists": small_index(0)[:, :18],
    "heads first": small_index(0).transpose(1, 2),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lists(case: str):
    argument, change = BAD[case]
    out = torch.full((2, 19, 4, 16), torch.nan)
    call = small_call(0) | {"key_blocks": small_lists(0), **BLOCKS, "out": out} | change
    refuse(flashtile.attention, call, argument, [out])


@pytest.mark.parametrize("case", BAD_INDEX)
def test_bad_lists_of_keys(case: str):
    out = torch.full((2, 19, 4, 16), torch.nan)
    call = small_call(0) | {"key_index": BAD_INDEX[case], "out": out}
    refuse(flashtile.attention, call, "key_index", [out])


def test_bad_lists_of_packed_queries():
    packed = {n: x.flatten(0, 1) for n, x in small_call(0).items()}
    packed |= {"cu_seqlens_q": cu_seqlens([19, 19]), "cu_seqlens_k": cu_seqlens([27, 27])}
    lists = torch.cat((*small_lists(0).unbind(0),), 1)[None]
    for wrong in (lists[:, :, :5], small_lists(0)):
        refuse(
            flashtile.attention_varlen, packed | {"key_blocks": wrong, **BLOCKS}, "key_blocks", []
        )


def test_repeated_calls_take_the_lists_of_their_own(seed: int):
    call = small_call(seed)
    for n in range(3):
        lists = small_lists(seed + n)
        got = flashtile.attention(**call, key_blocks=lists, **BLOCKS)
        assert torch.equal(got, flashtile.attention(**call, block_mask=as_mask(lists)))


# The harness differentiates a graph several times.
@torch._functorch.config.patch(donated_buffer=False)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 1])
def test_compiled(rows: int, seed: int):
    """In one graph, selection included: no value is read."""

    def selected(q: Tensor, k: Tensor) -> Tensor:
        q = q[:, :, ::2].unflatten(1, (-1, rows)).mean(2)  # two heads a key head
        scores = torch.einsum("bmhd,bnhd->bhmn", q, k.unflatten(1, (-1, 8)).mean(2))
        return scores.topk(2, -1).indices.int()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        given = {"key_blocks": selected(q, k), "block_size": (rows, 8), "causal": True}
        return flashtile.attention(q, k, v, **given, return_lse=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for M in (24, 40):
        g, s = generator(seed), Sizes(M=M, N=M)
        leaves = {n: normal(g, 2, M, h, 16) for n, h in (("q", 4), ("k", 2), ("v", 2))}
        dense = seen(selected(leaves["q"], leaves["k"]), (rows, 8), s)
        compare(
            lambda x: compiled(**x),
            lambda x, dense=dense, **how: attention_reference(
                **x, causal=True, block_mask=dense, **how
            ),
            leaves,
            seed=seed,
        )


def test_fake_tensors():
    with FakeTensorMode():
        q, k = torch.empty(2, 19, 4, 16), torch.empty(2, 27, 2, 16)
        lists = torch.empty(2, 2, 3, 3, dtype=torch.int32)
        assert flashtile.attention(q, k, k, key_blocks=lists, **BLOCKS).shape == q.shape
        index = torch.empty(2, 19, 1, 3, dtype=torch.int32)
        assert flashtile.attention(q, k, k, key_index=index).shape == q.shape


def test_statistics_derivatives_and_dropout(seed: int):
    """All other options see a block mask."""
    call, lists = small_call(seed), small_lists(seed)
    stats = {"return_stats": ("entropy", "column_sum"), "dropout_p": 0.2}
    found = []
    for mask in ({"key_blocks": lists, **BLOCKS}, {"block_mask": as_mask(lists)}):
        torch.manual_seed(seed)
        out, numbers = flashtile.attention(**call, **mask, **stats)
        found.append((out, numbers.entropy, numbers.column_sum))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_statistics_and_derivatives_of_lists_of_keys(seed: int):
    call, index = small_call(seed), small_index(seed)
    call, mask = {n: x.double() for n, x in call.items()}, index_as_mask(index)
    tangents = {n: torch.randn_like(x) for n, x in call.items()}
    found = []
    for given in ({"key_index": index}, {"block_mask": mask}):

        def attend(x: dict[str, Tensor], given: dict[str, Any] = given) -> Any:
            return flashtile.attention(**x, **given, causal=True)

        out, stats = flashtile.attention(**call, **given, return_stats=("entropy", "column_sum"))
        probs = flashtile.attention(**call, **given, return_attn_probs=True)[2]
        moved = torch.func.jvp(attend, (call,), (tangents,))[1]
        leaves = {n: x.clone().requires_grad_() for n, x in call.items()}
        (dq,) = torch.autograd.grad(attend(leaves).square().sum(), leaves["q"], create_graph=True)
        second = torch.autograd.grad(dq.square().sum(), list(leaves.values()))
        found.append((out, stats.entropy, stats.column_sum, probs, moved, *second))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "options",
    [{"batch_invariant": True}, {"mask": EMPTY}],
    ids=["batch_invariant", "a mask of spans"],
)
def test_what_lists_of_keys_are_refused_with(options: dict[str, Any], request: Any):
    name = request.node.callspec.id
    with pytest.raises(NotImplementedError, match=f"(?=.*lists of keys).*{name}"):
        flashtile.attention(**small_call(0), key_index=small_index(0), **options)


def test_a_mask_from_lists(seed: int):
    lists = small_lists(seed)
    mask = BlockMask.from_key_blocks(lists, 27, (8, 4))
    assert mask.kinds.bool().equal(as_kinds(lists, 7)) and mask.lengths == (24, 28)
    with pytest.raises(ValueError, match="key_blocks: got shape"):
        BlockMask.from_key_blocks(lists[0], 27, (8, 4))
    with pytest.raises(TypeError, match=r"key_blocks: got dtype torch\.float32, want torch\.int32"):
        BlockMask.from_key_blocks(lists.float(), 27, (8, 4))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_a_mask_of_many_blocks_from_narrow_integers(dtype: torch.dtype):
    lists = torch.tensor([[[[100, 7, -1 if dtype.is_signed else 255]]]]).to(dtype)
    columns = 200
    kinds = BlockMask.from_key_blocks(lists, columns * 4, (8, 4)).kinds
    assert kinds.flatten().nonzero().flatten().tolist() == [7, 100]
