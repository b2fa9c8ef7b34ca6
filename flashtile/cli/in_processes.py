"""Run independent work in several processes and show how much of it is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

BAR = 40  # characters of a progress bar
MOST_PROCESSES = 8  # each holds a CUDA context, several hundred MiB on the GPU


def default_processes(most: int = MOST_PROCESSES) -> int:
    """As many processes as there are cores, up to `most`."""
    return min(os.cpu_count() or 1, most)


def in_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    seconds: float | None = None,
) -> Iterator[tuple[Item, Result | Exception]]:
    """(item, result) in the order in which they are done; an error is the result of its item.

    `function` is importable, because the processes are started anew: CUDA does not survive a fork.
    After `seconds`, or where the caller stops, items that have not been started are left out.
    """
    workers = max(1, min(processes, len(items)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_attempt, function, item): item for item in items}
        try:
            for future in as_completed(futures, seconds):
                error = future.exception()  # of a process that ended
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield futures[future], future.result() if error is None else error
        except TimeoutError:
            return
        finally:
            pool.shutdown(cancel_futures=True)


def _attempt(function: Callable[[Item], Result], item: Item) -> Result | Exception:
    """The result, or an error with the same text: not every error survives the way back."""
    try:
        return function(item)
    except Exception as error:  # the parent process reports whatever a task raises
        return RuntimeError(f"{type(error).__name__}: {error}")


def with_progress(results: Iterator[Any], count: int, what: str) -> Iterator[Any]:
    """The same, with a bar in a terminal, else with a line for each."""
    begin, end = ("\r", "") if sys.stdout.isatty() else ("", "\n")
    for done, item in enumerate(results, 1):
        bar = ("#" * (BAR * done // count)).ljust(BAR, ".")
        print(f"{begin}{what} [{bar}] {done} of {count}", end=end, flush=True)
        yield item
    if not end:
        print()
