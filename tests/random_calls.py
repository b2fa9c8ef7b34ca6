"""Random calls of the public functions, and what they mean: dense attention, a sequence at a time.

Nothing here comes from `flashtile.testing`, so that an error there cannot hide one in a backend.
A call is a function of one seed. It draws a layout (dense, packed or cached), sizes, options and
dtype; every token that no query sees holds NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import BlockMask, Spans
from flashtile.dropout import keep_rate

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("dense", "dense", "packed", "packed", "cached")
HEADS = ((4, 2), (3, 3), (4, 1), (6, 2), (1, 1))
HEAD_DIMS = (16, 32, 64, 8, 40, 5)


@dataclass
class Rows:
    """Where one sequence is: indices of its queries and keys in the tensors of the call."""

    queries: tuple[Any, ...]
    keys: tuple[Any, ...]


@dataclass
class RandomCall:
    """A call and its meaning."""

    seed: int
    layout: str
    dtype: torch.dtype
    leaves: dict[str, Tensor]  # what has gradients, except in a cached call
    options: dict[str, Any] = field(default_factory=dict)  # the other arguments
    sequences: list[Rows] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)  # bool (Hq, M, N) of each sequence
    score: Callable[..., Tensor] | None = None
    blocks: Tensor | None = None  # what `block_mask` says, bool (M, N)
    lists: list[Tensor] = field(default_factory=list)  # likewise lists of keys, (Hq, M, N) each
    new: dict[str, Tensor] = field(default_factory=dict)  # keys and values that a cached call adds

    def __str__(self) -> str:
        shapes = {n: tuple(x.shape) for n, x in self.leaves.items()}
        plain = {
            n: tuple(x.shape) if isinstance(x, Tensor) else x
            for n, x in self.options.items()
            if not isinstance(x, Spans) and n != "score_mod"
        }
        return f"seed {self.seed}: {self.layout} {self.dtype} {shapes} {plain}"


class Results(NamedTuple):
    """Of a call."""

    out: Tensor
    lse: Tensor
    probabilities: list[tuple[Tensor, Tensor]]  # (Hq, M, N) each: P, and P as dropout leaves it


class Draw:
    """The draws of one seed."""

    def __init__(self, seed: int, longest: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.longest = longest

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def length(self) -> int:
        few, many = self.random.randint(0, 9), self.random.randint(1, self.longest)
        return few if self.chance(0.25) else many

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def bools(self, p: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) < p


def _lengths(x: list[int]) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


def draw_call(
    seed: int,
    longest: int = 70,
    dtypes: Sequence[torch.dtype] = DTYPES,
    hidden: float = math.nan,
    layouts: Sequence[str] = LAYOUTS,
    lists: float = 0.25,
) -> RandomCall:
    """The call of a seed, in one of `layouts` and `dtypes`, whose sequences have at most `longest`
    queries and keys; tokens that no query sees are `hidden`. A share of `lists` of the calls
    without masks that exclude them has lists of keys."""
    d = Draw(seed, longest)
    layout = d.random.choice(layouts)
    dtype = d.random.choice(dtypes)
    Hq, Hk = d.random.choice(HEADS)
    D = d.random.choice(HEAD_DIMS)
    Dv = d.random.choice(HEAD_DIMS) if d.chance(0.2) else D
    B = d.random.randint(1, 3)
    call = RandomCall(seed, layout, dtype, {})
    place = {"dense": _dense, "packed": _packed, "cached": _cached}[layout]
    sizes = place(d, call, B, (Hq, Hk, D, Dv))
    _draw_options(d, call, sizes, (Hq, Hk))
    if d.chance(lists) and not call.options.keys() & {"block_mask", "mask"}:
        _draw_lists(d, call, sizes, (Hq, Hk))
    _hide(call, sizes, Hq, hidden)
    return call


def _dense(d: Draw, call: RandomCall, B: int, dims: tuple[int, ...]) -> list[tuple[int, int]]:
    """Tensors of a padded batch, the places of its sequences, and their lengths."""
    Hq, Hk, D, Dv = dims
    M, N = d.length(), d.length()
    call.leaves = {
        "q": d.normal(B, M, Hq, D, dtype=call.dtype),
        "k": d.normal(B, N, Hk, D, dtype=call.dtype),
        "v": d.normal(B, N, Hk, Dv, dtype=call.dtype),
    }
    sizes = [(M, N)] * B
    if d.chance(0.25):
        sizes = [(d.random.randint(0, M), d.random.randint(0, N)) for _ in range(B)]
        call.options["seqused_q"] = _lengths([m for m, _ in sizes])
        call.options["seqused_k"] = _lengths([n for _, n in sizes])
    call.sequences = [Rows((b, slice(0, m)), (b, slice(0, n))) for b, (m, n) in enumerate(sizes)]
    return sizes


def _packed(d: Draw, call: RandomCall, B: int, dims: tuple[int, ...]) -> list[tuple[int, int]]:
    """The same for sequences back to back, with tokens of nobody behind the last."""
    Hq, Hk, D, Dv = dims
    room = [(d.length(), d.length()) for _ in range(B)]
    starts = [[0], [0]]
    for m, n in room:
        starts[0].append(starts[0][-1] + m)
        starts[1].append(starts[1][-1] + n)
    rest = d.random.choice((0, 0, 3))
    call.leaves = {
        "q": d.normal(starts[0][-1] + rest, Hq, D, dtype=call.dtype),
        "k": d.normal(starts[1][-1] + rest, Hk, D, dtype=call.dtype),
        "v": d.normal(starts[1][-1] + rest, Hk, Dv, dtype=call.dtype),
    }
    sizes = room
    if d.chance(0.2):
        sizes = [(d.random.randint(0, m), d.random.randint(0, n)) for m, n in room]
        call.options["seqused_q"] = _lengths([m for m, _ in sizes])
        call.options["seqused_k"] = _lengths([n for _, n in sizes])
    call.options |= {
        "cu_seqlens_q": _lengths(starts[0]),
        "cu_seqlens_k": _lengths(starts[1]),
        "max_seqlen_q": max(m for m, _ in room) + d.random.choice((0, 0, 2)),
        "max_seqlen_k": max(n for _, n in room) + d.random.choice((0, 0, 2)),
    }
    call.sequences = [
        Rows((slice(a, a + m),), (slice(b, b + n),))
        for a, b, (m, n) in zip(starts[0], starts[1], sizes, strict=False)
    ]
    return sizes


def _cached(d: Draw, call: RandomCall, B: int, dims: tuple[int, ...]) -> list[tuple[int, int]]:
    """The same for new tokens that a cache of rows or pages takes in front of the queries."""
    Hq, Hk, D, Dv = dims
    M = d.random.randint(1, 9)
    added = d.random.choice((0, M, 1))
    page = d.random.choice((1, 4, 16, 24))
    pages = -(-(d.longest + 9) // page)
    capacity = page * pages
    before = [d.random.randint(0, capacity - added) for _ in range(B)]
    rows = d.random.sample(range(B + 2), B)
    is_paged = d.chance(0.5)
    shape = ((B + 2) * pages, page) if is_paged else (B + 2, capacity)
    call.leaves = {
        "q": d.normal(B, M, Hq, D, dtype=call.dtype),
        "k_cache": d.normal(*shape, Hk, D, dtype=call.dtype),
        "v_cache": d.normal(*shape, Hk, Dv, dtype=call.dtype),
    }
    call.options["cache_seqlens"] = _lengths(before)
    table = torch.arange(B + 2).repeat_interleave(capacity).view(B + 2, capacity)
    slots = torch.arange(capacity).expand(B + 2, capacity)
    if is_paged:
        order = torch.randperm((B + 2) * pages, generator=d.generator).view(B + 2, pages)
        call.options["page_table"] = order.int()
        table = order.repeat_interleave(page, 1)
        slots = (torch.arange(capacity) % page).expand(B + 2, capacity)
    if is_paged and d.chance(0.5):
        rows = list(range(B))
        call.options["page_table"] = call.options["page_table"][:B].contiguous()
    else:
        call.options["cache_batch_idx"] = _lengths(rows)
    pads = [0] * B
    if d.chance(0.3):
        pads = [d.random.randint(0, n) for n in before]
        call.options["cache_leftpad"] = _lengths(pads)
    if added:
        call.new = {
            "k_new": d.normal(B, added, Hk, D, dtype=call.dtype),
            "v_new": d.normal(B, added, Hk, Dv, dtype=call.dtype),
        }
    call.sequences = [
        Rows((b, slice(0, M)), (table[r, p : n + added], slots[r, p : n + added]))
        for b, (r, p, n) in enumerate(zip(rows, pads, before, strict=True))
    ]
    return [(M, n + added - p) for n, p in zip(before, pads, strict=True)]


def _draw_options(
    d: Draw, call: RandomCall, sizes: list[tuple[int, int]], dims: tuple[int, int]
) -> None:
    """Everything that changes a score."""
    (Hq, _), B, options = dims, len(sizes), call.options
    wide = torch.promote_types(call.dtype, torch.float32)
    M, N = (max(x) for x in zip(*sizes, strict=True))
    if call.layout == "dense":
        M, N = call.leaves["q"].shape[1], call.leaves["k"].shape[1]
    elif call.layout == "packed":
        M, N = options["max_seqlen_q"], options["max_seqlen_k"]
    if d.chance(0.4):
        options["causal"] = True
    if d.chance(0.3):
        options["window_size"] = tuple(d.random.choice((-1, 0, 3, 20)) for _ in range(2))
    if d.chance(0.15):
        options["attention_chunk"] = d.random.randint(1, 30)
    if d.chance(0.3):
        options["softmax_scale"] = d.random.choice((0.1, 0.5, -0.3, 0.0))
    if d.chance(0.2):
        options["softcap"] = d.random.choice((1.0, 5.0))
    if d.chance(0.2):
        slopes = (Hq,) if d.chance(0.5) else (B, Hq)
        options["alibi_slopes"] = d.normal(*slopes, dtype=wide).abs() / 4
    if d.chance(0.2):
        options["sink"] = d.normal(Hq, dtype=wide)
    if d.chance(0.15):
        radius = d.random.randint(0, 9)
        options["relative_bias"] = d.normal(Hq, 2 * radius + 1, dtype=wide)
    if call.layout != "cached" and d.chance(0.2):
        lead = (B if d.chance(0.5) else 1, Hq if d.chance(0.5) else 1)
        options["bias"] = d.normal(*lead, M, N, dtype=call.dtype)
    if call.layout != "cached" and d.chance(0.15):
        options["dropout_p"] = d.random.choice((0.1, 0.5))
    if d.chance(0.15):
        call.score = lambda s, b, h, i, j: 0.9 * s + 0.3 * h * ((i + 2 * j) % 3)
        options["score_mod"] = call.score
    tokens = call.leaves["q"].shape[0] if call.layout == "packed" else M
    lead = 1 if call.layout == "packed" else d.random.choice((1, B))
    if d.chance(0.15):
        starts = d.integers(-3, N + 2, lead, 1, tokens, d.random.choice((1, 2)))
        options["mask"] = Spans(starts, starts + d.integers(0, N + 2, *starts.shape))
    if call.layout == "dense" and d.chance(0.15):
        options["key_padding_mask"] = d.bools(0.7, B, N)
    elif call.layout == "dense" and d.chance(0.15):
        options["attn_mask"] = d.bools(0.7, d.random.choice((1, B)), 1, M, N)
    elif call.layout != "cached" and min(M, N) > 0 and d.chance(0.15):
        call.blocks = d.bools(0.6, M, N)
        tile = (d.random.randint(3, 20), d.random.randint(3, 20))
        options["block_mask"] = BlockMask.from_dense(call.blocks[None, None], tile)


def _draw_lists(
    d: Draw, call: RandomCall, sizes: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    """Lists of keys, or of blocks of them, of the queries of each sequence or block of queries."""
    Hq, Hk = heads
    is_index = d.chance(0.4)
    rows, keys = (
        (1, 1) if is_index else d.random.choice(((1, 4), (1, 16), (8, 8), (5, 3), (64, 32)))
    )
    options = call.options
    if call.layout == "packed":
        queries = options["cu_seqlens_q"].diff().tolist()
        longest = options["max_seqlen_k"]
    elif call.layout == "dense":
        queries = [call.leaves["q"].shape[1]] * len(sizes)
        longest = call.leaves["k"].shape[1]
    else:
        queries = [call.leaves["q"].shape[1]] * len(sizes)
        cache = call.leaves["k_cache"]
        longest = cache.shape[1]
        if "page_table" in options:
            longest *= options["page_table"].shape[1]
    columns = -(-longest // keys)
    listed_heads = d.random.choice((1, Hk))
    top = d.random.randint(0, columns + 1)
    is_shared = call.layout != "packed" and d.chance(0.3)

    def lists(M: int) -> Tensor:  # (heads, blocks, top)
        made = torch.full((listed_heads, -(-M // rows), top), -1, dtype=torch.int32)
        for one in made.view(-1, top) if made.numel() else ():
            count = d.random.randint(0, min(top, columns))
            entries = [*d.random.sample(range(columns), count), *[-1] * (top - count)]
            d.random.shuffle(entries)
            one.copy_(torch.tensor(entries, dtype=torch.int32))
        return made

    drawn = [lists(M) for M in queries[: 1 if is_shared else None]]
    if call.layout == "packed":
        rest = call.leaves["q"].shape[0] - sum(queries)
        if is_index:
            drawn.append(lists(rest))
        value = torch.cat(drawn, 1)[None]
    else:
        value = torch.stack(drawn)
    drawn = (drawn * len(sizes))[: len(sizes)] if is_shared else drawn
    if is_index:
        options["key_index"] = value.transpose(1, 2).contiguous()
    else:
        options |= {"key_blocks": value, "block_size": (rows, keys)}
    for one, (M, N) in zip(drawn, sizes, strict=False):
        seen = (one[..., None] == torch.arange(columns)).any(-2)
        seen = seen.repeat_interleave(rows, 1).repeat_interleave(keys, 2)[:, :M, :N]
        call.lists.append(seen.expand(Hk, M, N).repeat_interleave(Hq // Hk, 0))


def _hide(call: RandomCall, sizes: list[tuple[int, int]], Hq: int, hidden: float) -> None:
    """Work out what every query sees, and put `hidden` where no query looks."""
    call.seen = [_visible(call, b, m, n).expand(Hq, m, n) for b, (m, n) in enumerate(sizes)]
    if call.lists:
        call.seen = [x & y for x, y in zip(call.seen, call.lists, strict=True)]
    names = ("k_cache", "v_cache") if call.layout == "cached" else ("k", "v")
    looked_at = torch.zeros(
        call.leaves[names[0]].shape[: 2 if call.layout != "packed" else 1]
    ).bool()
    asked = torch.zeros(call.leaves["q"].shape[: looked_at.dim()]).bool()
    for rows, seen in zip(call.sequences, call.seen, strict=True):
        asked[rows.queries] = True
        looked_at[rows.keys] = seen.any(0).any(0)
    for name in names:
        call.leaves[name][~looked_at] = hidden
    if call.layout != "cached":
        call.leaves["q"][~asked] = hidden


def _visible(call: RandomCall, b: int, M: int, N: int) -> Tensor:
    """(1, M, N), which keys every query of sequence `b` sees."""
    options = call.options
    i, j = torch.arange(M)[:, None], torch.arange(N)
    p = i + N - M
    left, right = options.get("window_size", (-1, -1))
    if options.get("causal"):
        right = 0
    seen = torch.ones(M, N, dtype=torch.bool)
    if left >= 0:
        seen &= j >= p - left
    if right >= 0:
        seen &= j <= p + right
    if chunk := options.get("attention_chunk", 0):
        seen &= p.div(chunk, rounding_mode="floor") == j // chunk
    if (spans := options.get("mask")) is not None:
        starts, stops = (x[b % x.shape[0], 0][call.sequences[b].queries[-1]] for x in spans)
        seen &= ((starts[:, None] <= j[:, None]) & (j[:, None] < stops[:, None])).any(-1)
    if (padding := options.get("key_padding_mask")) is not None:
        seen &= padding[b, :N]
    if (mask := options.get("attn_mask")) is not None:
        seen &= mask[b % mask.shape[0], 0, :M, :N]
    if call.blocks is not None:
        seen &= call.blocks[:M, :N]
    return seen[None]


def _scores(call: RandomCall, given: dict[str, Any], b: int, q: Tensor, k: Tensor) -> Tensor:
    """(Hq, M, N), the scores of sequence `b`."""
    options = call.options
    s = options.get("softmax_scale", q.shape[-1] ** -0.5) * torch.einsum("mhd,nhd->hmn", q, k)
    if cap := options.get("softcap", 0.0):
        s = cap * torch.tanh(s / cap)
    _, M, N = s.shape
    h, i, j = torch.meshgrid(*map(torch.arange, s.shape), indexing="ij")
    distance = j - i - (N - M)
    if call.score is not None:
        s = call.score(s, b, h, i, j).to(s.dtype)
    if (slopes := given.get("alibi_slopes")) is not None:
        s = s - (slopes if slopes.dim() == 1 else slopes[b])[:, None, None] * distance.abs()
    if (bias := given.get("bias")) is not None:
        s = s + bias[b % bias.shape[0], :, :M, :N]
    if (table := given.get("relative_bias")) is not None:
        R = table.shape[1] // 2
        s = s + table[h, distance.clamp(-R, R) + R]
    return s


def _keys_and_values(call: RandomCall, given: dict[str, Any], b: int) -> tuple[Tensor, Tensor]:
    """(N, Hq, D) and (N, Hq, Dv) of sequence `b`; what no query sees is 0."""
    rows, looked_at = call.sequences[b], call.seen[b].any(0).any(0)[:, None, None]
    found = []
    for name in ("k", "v"):
        x = given[f"{name}_cache" if call.layout == "cached" else name][rows.keys]
        if call.new:
            new = given[f"{name}_new"][b]
            x = torch.cat([x[: len(x) - len(new)], new])
        x = x.where(looked_at, torch.zeros_like(x))
        found.append(x.repeat_interleave(len(call.seen[b]) // x.shape[1], 1))
    return found[0], found[1]


def meaning(call: RandomCall, given: dict[str, Any], keep: Tensor | None = None) -> Results:
    """(out, lse) of a call with the tensors `given`, in their dtype."""
    q, v = given["q"], given["v_cache" if call.layout == "cached" else "v"]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[:-1], -torch.inf)
    probabilities = []
    for b, (rows, seen) in enumerate(zip(call.sequences, call.seen, strict=True)):
        keys, values = _keys_and_values(call, given, b)
        s = _scores(call, given, b, q[rows.queries], keys).masked_fill(~seen, -torch.inf)
        if (sink := given.get("sink")) is not None:
            s = torch.cat([s, sink[:, None, None].expand(*s.shape[:2], 1)], -1)
        sees_nothing = (s == -torch.inf).all(-1, keepdim=True)
        s = s.masked_fill(sees_nothing, 0)
        p = s.softmax(-1).masked_fill(sees_nothing, 0)[..., : len(keys)].masked_fill(~seen, 0)
        kept = p
        if keep is not None:
            kept = p * keep[b, :, : p.shape[1], : p.shape[2]] / keep_rate(call.options["dropout_p"])
        out[rows.queries] = torch.einsum("hmn,nhd->mhd", kept, values)
        lse[rows.queries] = s.logsumexp(-1).masked_fill(sees_nothing[..., 0], -torch.inf).T
        probabilities.append((p, kept))
    return Results(out, lse.movedim(-1, 1 if lse.dim() == 3 else 0), probabilities)


def floors(
    call: RandomCall, given: dict[str, Tensor], found: Results, dout: Tensor, dlse: Tensor
) -> dict[str, Tensor]:
    """The error that rounding makes in each element of results and gradients, whatever cancels.

    A probability is rounded once to the call's dtype, and has the relative error of its score: the
    sum of the magnitudes of the score's terms times a rounding of the accumulators. The derivatives
    of `softcap` and of the score function are at most 1.
    """
    eps = torch.finfo(call.dtype).eps
    wide = torch.finfo(torch.promote_types(call.dtype, torch.float32)).eps
    scale = abs(call.options.get("softmax_scale", call.leaves["q"].shape[-1] ** -0.5))
    changed = {"softcap": 0.0, "softmax_scale": scale}
    linear = replace(call, score=None, options=call.options | changed)
    sizes = {n: x.detach().abs().nan_to_num(0).requires_grad_() for n, x in given.items()}
    total = torch.zeros((), dtype=torch.float64)
    of_out = torch.zeros_like(found.out.detach())
    of_lse = torch.zeros(found.out.shape[:-1], dtype=torch.float64)
    rows_of_lse = dlse.movedim(1 if dlse.dim() == 3 else 0, -1)
    for b, (rows, both) in enumerate(zip(call.sequences, found.probabilities, strict=True)):
        do = dout[rows.queries].abs().double()
        keys, values = _keys_and_values(call, sizes, b)
        s = _scores(linear, sizes, b, sizes["q"][rows.queries], keys)
        if s.numel() > 0:
            of_lse[rows.queries] = wide * (1 + s.detach().abs().amax(-1).T)
        magnitude = torch.einsum("hmn,nhd->mhd", both[1].detach(), values.detach())
        p, kept = (x.detach() * (eps + wide * (1 + s.detach().abs())) for x in both)
        of_out[rows.queries] = torch.einsum("hmn,nhd->mhd", kept, values.detach())
        delta = (do * magnitude).sum(-1).T  # of dO . O, whose rounding is that of O's terms
        delta = (delta + rows_of_lse[rows.queries].abs().double().T)[..., None]
        ds = kept * torch.einsum("mhd,nhd->hmn", do, values.detach()) + p * delta
        total = total + (ds * s).sum() + torch.einsum("hmn,mhd,nhd->", kept, do, values)
        if "sink" in sizes:
            total = total + (eps * delta[..., 0].sum(-1) * sizes["sink"]).sum()
    floor = {"out": of_out, "lse": of_lse.movedim(-1, 1 if of_lse.dim() == 3 else 0)}
    if not found.out.requires_grad:
        return floor
    terms = torch.autograd.grad(total, list(sizes.values()), allow_unused=True)
    return floor | {
        f"d{n}": torch.zeros_like(x) if term is None else term.abs()
        for (n, x), term in zip(sizes.items(), terms, strict=True)
    }
