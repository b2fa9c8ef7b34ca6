"""Score functions as functions of Triton, made from their programs."""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import replace
from typing import Any

import triton.language as tl

from ...lru import memoised
from ...problem import AttentionProblem
from .plan import KernelPlan, Plan, plan
from .score_source import source_of


@memoised(256)
def function_of(text: str, is_derivative: bool) -> Any:
    """The function of a program, compiled into the kernels that call it.

    Triton reads the source of a function and keeps compiled kernels on disk by that source and by
    the names of the functions in their configuration, so the name has a hash of the whole source.
    """
    source = source_of(text, is_derivative)
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
    forward = {"SCORE_MOD": function_of(options.score_mod, is_derivative=False)}
    backward = dict(forward)
    if options.score_mod_gradient:
        backward["SCORE_GRADIENT"] = function_of(options.score_mod_gradient, is_derivative=True)

    def calling(kernel_plan: KernelPlan, functions: dict[str, Any]) -> KernelPlan:
        return kernel_plan._replace(config=replace(kernel_plan.config, **functions))

    return Plan(
        forward=calling(planned.forward, forward),
        split=calling(planned.split, forward),
        keys=calling(planned.keys, backward),
        queries=calling(planned.queries, backward),
        values=None if planned.values is None else calling(planned.values, backward),
        scores=calling(planned.scores, forward),
    )
