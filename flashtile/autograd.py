"""One autograd.Function around two registered ops.

Eager, ``torch.compile``, ``torch.export`` and CUDA graphs all reach a backend through
``torch.ops.flashtile.attention_forward`` and ``attention_backward``, which are opaque to tracers
and have fakes. The backward is a separate Function, so that it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual

from . import backends
from .autocast import autocast_off, is_any_autocast_on
from .backend_interface import Gradients, PreparedForward, Run, Tensors
from .gpu.described import followed_by
from .invariance_check import check_bits, check_gradient_bits, checks_everything
from .operators import library, ops, register_fake, register_flops_when_counting, schema_of
from .problem import (
    DIFFERENTIABLE,
    AttentionProblem,
    Operands,
    Options,
    Presence,
    lse_dtype,
    lse_shape,
    needing_gradients,
    output_dtype,
    presence_of,
)

TENSORS, NUMBERS = schema_of(Operands), schema_of(Options)
INPUTS = len(Operands._fields)
_BIAS = Operands._fields.index("bias")
_MOVED = DIFFERENTIABLE + 2  # the inputs of `TangentFunction` before the operands

library.define(f"attention_forward({TENSORS}, {NUMBERS}) -> (Tensor, Tensor)")
# The same op with a schema that writes to the workspace. Most calls have no workspace, and an op
# that changes nothing gives a tracer more freedom.
_WRITING = TENSORS.replace("Tensor? workspace", "Tensor(a!) workspace")
library.define(f"attention_forward_in_workspace({_WRITING}, {NUMBERS}) -> (Tensor, Tensor)")
library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool bias_needs_grad, "
    f"{TENSORS}, {NUMBERS}) -> (" + ", ".join(["Tensor"] * DIFFERENTIABLE) + ")"
)

library.define(f"attention_probabilities({TENSORS}, Tensor lse, {NUMBERS}) -> Tensor")


def attention_probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Softmax probabilities (batch, heads, M, N) of a call, negative where dropped; quadratic,
    without gradient.
    """
    constants = (None if x is None else x.detach() for x in operands)  # without tangents, too
    return ops.attention_probabilities(*constants, lse.detach(), *problem.options)


def attend(
    problem: AttentionProblem,
    operands: Operands,
    forward: PreparedForward | None = None,
    wants_lse: bool = True,
) -> tuple[Tensor, Any]:
    """(out, lse) of a prepared call, recorded for gradients; the strides of the lse may be any.

    Args:
        forward: the prepared forward, if an equal call has been made before; its arguments are
            plain tensors then.
        wants_lse: whether the caller reads the lse, which may be None otherwise.
    """
    # No call is prepared under a tracer.
    if forward is not None and not is_call_observed():
        if problem.needs_grad:
            return _record(problem, operands, forward, wants_lse)
        made = _run_forward(problem, operands, forward)
        return made[0], made[1]
    compiling = torch.compiler.is_compiling()
    transforms = is_transformed()
    if compiling and transforms:
        # A tracer does not know that an input of torch.func.grad needs a gradient, but it knows
        # that of a view.
        operands = Operands(*(x if x is None else x.view_as(x) for x in operands))  # type: ignore[arg-type]  # its fields
    elif compiling:
        operands = Operands(*dealiased(operands))  # type: ignore[arg-type]  # its fields
    forward_mode = forward_ad._current_level >= 0
    if forward_mode and compiling:
        raise NotImplementedError(
            "flashtile: got torch.func.jvp or dual numbers inside torch.compile; expected them in "
            "an eager call"
        )
    if transforms or forward_mode:  # which want nothing written in place
        operands = operands._replace(workspace=None)
    # Of a meta tensor the op makes sizes and dtypes.
    seen = operands if forward is None else ()
    if (
        compiling
        or transforms
        or forward_mode
        or operands.q.is_meta
        or _is_observed(seen)
        # Memory that holds numbers with the opposite sign, as that of the imaginary part of a
        # conjugate does, of which an op gets a copy. PyTorch's own operations, of which the CPU
        # backend consists, see to the signs.
        or (
            problem.device_type == "cuda"
            and any(x is not None and x.is_neg() for x in seen[:DIFFERENTIABLE])
        )
    ):
        options = problem.options
        if not compiling:
            register_flops_when_counting()
        if transforms or forward_mode or problem.needs_grad:
            function = AttentionFunction if compiling else DualAttention
            return function.apply(*operands, *options)
        if operands.workspace is not None:
            return ops.attention_forward_in_workspace(*operands, *options)
        return ops.attention_forward(*operands, *options)
    # Nobody would see the ops, which cost as much time as all that is above.
    if problem.needs_grad:
        return _record(problem, operands, None, wants_lse)
    made = _run_forward(problem, operands)
    return made[0], made[1]


def _record(
    problem: AttentionProblem,
    operands: Operands,
    forward: PreparedForward | None,
    wants_lse: bool,
) -> tuple[Tensor, Any]:
    """(out, lse) by `DirectAttention`; lse is None unless the caller wants it."""
    presence = None if forward is None else forward.presence
    if presence is None:
        presence = presence_of(operands)
        if forward is not None:
            forward.presence = presence
    leading = operands[: presence.differentiable]
    results = _apply_directly((problem, presence, forward, wants_lse), operands, *leading)
    return results if wants_lse else (results, None)


# Whether a transform of torch.func is at work.
is_transformed = torch._C._are_functorch_transforms_active


# Whether a gradient is many at once, as ``is_grads_batched=True`` makes them.
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def is_batched(x: Tensor | None) -> bool:
    """`is_legacy_batched`; False for None."""
    return x is not None and is_legacy_batched(x)


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def is_traced(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a tracer, a mode, a profiler or a subclass of Tensor is to see the op itself."""
    return torch.compiler.is_compiling() or _is_observed(tensors)


def _is_observed(tensors: tuple[Tensor | None, ...]) -> bool:
    """`is_traced` where nothing is being compiled."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch.autograd.profiler._is_profiler_enabled
        or torch._C._is_tracing()
        or (tensors != () and not _PLAIN.issuperset(map(type, tensors)))
    )


def is_call_observed() -> bool:
    """Whether anything but plain autograd is to see a call of plain tensors."""
    return is_transformed() or forward_ad._current_level >= 0 or _is_observed(())


def dealiased(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace the second use of a tensor (as q and as k, or one cu_seqlens) with a view, because a
    tracer does not accept the same input of a Function twice.
    """
    seen: list[Tensor] = []
    result: list[Tensor | None] = []
    for x in tensors:
        if x is not None and any(x is other for other in seen):
            x = x.view_as(x)
        elif x is not None:
            seen.append(x)
        result.append(x)
    return result


# A backend determines the dtype of each of its products, so autocast is off inside.


def _run_forward(
    problem: AttentionProblem,
    operands: Operands,
    forward: PreparedForward | None = None,
) -> tuple[Tensor, ...]:
    """Out, lse, and what else was allocated, from the backend that `problem` names."""
    run: Run = (
        partial(backends.BACKENDS[problem.options.backend].forward, problem)
        if forward is None
        else forward.run
    )
    if problem.options.batch_invariant and checks_everything():
        return _run_checked(problem, operands, run)
    if not is_any_autocast_on():  # entering a context takes longer than asking
        return run(operands)
    with autocast_off(operands.q):
        return run(operands)


def _run_checked(problem: AttentionProblem, operands: Operands, run: Run) -> tuple[Tensor, ...]:
    """A forward that also compares the bits of a row with those in another layout."""
    backend = backends.BACKENDS[problem.options.backend]
    with autocast_off(operands.q):
        made = run(operands)
        check_bits(backend.forward, problem, operands, made[0], made[1])
    return made


def _run_backward(
    problem: AttentionProblem,
    tensors: Tensors,
    present: tuple[Tensor, ...] = (),
    forward: PreparedForward | None = None,
) -> Gradients:
    """The gradients.

    Args:
        tensors: the operands, out, lse, dout and dlse.
        present: those of them that are not None; needed for a prepared `forward`.
    """
    *given, out, lse, dout, dlse = tensors
    assert out is not None and lse is not None and dout is not None
    # As many as `Operands` has, of which only the optional ones are None.
    operands = Operands(*given)  # type: ignore[arg-type]  # its fields
    backend = backends.BACKENDS[problem.options.backend]
    with autocast_off(operands.q):
        if forward is not None:
            gradients = forward.backward(tensors, present)
        else:
            gradients = backend.backward(problem, operands, out, lse, dout, dlse)
        if problem.options.batch_invariant and checks_everything():
            check_gradient_bits(backend.backward, problem, tensors, gradients)
        return _with_score_gradients(gradients, problem, operands, out, lse, dout, dlse)


def _with_score_gradients(gradients: Gradients, problem: AttentionProblem, *call: Any) -> Gradients:
    """The gradients of a backward, with those of tensors that scores read, if it left them out."""
    if not problem.has_score_gradients or gradients.has_those_of_scores:
        return gradients
    others = backends.score_gradients().gradients_of_scores(problem, *call)
    found = (y if x is None else x for x, y in zip(gradients, others, strict=True))
    return Gradients(*found)  # type: ignore[arg-type]  # its fields


def _describe_backward(problem: AttentionProblem, operands: Operands) -> None:
    """The backward of a call, with tensors that have no memory."""
    described = operands.without_memory()
    out, lse = _fake_forward(*described, *problem.options)
    call = described, out, lse, out, None
    gradients = backends.BACKENDS[problem.options.backend].backward(problem, *call)
    _with_score_gradients(gradients, problem, *call)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS:])
    problem = AttentionProblem.of(operands, options)
    out, lse, *_ = _run_forward(problem, operands)
    return out, lse.contiguous()


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_needs_grad: bool,
    *args: Any,
) -> Any:
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS:])
    problem = AttentionProblem.of(operands, options)._replace(bias_needs_grad=bias_needs_grad)
    gradients = _run_backward(problem, (*operands, out, lse, dout, dlse))
    # An op cannot return None, so an empty tensor means "no such operand".
    return tuple(dout.new_empty(0) if g is None else g for g in gradients)


def _probabilities(*args: Any) -> Tensor:
    operands, lse, options = Operands(*args[:INPUTS]), args[INPUTS], Options(*args[INPUTS + 1 :])
    problem = AttentionProblem.of(operands, options)
    with autocast_off(operands.q):
        return backends.BACKENDS[options.backend].probabilities(problem, operands, lse)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    register_flops_when_counting()  # of a graph, whose operations no function here calls
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS:])
    q, Dv = operands.q, options.value_head_dim or operands.v.shape[-1]
    out = q.new_empty(*q.shape[:-1], Dv, dtype=output_dtype(q.dtype))
    return out, q.new_empty(lse_shape(operands), dtype=lse_dtype(q.dtype))


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_needs_grad: bool,
    *args: Any,
) -> Any:
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS:])
    return tuple(
        dout.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in needing_gradients(operands, options, bias_needs_grad)
    )


def _fake_probabilities(*args: Any) -> Tensor:
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS + 1 :])
    problem = AttentionProblem.of(operands, options)
    shape = (problem.B, problem.Hq, problem.M, problem.N)
    return operands.q.new_empty(shape, dtype=output_dtype(problem.dtype))


for _key in ("CPU", "CUDA"):
    library.impl("attention_probabilities", _probabilities, _key)
    library.impl("attention_forward", _forward, _key)
    library.impl("attention_forward_in_workspace", _forward, _key)
    library.impl("attention_backward", _backward, _key)
for _name in ("attention_forward", "attention_forward_in_workspace"):
    register_fake(_name, _fake_forward)
register_fake("attention_backward", _fake_backward)
register_fake("attention_probabilities", _fake_probabilities)


class AttentionFunction(torch.autograd.Function):
    """(operands, options) -> (out, lse), with gradients for the first `DIFFERENTIABLE` operands."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return ops.attention_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.options = inputs[INPUTS:]
        ctx.save_for_backward(*output, *inputs[:INPUTS])

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        leading = first_derivative(ctx, dout, dlse, *ctx.saved_tensors)
        return leading + (None,) * (len(ctx.needs_input_grad) - DIFFERENTIABLE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _mapped(AttentionFunction, 0, info, in_dims, args), (0, 0)


class DualAttention(AttentionFunction):
    """`AttentionFunction` with a forward mode, which a compiler does not trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        AttentionFunction.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*output, *inputs[:INPUTS])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        refuse_nested_forward_mode()
        saved = (None if x is None else unpack_dual(x).primal for x in ctx.saved_tensors)
        return TangentFunction.apply(*tangents[:DIFFERENTIABLE], *saved, *ctx.options)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _mapped(DualAttention, 0, info, in_dims, args), (0, 0)


class TangentFunction(torch.autograd.Function):
    """The tangents of out and lse: (those of the first `DIFFERENTIABLE` operands, out, lse,
    operands, options) -> (tangent of out, tangent of lse). A derivative of it takes out and lse for
    what they are, functions of the operands.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        moved, (out, lse), rest = args[:DIFFERENTIABLE], args[DIFFERENTIABLE:][:2], args[_MOVED:]
        operands, options = Operands(*rest[:INPUTS]), Options(*rest[INPUTS:])
        problem = AttentionProblem.of(operands, options)
        with autocast_off(operands.q):
            kernels = backends.forward_mode(problem.device_type)
            if any(map(is_batched, moved)):
                kernels = None
            found = kernels and kernels.tangents(problem, operands, out, lse, moved)
            return found or _higher().tangents(problem, operands, out, lse, moved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = inputs[_MOVED + INPUTS :]
        ctx.save_for_backward(*inputs[:DIFFERENTIABLE], *inputs[_MOVED : _MOVED + INPUTS])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        saved = ctx.saved_tensors
        moved, operands = saved[:DIFFERENTIABLE], Operands(*saved[DIFFERENTIABLE:])
        problem = AttentionProblem.of(operands, Options(*ctx.options))
        found = _higher().tangents_derivative(problem, operands, moved, cotangents)
        rest = len(ctx.needs_input_grad) - _MOVED - DIFFERENTIABLE
        return *found[1], None, None, *found[0], *(None,) * rest

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _mapped(TangentFunction, _MOVED, info, in_dims, args), (0, 0)


def first_derivative(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *operands: Any
) -> tuple[Tensor | None, ...]:
    """The needed gradients of the differentiable operands of a Function with these results."""
    dout = torch.zeros_like(out) if dout is None else dout
    given = (dout, dlse, out, lse, ctx.needs_input_grad[_BIAS], *operands, *ctx.options)
    return _seen_derivative(given, ctx.needs_input_grad)


def _seen_derivative(given: tuple[Any, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
    """The needed gradients, computed by the op; they can be differentiated again."""
    # Compiled graphs reject double backward themselves, and cannot trace a Function in a backward.
    compiling = torch.compiler.is_compiling()
    if not compiling:
        register_flops_when_counting()
    derivative = ops.attention_backward if compiling else AttentionBackwardFunction.apply
    gradients = derivative(*given)
    needed = needed[:DIFFERENTIABLE]
    # PyTorch 2.9 does not trace a zip of unequal lengths.
    pairs = zip(gradients[: len(needed)], needed, strict=True)
    return tuple(g if wanted else None for g, wanted in pairs)


class DirectAttention(torch.autograd.Function):
    """`AttentionFunction` without the registered ops: it calls the backend directly.

    (call, operands, the leading operands that may need gradients) -> (out, lse), or only out if
    nobody wants the lse. `call` is the problem, which operands there are, the prepared forward, and
    whether the lse is wanted. It is used when no tracer or dispatch mode is active, because at
    small sizes the host limits the speed of training. If one becomes active before the backward,
    the backward calls its op.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[AttentionProblem, Presence, PreparedForward | None, bool],
        operands: Operands,
        *differentiable: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        problem, presence, forward, wants_lse = call
        if forward is None and problem.device_type == "cuda":
            with followed_by(partial(_describe_backward, problem, operands)):
                made = _run_forward(problem, operands, forward)
        else:
            made = _run_forward(problem, operands, forward)
        out, lse = made[0], made[1]
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*presence.pick(operands), out, lse)
        return (out, lse) if wants_lse else out

    # PyTorch calls it in another thread than the forward, where reading what that one has written
    # takes longer than anything else: it touches as few objects as it can.
    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        problem, presence, forward, _ = ctx.call
        saved = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * len(ctx.needs_input_grad)
            dout = torch.zeros_like(saved[-2])
        present = (*saved, dout) if dlse is None else (*saved, dout, dlse)
        operands = presence.spread(saved)
        if (
            torch.is_grad_enabled()  # the derivative will be differentiated
            or is_transformed()
            or is_legacy_batched(dout)
            or dout.is_neg()
            or (dlse is not None and (is_legacy_batched(dlse) or dlse.is_neg()))
            or is_traced(present)
        ):
            given = (dout, dlse, *saved[-2:], problem.bias_needs_grad, *operands, *problem.options)
            return None, None, *_seen_derivative(given, ctx.needs_input_grad[2:])
        tensors = (*operands, *saved[-2:], dout, dlse)
        if forward is None or not forward.has_plain_backward or is_any_autocast_on():
            gradients = _run_backward(problem, tensors, present, forward)
        else:
            gradients = forward.backward(tensors, present)
        return None, None, *gradients[: presence.differentiable]


# `Function.apply` without the part for transforms of torch.func, of which none is active.
_apply_directly = super(torch.autograd.Function, DirectAttention).apply


class AttentionBackwardFunction(torch.autograd.Function):
    """The first derivative of attention, a function of dout, dlse and the operands. It is not one
    of its inputs out and lse: these follow from the operands.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        return ops.attention_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        dout, dlse, _, _, _, *operands = inputs[: 5 + INPUTS]
        ctx.options = inputs[5 + INPUTS :]
        # An empty tensor means "not needed", as in the op.
        pairs = zip(operands, output, strict=False)
        ctx.given = tuple(x is not None and x.shape == g.shape for x, g in pairs)
        ctx.save_for_backward(dout, dlse, *operands)
        ctx.save_for_forward(dout, dlse, *operands)

    @staticmethod
    def backward(ctx: Any, *of_gradients: Any) -> Any:
        problem, operands, cotangents = _differentiated_again(ctx)
        pairs = zip(of_gradients, ctx.given, strict=True)
        wanted = tuple(gradient if given else None for gradient, given in pairs)
        found, of_cotangents = _higher().second_derivative(problem, operands, cotangents, wanted)
        dout, dlse = (*of_cotangents, None)[:2]
        rest = len(ctx.needs_input_grad) - 5 - DIFFERENTIABLE
        return dout, dlse, None, None, None, *found, *(None,) * rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_nested_forward_mode()
        problem, operands, cotangents = _differentiated_again(ctx)
        moved = tuple(
            torch.zeros_like(x) if moved is None else moved
            for x, moved in zip(cotangents, tangents, strict=False)
        )
        of_operands = tangents[5 : 5 + DIFFERENTIABLE]
        found = _higher().gradient_tangents(problem, operands, cotangents, of_operands, moved)
        pairs = zip(found, ctx.given, strict=True)
        return tuple(x if given else cotangents[0].new_empty(0) for x, given in pairs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        results = _mapped(AttentionBackwardFunction, 5, info, in_dims, args)
        return results, (0,) * len(results)


def _mapped(
    function: Any, first: int, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> Any:
    """vmap rule: one call whose batch has that of every element. Where sequences share more than
    rows of q, k and v, or are numbered, one call for each element. Any operand may be mapped.

    Args:
        first: the index of the operands in `args`; the tensors before them have a batch, too.
    """
    n, options = info.batch_size, Options(*args[first + INPUTS :])
    if n == 0:
        raise ValueError("vmap: got a mapped dimension of size 0, want at least 1")
    pairs = list(zip(args, in_dims, strict=True))
    if options.score_mod == "" and all(x is None for x in args[first + 3 : first + INPUTS]):

        def in_batch(x: Tensor, d: int | None) -> Tensor:
            return (x.expand(n, *x.shape) if d is None else x.movedim(d, 0)).flatten(0, 1)

        results = function.apply(
            *(in_batch(x, d) if isinstance(x, Tensor) else x for x, d in pairs)
        )
        return tuple(x.unflatten(0, (n, x.shape[0] // n)) for x in results)
    calls = [
        function.apply(*(x if d is None else x.select(d, i) for x, d in pairs)) for i in range(n)
    ]
    return tuple(torch.stack(results) for results in zip(*calls, strict=True))


def _differentiated_again(ctx: Any) -> tuple[AttentionProblem, Operands, tuple[Tensor, ...]]:
    """The problem, the operands and the cotangents of a first derivative."""
    dout, dlse, *rest = ctx.saved_tensors
    operands = Operands(*rest)
    problem = AttentionProblem.of(operands, Options(*ctx.options))
    return problem, operands, (dout,) if dlse is None else (dout, dlse)


def refuse_nested_forward_mode() -> None:
    """Raise where PyTorch would silently take a tangent for a constant: it does not differentiate
    the forward mode of a Function in forward mode.
    """
    if torch._functorch.eager_transforms.JVP_NESTING > 1:
        raise NotImplementedError(
            "flashtile: got torch.func.jvp (or jacfwd) inside torch.func.jvp; expected at most "
            "one, outside or inside of reverse mode, as in torch.func.jvp(torch.func.grad(f), ...)"
        )


def _higher() -> Any:
    """The derivatives of higher order and in forward mode: few programs need them."""
    return import_module(".backends.cpu.derivatives", __package__)
