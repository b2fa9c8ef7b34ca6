"""Context parallel attention as registered ops, which ``torch.compile(fullgraph=True)`` can trace.

The ops take a rank's own tensors as the caller passes them, and the ticket of the layout. Planning,
agreement and exchanges are inside. The backward op plans again and records the known results, so it
repeats the exchange of heads, but not the attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import autocast_off, cast_inputs
from ..call import checks
from ..call.prepare import with_score_mod
from ..dropout import draw_rng_state
from ..masks import BlockMask, Spans
from ..operators import library, ops, register_fake, schema_of
from ..problem import lse_dtype
from ..score_mod import Described
from .arguments import OPTIONS, Arguments, refuse_unknown
from .layout import layout_of


class _Tensors(NamedTuple):
    """Tensors of an op; the first `_GRADIENTS` can have gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    attn_mask: Tensor | None
    sink: Tensor | None
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    qv: Tensor | None
    captured: Tensor | None
    key_padding_mask: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    captured_integers: Tensor | None
    span_starts: Tensor | None
    span_stops: Tensor | None
    tile_kinds: Tensor | None
    partial_index: Tensor | None
    partial_tiles: Tensor | None
    rng_state: Tensor | None
    ticket: Tensor


class _Scalars(NamedTuple):
    """Scalars of an op, as the caller passes them."""

    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    attention_chunk: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    num_splits: int = 0
    block_rows: int = 0  # the lengths of a block mask
    block_keys: int = 0
    return_lse: bool = False
    score_mod: str = ""  # a program
    backend: str = ""


_GRADIENTS = 10
_COUNT = len(_Tensors._fields)
# Options that are tensors or scalars of the ops by themselves.
_TENSOR_NAMES = [name for name in _Tensors._fields if name in OPTIONS]
_SCALAR_NAMES = [name for name in _Scalars._fields if name in OPTIONS and name != "score_mod"]
_TENSOR_SCHEMA, _SCALAR_SCHEMA = schema_of(_Tensors), schema_of(_Scalars)
# A CUDA graph would repeat the exchanges of the documents that it was recorded with.
_TAGS = (torch.Tag.cudagraph_unsafe,)
library.define(
    f"context_forward({_TENSOR_SCHEMA}, {_SCALAR_SCHEMA}) -> (Tensor, Tensor)", tags=_TAGS
)
library.define(
    "context_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needed, "
    f"{_TENSOR_SCHEMA}, {_SCALAR_SCHEMA}) -> ({', '.join(['Tensor'] * _GRADIENTS)})",
    tags=_TAGS,
)


def attend(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """(out, lse) of a traced call of `ContextParallel.attention`."""
    qkv, layout, options, return_lse, backend = arguments
    refuse_unknown(options, attend)
    if "return_stats" in options:
        raise NotImplementedError("return_stats: context parallelism has none under torch.compile")
    for name in _TENSOR_NAMES:
        if options.get(name) is not None:
            checks.tensor(name, options[name])
    q, k, v = cast_inputs(*qkv)
    window = checks.window(options.get("window_size", (-1, -1)))
    checks.performance_hints(options.get("pack_gqa"), options.get("sm_margin", 0), None, q)
    dropout_p = options.get("dropout_p", 0.0)
    blocks, spans = options.get("block_mask"), options.get("mask")
    if spans is not None:
        checks.spans(spans, q)
    if blocks is not None and not isinstance(blocks, BlockMask):
        raise TypeError(f"block_mask: got {type(blocks).__name__}, want flashtile.BlockMask")
    tiles: tuple[Tensor | None, ...] = (None, None, None)
    if blocks is not None:
        tiles = blocks.kinds, blocks.partial_index, blocks.partial_tiles
    function = with_score_mod(q, k, {"score_mod": options.get("score_mod")})
    tensors = _Tensors(
        q,
        k,
        v,
        **{name: options.get(name) for name in _TENSOR_NAMES},
        captured=function.get("captured"),
        captured_integers=function.get("captured_integers"),
        span_starts=None if spans is None else spans.starts,
        span_stops=None if spans is None else spans.stops,
        tile_kinds=tiles[0],
        partial_index=tiles[1],
        partial_tiles=tiles[2],
        rng_state=draw_rng_state(q.device) if dropout_p > 0 else None,
        ticket=layout.ticket,
    )
    scalars = _Scalars(
        **{name: options[name] for name in _SCALAR_NAMES if name in options},
        window_left=window.left,
        window_right=window.right,
        block_rows=0 if blocks is None else blocks.lengths[0],
        block_keys=0 if blocks is None else blocks.lengths[1],
        return_lse=return_lse,
        score_mod=function.get("score_mod", ""),
        backend=backend or "",
    )
    out, lse = ops.context_forward(*tensors, *scalars)
    return out, lse


def _options_of(tensors: _Tensors, scalars: _Scalars) -> dict[str, Any]:
    """The options of the call."""
    options: dict[str, Any] = {
        name: getattr(source, name)
        for source, names in ((tensors, _TENSOR_NAMES), (scalars, _SCALAR_NAMES))
        for name in names
    }
    options["window_size"] = (scalars.window_left, scalars.window_right)
    if tensors.span_starts is not None and tensors.span_stops is not None:
        options["mask"] = Spans(tensors.span_starts, tensors.span_stops)
    if scalars.score_mod:
        captured = tensors.captured, tensors.captured_integers
        options["score_mod"] = Described(scalars.score_mod, *captured)
    if tensors.tile_kinds is not None:
        assert tensors.partial_index is not None and tensors.partial_tiles is not None
        options["block_mask"] = BlockMask(
            tensors.tile_kinds,
            tensors.partial_index,
            tensors.partial_tiles,
            (scalars.block_rows, scalars.block_keys),
        )
    return {name: x for name, x in options.items() if x is not None}


def _run(
    tensors: _Tensors, scalars: _Scalars, precomputed: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    layout = layout_of(tensors.ticket)
    with autocast_off(tensors.q):
        out, lse = layout.context.run(
            tensors[:3],
            layout,
            _options_of(tensors, scalars),
            scalars.return_lse,
            scalars.backend or None,
            tensors.rng_state,
            precomputed,
        )
    return out, lse


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, lse = _run(_Tensors(*args[:_COUNT]), _Scalars(*args[_COUNT:]))
    missing = out.shape[-3] - lse.shape[-1]
    if missing:  # nobody sees lse, but graphs rely on its shape
        lse = torch.nn.functional.pad(lse, (0, missing), value=-torch.inf)
    return out.contiguous(), lse.contiguous()


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needed: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    tensors, scalars = _Tensors(*args[:_COUNT]), _Scalars(*args[_COUNT:])
    leaves = [
        x if x is None else x.detach().requires_grad_(needs_grad)
        for x, needs_grad in zip(tensors[:_GRADIENTS], needed, strict=True)
    ]
    named = {name: x for name, x in zip(_Tensors._fields, leaves, strict=False) if x is not None}
    with torch.enable_grad():
        recorded = _run(tensors._replace(**named), scalars, (out, lse))
        results = [(x, g) for x, g in zip(recorded, (dout, dlse), strict=True) if g is not None]
        differentiable = [x for x in leaves if x is not None and x.requires_grad]
        gradients = iter(
            torch.autograd.grad([x for x, _ in results], differentiable, [g for _, g in results])
        )
    # An op cannot return None, so an empty tensor means "no gradient".
    return tuple(
        next(gradients) if x is not None and x.requires_grad else dout.new_empty(0) for x in leaves
    )


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    q, v = args[0], args[2]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    *batch, rows, heads, _ = q.shape
    return out, q.new_empty((*batch, heads, rows), dtype=lse_dtype(q.dtype))


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needed: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_grad else dout.new_empty(0)
        for x, needs_grad in zip(args[:_GRADIENTS], needed, strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.scalars = inputs[_COUNT:]
    ctx.save_for_backward(*output, *inputs[:_COUNT])
    if not _Scalars(*ctx.scalars).return_lse:
        ctx.mark_non_differentiable(output[1])


def _derivative(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    needed = [bool(x) for x in ctx.needs_input_grad[:_GRADIENTS]]
    if dout is None:
        dout = torch.zeros_like(out)
    results = ops.context_backward(dout, dlse, out, lse, needed, *tensors, *ctx.scalars)
    leading = (g if needs_grad else None for g, needs_grad in zip(results, needed, strict=True))
    return (*leading, *(None,) * (len(ctx.needs_input_grad) - _GRADIENTS))


library.impl("context_forward", _forward, "CompositeExplicitAutograd")
library.impl("context_backward", _backward, "CompositeExplicitAutograd")
register_fake("context_forward", _fake_forward)
register_fake("context_backward", _fake_backward)
torch.library.register_autograd(
    f"{library.ns}::context_forward", _derivative, setup_context=_setup, lib=library
)
