"""Run cases once in several processes, so that their kernels are in the caches on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from itertools import product
from multiprocessing import get_context

from .run import Settings, measure_case
from .shapes import Case


def compile_ahead(cases: Sequence[Case], settings: Settings, processes: int) -> float:
    """Run every peer and pass of `cases` once, in `processes` new processes; returns the seconds.

    Failures are not reported, because they occur again in the measurement.
    """
    start = time.monotonic()
    single = [
        replace(settings, peers=(peer,), directions=(direction,))
        for direction, peer in product(settings.directions, settings.peers)
    ]
    jobs = list(product(cases, single))
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin)
    with pool, suppress(BrokenProcessPool):  # if a process dies, the others stop too
        list(pool.map(_run_once, *zip(*jobs, strict=True)))
    return time.monotonic() - start


def _begin() -> None:
    """What a new process does first."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # instead of one for each core
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # hides the tracebacks of failures


def _run_once(case: Case, settings: Settings) -> None:
    quick = replace(settings, seconds=0, min_rounds=1, memory=False, accuracy=False, host=False)
    measure_case(case, quick)
