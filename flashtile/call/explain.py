"""Explain which backend would run a call, how, and why the others would not."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import backends
from ..problem import AttentionProblem, Operands, Options, dtype_name
from . import checks, dispatch
from .attn_mask import with_masks
from .dispatch import BackendName
from .layouts import Layout, as_packed
from .prepare import Arguments, dense_call, packed_call


class Verdict(NamedTuple):
    """The answer of one backend for a problem."""

    backend: str
    reasons: list[str]  # empty: it can run it
    plan: str  # empty when it cannot


class Explanation(NamedTuple):
    """The answer of `explain`; printing it gives the report."""

    problem: AttentionProblem
    verdicts: list[Verdict]
    chosen: str | None
    hints: tuple[str, ...] = ()  # the performance hints of the call, and what becomes of them

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"attention on {p.device_type}, {dtype_name(p.dtype)}, {p.layout}: batch {p.B}, "
            f"queries {p.M}, keys {p.N}, heads {p.Hq}:{p.Hk}, head dim {p.D}"
            + (f" (values {p.Dv})" if p.Dv != p.D else "")
        ]
        for verdict in self.verdicts:
            mark = "->" if verdict.backend == self.chosen else "  "
            if verdict.reasons:
                lines.append(f"{mark} {verdict.backend}: no: " + "; ".join(verdict.reasons))
            else:
                lines.append(f"{mark} {verdict.backend}: yes")
                lines.extend(f"      {line}" for line in verdict.plan.splitlines())
        if self.hints:
            lines.append("hints: " + "; ".join(self.hints))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


MASKS = ("attn_mask", "key_padding_mask")  # arguments of `attention` that become others


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, backend: BackendName | None = None, **options: Any
) -> Explanation:
    """Every backend with its reasons and its plan for a call that is not made.

    Args:
        q, k, v: as in `attention`; or as in `attention_varlen`, with its layout arguments by
            keyword.
        backend: forced backend, as in the call.
        options: the other arguments of that call.

    Raises:
        ValueError, TypeError: as the call itself would.
    """
    wants_probabilities = checks.flag("return_attn_probs", options.pop("return_attn_probs", False))
    names = {name: options.pop(name) for name in Layout._fields if name in options}
    masks = {name: options.pop(name) for name in MASKS if name in options and not names}
    if any(mask is not None for mask in masks.values()):
        attn_mask, key_padding_mask = (masks.get(name) for name in MASKS)
        others = options.get("bias"), options.get("block_mask")
        bias, block_mask = with_masks(q, k, attn_mask, key_padding_mask, *others)
        options |= {"bias": bias, "block_mask": block_mask}
    if unknown := options.keys() - {*Arguments._fields}:
        raise checks.unexpected_keywords(sorted(unknown), Arguments, () if names else MASKS)
    arguments = Arguments(**options)
    if names:
        call = as_packed(q, k, v, arguments.qv, Layout(**names))
        arguments = arguments._replace(qv=call.qv)
        operands, numbers = packed_call(*call[:3], call.layout, arguments)
    else:
        operands, numbers = dense_call(q, k, v, arguments)
    explanation = explain_operands(operands, numbers, backend, wants_probabilities)
    return explanation._replace(hints=_hints(arguments, explanation.chosen))


def _hints(arguments: Arguments, chosen: str | None) -> tuple[str, ...]:
    """Each hint that was given, and whether the chosen backend honours it."""
    if chosen is None:
        return ()
    given = {
        "num_splits": arguments.num_splits or None,
        "pack_gqa": arguments.pack_gqa,
        "sm_margin": arguments.sm_margin or None,
        "scheduler_metadata": None if arguments.scheduler_metadata is None else "...",
    }
    honoured = backends.load(chosen).HINTS
    return tuple(
        f"{name}={value} {'honoured' if name in honoured else 'ignored'} by {chosen}"
        for name, value in given.items()
        if value is not None
    )


def explain_operands(
    operands: Operands, options: Options, backend: str | None, wants_probabilities: bool = False
) -> Explanation:
    """The explanation of a described call."""
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(wants_probabilities=wants_probabilities)
    verdicts = []
    for name in dispatch.ORDER:
        reasons = dispatch.unsupported_reasons(name, problem)
        plan = "" if reasons else backends.load(name).describe_plan(problem)
        verdicts.append(Verdict(name, reasons, plan))
    try:
        chosen = dispatch.select(problem, backend)
    except NotImplementedError:
        chosen = None
    return Explanation(problem, verdicts, chosen)
