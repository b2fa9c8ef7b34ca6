"""Score functions as functions of Triton, made from their programs."""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import replace
from typing import Any

import triton.language as tl

from ...lru import memoised
from ...problem import AttentionProblem, captured_needs_grad
from .captured_source import CAPTURED, SUMS, captured_source, kept_tiles
from .plan import KernelPlan, Plan, plan
from .score_source import GRADIENT, SCORE, source_of


@memoised(256)
def function_of(source: str) -> Any:
    """The function of a module's source, compiled into the kernels that call it.

    Triton reads the source of a function and keeps compiled kernels on disk by that source and by
    the names of the functions in their configuration, so the name has a hash of the whole source.
    """
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
    forward: dict[str, Any] = {"SCORE_MOD": function_of(source_of(options.score_mod, SCORE))}
    backward = dict(forward)
    if options.score_mod_gradient:
        backward["SCORE_GRADIENT"] = function_of(source_of(options.score_mod_gradient, GRADIENT))
    bands = dict(forward)
    if captured_needs_grad(options):
        given = options.score_mod_gradient
        by_difference = problem.runs == 0
        for name, kind in (("CAPTURED_GRADIENT", CAPTURED), ("CAPTURED_SUMS", SUMS)):
            bands[name] = function_of(captured_source(given, kind, by_difference))
        bands["CAPTURED_KEPT"] = kept_tiles(given, by_difference)

    def calling(kernel_plan: KernelPlan, functions: dict[str, Any]) -> KernelPlan:
        return kernel_plan._replace(config=replace(kernel_plan.config, **functions))

    return Plan(
        forward=calling(planned.forward, forward),
        split=calling(planned.split, forward),
        keys=calling(planned.keys, backward),
        queries=calling(planned.queries, backward),
        values=None if planned.values is None else calling(planned.values, backward),
        scores=calling(planned.scores, forward),
        bands=calling(planned.bands, bands),
    )
