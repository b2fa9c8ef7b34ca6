"""Append the new tokens of a cached call to its cache and attend to it.

In one launch if the backend can do that, else one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import autograd
from ..ops.append import formula, op
from ..prepared_calls import PreparedForward
from ..problem import FLOAT8, Operands
from . import dispatch, prefill
from .absorbed import absorb_operands
from .layouts import Cached
from .prepare import Prepared, check_indices


def append_and_attend(call: Prepared) -> tuple[Tensor, Tensor]:
    """(out, lse) of a cached call."""
    problem, operands, layout = call.problem, call.operands, call.layout
    assert isinstance(layout, Cached)
    if layout.k_new is not None and operands.seqused_k is not None:
        check_indices(problem, operands._replace(seqused_k=operands.seqused_k + layout.added))
    if call.forward is not None and not autograd.is_call_observed():
        return _attend(call.forward, operands, layout)
    if problem.appending is not None:
        if not _is_observed((*operands, layout.k_new, layout.v_new)):
            backend = dispatch.load(problem.options.backend)
            return _attend(PreparedForward(problem, backend), operands, layout)
        problem = problem._replace(appending=None)
    operands = absorb_operands(rotate_and_append(call), call.given.get("qv"))
    return prefill.attend(problem, operands)


def _attend(forward: PreparedForward, operands: Operands, layout: Cached) -> tuple[Tensor, Tensor]:
    """(out, lse) by one function of the backend, which also appends the new tokens if any."""
    if layout.k_new is None:
        made = forward.run(operands)
        return made[0], made[1]
    assert layout.v_new is not None
    cos, sin, base = layout.rotary_cos, layout.rotary_sin, None
    if cos is not None:
        base = operands.seqused_k if layout.rotary_seqlens is None else layout.rotary_seqlens
    made = forward.run((*operands, layout.k_new, layout.v_new, cos, sin, base))
    op.record_write(operands.k, operands.v)
    return made[0], made[1]


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
    descales = (operands.k_descale, operands.v_descale)
    if k_cache.dtype not in FLOAT8 or k.dtype in FLOAT8:
        descales = (None, None)  # the new tokens need no conversion
    where = (layout.cu_seqlens_k_new, operands.page_table, operands.cache_batch_idx)
    append_only, append_rotated = _ops(operands, layout)
    cos, sin = layout.rotary_cos, layout.rotary_sin
    if cos is None or sin is None:
        used = append_only(k_cache, v_cache, k, v, lengths, *where, *descales)
        return operands._replace(seqused_k=used)
    base = lengths if layout.rotary_seqlens is None else layout.rotary_seqlens
    q, used = append_rotated(
        q, k_cache, v_cache, k, v, cos, sin, lengths, base, layout.cu_seqlens_q,
        *where, *descales, layout.rotary_interleaved, bool(options.facts),
    )  # fmt: skip
    return operands._replace(q=q, seqused_k=used)


def _ops(operands: Operands, layout: Cached) -> tuple[Any, Any]:
    """The two ops or, where nobody would see them, their functions."""
    if _is_observed((*operands, layout.k_new, layout.v_new)):
        ops = torch.ops.flashtile
        return ops.kvcache_append, ops.kvcache_rotate_append
    if operands.k.is_cuda:
        return op.append_on_gpu, op.rotate_and_append_on_gpu
    return formula.append, formula.rotate_and_append


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
