"""The description of one attention call: `Operands` (tensors), `Options` (plain numbers) and
`AttentionProblem` (facts without tensors).

The registered ops take the fields of `Operands` and `Options` in this order. A backend reads the
`AttentionProblem` to decide whether and how it runs the call; it holds no tensor, so it is
hashable and its plan can be cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gpu.described import capability_of, current_target
from .lru import memoised
from .masks import BlockMask, Chunk, Window, structure
from .score_mod.program import has_gradients_of_captured, reads_only_score


class Operands(NamedTuple):
    """The tensors of a call. The first eight can have gradients."""

    q: Tensor  # (B, M, Hq, D) or (total_q, Hq, D)
    # (B, N, Hk, D) or (total_k, Hk, D) or (pages, page_size, Hk, D); of packed rows their bytes
    k: Tensor
    v: Tensor  # as k, with Dv
    bias: Tensor | None = None  # (B or 1, Hq or 1, M or 1, N or 1)
    sink: Tensor | None = None  # (Hq,)
    captured: Tensor | None = None  # (n,) float32 or float64, what `score_mod` reads
    alibi_slopes: Tensor | None = None  # (Hq,) or (B, Hq)
    relative_bias: Tensor | None = None  # (Hq, 2 R + 1), a number for each distance from -R to R
    cu_seqlens_q: Tensor | None = None  # (B + 1,) int32
    cu_seqlens_k: Tensor | None = None  # (B + 1,) int32
    seqused_q: Tensor | None = None  # (B,) int32
    seqused_k: Tensor | None = None  # (B,) int32; counts a left pad
    page_table: Tensor | None = None  # (B, pages per sequence) int32
    cache_batch_idx: Tensor | None = None  # (B,) int32, rows of k and v
    leftpad_k: Tensor | None = None  # (B,) int32
    tile_kinds: Tensor | None = None  # block mask: see masks.BlockMask
    partial_index: Tensor | None = None
    partial_tiles: Tensor | None = None
    rng_state: Tensor | None = None  # (2,) int64, seed and offset of dropout
    # Float8 inputs only: float32 per-head scales (B, Hk), or per-block scales (B, Hq, blocks of M)
    # for q and (B, Hk, blocks of N) for k and v.
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    workspace: Tensor | None = None  # (bytes,) uint8, scratch for partial results of a forward
    # Packed sequences of which the tensors hold parts only (see `masks.Positions`). Runs are pairs
    # of first row, 0 first, and position; unused ones begin at row NO_RUN. Both have as many runs.
    q_runs: Tensor | None = None  # (B, runs, 2) int32
    k_runs: Tensor | None = None  # (B, runs, 2) int32
    # (B, 2) int32: the index of the sequence in the whole call, and its keys minus its queries.
    sequences: Tensor | None = None
    # Intervals of keys of each query, (B or 1, Hq or 1, M, R) or (1, Hq or 1, total_q, R) int32.
    span_starts: Tensor | None = None
    span_stops: Tensor | None = None
    captured_integers: Tensor | None = None  # (n,) int64, what `score_mod` reads
    # Keys of each query, (B, M, Hk or 1, top) or (1, total_q, Hk or 1, top) int32: the numbers of
    # runs of `Options.key_run` keys; those outside of the sequence stand for none.
    key_index: Tensor | None = None

    def without_memory(self) -> Operands:
        """Tensors like these that only describe a call."""

        def like(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

        return Operands(*map(like, self))  # type: ignore[arg-type]  # its fields


def tile_operands(mask: BlockMask) -> dict[str, Tensor]:
    """The operands that hold a block mask, by name."""
    return {
        "tile_kinds": mask.kinds,
        "partial_index": mask.partial_index,
        "partial_tiles": mask.partial_tiles,
    }


class Presence:
    """Which operands of a call are not None: few of them."""

    def __init__(self, missing: tuple[bool, ...]) -> None:
        present = [index for index, is_missing in enumerate(missing) if not is_missing]
        self.pick: Callable[[Operands], tuple[Tensor, ...]] = itemgetter(*present)
        # The leading operands up to the last one that may have a gradient.
        self.differentiable = max(index for index in present if index < DIFFERENTIABLE) + 1
        indices = dict(zip(present, range(len(present)), strict=True))
        self._spread = itemgetter(*(indices.get(index, -1) for index in range(len(missing))))

    def spread(self, picked: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The operands whose `pick` is at the start of `picked`."""
        operands: tuple[Any, ...] = self._spread((*picked, None))
        return operands


def presence_of(operands: Operands) -> Presence:
    """The `Presence` of operands."""
    return _presence(tuple([x is None for x in operands]))


_presence = memoised(256)(Presence)


class Options(NamedTuple):
    """The numeric options of a call, normalised: None is an unbounded window side, 0 is no chunk,
    no softcap, no dropout.
    """

    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    attention_chunk: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0
    num_splits: int = 0
    deterministic: bool = False
    # A row's bits do not depend on the other rows, on the batch or on the layout; None: that is up
    # to the setting `dispatch.batch_invariant`.
    batch_invariant: bool | None = None
    first_head: int = 0  # the number of the first query head in the whole call
    score_mod: str = ""  # the program of a score function (see `score_mod.program`); "": none
    score_mod_gradient: str = ""  # the program of its derivative, if gradients are recorded
    alibi_needs_grad: bool = False
    relative_bias_needs_grad: bool = False
    # A cache of packed rows: the programs of their elements (see `cache_formats`) and the head dim
    # of the values, which the cache does not show; "" and 0: none.
    k_unpack: str = ""
    v_unpack: str = ""
    value_head_dim: int = 0
    key_run: int = 1  # adjacent keys that an entry of `key_index` stands for
    backend: str = ""

    @property
    def has_indexed_scores(self) -> bool:
        """Whether a score function reads more than the score: indices or captured numbers."""
        return bool(self.score_mod) and not reads_only_score(self.score_mod)

    @property
    def facts(self) -> tuple[Window | Chunk, ...]:
        """The mask rules: none if every query sees all keys."""
        return structure(self.window_left, self.window_right, self.attention_chunk)


class NewTokens(NamedTuple):
    """The tensors of new tokens that a call appends to its cache while it attends."""

    k: Tensor  # (B, seq_new, Hk, D)
    v: Tensor  # (B, seq_new, Hk, Dv)
    cos: Tensor | None = None  # (positions, rotary_dim / 2); None: nothing is rotated
    sin: Tensor | None = None
    base: Tensor | None = None  # (B,) int32, the rotary position of each sequence's first new token


@dataclass(frozen=True)
class Appending:
    """What decides how `NewTokens` are appended."""

    tokens: int  # at most, of each sequence; a power of two
    pairs: int  # rotated pairs of features of a head; 0 without rotary embedding
    is_interleaved: bool  # pairs are neighbours instead of features of the two halves
    has_own_positions: bool  # each query has its own position; else that of the first new token


class AttentionProblem(NamedTuple):
    """Everything about a call that decides which backend runs it and how; no tensors."""

    device_type: str
    capability: tuple[int, int] | None  # CUDA compute capability
    dtype: torch.dtype
    layout: str  # "dense", "packed" (queries and keys) or "packed_queries" (keys in a cache)
    B: int
    M: int  # longest query
    N: int  # longest key
    Hq: int
    Hk: int
    D: int
    Dv: int
    page_size: int  # 0: not paged
    options: Options
    has_lengths: bool  # seqused_q, seqused_k, cache_batch_idx or leftpad_k
    has_alibi: bool
    has_bias: bool
    has_sink: bool
    has_descale: bool
    block_tile: tuple[int, int] | None  # rows and keys of a block-mask tile
    needs_grad: bool
    bias_needs_grad: bool
    wants_probabilities: bool = False
    has_statistics: bool = False  # the forward also has the largest score and entropy of each row
    has_entropy: bool = True  # of these; without, a backend may leave it out
    has_float8_keys: bool = False  # a float8 cache of keys and values, with 16-bit queries
    has_cache_rows: bool = False  # cache_batch_idx or leftpad_k
    has_block_descale: bool = False  # per-block instead of per-head scales of float8
    runs: int = 0  # most runs of positions in a sequence; 0 where tensors hold whole sequences
    # Dropout and score functions count by `sequences` and `first_head`.
    has_sequences: bool = False
    # Runs of keys begin at multiples of `dropout.BLOCK_KEYS`: dropout finds its blocks whole.
    has_key_blocks: bool = False
    spans: int = 0  # intervals of keys of each query (`Spans`); 0 without such a mask
    has_key_index: bool = False  # each query has a list of its keys
    relative_distance: int | None = None  # R of `relative_bias`; None without one
    # The result is one part of several: `out` and the gradients keep the dtype of their sums.
    is_partial: bool = False
    # Of a partial result: no other part has these queries, so that dq is whole and in q's dtype.
    has_whole_queries: bool = False
    reserved_processors: int = 0  # multiprocessors that persistent kernels leave to exchanges
    allows_tf32: bool = False  # float32 may be multiplied in TF32: see `allows_tf32`
    # The backend appends new tokens to the cache while it attends; None: the cache has them.
    appending: Appending | None = None
    # Each value is the first columns of its key, as of latents: kernels may read keys only.
    has_values_in_keys: bool = False

    @property
    def facts(self) -> tuple[Window | Chunk, ...]:
        """The mask rules."""
        return self.options.facts

    @property
    def has_own_mask(self) -> bool:
        """Whether a mask is data: tiles, spans or lists."""
        return self.block_tile is not None or self.spans > 0 or self.has_key_index

    @property
    def has_hidden_keys(self) -> bool:
        """Whether a mask may hide a key from every query of its sequence: then what it holds must
        not matter. A bool mask of one query arrives as a bias of -inf.
        """
        if self.has_own_mask or (self.has_bias and self.M == 1):
            return True
        left, right = self.options.window_left, self.options.window_right
        if (left or 0) < 0 or (right or 0) < 0:
            return True
        # Without a bound on the left, the last query sees all keys; with as many queries as keys,
        # each key is seen by the query beside it.
        is_bounded = left is not None or self.options.attention_chunk > 0
        has_all_queries = self.layout == "dense" and not self.has_lengths and self.M >= self.N
        return is_bounded and not has_all_queries

    @property
    def has_dead_rows(self) -> bool:
        """Whether a query may see none of the keys of its sequence: then what the gradient of its
        output holds must not matter.
        """
        if self.has_own_mask or self.has_bias:
            return True
        left, right = self.options.window_left, self.options.window_right
        if (left or 0) < 0 or (right or 0) < 0:
            return True
        # With at least as many keys as queries, each query sees the key beside it.
        is_bounded = right is not None or self.options.attention_chunk > 0
        has_all_keys = self.layout == "dense" and not self.has_lengths and self.M <= self.N
        return is_bounded and not has_all_keys

    @property
    def has_score_gradients(self) -> bool:
        """Whether a tensor that scores read needs a gradient: the bias, ALiBi's slopes, the
        relative bias or what a score function captures.
        """
        options = self.options
        by_distance = options.alibi_needs_grad or options.relative_bias_needs_grad
        return self.bias_needs_grad or by_distance or captured_needs_grad(options)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.Hq // self.Hk

    @classmethod
    def of(cls, operands: Operands, options: Options) -> AttentionProblem:
        """Describe a validated call."""
        q, k, v = operands.q, operands.k, operands.v
        device_type = q.device.type if current_target.gpu is None else "cuda"
        paged = operands.page_table is not None
        starts_q = operands.cu_seqlens_q
        packed = starts_q is not None
        dense_keys = operands.cu_seqlens_k is None
        grad = torch.is_grad_enabled()
        bias_needs_grad = grad and operands.bias is not None and operands.bias.requires_grad
        return cls(
            device_type=device_type,
            capability=capability_of(q) if device_type == "cuda" else None,
            dtype=q.dtype,
            layout="dense" if not packed else "packed_queries" if dense_keys else "packed",
            B=q.shape[0] if starts_q is None else starts_q.shape[0] - 1,
            M=options.max_seqlen_q,
            N=options.max_seqlen_k,
            Hq=q.shape[-2],
            Hk=k.shape[-2],
            D=q.shape[-1],
            Dv=options.value_head_dim or v.shape[-1],
            page_size=k.shape[1] if paged else 0,
            options=options,
            has_lengths=any(
                x is not None
                for x in (
                    operands.seqused_q,
                    operands.seqused_k,
                    operands.cache_batch_idx,
                    operands.leftpad_k,
                )
            ),
            has_alibi=operands.alibi_slopes is not None,
            has_bias=operands.bias is not None,
            has_sink=operands.sink is not None,
            has_descale=any(
                x is not None for x in (operands.q_descale, operands.k_descale, operands.v_descale)
            ),
            block_tile=None
            if operands.partial_tiles is None
            else (operands.partial_tiles.shape[1], operands.partial_tiles.shape[2]),
            needs_grad=grad
            and any(x is not None and x.requires_grad for x in operands[:DIFFERENTIABLE]),
            bias_needs_grad=bias_needs_grad,
            has_float8_keys=k.dtype in FLOAT8 and q.dtype not in FLOAT8,
            has_cache_rows=operands.cache_batch_idx is not None or operands.leftpad_k is not None,
            has_block_descale=operands.k_descale is not None and operands.k_descale.dim() == 3,
            runs=0 if operands.q_runs is None else operands.q_runs.shape[1],
            has_sequences=operands.sequences is not None,
            spans=0 if operands.span_starts is None else operands.span_starts.shape[-1],
            has_key_index=operands.key_index is not None,
            relative_distance=None
            if operands.relative_bias is None
            else operands.relative_bias.shape[1] // 2,
            allows_tf32=q.is_cuda and q.dtype == torch.float32 and allows_tf32(),
            has_values_in_keys=v.shape[-1] < k.shape[-1] and starts_after(k, v, 0),
        )


NO_RUN = 2**31 - 1  # the first row of a run that is not used
# q, k, v, bias, sink, captured, alibi_slopes and relative_bias lead `Operands`
DIFFERENTIABLE = 8
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Rows of float8 queries, and of float8 keys and values, that share a per-block scale.
FLOAT8_QUERY_BLOCK, FLOAT8_KEY_BLOCK = 64, 128


def starts_after(x: Tensor, y: Tensor, columns: int) -> bool:
    """Whether every row of `y` starts so many elements after that of `x`, in one buffer. False
    where that is not known: tracers do not know the memory addresses of tensors.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if type(x) is not Tensor or type(y) is not Tensor:
        return False
    # A private function without type annotations.
    is_alias: bool = torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]
    is_there = y.storage_offset() == x.storage_offset() + columns
    if not is_alias or not is_there or x.shape[:-1] != y.shape[:-1]:
        return False
    sizes = (*x.shape[:-1], 2)  # of size 1 a dimension may have any stride, but for the last one
    steps = zip(sizes, x.stride(), y.stride(), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in steps)


def allows_tf32() -> bool:
    """Whether PyTorch's switches, old or new, let its float32 products on CUDA use TF32. While a
    call is traced, the result is False; the op reads the switches again when it runs.
    """
    return not torch.compiler.is_compiling() and _precision_of("cuda", "matmul") == "tf32"


_precision_of = torch._C._get_fp32_precision_getter


def captured_needs_grad(options: Options) -> bool:
    """Whether the derivative of the score function includes those of captured values."""
    program = options.score_mod_gradient
    return program != "" and has_gradients_of_captured(program)


def needing_gradients(
    operands: Operands, options: Options, bias_needs_grad: bool
) -> tuple[Tensor | None, ...]:
    """The differentiable operands, with None in place of those whose gradient nobody needs."""
    return (
        *operands[:3],
        operands.bias if bias_needs_grad else None,
        operands.sink,
        operands.captured if captured_needs_grad(options) else None,
        operands.alibi_slopes if options.alibi_needs_grad else None,
        operands.relative_bias if options.relative_bias_needs_grad else None,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the prefix ``torch.``."""
    return str(dtype).removeprefix("torch.")


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of `out` for inputs of `dtype`: the same, bfloat16 for float8."""
    return torch.bfloat16 if dtype in FLOAT8 else dtype


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp: float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Size of a log-sum-exp from which a backward adds up P = exp(S - lse) first, and divides by the
# sum: rounding the log-sum-exp to float32 changes P by up to 2**-24 of it.
LARGE_LSE = 1024.0


def lse_shape(operands: Operands) -> tuple[int, ...]:
    """(B, Hq, M), or (Hq, total_q) when the queries are packed."""
    q = operands.q
    if operands.cu_seqlens_q is not None:
        return q.shape[1], q.shape[0]
    return q.shape[0], q.shape[2], q.shape[1]
