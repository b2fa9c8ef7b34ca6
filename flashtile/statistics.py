"""Statistics of attention, which ``return_stats=`` asks for: computed from tiles, as the output is.

Source: the largest logit of each head clips queries and keys in Muon (Kimi K2, Moonshot 2025); the
sums of the columns say what a cache may evict (H2O, Zhang et al. 2023; SnapKV, Li et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import autograd, backends
from .autocast import autocast_off
from .autograd import INPUTS, NUMBERS, TENSORS, is_transformed
from .backend_interface import Measurer
from .lru import memoised
from .operators import library, ops, register_fake
from .problem import (
    DIFFERENTIABLE,
    FLOAT8,
    AttentionProblem,
    Operands,
    Options,
    dtype_name,
    lse_dtype,
    lse_shape,
)


class Statistics(NamedTuple):
    """What ``return_stats=`` returns, in float32 (float64 for float64); None where it was not asked
    for. The probabilities are those before dropout.

    Attributes:
        max_logit: (heads,), the largest visible score of each head, scaled and capped, before
            `score_mod`, ALiBi and biases; -inf if no score is visible. Without gradient.
        entropy: shaped as the log-sum-exp, the entropy of each row's probabilities in nats, of
            which the sink has one; 0 for a row that sees no key. Differentiable once.
        column_sum: the probabilities of each key, added up over its queries: (batch, heads, seq_k)
            or, for packed keys, (heads, total_k); 0 for keys that nobody sees. Of a cache, seq_k
            are the slots of a row, or of its pages. Without gradient.
    """

    max_logit: Tensor | None = None
    entropy: Tensor | None = None
    column_sum: Tensor | None = None


def checked_names(names: Any) -> frozenset[str]:
    """The statistics that a caller names.

    Raises:
        TypeError, ValueError: they are not a sequence of known names.
    """
    known = ", ".join(map(repr, Statistics._fields))
    if isinstance(names, str) or not isinstance(names, Sequence | frozenset | set):
        raise TypeError(f"return_stats: got {names!r}, want a tuple of some of {known}")
    for name in names:
        if name not in Statistics._fields:
            raise ValueError(f"return_stats: got {name!r}, want some of {known}")
    return frozenset(names)


def column_shape(problem: AttentionProblem, operands: Operands) -> tuple[int, ...]:
    """The shape of the sums of columns."""
    if problem.layout == "packed":
        return problem.Hq, operands.k.shape[0]
    return problem.B, problem.Hq, problem.N


def of_rows(names: frozenset[str]) -> bool:
    """Whether the forward computes some of the statistics: `problem.has_statistics`."""
    return not names.isdisjoint(("max_logit", "entropy"))


def refuse_unsupported(problem: AttentionProblem) -> None:
    """Raise if a call has no statistics.

    Raises:
        NotImplementedError: it has float8 inputs or `batch_invariant`, or a transform of torch.func
            or dual numbers are active, which would take the entropy for a constant.
    """
    if is_transformed() or torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            "return_stats: got a call inside a transform of torch.func or with dual numbers; want "
            "an eager or a compiled call"
        )
    if problem.dtype in FLOAT8 or problem.has_float8_keys:
        dtype = "float8" if problem.has_float8_keys else dtype_name(problem.dtype)
        raise NotImplementedError(
            f"return_stats: got keys in {dtype}, want float64, float32, bfloat16 or float16"
        )
    if problem.options.k_unpack:
        raise NotImplementedError("return_stats: got a cache_format, want a cache of numbers")
    if problem.has_key_index and problem.device_type != "cpu":
        raise NotImplementedError("return_stats: got lists of keys on a GPU, want them on a CPU")
    if problem.options.batch_invariant:
        raise NotImplementedError(
            "return_stats: got batch_invariant=True, whose promise statistics do not keep"
        )


def _measuring(problem: AttentionProblem) -> AttentionProblem:
    """The problem, with the backend of its device that has all statistics."""
    name = "cpu" if problem.device_type == "cpu" else "triton"
    return problem._replace(options=problem.options._replace(backend=name))


@memoised(4096)
def _with_statistics_of_rows(problem: AttentionProblem) -> AttentionProblem:
    """The problem with statistics of rows: of its backend, which has its backward, if it can."""
    problem = problem._replace(has_statistics=True)
    reasons = backends.BACKENDS[problem.options.backend].unsupported_reasons(problem)
    return _measuring(problem) if reasons else problem


def attend(
    problem: AttentionProblem, operands: Operands, names: frozenset[str], backward: str
) -> tuple[Tensor, Tensor, Statistics]:
    """(out, lse, the statistics `names`) of a call that has passed `refuse_unsupported`, recorded
    for gradients.

    Args:
        backward: the backend of the backward.
    """
    found = Statistics()
    if problem.has_statistics:
        options = problem.options._replace(backend=backward)
        operands = operands._replace(workspace=None)
        has_entropy = "entropy" in names
        out, lse, largest, entropy = ops.attention_with_statistics(*operands, *options, has_entropy)
        if has_entropy:
            found = found._replace(entropy=entropy)
        if "max_logit" in names:
            found = found._replace(max_logit=largest_of_heads(largest.detach()))
    else:
        out, lse = autograd.attend(problem, operands)
    if "column_sum" in names:
        constants = (None if x is None else x.detach() for x in (*operands, lse))
        sums = ops.attention_column_sums(*constants, *problem.options)
        found = found._replace(column_sum=sums)
    return out, lse, found


def largest_of_heads(largest: Tensor) -> Tensor:
    """(heads,): the largest of each head, of (batch, heads, seq_q) or (heads, total_q)."""
    if largest.numel() == 0:
        return largest.new_full((largest.shape[-2],), -torch.inf)
    largest = largest.amax(-1)  # of rows first, which are contiguous
    return largest.amax(0) if largest.dim() == 2 else largest


def as_batch(
    found: Statistics, queries: tuple[int, int] | None, keys: tuple[int, int] | None
) -> Statistics:
    """The statistics of packed queries or keys of equal lengths, (batch, length), as those of a
    batch: (batch, heads, length).
    """

    def unpacked(x: Tensor | None, sizes: tuple[int, int] | None) -> Tensor | None:
        return x if x is None or sizes is None else x.unflatten(1, sizes).transpose(0, 1)

    return found._replace(
        entropy=unpacked(found.entropy, queries), column_sum=unpacked(found.column_sum, keys)
    )


library.define(
    f"attention_with_statistics({TENSORS}, {NUMBERS}, bool has_entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(f"attention_column_sums({TENSORS}, Tensor lse, {NUMBERS}) -> Tensor")
library.define(
    f"attention_entropy_backward(Tensor dentropy, {TENSORS}, Tensor lse, Tensor entropy, {NUMBERS})"
    " -> (" + ", ".join(["Tensor"] * DIFFERENTIABLE) + ")"
)


def _with_statistics(*args: Any) -> tuple[Tensor, ...]:
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS:-1])
    problem = AttentionProblem.of(operands, options)._replace(has_entropy=args[-1])
    problem = _with_statistics_of_rows(problem)
    with autocast_off(operands.q):
        out, *rows = backends.BACKENDS[problem.options.backend].forward(problem, operands)
    entropy = rows[2] if problem.has_entropy else rows[0].new_empty(0)
    rows = [*rows[:2], entropy]  # Triton's also have what column sums need
    # No result of an op may share memory with another one.
    shared = (x.untyped_storage().nbytes() > x.nbytes for x in rows)
    return out, *(x.clone() if is_part else x for x, is_part in zip(rows, shared, strict=True))


def _fake_with_statistics(*args: Any) -> tuple[Tensor, ...]:
    operands = Operands(*args[:INPUTS])
    q, v = operands.q, operands.v
    shapes = (lse_shape(operands),) * 2 + (lse_shape(operands) if args[-1] else (0,),)
    rows = (q.new_empty(shape, dtype=lse_dtype(q.dtype)) for shape in shapes)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), *rows


def _column_sums(*args: Any) -> Tensor:
    operands, lse, options = Operands(*args[:INPUTS]), args[INPUTS], Options(*args[INPUTS + 1 :])
    sums = _fake_column_sums(*args).zero_()
    add_column_sums(AttentionProblem.of(operands, options), operands, lse, sums)
    return sums


def add_column_sums(
    problem: AttentionProblem, operands: Operands, lse: Tensor, into: Tensor
) -> None:
    """Add the probabilities of each key to `into`: `backend_interface.Measurer`."""
    problem = _measuring(problem)
    backend = cast(Measurer, backends.BACKENDS[problem.options.backend])
    with autocast_off(operands.q):
        backend.column_sums(problem, operands, lse, into)


def _fake_column_sums(*args: Any) -> Tensor:
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS + 1 :])
    shape = column_shape(AttentionProblem.of(operands, options), operands)
    return operands.q.new_empty(shape, dtype=lse_dtype(operands.q.dtype))


def _entropy_backward(dentropy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS + 2 :])
    problem = AttentionProblem.of(operands, options)
    with autocast_off(operands.q):
        gradients = entropy_gradient(problem, operands, *args[INPUTS : INPUTS + 2], dentropy)
    pairs = zip(gradients, args[:DIFFERENTIABLE], strict=True)
    return tuple(dentropy.new_empty(0) if g is None else g.to(x.dtype) for g, x in pairs)


def entropy_gradient(*given: Any) -> tuple[Tensor | None, ...]:
    """`backends.cpu.statistics.entropy_gradient`, on any device: few programs need it."""
    return import_module(".backends.cpu.statistics", __package__).entropy_gradient(*given)


def _fake_entropy_backward(dentropy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    operands = Operands(*args[:INPUTS])[:DIFFERENTIABLE]
    return tuple(dentropy.new_empty(0) if x is None else torch.empty_like(x) for x in operands)


for _name, _function, _fake in (
    ("attention_with_statistics", _with_statistics, _fake_with_statistics),
    ("attention_column_sums", _column_sums, _fake_column_sums),
    ("attention_entropy_backward", _entropy_backward, _fake_entropy_backward),
):
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _function, _key)
    register_fake(_name, _fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[INPUTS:-1]
    out, lse, _, entropy = output
    ctx.save_for_backward(out, lse, entropy, *inputs[:INPUTS])


def _backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None, dentropy: Tensor | None
) -> Any:
    out, lse, entropy, *operands = ctx.saved_tensors
    found: tuple[Tensor | None, ...] = (None,) * DIFFERENTIABLE
    if dout is not None or dlse is not None:
        found = autograd.first_derivative(ctx, dout, dlse, out, lse, *operands)
    if dentropy is not None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "return_stats: got create_graph=True; the entropy can be differentiated only once"
            )
        more = ops.attention_entropy_backward(dentropy, *operands, lse, entropy, *ctx.options)
        sums = zip(found, more, ctx.needs_input_grad, strict=False)
        found = tuple((g if f is None else f + g) if wanted else None for f, g, wanted in sums)
    return *found, *(None,) * (len(ctx.needs_input_grad) - DIFFERENTIABLE)


torch.library.register_autograd(
    f"{library.ns}::attention_with_statistics", _backward, setup_context=_save, lib=library
)
