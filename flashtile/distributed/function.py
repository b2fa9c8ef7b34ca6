"""Context parallel attention as one differentiable function.

The exchanges of the forward and those of the backward are each in one node of autograd's graph, so
that all ranks run them in the same order, also a rank that has no heads or no tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import is_batched, refuse_second_derivative
from ..problem import DIFFERENTIABLE, Operands
from . import executor
from .executor import Plan
from .heads import Ulysses
from .wire import Wire


class Route(NamedTuple):
    """What this rank does with its neighbours, and then with the ranks that hold other tokens."""

    ulysses: Ulysses | None
    plan: Plan
    wire: Wire
    wants_lse: bool  # otherwise nobody sees lse, and it has no gradient
    known: tuple[Tensor, Tensor] | None = None  # (out, lse), if they have been computed
    # Rows of q and of k and v without padding, if these have padding; then out has it, too.
    tokens: tuple[int, int] | None = None

    def without_padding(self, operands: Operands) -> Operands:
        """The operands without the rows of padding."""
        if self.tokens is None:
            return operands
        queries, keys = self.tokens
        q, k, v = operands[:3]
        return operands._replace(q=q[:queries], k=k[:keys], v=v[:keys])


class ContextAttention(torch.autograd.Function):
    """(route, operands, the differentiable ones of them) -> (out, lse)."""

    @staticmethod
    def forward(
        ctx: Any, route: Route, operands: Operands, *differentiable: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ulysses, _, _, wants_lse, known, _ = route
        given = operands if ulysses is None else ulysses.spread(operands)
        if known is None:
            out, lse = _computed(route, given, any(ctx.needs_input_grad))
        elif ulysses is None:
            out, lse = known[0].clone(), known[1].clone()
        else:
            out, lse = ulysses.spread_out(known[0]), ulysses.spread_lse(known[1])
        ctx.set_materialize_grads(False)
        ctx.route, ctx.bias = route, operands.bias
        ctx.save_for_backward(out, lse, *given)
        if ulysses is not None:
            out, lse = ulysses.collect_results(out, lse)
        if not wants_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if is_batched(dout) or is_batched(dlse):
            raise NotImplementedError(
                "is_grads_batched: got True, want False under context parallelism"
            )
        # Of a derivative that will be differentiated, every use requires a gradient.
        differentiated = torch.ones((), requires_grad=torch.is_grad_enabled())
        gradients = _FirstDerivative.apply(ctx, dout, dlse, differentiated)
        return None, None, *gradients


class _FirstDerivative(torch.autograd.Function):
    """The gradients of `ContextAttention`; their own derivative raises NotImplementedError."""

    @staticmethod
    def forward(_ctx: Any, ctx: Any, dout: Tensor | None, dlse: Tensor | None, __: Tensor) -> Any:
        route = ctx.route
        ulysses, plan, wire, wants_lse, _, tokens = route
        out, lse, *saved = ctx.saved_tensors
        with_padding = Operands(*saved)
        operands = route.without_padding(with_padding)
        heads = out.shape[1] if ulysses is None else ulysses.heads[0]
        if dout is None:
            assert dlse is not None
            dout = out.new_zeros(dlse.shape[1], heads, out.shape[2])
        if wants_lse and dlse is None:  # on this rank, perhaps not on the others
            dlse = lse.new_zeros(heads, dout.shape[0] if tokens is None else tokens[0])
        padding = 0, 0
        if tokens is not None:
            out, dout = out[: tokens[0]], dout[: tokens[0]]
            padding = len(with_padding.q) - tokens[0], len(with_padding.k) - tokens[1]
        if ulysses is not None:
            dout = ulysses.spread_out(dout)
            dlse = None if dlse is None else ulysses.spread_lse(dlse)
        needed = ctx.needs_input_grad[2:]
        bias_needs_grad = needed[Operands._fields.index("bias")]
        results = out, lse, dout, dlse
        is_shared = ulysses is not None and ulysses.has_shared_keys
        gradients = executor.backward(
            plan, wire, operands, *results, bias_needs_grad, padding, is_shared
        )
        if ulysses is not None:
            gradients = ulysses.collect_gradients(gradients, operands._replace(bias=ctx.bias))
        found = zip(gradients, with_padding[:DIFFERENTIABLE], needed, strict=True)
        return tuple(_like(g, x) if wanted else None for g, x, wanted in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative()


def _like(gradient: Tensor | None, x: Tensor | None) -> Tensor | None:
    return None if gradient is None or x is None else gradient.to(x.dtype)


def attend(route: Route, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a rank's own queries, recorded for gradients if some tensor needs them."""
    differentiable = operands[:DIFFERENTIABLE]
    wants_grad = any(x is not None and x.requires_grad for x in differentiable)
    is_plain = route.ulysses is None and route.known is None
    if is_plain and not (wants_grad and torch.is_grad_enabled()):
        return _computed(route, operands, wants_grad)
    return ContextAttention.apply(route, operands, *differentiable)


def _computed(route: Route, operands: Operands, wants_grad: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries here."""
    given, padding = route.without_padding(operands), 0
    if route.tokens is not None:
        padding = len(operands.q) - route.tokens[0]
    return executor.forward(route.plan, route.wire, given, wants_grad, padding)


def is_recomputing() -> bool:
    """Whether a backward is under way, which computes a checkpoint's forward again."""
    return torch._C._current_graph_task_id() != -1
