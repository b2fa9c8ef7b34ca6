"""One call: its arguments checked, described and decided, before a backend sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..autocast import cast_input, cast_inputs, is_autocasting
from ..masks import BlockMask
from ..problem import FLOAT8, AttentionProblem, Operands, Options
from . import checks, dispatch, memo
from .absorbed import absorb_operands
from .layouts import Packed


class HasToList(Protocol):
    """A tensor or a NumPy array."""

    def tolist(self) -> Any:
        """Its values as Python numbers."""
        ...


WindowSize = Sequence[int | None] | HasToList | None


class Arguments(NamedTuple):
    """The options that all three functions share, as the caller gave them."""

    qv: Tensor | None = None
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
    pack_gqa: bool | None = None
    sm_margin: int = 0
    scheduler_metadata: Tensor | None = None
    workspace: Tensor | None = None


def dense_call(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> tuple[Operands, Options]:
    """Check and describe a call of `attention`."""
    q, k, v, qv = cast_inputs(q, k, v, arguments.qv)
    checks.dense(q, k, v)
    checks.absorbed(qv, q, v)
    checks.flex_mask_lengths(arguments.block_mask, q.shape[1], k.shape[1])
    operands = absorb_operands(Operands(q, k, v), qv)
    return with_arguments(operands, q.shape[1], k.shape[1], arguments)


def packed_call(
    q: Tensor, k: Tensor, v: Tensor, layout: Packed, arguments: Arguments
) -> tuple[Operands, Options]:
    """Check and describe a call of `attention_varlen`."""
    q, k, v, qv = cast_inputs(q, k, v, arguments.qv)
    cu_seqlens_q, cu_seqlens_k, M, N, page_table = layout
    checks.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table)
    checks.absorbed(qv, q, v)
    operands = absorb_operands(Operands(q, k, v, cu_seqlens_q=cu_seqlens_q), qv)
    M, N = checks.length("max_seqlen_q", M), checks.length("max_seqlen_k", N)
    if page_table is None:
        return with_arguments(operands._replace(cu_seqlens_k=cu_seqlens_k), M, N, arguments)
    # The pages say where the keys are; cu_seqlens_k only how many each sequence has.
    lengths, used = cu_seqlens_k.diff(), arguments.seqused_k
    checks.per_sequence("seqused_k", used, q, lengths.shape[0])
    if checks.checking_values((q, cu_seqlens_k, used, page_table)):
        counts = checks.packed_lengths("k", cu_seqlens_k, used, None, N)
        name = "cu_seqlens_k" if used is None else "seqused_k"
        checks.lengths_in_pages(name, counts, page_table, k.shape[1])
    arguments = arguments._replace(
        seqused_k=lengths if used is None else torch.minimum(used, lengths)
    )
    operands = operands._replace(page_table=page_table)
    # Without pages every number in the table points nowhere.
    capacity = page_table.shape[1] * k.shape[1] if k.shape[0] > 0 else 0
    return with_arguments(operands, M, min(N, capacity), arguments)


def with_arguments(
    operands: Operands, M: int, N: int, arguments: Arguments
) -> tuple[Operands, Options]:
    """Operands with the optional tensors, and the checked numbers."""
    checks.hints(arguments.pack_gqa, arguments.sm_margin, arguments.scheduler_metadata, operands.q)
    operands = with_tensors(operands, arguments)
    block_mask = _block_mask(arguments.block_mask)
    if block_mask is not None:
        checks.block_mask_lengths(block_mask, M, N)
        operands = operands._replace(
            tile_kinds=block_mask.kinds,
            partial_index=block_mask.partial_index,
            partial_tiles=block_mask.partial_tiles,
        )
    numbers = {name: getattr(arguments, name) for name in _NUMBERS}
    return operands, checks.options(
        head_dim=operands.q.shape[-1], max_seqlen_q=M, max_seqlen_k=N, **numbers
    )


def with_tensors(operands: Operands, arguments: Arguments) -> Operands:
    """Operands with the optional tensors that are operands as they come."""
    given = {}
    for name in _OPTIONAL_TENSORS:
        x = getattr(arguments, name)
        if x is not None:
            given[name] = x
    if not given:
        return operands
    if "bias" in given:
        given["bias"] = _four_dimensional(given["bias"])
    return operands._replace(**given)


_OPTIONAL_TENSORS = (
    "bias",
    "sink",
    "alibi_slopes",
    "seqused_q",
    "seqused_k",
    "q_descale",
    "k_descale",
    "v_descale",
    "workspace",
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


def with_numbers_read(arguments: Arguments) -> Arguments:
    """Arguments whose numbers are plain, so that a memo may key on them."""
    window_size = arguments.window_size
    if window_size is None or type(window_size) is tuple:
        return arguments
    return arguments._replace(window_size=checks.window(window_size))


def decided(
    qkv: tuple[Tensor, Tensor, Tensor],
    layout: Packed | None,
    arguments: Arguments,
    backend: str | None,
    out: Tensor | None,
    wants_probabilities: bool = False,
) -> tuple[Operands, memo.Decision]:
    """The operands of a call and what is decided about it, from memory where nothing new came."""
    arguments = with_numbers_read(arguments)
    has_pages = layout is not None and layout.page_table is not None
    key = None
    # Autocast, pages and qv change the operands, and `out` is looked at each time.
    changed = has_pages or arguments.qv is not None or is_autocasting(qkv[0])
    if not (changed or out is not None):
        given = (*qkv, *(layout or ()), *arguments, backend, wants_probabilities)
        key = memo.key_of(given)
    decision = memo.recall(key)
    if decision is not None:
        operands = Operands(*qkv)
        if not decision.has_extras:
            return operands, decision
        if layout is not None:
            operands = operands._replace(cu_seqlens_q=layout[0], cu_seqlens_k=layout[1])
        operands = with_tensors(operands, arguments)
        checks.workspace(operands, decision.options)
        checks.values(operands, decision.options)
        return operands, decision
    if layout is None:
        operands, options = dense_call(*qkv, arguments)
    else:
        operands, options = packed_call(*qkv, layout, arguments)
    decision = decide(operands, options, backend, out, wants_probabilities)
    memo.remember(key, decision)
    return operands, decision


def decide(
    operands: Operands,
    options: Options,
    backend: str | None,
    out: Tensor | None,
    wants_probabilities: bool = False,
) -> memo.Decision:
    """The last checks of a call, and the choice of the backend."""
    checks.extras(operands, options.max_seqlen_q, options.max_seqlen_k)
    checks.float8_forward_only(operands)
    checks.output(out, operands)
    checks.workspace(operands, options)
    checks.values(operands, options)
    if backend is not None:
        dispatch.check_name(backend)
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(wants_probabilities=wants_probabilities)
    options = options._replace(backend=dispatch.select(problem, backend))
    has_extras = any(x is not None for x in operands[3:])
    return memo.Decision(problem._replace(options=options), options, has_extras)


def autocast_to_cache(cache: Tensor, *tensors: Any) -> tuple[Any, ...]:
    """Under autocast, cast queries and new tokens to the cache's dtype; a cache never changes.

    To the dtype of autocast where the cache is float8.
    """
    if not is_autocasting(cache):
        return tensors
    dtype = cache.dtype
    if dtype in FLOAT8:
        dtype = torch.get_autocast_dtype(cache.device.type)
    return tuple(cast_input(x, dtype) for x in tensors)


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
