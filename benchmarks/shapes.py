"""A `Case` is one attention problem in plain numbers; its inputs and its number of operations.

The count of operations follows the FlashAttention papers (4*B*H*M*N*D forward, halved when causal,
2.5 times that backward), made exact: only the scores that the mask leaves visible count, and the
value head dim has its own share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.masks import Visibility, structure
from flashtile.ops.quantize.formula import Recipe
from flashtile.testing import cu_seqlens, dense_from_tiles, generator, paged

BLOCK_TILE = 128  # rows and keys of a tile in the block-sparse cases
LAYER_WEIGHTS = (
    12  # of a layer, in squares of its width: 3 for q, k, v, 1 after attention, 8 in the MLP
)


@dataclass(frozen=True)
class Case:
    """One attention problem; lengths are tokens, masks are those of `flashtile.attention`."""

    variant: str = "dense"
    dtype: str = "float32"
    batch: int = 1
    heads_q: int = 8
    heads_kv: int = 8
    head_dim: int = 64
    head_dim_v: int = 64
    seqlen_q: int = 1024
    seqlen_k: int = 1024
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    dropout: float = 0.0
    alibi: bool = False
    bias: bool = False
    sink: bool = False
    relative: int = 0  # distances to each side that a learned bias has a number for; 0: no bias
    prefix: int = 0  # keys that all queries see, causal or not (a prefix language model)
    block_density: float = 1.0  # share of tiles that a block mask keeps; 1: no block mask
    documents: int = 0  # number of sequences that the batch's tokens are packed as; 0: not packed
    lengths: tuple[int, ...] = ()  # their lengths, which add up to the tokens; (): random
    cached: bool = False  # the keys come from a KV cache; forward only
    page_size: int = 0  # 0: the cache is contiguous
    cache_dtype: str = ""  # of the cache, where it is not `dtype`
    shared_prefix: int = 0  # tokens with which the caches of all sequences begin
    appends: bool = False  # the call writes the queries' own keys and values to the cache
    rotates: bool = True  # these keys and the queries are rotated
    layer: bool = False  # a whole transformer layer, see `layer.py`
    recipe: Recipe | None = None  # no attention: q, k and v are quantised so, see `float8.py`
    seed: int = 0  # of the inputs; in a preset that draws its cases, of these too
    preset: str = ""  # the set of cases that it was measured with
    index: int = 0  # its number there, from 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch's object."""
        return getattr(torch, self.dtype)

    @property
    def label(self) -> str:
        """One line for people."""
        causal = " causal" if self.causal else ""
        heads = f"{self.heads_q}:{self.heads_kv}"
        sizes = f"B{self.batch} H{heads} D{self.head_dim} N{self.seqlen_k}"
        return f"{drawn_as(self.index, self.seed)}{self.variant}{causal} {self.dtype} {sizes}"

    @property
    def masked(self) -> bool:
        """Whether any score inside a sequence is hidden."""
        return bool(self.visibility(1, 1).facts) or self.block_sparse

    @property
    def block_sparse(self) -> bool:
        """Whether a block mask hides tiles."""
        return self.block_density < 1

    @property
    def value_dim(self) -> bool:
        """Whether values have another head dim than keys."""
        return self.head_dim_v != self.head_dim

    def visibility(self, M: int, N: int) -> Visibility:
        """The structural mask of a sequence of M queries and N keys."""
        left, right = (None if side < 0 else side for side in self.window)
        return Visibility(structure(left, 0 if self.causal else right, self.chunk), M, N)


def drawn_as(index: int, seed: int) -> str:
    """Which case of which draw, before a description of it; nothing for a case that is not drawn.

    >>> drawn_as(17, 2), drawn_as(17, 0)
    ('case 17 of seed 2, ', '')
    """
    return f"case {index} of seed {seed}, " if seed else ""


# How each function changes the plain case, in the order of the report.
VARIANTS: dict[str, Callable[[Case], Case]] = {
    "dense": lambda case: case,
    "varlen": lambda case: replace(case, documents=8 * case.batch),
    "window": lambda case: replace(case, window=(511, 0)),
    "chunk": lambda case: replace(case, chunk=512),
    "block-sparse": lambda case: replace(case, block_density=0.25),
    "sink": lambda case: replace(case, sink=True),
    "softcap": lambda case: replace(case, softcap=30.0),
    "alibi": lambda case: replace(case, alibi=True),
    "bias": lambda case: replace(case, bias=True),
    "dropout": lambda case: replace(case, dropout=0.1),
    "value-dim": lambda case: replace(case, head_dim_v=max(1, case.head_dim // 2)),
    "decode": lambda case: replace(case, seqlen_q=1, cached=True),
    "paged-decode": lambda case: replace(
        case, seqlen_q=1, cached=True, page_size=gcd(64, case.seqlen_k)
    ),
}


def vary(case: Case, variant: str) -> Case:
    """`case` as the function named `variant` (a key of `VARIANTS`) would run it."""
    return replace(VARIANTS[variant](case), variant=variant)


class Inputs(NamedTuple):
    """The tensors of a case; q, k, v and dout are (total, heads, dim) when it is packed."""

    q: Tensor  # (B, M, Hq, D)
    k: Tensor  # (B, N, Hk, D)
    v: Tensor  # (B, N, Hk, Dv)
    dout: Tensor  # (B, M, Hq, Dv)
    bias: Tensor | None  # (1, Hq, M, N)
    relative_bias: Tensor | None  # (Hq, 2 R + 1) float32
    sink: Tensor | None  # (Hq,)
    alibi_slopes: Tensor | None  # (Hq,) float32
    tiles: Tensor | None  # bool (rows of tiles, columns of tiles) that the block mask keeps
    cu_seqlens: Tensor | None  # (sequences + 1,) int32
    k_pages: Tensor | None  # (pages, page_size, Hk, D), the keys of k in shuffled pages
    v_pages: Tensor | None  # (pages, page_size, Hk, Dv)
    page_table: Tensor | None  # (B, pages per sequence) int32
    k_new: Tensor | None  # (B, M, Hk, D), to append
    v_new: Tensor | None  # (B, M, Hk, Dv)
    rotary_cos: Tensor | None  # (N, D / 2), for what is appended and the queries
    rotary_sin: Tensor | None


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Normal inputs for `case`, the same for the same seed and kind of device."""
    random = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(case.torch_dtype)

    B, M, N, Hq, Hk = case.batch, case.seqlen_q, case.seqlen_k, case.heads_q, case.heads_kv
    rows, keys = ((B * M,), (B * N,)) if case.documents else ((B, M), (B, N))
    k, v = normal(*keys, Hk, case.head_dim), normal(*keys, Hk, case.head_dim_v)
    for cache in (k, v):
        cache[:, : case.shared_prefix] = cache[:1, : case.shared_prefix].clone()
    k_pages = v_pages = page_table = None
    if case.page_size:  # one seed: the same order of pages twice
        how = {"spare": 0, "shared": case.shared_prefix // case.page_size}
        k_pages, page_table = paged(generator(case.seed), k, case.page_size, **how)
        v_pages, _ = paged(generator(case.seed), v, case.page_size, **how)
        page_table = page_table.to(device)
    if case.cache_dtype:
        stored = getattr(torch, case.cache_dtype)
        k, v = k.to(stored), v.to(stored)
        if k_pages is not None and v_pages is not None:
            k_pages, v_pages = k_pages.to(stored), v_pages.to(stored)
    angle = torch.outer(torch.arange(N), 1e-4 ** torch.linspace(0, 1, case.head_dim // 2))
    angle_on_device = angle.to(device) if case.appends and case.rotates else None
    head = torch.arange(1, Hq + 1, device=device, dtype=torch.float32)
    return Inputs(
        q=normal(*rows, Hq, case.head_dim),
        k=k,
        v=v,
        dout=normal(*rows, Hq, case.head_dim_v),
        bias=normal(1, Hq, M, N) if case.bias else None,
        relative_bias=normal(Hq, 2 * case.relative + 1).float() if case.relative else None,
        sink=normal(Hq) if case.sink else None,
        alibi_slopes=2.0 ** (-8.0 * head / Hq) if case.alibi else None,
        tiles=block_tiles(case).to(device) if case.block_sparse else None,
        cu_seqlens=cu_seqlens(document_lengths(case)).to(device) if case.documents else None,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        k_new=normal(B, M, Hk, case.head_dim) if case.appends else None,
        v_new=normal(B, M, Hk, case.head_dim_v) if case.appends else None,
        rotary_cos=None if angle_on_device is None else angle_on_device.cos().to(case.torch_dtype),
        rotary_sin=None if angle_on_device is None else angle_on_device.sin().to(case.torch_dtype),
    )


def document_lengths(case: Case) -> list[int]:
    """The batch's tokens cut into `case.documents` pieces, at random positions if the case does not
    give the lengths; none is empty."""
    if case.lengths:
        return list(case.lengths)
    tokens = case.batch * case.seqlen_k
    cuts = torch.randperm(tokens - 1, generator=generator(case.seed))[: case.documents - 1] + 1
    edges = torch.tensor([0, *sorted(cuts.tolist()), tokens])
    return edges.diff().tolist()


def block_tiles(case: Case) -> Tensor:
    """Random tiles at the case's density; the first column and the diagonal are always visible."""
    rows, columns = -(-case.seqlen_q // BLOCK_TILE), -(-case.seqlen_k // BLOCK_TILE)
    tiles = torch.rand(rows, columns, generator=generator(case.seed)) < case.block_density
    tiles[:, 0] = True
    tiles.diagonal().fill_(True)
    return tiles


def visible(case: Case, inputs: Inputs, M: int, N: int) -> Tensor | None:
    """The mask of M queries and N keys, bool (M, N); None when every key is visible."""
    if not case.masked:
        return None
    mask = case.visibility(M, N).dense(device=inputs.q.device)
    mask[:, : case.prefix] = True
    if inputs.tiles is not None:
        mask &= dense_from_tiles(inputs.tiles.cpu(), (BLOCK_TILE, BLOCK_TILE), M, N).to(mask.device)
    return None if mask.all() else mask


@lru_cache  # the peers of a case follow each other
def visible_scores(case: Case) -> int:
    """Unmasked scores of all sequences and heads, counted without forming the mask."""
    if case.documents:
        return case.heads_q * sum(_visible_pairs(case, n, n) for n in document_lengths(case))
    return case.batch * case.heads_q * _visible_pairs(case, case.seqlen_q, case.seqlen_k)


def density(case: Case) -> float:
    """The share of all scores that the mask leaves visible."""
    tokens = [(case.seqlen_q, case.seqlen_k)] * case.batch
    if case.documents:
        tokens = [(n, n) for n in document_lengths(case)]
    return visible_scores(case) / (case.heads_q * sum(m * n for m, n in tokens))


def _visible_pairs(case: Case, M: int, N: int) -> int:
    position = torch.arange(M) + N - M
    first, past = torch.zeros(M, dtype=torch.long), torch.full((M,), N)
    for fact in case.visibility(M, N).facts:
        start, stop = fact.key_range(position, N)
        first, past = torch.maximum(first, start), torch.minimum(past, stop)
    if case.prefix:  # of a mask that has no left side
        past = past.clamp(min=min(case.prefix, N))
    past = torch.maximum(first, past)  # a row without visible keys counts 0
    if not case.block_sparse:
        return int((past - first).sum())
    columns = block_tiles(case).repeat_interleave(BLOCK_TILE, 1)[:, :N].long()
    before = torch.nn.functional.pad(columns.cumsum(1), (1, 0))  # (rows of tiles, N + 1)
    tile = torch.arange(M) // BLOCK_TILE
    return int((before[tile, past.clamp(max=N)] - before[tile, first.clamp(max=N)]).sum())


def flops(case: Case, direction: str) -> int:
    """Floating-point operations of one pass: forward, decode, backward, or both.

    Forward multiplies twice (Q K^T, P V): 2*D + 2*Dv a score. Backward multiplies five times
    (Q K^T, dO V^T, dS K, dS^T Q, P^T dO): 6*D + 4*Dv, 2.5 times the forward when D = Dv. A layer's
    weights add 2 each and token forward, 4 backward.
    """
    D, Dv = case.head_dim, case.head_dim_v
    forward, backward = 2 * D + 2 * Dv, 6 * D + 4 * Dv
    per_score = {"backward": backward, "both": forward + backward}.get(direction, forward)
    of_attention = per_score * visible_scores(case)
    if not case.layer:
        return of_attention
    per_weight = {"backward": 4, "both": 6}.get(direction, 2)
    tokens = case.batch * case.seqlen_q
    return of_attention + per_weight * tokens * LAYER_WEIGHTS * (case.heads_q * D) ** 2


def cache_bytes(case: Case) -> int:
    """Bytes of keys and values that one decoding step reads."""
    stored = getattr(torch, case.cache_dtype or case.dtype)
    per_token = case.heads_kv * (case.head_dim + case.head_dim_v) * stored.itemsize
    return case.batch * case.seqlen_k * per_token


def quantized_bytes(case: Case) -> int:
    """Bytes that quantising q, k and v moves: read in 16 bits, once more for a scale that many
    blocks share, and written in 8."""
    assert case.recipe is not None
    queries = case.seqlen_q * case.heads_q * case.head_dim
    keys = case.seqlen_k * case.heads_kv * (case.head_dim + case.head_dim_v)
    reads = 1 if case.recipe.scales == "block" else 2
    return case.batch * (queries + keys) * (reads * case.torch_dtype.itemsize + 1)
