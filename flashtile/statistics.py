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

from . import backends
from .autocast import autocast_off
from .autograd import INPUTS, NUMBERS, TENSORS, is_transformed
from .backend_interface import Measurer
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


def refuse_unsupported(problem: AttentionProblem) -> None:
    """Raise if a call has no statistics.

    Raises:
        NotImplementedError: it has float8 inputs or `batch_invariant`, no backend of its device
            runs it, or a transform of torch.func or dual numbers are active, which would take the
            entropy for a constant.
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
    if problem.options.batch_invariant:
        raise NotImplementedError(
            "return_stats: got batch_invariant=True, whose promise statistics do not keep"
        )
    problem = _of_backend(problem)._replace(needs_grad=False, appending=None)
    name = problem.options.backend
    reasons = backends.BACKENDS[name].unsupported_reasons(problem)
    if reasons:
        raise NotImplementedError(f"return_stats: backend {name!r}: {'; '.join(reasons)}")


def _of_backend(problem: AttentionProblem) -> AttentionProblem:
    """The problem, with the backend that has the statistics of its device."""
    name = "cpu" if problem.device_type == "cpu" else "triton"
    return problem._replace(options=problem.options._replace(backend=name))


def measure(
    problem: AttentionProblem, operands: Operands, lse: Tensor, names: frozenset[str]
) -> Statistics:
    """The statistics of a call that has been made and passed `refuse_unsupported`."""
    of_rows = not names.isdisjoint(("max_logit", "entropy"))
    row_max, entropy, column_sum = ops.attention_statistics(
        *operands, lse.detach(), of_rows, "column_sum" in names, *_of_backend(problem).options
    )
    found = Statistics(entropy=entropy if "entropy" in names else None)
    if "max_logit" in names:
        # (batch, heads, seq_q) or (heads, total_q)
        rows = row_max.detach().movedim(-2, 0).flatten(1)
        least = rows.new_full((rows.shape[0], 1), -torch.inf)
        found = found._replace(max_logit=torch.cat((rows, least), 1).amax(1))
    if "column_sum" in names:
        found = found._replace(column_sum=column_sum.detach())
    return found


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
    f"attention_statistics({TENSORS}, Tensor lse, bool of_rows, bool of_columns, {NUMBERS}) -> "
    "(Tensor, Tensor, Tensor)"
)
library.define(
    f"attention_entropy_backward(Tensor dentropy, {TENSORS}, {NUMBERS}) -> ("
    + ", ".join(["Tensor"] * DIFFERENTIABLE)
    + ")"
)


def _statistics(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands = Operands(*args[:INPUTS])
    lse, of_rows, of_columns, *numbers = args[INPUTS:]
    options = Options(*numbers)
    problem = AttentionProblem.of(operands, options)
    row_max, entropy, column_sum = _fake_statistics(*args)
    row_max.fill_(-torch.inf)
    backend = cast(Measurer, backends.BACKENDS[options.backend])
    with autocast_off(operands.q):
        into = row_max, entropy.zero_(), column_sum.zero_()
        backend.measure(problem, operands, lse, of_rows, of_columns, *into)
    return row_max, entropy, column_sum


def _fake_statistics(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands = Operands(*args[:INPUTS])
    _, of_rows, of_columns, *numbers = args[INPUTS:]
    problem = AttentionProblem.of(operands, Options(*numbers))

    def tensor(shape: tuple[int, ...], is_wanted: bool) -> Tensor:
        dtype = lse_dtype(operands.q.dtype)
        return operands.q.new_empty(shape if is_wanted else (0,), dtype=dtype)

    rows = lse_shape(operands)
    columns = column_shape(problem, operands)
    return tensor(rows, of_rows), tensor(rows, of_rows), tensor(columns, of_columns)


def _entropy_backward(dentropy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    operands, options = Operands(*args[:INPUTS]), Options(*args[INPUTS:])
    problem = AttentionProblem.of(operands, options)
    on_any_device = import_module(".backends.cpu.statistics", __package__)
    with autocast_off(operands.q):
        gradients = on_any_device.entropy_gradient(problem, operands, dentropy)
    return tuple(dentropy.new_empty(0) if g is None else g for g in gradients)


def _fake_entropy_backward(dentropy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    operands = Operands(*args[:INPUTS])[:DIFFERENTIABLE]
    return tuple(dentropy.new_empty(0) if x is None else torch.empty_like(x) for x in operands)


for _key in ("CPU", "CUDA"):
    library.impl("attention_statistics", _statistics, _key)
    library.impl("attention_entropy_backward", _entropy_backward, _key)
register_fake("attention_statistics", _fake_statistics)
register_fake("attention_entropy_backward", _fake_entropy_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.options = inputs[INPUTS + 3 :]
    ctx.save_for_backward(*inputs[:INPUTS])


def _backward(ctx: Any, _: Tensor | None, dentropy: Tensor, __: Tensor | None) -> Any:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "return_stats: got create_graph=True; the entropy can be differentiated only once"
        )
    operands = ctx.saved_tensors
    gradients = ops.attention_entropy_backward(dentropy, *operands, *ctx.options)
    pairs = zip(gradients, ctx.needs_input_grad, strict=False)
    leading = tuple(g if wanted else None for g, wanted in pairs)
    return leading + (None,) * (len(ctx.needs_input_grad) - DIFFERENTIABLE)


torch.library.register_autograd(
    f"{library.ns}::attention_statistics", _backward, setup_context=_save, lib=library
)
