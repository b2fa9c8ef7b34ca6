"""The public attention functions: they take tensors and plain arguments, run the call on a backend
and return `(out, lse)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import autograd, statistics
from .call import checks, dispatch, shared_prefix
from .call.cached import append_and_attend, append_and_measure
from .call.converted_masks import packed_lists
from .call.dispatch import BackendName
from .call.explain import Explanation, explained
from .call.layouts import DENSE, Cached, Layout
from .call.options import (
    LISTS,
    AttentionOptions,
    CacheOptions,
    VarlenOptions,
    accepts,
    refuse_unknown,
)
from .call.packing import as_batch, as_packed, tokens
from .call.prepare import (
    QKV,
    Keywords,
    outside_of_graphs,
    prepare,
    with_dropout_seed,
)
from .gpu import memory as workspace

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | tuple[Any, ...]


@accepts(AttentionOptions)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    return_stats: Sequence[str] | None = None,
    out: Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: BackendName | None = None,
    **options: Unpack[AttentionOptions],
) -> Result:
    """Exact attention, ``softmax(scale * q k^T + ...) v``, without the (seq_q, seq_k) matrix in
    memory.

    A score is ``s = softmax_scale * q_i . k_j``, then ``softcap * tanh(s / softcap)``, then
    `score_mod`, then ALiBi, then the biases; the softmax leaves out masked scores. Masks are
    aligned to the bottom-right corner. Query head ``h`` reads key head ``h // (heads / kv_heads)``.
    A query that sees no key has out 0 and lse -inf (with `sink`: the sink's logit).

    Args:
        q: (batch, seq_q, heads, head_dim); float16, bfloat16, float32, float64, or float8_e4m3fn
            (forward only).
        k: (batch, seq_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seq_k, kv_heads, value_head_dim).
        qv: (batch, seq_q, heads, value_head_dim), queries for the values, as in the absorbed form
            of multi-head latent attention (DeepSeek-V2): a score is ``softmax_scale * (q_i . k_j +
            qv_i . v_j)``. The call copies keys and values into one tensor, unless they are views of
            one latent buffer and record no gradient. Not with float8.
        softmax_scale: factor on the scores; by default ``head_dim ** -0.5``, or ``(head_dim +
            value_head_dim) ** -0.5`` with `qv`.
        causal: key j is visible to query i when ``j <= i + seq_k - seq_q``; sets the window's right
            side to 0.
        window_size: (left, right), a tuple, list, array or tensor of two ints: key j is visible to
            query i when ``p - left <= j <= p + right`` at ``p = i + seq_k - seq_q``. -1 or None is
            unbounded. Other negative sides put the window after the query (left) or before it
            (right). A window without any key, ``left + right < 0``, is ignored, as in
            FlashAttention-4. The host waits for the GPU to read a tensor there.
        attention_chunk: chunk size in positions; a query sees only the keys of its own chunk (Llama
            4). 0 is off.
        softcap: bound on the scores' magnitude; 0 is off.
        alibi_slopes: (heads,) or (batch, heads); adds ``-slope * |i + seq_k - seq_q - j|``. Has a
            gradient.
        bias: broadcasts to (batch, heads, seq_q, seq_k), added to the scores; its gradient is
            summed over broadcast dimensions.
        relative_bias: (heads, 2 R + 1), added by the distance of key and query: ``relative_bias[h,
            clamp(j - p, -R, R) + R]`` at ``p = i + seq_k - seq_q``. Has a gradient; no matrix is
            made.
        sink: (heads,), the logit of one additional key per head whose value is 0: it only adds to
            the softmax's denominator. Has a gradient.
        block_mask: `BlockMask`, or FlexAttention's; its empty tiles are skipped.
        key_blocks: (batch, kv_heads or 1, ceil(seq_q / q_block), top) int32, the blocks of keys
            that each block of queries sees, -1 for none; other masks hide more. The lists stay on
            their device. An index out of range or twice in a list is an error on a CPU and with
            ``FLASHTILE_CHECK=1``; elsewhere the first lists nothing, the second counts once.
        block_size: (q_block, k_block), queries and keys of a block of `key_blocks`.
        key_index: (batch, seq_q, kv_heads or 1, top) int32, the same for single keys: those that
            each query sees.
        mask: `Spans`, one to eight intervals of visible keys for each query, in memory that grows
            with the number of queries.
        score_mod: function (score, b, h, i, j) -> score, as in FlexAttention, of the scaled and
            capped score and the indices of its sequence, query head, query and key, each a tensor
            without dimensions. It may read captured tensors, which have gradients. Queries and keys
            count from 0 in their own sequence, whatever the lengths, as for `bias`.
        attn_mask: broadcasts to (batch, heads, seq_q, seq_k), with PyTorch's meaning. Bool: True
            where a query sees a key; the call converts it to a block mask, for which the host waits
            for the GPU. Floating: added to the scores like `bias`, with a gradient.
        key_padding_mask: (batch, seq_k) bool, True for the keys that take part, as in flash_attn's
            modules (PyTorch's `nn.MultiheadAttention` means the opposite). Padding may be on the
            left, on the right or in between; it does not shift positions.
        dropout_p: rate in [0, 1) at which attention probabilities are dropped; those that are kept
            are scaled by ``1 / (1 - p)``, with p rounded to a multiple of 1/256 or, below 1/16, of
            2**-16.
        seqused_q, seqused_k: (batch,) int32, number of valid tokens of each sequence, counted from
            its start; the others are padding.
        q_descale, k_descale, v_descale: (batch, kv_heads) float32, scales by which float8 inputs
            are multiplied; or all three with per-block scales, (batch, heads, ceil(seq_q / 64)) for
            q and (batch, kv_heads, ceil(seq_k / 128)) for k and v, as `quantize_qkv` makes them.
        deterministic: make the backward bitwise repeatable (the forward always is).
        batch_invariant: make the bits of a row of out, lse and gradients depend only on its query,
            its keys, values, positions and options, not on the batch, the other rows or the layout
            of the call. None means what `flashtile.batch_invariant` says. Not with dropout, float8
            queries or `num_splits` above 1.
        num_splits: number of programs that share one sequence's keys on a GPU; 0 lets the backend
            choose.
        pack_gqa, sm_margin: performance hints of FlashAttention-3. Like `num_splits`, they change
            results only by rounding; `explain` says whether a backend honours or ignores them.
        return_lse: return (out, lse).
        return_attn_probs: return (out, lse, probs). Quadratic in memory: probs is (batch, heads,
            seq_q, seq_k) in q's dtype, normalised, negative where dropout dropped a probability,
            without gradient.
        return_stats: some of "max_logit", "entropy" and "column_sum": also return a
            `flashtile.Statistics` with them, behind all other results. Memory stays linear;
            "column_sum" computes the scores again. Not with float8.
        out: (batch, seq_q, heads, value_head_dim), the tensor to write the result to; not allowed
            while gradients are recorded.
        generator: where dropout draws its seed, a generator of q's device; PyTorch's own by
            default.
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
    refuse_unknown(options, AttentionOptions, attention)
    outputs = (return_lse, return_attn_probs, out, return_stats)
    return _run((q, k, v), DENSE, options, backend, outputs, None, generator)


@accepts(VarlenOptions)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    return_stats: Sequence[str] | None = None,
    out: Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: BackendName | None = None,
    **options: Unpack[VarlenOptions],
) -> Result:
    """Attention within each of several sequences of different lengths, packed back to back.

    Sequence ``b`` owns the queries ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]``, and likewise the
    keys; it may have no queries or no keys. Queries or keys without cumulative lengths are padded:
    sequence ``b`` owns the first ``seqused[b]`` tokens of its row, or all of them. All other
    options mean the same as in `attention`, with positions counted within the sequence.

    Args:
        q: (total_q, heads, head_dim), or padded (batch, seq_q, heads, head_dim).
        k, v: (total_k, kv_heads, head_dim) and (..., value_head_dim), or padded (batch, seq_k,
            kv_heads, head_dim); with `page_table` (num_pages, page_size, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, cumulative lengths, 0 first; None for padded
            queries or keys, and for pages whose lengths are in `seqused_k`.
        qv: (total_q, heads, value_head_dim).
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; tokens past them are an error on a
            CPU and ignored on a GPU. None means the size of the padded dimension or, for packed
            tokens, the longest length, which the host reads from the cumulative lengths. The host
            waits for the GPU to read it, or to read a tensor given here. Under torch.compile they
            must be ints.
        bias: broadcasts to (batch, heads, max_seqlen_q, max_seqlen_k), indexed from each sequence's
            start; with `page_table`, its last size is at most the tokens in a row of pages.
        key_blocks: (1, kv_heads or 1, blocks, top) int32 for packed queries: the lists of each
            sequence, whose blocks of queries and keys count from its start, one after the other.
        key_index: (1, total_q, kv_heads or 1, top) int32 for packed queries; keys count from the
            start of their sequence.
        seqused_q, seqused_k: (batch,) int32, number of valid tokens of each sequence, counted from
            its start; the others are padding.
        page_table: (batch, pages per sequence) int32, the pages that hold each sequence's keys;
            `cu_seqlens_k`, if given, then only gives the lengths.
        scheduler_metadata: int32, a performance hint of FlashAttention-3 that changes no result.
        workspace: as in `attention_with_kvcache`; not allowed while gradients are recorded.

    Returns:
        out (total_q, heads, value_head_dim), and on request lse (heads, total_q); for padded
        queries both are shaped as in `attention`. Also on request probs (batch, heads,
        max_seqlen_q, max_seqlen_k).

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`.
    """
    refuse_unknown(options, VarlenOptions, attention_varlen)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    qkv, qv, layout, padded = as_packed(q, k, v, options.get("qv"), *lengths, page_table)
    if padded is not None and qv is not None:
        options = {**options, "qv": qv}
    if padded is not None and LISTS.intersection(options):
        options = packed_lists(options, q.shape[0])
    mask = options.get("mask")
    if padded is not None and mask is not None:
        checks.spans(mask, q)
        options = {**options, "mask": mask.pack(q.shape[0])}
    outputs = (return_lse, return_attn_probs, out, return_stats)
    results = _run(qkv, layout, options, backend, outputs, padded, generator)
    if return_stats is None:
        return results
    *others, stats = results
    padded_keys = (k.shape[0], k.shape[1]) if k.dim() == 4 and page_table is None else None
    return (*others, statistics.as_batch(stats, padded, padded_keys))


@accepts(CacheOptions)
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
    max_seqlen_q: int | Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    shared_prefix_len: int | None = None,
    return_lse: bool = False,
    return_stats: Sequence[str] | None = None,
    out: Tensor | None = None,
    backend: BackendName | None = None,
    **options: Unpack[CacheOptions],
) -> Result:
    """Append new keys and values to a key-value cache, then attend to it.

    For inference: it records no gradients. It appends in place and, on a GPU, does not read lengths
    on the host.

    Args:
        q: (batch, seq_q, heads, head_dim), or (total_q, heads, head_dim) with `cu_seqlens_q`.
        k_cache, v_cache: (cache rows, capacity, kv_heads, head_dim), or with `page_table`
            (num_pages, page_size, kv_heads, head_dim); the value head dim may differ. In q's dtype,
            or both float8_e4m3fn with a q of float16 or bfloat16: they then hold keys divided by
            `k_descale` and values divided by `v_descale`. With `cache_format` uint8, whose last
            dimension has the bytes of a row.
        k, v: (batch, seq_new, kv_heads, head_dim) or, with `cu_seqlens_k_new`, (total_new,
            kv_heads, head_dim), in q's dtype: written into the cache at `cache_seqlens` before
            attending. Tokens past the capacity are an error on a CPU and dropped on a GPU; numbers
            beyond the range of float8 saturate.
        cache_format: a `CacheFormat` of keys and values, or one for each: how the bytes of a row
            become keys or values, which are then rounded to q's dtype. New tokens are packed by its
            `pack`, after the rotation; values that begin at the address of the keys are columns of
            them and not written by themselves. No derivatives, `qv`, `batch_invariant`, statistics
            or shared prefix.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate new keys at positions
            ``cache_seqlens + t``. Queries are rotated at the same positions under a causal mask, a
            window or a chunk, otherwise all at ``cache_seqlens``. Float8 is rotated in float32 and
            rounded to float8 again.
        cache_seqlens: number of tokens in each sequence's cache before the append, an int or
            (batch,) int32; includes the left pad. By default the capacity of the cache.
        cache_batch_idx: (batch,) int32, the cache row of each sequence, or its row of the
            page table.
        cache_leftpad: (batch,) int32, index of each sequence's first token in its cache row.
        page_table: (batch, pages per sequence) int32, or (rows, pages per sequence) with
            `cache_batch_idx`. Pages may have any size.
        cu_seqlens_q, max_seqlen_q: packed queries, as in `attention_varlen`.
        rotary_seqlens: (batch,) int32, positions for the rotation instead of `cache_seqlens`;
            without rotary tables it has no effect.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... (GPT-J) instead of the two halves
            (GPT-NeoX).
        shared_prefix_len: the number of tokens with which all sequences of the batch begin. Their
            keys and values are read once for the whole batch, where the first sequence has them.
            All queries and new keys come after it; with `page_table` it fills whole pages. Not for
            chunks, slopes of ALiBi for each sequence, bias, masks, score functions, left pads or a
            workspace.
        qv: shaped as q with the value head dim; read after the append, not rotated. The call copies
            both caches, unless they are views of one latent buffer.
        scheduler_metadata: int32, a performance hint of FlashAttention-3 that changes no result.
        return_lse: return (out, lse).
        workspace: (bytes,) uint8, contiguous, at least `workspace_size` bytes: scratch buffer for
            the partial results of split keys on a GPU, allocated per call if omitted. It holds
            nothing between calls, so all calls of one stream can share it, and it changes no
            result.

    Other arguments are those of `attention`. Per-block scales cannot be combined with
    `cache_leftpad`.

    Returns:
        out, shaped as q with the value head dim, and on request lse (batch, heads, seq_q) or
        (heads, total_q).

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`; nothing is written before every
            check has passed.

    Source: FlashAttention-2's ``flash_attn_with_kvcache`` and FlashAttention-3's additions to it.
    """
    refuse_unknown(options, CacheOptions, attention_with_kvcache)
    rows = (cache_seqlens, page_table, cache_batch_idx, cache_leftpad)
    rotary = (rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    layout = Cached(*rows, cu_seqlens_q, max_seqlen_q, k, v, cu_seqlens_k_new, *rotary)
    qkv = (q, k_cache, v_cache)
    outputs = (return_lse, return_stats, out)
    return _run_cached(qkv, layout, options, backend, outputs, shared_prefix_len)


def _run_cached(
    qkv: QKV,
    layout: Cached,
    options: Keywords,
    backend: str | None,
    outputs: tuple[Any, Any, Tensor | None],
    shared_prefix_len: int | None,
) -> Result:
    """Prepare a call over caches and run it.

    Args:
        outputs: `return_lse`, `return_stats` and `out` as the caller gave them.
    """
    # No tracer follows the functions of a format.
    if is_dynamo_compiling() and options.get("cache_format") is not None:
        run = outside_of_graphs(_run_cached)
        return run(qkv, layout, options, backend, outputs, shared_prefix_len)
    if torch.is_grad_enabled():  # entering the context takes longer than asking
        with torch.no_grad():
            return _run_cached(qkv, layout, options, backend, outputs, shared_prefix_len)
    return_lse, return_stats, out = outputs
    if type(return_lse) is not bool:
        return_lse = checks.flag("return_lse", return_lse)
    names = None if return_stats is None else statistics.checked_names(return_stats)
    has_statistics = names is not None and statistics.of_rows(names)
    if names is not None and shared_prefix_len is not None:
        raise NotImplementedError("return_stats: cannot be combined with shared_prefix_len")
    if shared_prefix_len is not None:
        shared_prefix_len = shared_prefix.checked_length(shared_prefix_len, options)
    call = prepare(qkv, layout, options, backend, out, has_statistics=has_statistics)
    stats = None
    if names is not None:
        statistics.refuse_unsupported(call.problem)  # before the cache is written
        result, lse, stats = append_and_measure(call, names)
    elif shared_prefix_len is None:
        result, lse = append_and_attend(call)
    else:
        result, lse = shared_prefix.append_and_attend(call, shared_prefix_len, backend)
    if out is not None:
        result = out.copy_(result)
    if stats is not None:
        return (result, lse.contiguous(), stats) if return_lse else (result, stats)
    return (result, lse.contiguous()) if return_lse else result


def explain(*call: Any, **options: Any) -> Explanation:
    """Say which backend would run a call and how, and why the others would not; the call is not
    made.

    ::

        explain(q, k, v, causal=True)
        explain(attention_with_kvcache, q, k_cache, v_cache, cache_seqlens=lengths)
        explain(attention_fp8, q, k, v)

    Args:
        call: q, k and v as in `attention` or, with its layout arguments by keyword, as in
            `attention_varlen`; or a function and its arguments. The function may be one of this
            package or one that calls it: it runs up to its first call of attention.
        options: the other arguments of the call.

    Returns:
        An `Explanation`: each backend with its plan, or with its reasons against the call; the name
        of the chosen backend (None if no backend can run the call); and the hints. Printing it
        gives the report.

    Raises:
        ValueError, TypeError: as the call itself would.
    """
    if call and callable(call[0]):
        return explained(call[0], call[1:], options)
    function = attention_varlen if options.keys() & _LAYOUT_OF_PACKED else attention
    return explained(function, call, options)


_LAYOUT_OF_PACKED = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "page_table"}


def workspace_size(
    batch: int,
    seq_q: int,
    heads: int,
    value_head_dim: int,
    num_splits: int = 0,
    device: torch.device | str = "cuda",
) -> int:
    """Bytes of a `workspace` that is large enough for every call of at most these sizes, whatever
    the length of the caches.

    Args:
        batch: largest number of sequences.
        seq_q: largest number of query tokens of a sequence; packed queries may have up to
            ``batch * seq_q`` tokens.
        heads: number of query heads.
        value_head_dim: head dim of the values.
        num_splits: as in the calls; the size for 0 is also enough for calls with `num_splits=1`.
        device: device of the calls; a CPU does not split keys and needs 0 bytes.

    Raises:
        ValueError, TypeError: a size is not a non-negative int, or the device is neither a CPU nor
            a CUDA GPU.
    """
    sizes = {"batch": batch, "seq_q": seq_q, "heads": heads, "value_head_dim": value_head_dim}
    for name, size in sizes.items():
        checks.length(name, size)
    checks.splits("num_splits", num_splits)
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}, want a cuda device or cpu")
    return workspace.workspace_size(batch * seq_q, heads, value_head_dim, num_splits, device)


def _run(
    qkv: QKV,
    layout: Layout,
    options: Keywords,
    backend: str | None,
    outputs: tuple[Any, Any, Tensor | None, Any],
    padded: tuple[int, int] | None,
    generator: torch.Generator | None,
) -> Result:
    """Prepare the call and run it.

    Args:
        outputs: `return_lse`, `return_attn_probs`, `out` and `return_stats` as the caller gave
            them.
        padded: (batch, seq_q) of the caller's queries and results, if they are padded.
    """
    return_lse, return_attn_probs, out, return_stats = outputs
    if type(return_lse) is not bool or type(return_attn_probs) is not bool:
        return_lse = checks.flag("return_lse", return_lse)
        return_attn_probs = checks.flag("return_attn_probs", return_attn_probs)
    if generator is not None:
        checks.generator(generator, qkv[0].device)
    wanted = out if padded is None else tokens("out", out)
    names = None if return_stats is None else statistics.checked_names(return_stats)
    has_statistics = names is not None and statistics.of_rows(names)
    call = prepare(qkv, layout, options, backend, wanted, return_attn_probs, has_statistics)
    problem, operands = call.problem, call.operands
    stats: Sequence[Any] = ()
    probs: tuple[Tensor, ...] = ()
    if problem.options.dropout_p > 0:
        operands = with_dropout_seed(problem, operands, generator)
    if names is not None:
        statistics.refuse_unsupported(problem)
        backward = dispatch.select(problem._replace(has_statistics=False), backend)
        result, lse, *stats = statistics.attend(problem, operands, names, backward)
    else:
        wants_lse = return_lse or return_attn_probs or padded is not None
        result, lse = autograd.attend(problem, operands, call.forward, wants_lse)
    if return_attn_probs:
        probs = (autograd.attention_probabilities(problem, operands, lse.detach()),)
    if padded is not None:
        result, lse = as_batch(result, lse, *padded)
    if out is not None:
        result = out.copy_(result)
    if not return_lse and not probs:
        return (result, *stats) if stats else result
    return (result, lse.contiguous(), *probs, *stats)
