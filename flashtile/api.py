"""The three attention functions: tensors and plain arguments in, a backend's `(out, lse)` out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import autograd, dispatch, dropout, kvcache, validate
from .masks import BlockMask
from .problem import FLOAT8, AttentionProblem, Operands, Options

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
WindowSize = tuple[int | None, int | None] | None


class Arguments(NamedTuple):
    """The options that all three functions share, as the caller gave them."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: WindowSize = (-1, -1)
    attention_chunk: int = 0
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    block_mask: Any = None
    dropout_p: float = 0.0
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    deterministic: bool = False
    num_splits: int = 0


class Packed(NamedTuple):
    """How sequences lie in packed tensors."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page_table: Tensor | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: Any = None,
    dropout_p: float = 0.0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Result:
    """Exact attention, ``softmax(scale * q k^T + ...) v``, without the (seq_q, seq_k) matrix in
    memory.

    A score is ``s = softmax_scale * q_i . k_j``, then ``softcap * tanh(s / softcap)``, then ALiBi,
    then bias; masked scores leave the softmax. Masks are aligned to the bottom-right corner. Query
    head ``h`` reads key head ``h // (heads / kv_heads)``. A query that sees no key gets out 0 and
    lse -inf (the sink, if there is one).

    Args:
        q: (batch, seq_q, heads, head_dim); float16, bfloat16, float32, float64, or float8_e4m3fn
            (forward only).
        k: (batch, seq_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seq_k, kv_heads, value_head_dim).
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: key j is visible to query i when ``j <= i + seq_k - seq_q``; sets the window's right
            side to 0.
        window_size: (left, right) keys visible around ``i + seq_k - seq_q``; -1 or None is
            unbounded.
        attention_chunk: keys of the query's own chunk of this many positions alone (Llama 4); 0 is
            off.
        softcap: bound on the scores' magnitude; 0 is off.
        alibi_slopes: (heads,) or (batch, heads); adds ``-slope * |i + seq_k - seq_q - j|``. No
            gradient.
        bias: broadcasts to (batch, heads, seq_q, seq_k), added to the scores; its gradient is
            summed over broadcast dimensions.
        sink: (heads,), a logit that takes part in the softmax's denominator with value 0; has a
            gradient.
        block_mask: `BlockMask`, or FlexAttention's; tiles it leaves empty are not touched.
        dropout_p: probability in [0, 1) with which a probability is dropped; the rest scale by ``1
            / (1 - p)``.
        seqused_q, seqused_k: (batch,) int32, use the first so many tokens of each sequence alone.
        q_descale, k_descale, v_descale: (batch, kv_heads) float32, factors of float8 inputs.
        deterministic: make the backward bitwise repeatable (the forward always is).
        return_lse: return (out, lse).
        return_attn_probs: return (out, lse, probs). Quadratic in memory: probs is (batch, heads,
            seq_q, seq_k) in q's dtype, normalised, negative where dropout dropped, without
            gradient.
        out: (batch, seq_q, heads, value_head_dim), where to write the result; not while recording
            gradients.
        backend: name of the backend to force; it never falls back to another.

    Returns:
        out (batch, seq_q, heads, value_head_dim) in q's dtype (bfloat16 for float8), and on request
        lse (batch, heads, seq_q), the natural log-sum-exp of the scores in float32 (float64 for
        float64), differentiable.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message lists each with its reasons.

    Source: FlashAttention (Dao et al. 2022) algorithms 1 and 2; FlashAttention-2 (Dao 2023)
        algorithm 1.
    """
    arguments = Arguments(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sink=sink,
        block_mask=block_mask,
        dropout_p=dropout_p,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        deterministic=deterministic,
    )
    operands, options = dense_call(q, k, v, arguments)
    return _run(operands, options, backend, return_lse, return_attn_probs, out)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: Any = None,
    dropout_p: float = 0.0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Result:
    """Attention over sequences of different lengths packed back to back, each with itself alone.

    Sequence ``b`` owns the queries ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and likewise the keys;
    it may be empty on either side. Every other option means what it means in `attention`, counted
    within the sequence.

    Args:
        q: (total_q, heads, head_dim).
        k, v: (total_k, kv_heads, head_dim) and (..., value_head_dim); with `page_table`
            (num_pages, page_size, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, cumulative lengths, 0 first.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; tokens past them are ignored.
        bias: broadcasts to (batch, heads, max_seqlen_q, max_seqlen_k), indexed from each sequence's
            start.
        seqused_q, seqused_k: (batch,) int32, use the first so many tokens of each sequence alone.
        page_table: (batch, pages per sequence) int32, the pages that hold each sequence's keys;
            `cu_seqlens_k` then says the lengths alone.

    Returns:
        out (total_q, heads, value_head_dim), and on request lse (heads, total_q) and probs (batch,
        heads, max_seqlen_q, max_seqlen_k).

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`.
    """
    arguments = Arguments(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sink=sink,
        block_mask=block_mask,
        dropout_p=dropout_p,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        deterministic=deterministic,
    )
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table)
    operands, options = packed_call(q, k, v, layout, arguments)
    return _run(operands, options, backend, return_lse, return_attn_probs, out)


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: Any = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Result:
    """Attention of new queries against a key-value cache, which new keys and values are first
    appended to.

    For inference: no gradient is recorded. In place and without reading lengths on the host.

    Args:
        q: (batch, seq_q, heads, head_dim), or (total_q, heads, head_dim) with `cu_seqlens_q`.
        k_cache, v_cache: (cache rows, capacity, kv_heads, head_dim), or with `page_table`
            (num_pages, page_size, kv_heads, head_dim); the value head dim may differ.
        k, v: (batch, seq_new, kv_heads, head_dim) or, with `cu_seqlens_k_new`, (total_new,
            kv_heads, head_dim): written into the cache at `cache_seqlens` before attending. Tokens
            past the capacity are dropped.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate new keys at positions
            ``cache_seqlens + t``, and queries there too when the mask is causal or a window, else
            all at ``cache_seqlens``.
        cache_seqlens: tokens in each sequence's cache before the append, an int or (batch,) int32;
            counts the left pad. By default the whole cache.
        cache_batch_idx: (batch,) int32, the cache row of each sequence; not with pages.
        cache_leftpad: (batch,) int32, where each sequence starts in its cache row.
        page_table: (batch, pages per sequence) int32.
        cu_seqlens_q, max_seqlen_q: packed queries, as in `attention_varlen`.
        rotary_seqlens: (batch,) int32, positions for the rotation instead of `cache_seqlens`.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... (GPT-J) instead of the two halves
            (GPT-NeoX).
        num_splits: programs that share one sequence's keys on a GPU; 0 lets the backend choose.
        return_lse: return (out, lse).

    Other arguments are those of `attention`.

    Returns:
        out, shaped as q with the value head dim, and on request lse (batch, heads, seq_q) or
        (heads, total_q).

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`; nothing is written before every
            check has passed.

    Source: FlashAttention-2's ``flash_attn_with_kvcache`` and FlashAttention-3's additions to it.
    """
    arguments = Arguments(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sink=sink,
        block_mask=block_mask,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=num_splits,
    )
    q, k, v = _autocast_to_cache(k_cache, q, k, v)
    cache = kvcache.Cache(
        k_cache, v_cache, page_table, cache_batch_idx, cache_leftpad, cache_seqlens
    )
    new = kvcache.NewTokens(k, v, cu_seqlens_k_new)
    rotary = kvcache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    with torch.no_grad():
        described, lengths, M, N = kvcache.describe(
            kvcache.Queries(q, cu_seqlens_q, max_seqlen_q), cache, new
        )
        operands, options = _with_arguments(described, M, N, arguments)
        kvcache.check_rotary(rotary, operands, new)
        kvcache.check_values(options, lengths, new, rotary)
        options = _ready(operands, options, backend, out)
        operands = kvcache.rotate_and_append(operands, options, lengths, cache, new, rotary)
        result, lse = autograd.attend(operands, options)
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if return_lse else result


def dense_call(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> tuple[Operands, Options]:
    """Check and describe a call of `attention`."""
    q, k, v = _autocast(q, k, v)
    validate.dense(q, k, v)
    return _with_arguments(Operands(q, k, v), q.shape[1], k.shape[1], arguments)


def packed_call(
    q: Tensor, k: Tensor, v: Tensor, layout: Packed, arguments: Arguments
) -> tuple[Operands, Options]:
    """Check and describe a call of `attention_varlen`."""
    q, k, v = _autocast(q, k, v)
    cu_seqlens_q, cu_seqlens_k, M, N, page_table = layout
    validate.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table)
    M, N = validate.length("max_seqlen_q", M), validate.length("max_seqlen_k", N)
    if page_table is None:
        operands = Operands(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        return _with_arguments(operands, M, N, arguments)
    # The pages say where the keys are; cu_seqlens_k only how many each sequence has.
    lengths, used = cu_seqlens_k.diff(), arguments.seqused_k
    validate.per_sequence("seqused_k", used, q, lengths.shape[0])
    arguments = arguments._replace(
        seqused_k=lengths if used is None else torch.minimum(used, lengths)
    )
    operands = Operands(q, k, v, cu_seqlens_q=cu_seqlens_q, page_table=page_table)
    return _with_arguments(operands, M, min(N, page_table.shape[1] * k.shape[1]), arguments)


def _with_arguments(
    operands: Operands, M: int, N: int, arguments: Arguments
) -> tuple[Operands, Options]:
    """Operands with the optional tensors, and the checked numbers."""
    block_mask = _block_mask(arguments.block_mask)
    tensors = {name: getattr(arguments, name) for name in _OPTIONAL_TENSORS}
    if operands.seqused_k is not None:  # a cache brings its own lengths
        del tensors["seqused_k"]
    operands = operands._replace(**tensors, bias=_four_dimensional(arguments.bias))
    if block_mask is not None:
        operands = operands._replace(
            tile_kinds=block_mask.kinds,
            partial_index=block_mask.partial_index,
            partial_tiles=block_mask.partial_tiles,
        )
    numbers = {name: getattr(arguments, name) for name in _NUMBERS}
    return operands, validate.options(
        head_dim=operands.q.shape[-1], max_seqlen_q=M, max_seqlen_k=N, **numbers
    )


_OPTIONAL_TENSORS = (
    "sink",
    "alibi_slopes",
    "seqused_q",
    "seqused_k",
    "q_descale",
    "k_descale",
    "v_descale",
)
_NUMBERS = (
    "softmax_scale",
    "causal",
    "window_size",
    "attention_chunk",
    "softcap",
    "dropout_p",
    "num_splits",
    "deterministic",
)


def _run(
    operands: Operands,
    options: Options,
    backend: str | None,
    return_lse: bool,
    return_attn_probs: bool,
    out: Tensor | None,
) -> Result:
    """Check what is left, choose the backend, run."""
    options = _ready(operands, options, backend, out)
    if options.dropout_p > 0:
        operands = operands._replace(rng_state=dropout.draw_rng_state(operands.q.device))
    result, lse = autograd.attend(operands, options)
    if out is not None:
        result = out.copy_(result)
    if return_attn_probs:
        return result, lse, autograd.attention_probabilities(operands, options, lse.detach())
    return (result, lse) if return_lse else result


def _ready(
    operands: Operands, options: Options, backend: str | None, out: Tensor | None
) -> Options:
    """The last checks of a call; returns the options with the backend chosen."""
    validate.extras(operands, options.max_seqlen_q, options.max_seqlen_k)
    validate.float8_forward_only(operands)
    validate.output(out, operands)
    validate.values(operands, options)
    if backend is not None:
        dispatch.check_name(backend)
    problem = AttentionProblem.of(operands, options)
    return options._replace(backend=dispatch.select(problem, backend))


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, cast as SDPA does: every floating input but float64 to the autocast dtype."""
    if not _is_autocasting(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _autocast_to_cache(cache: Tensor, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Under autocast, cast queries and new tokens to the cache's dtype; a cache never changes."""
    if not _is_autocasting(cache):
        return q, k, v
    return _cast(q, cache.dtype), _cast(k, cache.dtype), _cast(v, cache.dtype)


def _is_autocasting(x: Any) -> bool:
    """Whether autocast is on where `x` is; PyTorch raises when asked about other devices."""
    known = isinstance(x, Tensor) and x.device.type in ("cpu", "cuda")
    return known and torch.is_autocast_enabled(x.device.type)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(x, Tensor) and x.is_floating_point()
    return x.to(dtype) if castable and x.dtype not in (torch.float64, *FLOAT8) else x


def _four_dimensional(bias: Any) -> Any:
    """Bias with leading dimensions of size 1 added, as broadcasting would."""
    if not isinstance(bias, Tensor) or bias.dim() >= 4:
        if isinstance(bias, Tensor) and bias.dim() > 4:
            raise ValueError(f"bias: got {bias.dim()} dimensions, want at most 4")
        return bias
    return bias[(None,) * (4 - bias.dim())]


def _block_mask(block_mask: Any) -> BlockMask | None:
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(
            f"block_mask: got {type(block_mask).__name__}, want flashtile.BlockMask or "
            "FlexAttention's BlockMask"
        )
    if torch.compiler.is_compiling():
        raise TypeError(
            "block_mask: a FlexAttention BlockMask is converted by reading it on the host; call "
            "BlockMask.from_flex(...) outside of torch.compile and pass the result"
        )
    return BlockMask.from_flex(block_mask)
