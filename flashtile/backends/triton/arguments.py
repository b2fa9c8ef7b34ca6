"""The kernels' arguments in named tuples, which Triton accepts; None inside them costs nothing.

All strides count elements. The host builds these tuples for every call, so they must be cheap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dropout import first_kept, keep_rate
from ...gpu.rows import at_boundary, fields_of
from ...masks import as_kernel_number
from ...problem import AttentionProblem, NewTokens, Operands


class Bias(NamedTuple):
    """An additive bias; broadcast dimensions have stride 0."""

    ptr: Tensor | None
    batch: int
    head: int
    row: int
    key: int
    keys: int  # of the call; in a tuple, so that the compiler knows whether 16 divides it


class Sequences(NamedTuple):
    """Tensors that locate each sequence, in addition to the bounds in `Lengths`."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None
    cache_batch_idx: Tensor | None
    page_table: Tensor | None
    q_runs: Tensor | None = None  # (B, RUNS, 2), see `tiles.positions_of`
    k_runs: Tensor | None = None
    # Dropout and score functions use indices of the whole call: (B, 2), the index of each sequence
    # there and its keys minus its queries; and the index of the first head.
    numbers: Tensor | None = None
    first_head: int | None = None


class ScoreData(NamedTuple):
    """The numbers that turn products into scores, and the factor of kept probabilities."""

    scale: float
    softcap: float
    drop_scale: float  # 1 / `dropout.keep_rate`
    alibi_ptr: Tensor | None
    alibi_batch: int
    # Per-head scales (B, Hk) or per-block scales of float8 inputs: see `cache.py`.
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    q_block_descale: Tensor | None = None
    k_block_descale: Tensor | None = None
    v_block_descale: Tensor | None = None
    # What the score function captures: (n,) float32 or float64, and (n,) int64.
    captured: Tensor | None = None
    captured_integers: Tensor | None = None
    table_ptr: Tensor | None = None  # a relative bias (Hq, 2 R + 1), contiguous
    table_reach: int | None = None  # R


class NewData(NamedTuple):
    """New tokens to append, with their strides, rotary tables and the caches to append to."""

    k: Tensor
    k_batch: int
    k_row: int
    k_head: int
    k_dim: int
    v: Tensor
    v_batch: int
    v_row: int
    v_head: int
    v_dim: int
    k_cache: Tensor  # in the cache's own dtype, unlike words that hold pairs of float8 numbers
    v_cache: Tensor
    cos: Tensor | None
    sin: Tensor | None
    base: Tensor | None  # (B,), the rotary position of each sequence's first new token


class MaskData(NamedTuple):
    """The tensors of masks.

    A block mask (see `masks.BlockMask`): `has_batch` and `has_heads` are 0 if it is shared over
    that dimension, else 1. Spans (see `masks.py`), with their strides: 0 in shared dimensions.
    """

    kinds: Tensor | None = None
    partial_index: Tensor | None = None
    partial_tiles: Tensor | None = None
    has_batch: int = 0
    has_heads: int = 0
    starts: Tensor | None = None
    starts_batch: int | None = None
    starts_head: int | None = None
    starts_row: int | None = None
    starts_interval: int | None = None
    stops: Tensor | None = None
    stops_batch: int | None = None
    stops_head: int | None = None
    stops_row: int | None = None
    stops_interval: int | None = None


class Lists(NamedTuple):
    """The tiles to visit. A row of `tiles` lists full tiles from its front and masked tiles from
    its end; `counts` has the numbers of both.
    """

    counts: Tensor | None
    tiles: Tensor | None
    has_batch: int
    has_heads: int


# The tuples below hold lengths, so the kernels get their fields as separate arguments: see
# `gpu/kernel.py`.


class Lengths(NamedTuple):
    """The tensors that locate each sequence, and bounds of all sequences."""

    at: Any  # Sequences
    B: Any
    M: Any
    N: Any
    total_q: Any  # rows of a packed q
    total_k: Any  # number of rows of a packed k, rows of a cache, or pages
    page_columns: Any
    heads: Any


class Mask(NamedTuple):
    """The mask rules, which flags of `KernelConfig` select."""

    left: Any
    right: Any
    chunk: Any
    rows: Any  # of tiles of a block mask, and columns
    columns: Any
    data: Any  # MaskData


class Score(NamedTuple):
    """The score rule. (Triton 3.6 loses the numbers of a tuple inside a tuple argument.)"""

    data: Any  # ScoreData
    bias: Any  # Bias


# The tuples below exist in kernels only.


class Sequence(NamedTuple):
    """One sequence: its first row and number of queries, and of keys."""

    b: Any
    start_q: Any
    M: Any
    start_k: Any
    N: Any
    lengths: Any  # Lengths


class Dropout(NamedTuple):
    """What `tiles.kept` needs to know."""

    key: Any  # 0 without dropout
    first_kept: Any


class RowStats(NamedTuple):
    """Of the rows of a backward, in pointers or tiles: see `backward_pass.delta_kernel`."""

    pivot: Any
    log_sum: Any  # unused without HAS_LARGE_SCORES
    delta: Any


NO_LISTS = Lists(None, None, 0, 0)
NO_BIAS = Bias(None, 0, 0, 0, 0, 0)
NO_NEW = {"new": None, "added": 0, "table_rows": 0}

# What kernels take that Triton must not specialise: tensors that are read by rows of any length,
# where alignment saves nothing, and a number.
UNSPECIALISED = (
    "lse_ptr", "lost_ptr", "pivot_ptr", "delta_ptr", "dlse_ptr", "sink_ptr", "rng_ptr",
    "first_kept",
)  # fmt: skip


def common_of(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """The arguments that kernels over scores take, not all of them all."""
    options, page_table, kinds = problem.options, operands.page_table, operands.tile_kinds
    lengths = Lengths(
        at=sequences_of(problem, operands),
        B=problem.B,
        M=problem.M,
        N=problem.N,
        total_q=operands.q.shape[0],
        total_k=operands.k.shape[0],
        page_columns=0 if page_table is None else page_table.shape[1],
        heads=problem.Hq,
    )
    mask = Mask(
        left=as_kernel_number(options.window_left),
        right=as_kernel_number(options.window_right),
        chunk=as_kernel_number(options.attention_chunk),
        rows=0 if kinds is None else kinds.shape[2],
        columns=0 if kinds is None else kinds.shape[3],
        data=masks_of(operands),
    )
    bias = NO_BIAS if operands.bias is None else bias_of(operands.bias, problem.N)
    score = Score(score_of(problem, operands), bias)
    return {
        **fields_of(lengths=lengths, mask=mask, score=score),
        "rng_ptr": operands.rng_state if options.dropout_p > 0 else None,
        "first_kept": first_kept(options.dropout_p),
    }


def sequences_of(problem: AttentionProblem, operands: Operands) -> Sequences:
    """`Sequences` of a call."""
    counts = problem.options.dropout_p > 0 or problem.options.score_mod != ""
    has_numbers = problem.has_sequences and counts
    return Sequences(
        at_boundary(operands.cu_seqlens_q),
        at_boundary(operands.cu_seqlens_k),
        at_boundary(operands.seqused_q),
        at_boundary(operands.seqused_k),
        at_boundary(operands.leftpad_k),
        at_boundary(operands.cache_batch_idx),
        at_boundary(operands.page_table),
        at_boundary(operands.q_runs),
        at_boundary(operands.k_runs),
        at_boundary(operands.sequences) if has_numbers else None,
        problem.options.first_head if has_numbers else None,
    )


def score_of(problem: AttentionProblem, operands: Operands) -> ScoreData:
    """The numbers of the score rule."""
    slopes, options = operands.alibi_slopes, problem.options
    scales = (operands.q_descale, operands.k_descale, operands.v_descale)
    kind = "block_descale" if problem.has_block_descale else "descale"
    descales = {f"{x}_{kind}": at_boundary(scale) for x, scale in zip("qkv", scales, strict=True)}
    return ScoreData(
        scale=options.softmax_scale,
        softcap=options.softcap,
        drop_scale=1.0 / keep_rate(options.dropout_p),
        alibi_ptr=at_boundary(slopes),
        alibi_batch=0 if slopes is None or slopes.dim() == 1 else slopes.shape[1],
        table_ptr=at_boundary(operands.relative_bias),
        table_reach=problem.relative_distance,
        **descales,
        captured=at_boundary(operands.captured),
        captured_integers=at_boundary(operands.captured_integers),
    )


def new_of(new: NewTokens, k_cache: Tensor, v_cache: Tensor) -> dict[str, Any]:
    """The arguments of new tokens that the forward appends to the caches."""
    k_strides, v_strides = new.k.stride(), new.v.stride()
    tables = (at_boundary(new.cos), at_boundary(new.sin), at_boundary(new.base))
    return {
        "new": NewData._make((new.k, *k_strides, new.v, *v_strides, k_cache, v_cache, *tables)),
        "added": new.k.shape[1],
        "table_rows": 0 if new.cos is None else new.cos.shape[0],
    }


def bias_of(bias: Tensor, N: int) -> Bias:
    """`bias` (B or 1, Hq or 1, M or 1, N or 1) of a call with `N` keys."""
    return Bias._make((bias, *_shared_strides(bias), N))


def _shared_strides(x: Tensor) -> list[int]:
    """Strides, 0 for sizes of 1, which are shared."""
    return [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]


def masks_of(operands: Operands) -> MaskData:
    """The tensors of the masks of a call."""
    kinds, index, tiles = operands.tile_kinds, operands.partial_index, operands.partial_tiles
    starts, stops = operands.span_starts, operands.span_stops
    data = MaskData()
    if kinds is not None and index is not None and tiles is not None:
        data = MaskData(
            kinds=kinds.contiguous(),
            partial_index=index.contiguous(),
            partial_tiles=tiles.contiguous().view(torch.uint8),
            has_batch=int(kinds.shape[0] > 1),
            has_heads=int(kinds.shape[1] > 1),
        )
    if starts is not None and stops is not None:
        spans = (starts, *_shared_strides(starts), stops, *_shared_strides(stops))
        data = MaskData._make((*data[:5], *spans))
    return data
