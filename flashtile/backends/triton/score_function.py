"""Score functions as functions of Triton, made from their programs."""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import replace
from typing import Any

import triton.language as tl

from ...lru import memoised
from ...problem import AttentionProblem, captured_needs_grad
from .plan import KernelPlan, Plan, plan
from .score_source import CAPTURED, GRADIENT, SCORE, source_of


@memoised(256)
def function_of(text: str, kind: str) -> Any:
    """The function of a program, one of `KINDS`, compiled into the kernels that call it.

    Triton reads the source of a function and keeps compiled kernels on disk by that source and by
    the names of the functions in their configuration, so the name has a hash of the whole source.
    """
    source = source_of(text, kind)
    name = f"score_{hashlib.sha256(source.encode()).hexdigest()[:20]}"
    source = source.replace("def score(", f"def {name}(")
    filename = f"<flashtile {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"flashtile.generated.{name}", "tl": tl}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


def plan_with_functions(problem: AttentionProblem, aligned: bool) -> Plan:
    """The plan of a call; its kernels call the score function, those of the backward also its
    derivative.
    """
    planned, options = plan(problem, aligned), problem.options
    if not options.score_mod:
        return planned
    forward = {"SCORE_MOD": function_of(options.score_mod, SCORE)}
    backward = dict(forward)
    if options.score_mod_gradient:
        backward["SCORE_GRADIENT"] = function_of(options.score_mod_gradient, GRADIENT)
    scores = dict(forward)
    if captured_needs_grad(options):
        scores["CAPTURED_GRADIENT"] = function_of(options.score_mod_gradient, CAPTURED)

    def calling(kernel_plan: KernelPlan, functions: dict[str, Any]) -> KernelPlan:
        return kernel_plan._replace(config=replace(kernel_plan.config, **functions))

    return Plan(
        forward=calling(planned.forward, forward),
        split=calling(planned.split, forward),
        keys=calling(planned.keys, backward),
        queries=calling(planned.queries, backward),
        values=None if planned.values is None else calling(planned.values, backward),
        scores=calling(planned.scores, scores),
    )
