"""``flashtile tune``: measure tile sizes of the Triton backend on this GPU and keep the fastest.

Results go to the user's cache folder (FLASHTILE_CACHE, else ~/.cache/flashtile) as JSON, where
every later process finds them; a normal call never tunes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..backends.triton import plan
from ..call.layouts import Dense
from ..call.prepare import describe
from ..problem import AttentionProblem
from .in_processes import default_processes, in_processes, with_progress

HEAD_DIMS = (64, 128, 256)
TOKENS, HIDDEN = 16384, 2048  # size of the measured call: 32, 16 or 8 heads
GRID_BLOCKS = (32, 64, 128)
ROUNDS = 3
NOISE = 1.01  # ratio by which medians of one tile differ from run to run
# Kernel of a pass, and the flag of its result.
MARKS = {
    "forward": ("forward_kernel", ""),
    "keys": ("key_gradient_kernel", "HAS_DK"),
    "queries": ("query_gradient_kernel", ""),
    "values": ("key_gradient_kernel", "HAS_DV"),
}


class Candidate(NamedTuple):
    """One tile of one pass to measure."""

    head_dim: int
    kernel: str  # one of plan.PASSES
    tile: plan.Tile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: what to tune and where to write."""
    parser.add_argument(
        "--head-dims",
        type=int,
        nargs="+",
        default=list(HEAD_DIMS),
        metavar="N",
        help=f"head dims to tune, in elements (default: {' '.join(map(str, HEAD_DIMS))})",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=4096,
        metavar="N",
        help="length of the measured sequences, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="dtype of the measured calls (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=default_processes(),
        metavar="N",
        help="processes that compile the candidates (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the JSON file (default: the user's cache, where every process looks)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure the grid, print the fastest tiles and write them."""
    if not torch.cuda.is_available():
        print("flashtile tune: no CUDA device here; tiles are measured on the GPU that uses them")
        return 1
    name = plan.architecture(torch.cuda.get_device_capability())
    dtype = getattr(torch, args.dtype)
    best: dict[str, dict[str, list[int]]] = {}
    every = [in_use(name, dim, kernel) for dim in args.head_dims for kernel in plan.passes_of(dim)]
    compete = {now: list(dict.fromkeys([now, *grid(*now[:2])])) for now in every}
    compile_all([x for candidates in compete.values() for x in candidates], dtype, args)
    for now, candidates in compete.items():
        head_dim, kernel, tile = now
        times = measure(candidates, args.length, dtype)
        if not times:
            print(f"head dim {head_dim} {kernel}: no candidate fits")
            continue
        if now in times:
            print(f"head dim {head_dim} {kernel}, so far: {tile}, {times[now]:.3f} ms")
        winner = chosen(times, now)
        best.setdefault(str(head_dim), {})[kernel] = list(winner.tile)
        print(f"head dim {head_dim} {kernel}: {winner.tile}, {times[winner]:.3f} ms")
    path = write(best, name, args.output or plan.tuned_folder())
    print(f"written: {path}")
    return 0


def compile_all(candidates: list[Candidate], dtype: torch.dtype, args: argparse.Namespace) -> None:
    """Compile the candidates in several processes, so that measuring finds them on disk; those
    that do not fit fail again there.
    """
    started = time.monotonic()
    done = in_processes(
        partial(run_once, length=args.length, dtype=dtype), candidates, args.processes
    )
    for _ in with_progress(done, len(candidates), "compiled"):
        pass
    print(f"{len(candidates)} candidates compiled in {time.monotonic() - started:.0f} s")


def run_once(candidate: Candidate, length: int, dtype: torch.dtype) -> None:
    """Make the launches of a candidate, which compiles its kernels."""
    for causal in (False, True):
        for launch in launches_of(candidate, length, dtype, causal):
            launch.run()


def in_use(name: str, head_dim: int, kernel: str) -> Candidate:
    """The tile that a 16-bit call uses now on architecture `name`."""
    tiles = plan.tiles_for(name, head_dim)
    return Candidate(head_dim, kernel, tiles[plan.PASSES.index(kernel)])


def chosen(times: dict[Candidate, float], now: Candidate) -> Candidate:
    """The fastest candidate, or the one in use if it is as fast except for noise."""
    fastest = min(times, key=lambda candidate: times[candidate])
    is_as_fast = now in times and times[now] <= NOISE * times[fastest]
    return now if is_as_fast else fastest


def grid(head_dim: int, kernel: str) -> Iterator[Candidate]:
    """Tiles worth measuring; those that do not fit the GPU fail to compile and are skipped."""
    for BLOCK_M in GRID_BLOCKS:
        for BLOCK_N in GRID_BLOCKS:
            for warps in (4, 8):
                for stages in (2, 3):
                    accumulators = (BLOCK_N if kernel in ("keys", "values") else BLOCK_M) * head_dim
                    per_thread = (accumulators + BLOCK_M * BLOCK_N) // (32 * warps)
                    if 24 <= per_thread <= 224:  # of 255 registers
                        yield Candidate(
                            head_dim, kernel, plan.Tile(BLOCK_M, BLOCK_N, warps, stages)
                        )


def measure(candidates: list[Candidate], length: int, dtype: torch.dtype) -> dict[Candidate, float]:
    """Milliseconds of causal plus full attention, in random order so that no tile benefits from a
    cooler GPU.
    """
    samples: dict[Candidate, list[float]] = {}
    started = time.monotonic()
    for number in range(ROUNDS):
        random.shuffle(candidates)
        for done, candidate in enumerate(list(candidates)):
            milliseconds = time_candidate(candidate, length, dtype)
            if milliseconds is None:
                candidates.remove(candidate)
            else:
                samples.setdefault(candidate, []).append(milliseconds)
            print(
                f"\rround {number + 1} of {ROUNDS}, {done + 1} tiles, "
                f"{time.monotonic() - started:.0f} s ",
                end="",
                flush=True,
            )
    print()
    return {candidate: sorted(times)[len(times) // 2] for candidate, times in samples.items()}


def time_candidate(candidate: Candidate, length: int, dtype: torch.dtype) -> float | None:
    """Milliseconds, or None if the tile does not fit this GPU."""
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench

    total = 0.0
    for causal in (False, True):
        launches = launches_of(candidate, length, dtype, causal)
        try:
            # B023: the lambda runs now, with this round's launches.
            total += do_bench(lambda: [x.run() for x in launches], warmup=5, rep=20)  # noqa: B023
        except (OutOfResources, PTXASError):
            return None
    return total


def launches_of(candidate: Candidate, length: int, dtype: torch.dtype, causal: bool) -> list[Any]:
    """The launches of the candidate's kernel."""
    from ..backends.triton import kernel_launches, launch

    batch, heads = max(1, TOKENS // length), HIDDEN // candidate.head_dim
    shape = (batch, length, heads, candidate.head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    operands, options = describe((q, k, v), Dense(), {"causal": causal})
    problem = AttentionProblem.of(operands, options)
    with plan.forced_tile(candidate.kernel, candidate.tile):
        out, lse = made = launch.forward_buffers(problem, operands)
        launches = kernel_launches.forward_launches(problem, operands, made)
        if candidate.kernel != "forward":
            launch.run(launches, q)
            gradients = launch.backward_buffers(problem, operands, dtype)
            given = (*operands, out, lse, dout, None)
            launches = kernel_launches.backward_launches(problem, given, gradients)
    name, makes = MARKS[candidate.kernel]
    return [x for x in launches if x.kernel.__name__ == name and x.arguments.get(makes, True)]


def write(tiles: dict[str, dict[str, list[int]]], name: str, folder: Path) -> Path:
    """Add the fastest tiles to the folder's file for this architecture."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    known = json.loads(path.read_text())["tiles"] if path.is_file() else {}
    for head_dim, passes in tiles.items():
        known.setdefault(head_dim, {}).update(passes)
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "tiles": known,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path
