"""Run a cached call as decided: append its new tokens to the cache and attend to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import autograd, statistics
from ..backend_interface import PreparedForward
from ..cache_formats import CacheFormat
from ..gpu.described import current_target
from ..invariance_check import checks_everything
from ..operators import ops
from ..ops import append
from ..ops.append import formula
from ..ops.gather import gather_pages
from ..problem import FLOAT8, AttentionProblem, Operands, starts_after
from . import checks, dispatch
from .fold_qv import with_folded_qv
from .layouts import Cached
from .packing import as_batch, starts
from .prepare import Prepared, check_indices


def append_and_attend(call: Prepared) -> tuple[Tensor, Tensor]:
    """(out, lse) of a cached call."""
    problem, operands, layout = call.problem, call.operands, call.layout
    assert isinstance(layout, Cached)
    has_new_tokens = layout.k_new is not None
    if problem.options.score_mod and has_new_tokens and operands.seqused_k is not None:
        check_indices(problem, operands._replace(seqused_k=operands.seqused_k + layout.added))
    is_checked = problem.options.batch_invariant and checks_everything()
    if call.forward is not None and not is_checked and not autograd.is_call_observed():
        return _attend(call.forward, operands, layout)
    if problem.appending is not None:
        if not is_checked and not _is_observed((*operands, layout.k_new, layout.v_new)):
            backend = dispatch.BACKENDS[problem.options.backend]
            return _attend(PreparedForward(problem, backend), operands, layout)
        problem = problem._replace(appending=None)
    operands, qv = rotate_and_append(call), call.keywords.get("qv")
    if qv is not None:
        operands = with_folded_qv(operands, qv)
        is_latent = starts_after(operands.k, operands.v, 0)
        problem = problem._replace(has_values_in_keys=is_latent)
    if problem.layout != "packed":
        return autograd.attend(problem, operands)
    out, lse = autograd.attend(problem, _as_packed(operands, problem))
    if operands.cu_seqlens_q is not None:
        return out, lse
    return as_batch(out, lse, problem.B, problem.M)


def append_and_measure(
    call: Prepared, names: frozenset[str]
) -> tuple[Tensor, Tensor, statistics.Statistics]:
    """(out, lse, the statistics that `names` lists) of a cached call."""
    problem = call.problem._replace(appending=None)
    operands, qv = rotate_and_append(call._replace(problem=problem)), call.keywords.get("qv")
    if qv is not None:
        operands = with_folded_qv(operands, qv)
    is_padded = problem.layout == "packed" and operands.cu_seqlens_q is None
    if problem.layout == "packed":
        operands = _as_packed(operands, problem)
    out, lse, found = statistics.attend(problem, operands, names, problem.options.backend)
    if problem.layout == "packed":
        queries = (problem.B, problem.M) if is_padded else None
        found = statistics.as_batch(found, queries, (problem.B, problem.N))
    if is_padded:
        out, lse = as_batch(out, lse, problem.B, problem.M)
    return out, lse, found


def _attend(forward: PreparedForward, operands: Operands, layout: Cached) -> tuple[Tensor, Tensor]:
    """(out, lse) by one function of the backend, which also appends the new tokens if any."""
    if layout.k_new is None:
        results = forward.run(operands)
        return results[0], results[1]
    assert layout.v_new is not None
    cos, sin, base = layout.rotary_cos, layout.rotary_sin, None
    if cos is not None:
        base = operands.seqused_k if layout.rotary_seqlens is None else layout.rotary_seqlens
    results = forward.run((*operands, layout.k_new, layout.v_new, cos, sin, base))
    append.record_write(operands.k, operands.v)
    return results[0], results[1]


def _as_packed(operands: Operands, problem: AttentionProblem) -> Operands:
    """The operands of a `packed_problem`, from those of the cached call."""
    q, k, v, used = operands.q, operands.k, operands.v, operands.seqused_k
    assert used is not None
    if operands.page_table is not None:
        k, v = gather_pages(k, v, operands.page_table, used)
    starts_q = operands.cu_seqlens_q
    return operands._replace(
        q=q if starts_q is not None else q.flatten(0, 1),
        k=k.flatten(0, 1),
        v=v.flatten(0, 1),
        cu_seqlens_q=starts(problem.B, problem.M, q.device) if starts_q is None else starts_q,
        cu_seqlens_k=starts(problem.B, problem.N, q.device),
        page_table=None,
    )


def rotate_and_append(call: Prepared) -> Operands:
    """Rotate the queries and the new keys, and write the new keys and values into the cache.

    With a causal mask, a window or a chunk every query has its own position; otherwise all queries
    are rotated like the first one, as in FlashAttention-2.

    Returns:
        The operands with rotated queries and with lengths that include the new tokens.
    """
    options, operands, layout = call.problem.options, call.operands, call.layout
    assert isinstance(layout, Cached)
    q, k_cache, v_cache = operands[:3]
    k, v, lengths = layout.k_new, layout.v_new, operands.seqused_k
    if k is None or v is None or lengths is None:
        return operands
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    for name, x in given.items() if forward_ad._current_level >= 0 else ():
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name}: got a forward-mode tangent, expected none: an append to a cache has no "
                "derivative"
            )
    descales = (operands.k_descale, operands.v_descale)
    if k_cache.dtype not in FLOAT8 or k.dtype in FLOAT8:
        descales = (None, None)  # the new tokens need no conversion
    where = (layout.cu_seqlens_k_new, operands.page_table, operands.cache_batch_idx)
    append_only: Any  # the two ops or, where nobody would see them, their functions
    append_rotated: Any
    if _is_observed((*operands, k, v)):
        append_only = ops.kvcache_append
        append_rotated = ops.kvcache_rotate_append
    elif k_cache.is_cuda or current_target.gpu is not None:
        append_only, append_rotated = append.append_on_gpu, append.rotate_and_append_on_gpu
    else:
        append_only, append_rotated = formula.append, formula.rotate_and_append
    cos, sin = layout.rotary_cos, layout.rotary_sin
    base = lengths if layout.rotary_seqlens is None else layout.rotary_seqlens
    if layout.formats is not None:  # rotated and packed in PyTorch
        if cos is not None and sin is not None:
            at_k = formula.positions(k, base, layout.cu_seqlens_k_new, own=True)
            at_q = formula.positions(q, base, layout.cu_seqlens_q, own=bool(options.facts))
            k = formula.rotate(k, cos, sin, at_k, layout.rotary_interleaved)
            q = formula.rotate(q, cos, sin, at_q, layout.rotary_interleaved)
        k, v = _packed(layout.formats, operands, k, v)
        used = append_only(k_cache, v_cache, k, v, lengths, *where, *descales)
        return operands._replace(q=q, seqused_k=used)
    if cos is None or sin is None:
        used = append_only(k_cache, v_cache, k, v, lengths, *where, *descales)
        return operands._replace(seqused_k=used)
    q, used = append_rotated(
        q, k_cache, v_cache, k, v, cos, sin, lengths, base, layout.cu_seqlens_q,
        *where, *descales, layout.rotary_interleaved, bool(options.facts),
    )  # fmt: skip
    return operands._replace(q=q, seqused_k=used)


def _packed(
    formats: tuple[CacheFormat, CacheFormat], operands: Operands, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows of new keys and values. Values in the memory of the keys are columns of theirs."""
    keys, (k_cache, v_cache) = formats[0].packed(k), (operands.k, operands.v)
    is_readable = checks.is_readable(k_cache)
    if k_cache is v_cache or (is_readable and k_cache.data_ptr() == v_cache.data_ptr()):
        return keys, keys
    return keys, formats[1].packed(v)


def _is_observed(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a transform, forward-mode differentiation, a tracer or a dispatch mode is to see the
    ops, or memory holds numbers with the opposite sign, of which an op gets a copy.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or autograd.is_traced(tensors)
        or any(x is not None and (x.is_meta or x.is_neg()) for x in tensors)
    )
