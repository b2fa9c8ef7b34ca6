"""Explain which backend would run a call, how, and why the others would not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..problem import AttentionProblem, Options, dtype_name
from ..score_mod import parsed, times_traced
from ..score_mod.trace import compiled_functions_run_eagerly
from . import dispatch
from .dispatch import Checked, decide
from .layouts import Cached, Layout
from .options import OPTIONS
from .prepare import Keywords, instead_of_decide


class Verdict(NamedTuple):
    """The answer of one backend for a problem."""

    backend: str
    reasons: list[str]  # empty if it can run the problem
    plan: str  # empty if it cannot


class Explanation(NamedTuple):
    """The answer of `explain`; printing it gives the report."""

    problem: AttentionProblem
    verdicts: list[Verdict]
    chosen: str | None
    hints: tuple[str, ...] = ()  # the performance hints of the call: honoured or ignored
    steps: tuple[str, ...] = ()  # steps on a cache before the backend runs
    score_mod: str = ""  # the traced score function, and how often it has been traced

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"attention on {p.device_type}, {dtype_name(p.dtype)}, {p.layout}: batch {p.B}, "
            f"queries {p.M}, keys {p.N}, heads {p.Hq}:{p.Hk}, head dim {p.D}"
            + (f" (values {p.Dv})" if p.Dv != p.D else "")
        ]
        lines.extend(f"first: {step}" for step in self.steps)
        lines.extend(self.score_mod.splitlines())
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


class _Stop(BaseException):
    """Ends a function at its first call of attention, which is its argument. Not an Exception, so
    that the function does not handle it.
    """


def _stop(call: Checked) -> NoReturn:
    raise _Stop(call)


def explained(
    function: Callable[..., Any], call: tuple[Any, ...], options: dict[str, Any]
) -> Explanation:
    """The explanation of the first call of attention that ``function(*call, **options)`` makes.

    The function runs up to the choice of a backend, so its checks are those of the call itself.
    It has written nothing at that point.
    """
    if torch.compiler.is_compiling():  # the graph ends here: `function` runs without a tracer
        return torch.compiler.disable(explained)(function, call, options)
    token = instead_of_decide.set(_stop)
    try:
        with compiled_functions_run_eagerly():  # a graph would run the call and write its results
            function(*call, **options)
    except _Stop as stop:
        return _explanation(*stop.args)
    finally:
        instead_of_decide.reset(token)
    raise ValueError(f"explain: {function} makes no call of attention")


def _explanation(call: Checked) -> Explanation:
    problem, chosen = call.problem, None
    try:
        decided = decide(call)
    except NotImplementedError:
        if problem.options.batch_invariant is None:
            invariant = dispatch.is_batch_invariant()
            problem = problem._replace(options=problem.options._replace(batch_invariant=invariant))
    else:
        chosen = decided.options.backend
        problem = decided._replace(options=decided.options._replace(backend=""))
    verdicts = []
    for name in dispatch.ORDER:
        backend = dispatch.BACKENDS[name]
        reasons = backend.unsupported_reasons(problem)
        plan = "" if reasons else backend.describe_plan(problem)
        why = backend.defers(problem) if plan and backend.defers is not None else ""
        if why:
            plan = f'after the other backends, unless backend="{name}" is given: {why}\n{plan}'
        verdicts.append(Verdict(name, reasons, plan))
    return Explanation(
        problem,
        verdicts,
        chosen,
        hints=_hints(call.keywords, chosen),
        steps=_steps(call.problem, problem, call.layout),
        score_mod=_score_mod(problem.options),
    )


def _score_mod(options: Options) -> str:
    """The program of a score function, with a line about it."""
    if not options.score_mod:
        return ""
    count, times = parsed(options.score_mod).operations, times_traced(options.score_mod)
    shown = "\n".join(f"      {line}" for line in options.score_mod.splitlines())
    return f"score_mod: {count} operations, traced {times} times\n{shown}"


def _hints(keywords: Keywords, chosen: str | None) -> tuple[str, ...]:
    """Each given hint, and whether the chosen backend honours it."""
    if chosen is None:
        return ()
    honoured = dispatch.BACKENDS[chosen].HINTS
    hints = [name for name, option in OPTIONS.items() if option.kind == "hint"]
    lines = []
    for name in ("num_splits", *hints):
        value = keywords.get(name)
        if value is None or (value == 0 and value is not False):
            continue
        shown = "..." if isinstance(value, Tensor) else value
        lines.append(f"{name}={shown} {'honoured' if name in honoured else 'ignored'} by {chosen}")
    return tuple(lines)


def _steps(problem: AttentionProblem, run: AttentionProblem, layout: Layout) -> tuple[str, ...]:
    """The steps before the backend runs: appending to a cache, and gathering its pages."""
    if not isinstance(layout, Cached):
        return ()
    steps = []
    if layout.k_new is not None:
        how = "" if layout.rotary_cos is None else ", rotated"
        when = "" if run.appending is None else ", in the launch of the attention"
        steps.append(f"append the new keys and values to the cache{how}{when}")
    if run.layout != problem.layout:
        how = "gather its pages into" if problem.page_size else "view it as"
        steps.append(f"chunked prefill: {how} packed sequences of {run.N} tokens")
    return tuple(steps)
