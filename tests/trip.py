"""What a reader has to follow: the functions of the package that one call enters.

::

    python tests/trip.py cpu        # flash_attn_func on a CPU
    python tests/trip.py cache      # flash_attn_with_kvcache, which appends a token to its cache
    python tests/trip.py context    # ContextParallel.attention, rank 0 of two over gloo
    python tests/trip.py cpu --list # with the functions, in the order in which they are entered

A row counts the files and the functions that the thread of a call enters, each once, and its moves:
how often it enters a function of another file than the function entered before. A return into a
file is no move, but entering the next function from there may be one. A generator that goes on is
entered again. Module and class bodies, comprehensions and lambdas are not counted: some versions of
Python inline comprehensions.

The first call is the first of its process. `tests/test_trip.py` has the ceilings.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import processes
import torch
import torch.distributed as dist

import flashtile
from flashtile.distributed import ContextParallel

PACKAGE = Path(flashtile.__file__).parent
CALLS = ("cpu", "cache", "context")


class Entered(NamedTuple):
    """A function of the package."""

    file: str
    name: str
    line: int


class Counts(NamedTuple):
    """What a call enters."""

    files: int
    functions: int
    moves: int

    @classmethod
    def of(cls, trip: list[Entered]) -> Counts:
        files = [entered.file for entered in trip]
        moves = sum(a != b for a, b in pairwise(files))
        return cls(len(set(files)), len(set(trip)), moves)


def traced(call: Callable[[], Any]) -> list[Entered]:
    """The functions that `call` enters, in order."""
    trip = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and is_function and Path(code.co_filename).is_relative_to(PACKAGE):
            file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            trip.append(Entered(file, name, code.co_firstlineno))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return trip


def trips_of_cpu() -> dict[str, list[Entered]]:
    q, k, v = (torch.randn(1, 37, heads, 32) for heads in (4, 2, 2))

    def call() -> None:
        flashtile.flash_attn_func(q, k, v, causal=True)

    return {"first": traced(call), "repeated": traced(call)}


def trips_of_cache() -> dict[str, list[Entered]]:
    k_cache, v_cache = (torch.zeros(1, 64, 2, 32) for _ in "kv")
    q, k, v = (torch.randn(1, 1, heads, 32) for heads in (4, 2, 2))
    lengths = torch.tensor([5], dtype=torch.int32)

    def call() -> None:
        flashtile.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
        )

    return {"first": traced(call), "repeated": traced(call)}


def trips_of_context() -> dict[str, list[Entered]]:
    """Of one rank, on which the process group is set up."""
    parallel = ContextParallel()
    layout = parallel.layout(seq_len=64)
    whole = (torch.randn(1, 64, heads, 32) for heads in (4, 2, 2))
    q, k, v = (layout.shard(x).requires_grad_() for x in whole)

    def forward() -> torch.Tensor:
        return parallel.attention(q, k, v, layout, causal=True)

    first: list[torch.Tensor] = []
    trips = {"first": traced(lambda: first.append(forward()))}
    first[0].sum().backward()
    return trips | {"repeated, with backward": traced(lambda: forward().sum().backward())}


def show(trips: dict[str, list[Entered]], lists: bool) -> None:
    """Print a table, and before it the functions."""
    if lists:
        for what, trip in trips.items():
            print(f"{what}:")
            for before, entered in zip([None, *trip], trip, strict=False):
                moved = before is None or before.file != entered.file
                print(f"  {entered.file if moved else '':50} {entered.name}")
    print(f"{'call':25} {'files':>9} {'functions':>9} {'moves':>9}")
    for what, trip in trips.items():
        print(f"{what:25}", *(f"{count:9}" for count in Counts.of(trip)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--list", action="store_true", help="print the functions too")
    options = parser.parse_args()
    if options.call == "context":
        print(of_ranks(*(["--list"] if options.list else [])), end="")
    else:
        show({"cpu": trips_of_cpu, "cache": trips_of_cache}[options.call](), options.list)


def of_ranks(*lists: str) -> str:
    """What the first of two ranks shows."""
    with tempfile.TemporaryDirectory() as folder:
        return processes.run("trip.py", 2, Path(folder) / "rendezvous", *lists)


def main_of_rank(rank: int, world: int, rendezvous: str, *lists: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    trips = trips_of_context()
    if rank == 0:
        show(trips, bool(lists))
    dist.barrier()


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdigit():
        main_of_rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    else:
        main()
