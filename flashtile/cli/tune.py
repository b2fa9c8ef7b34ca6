"""``flashtile tune``: measure tile sizes of the Triton backend on this GPU and keep the fastest.

Results go to the user's cache folder (FLASHTILE_CACHE, else ~/.cache/flashtile) as JSON, where
every later process with a GPU of the same name finds them; a normal call never tunes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..backends.triton import plan
from ..call.layouts import Cached, Dense
from ..call.prepare import describe
from ..gpu.described import AbsentGpu, current_target
from ..gpu.hardware import multiprocessors
from ..problem import AttentionProblem
from . import integer
from .in_processes import default_processes, in_processes, with_progress

HEAD_DIMS = (64, 128, 256)
TOKENS, HIDDEN = 16384, 2048  # size of the measured call: 32, 16 or 8 heads
CALLS = ("16-bit", "bias", "float32", "decoding", "split-decoding")
PAGE = 16  # tokens of a page
SPLITS = 4  # of the KV loop in "split-decoding"
DECODED = 16  # sequences in "decoding": programs for the whole GPU without splits
MOST_PROCESSES = 64  # each holds PyTorch and Triton in main memory, half a GiB
ROUNDS = 3
NOISE = 1.01  # ratio by which medians of one tile differ from run to run
# Kernel of a pass, and the flag of its result.
MARKS = {
    "forward": ("forward_kernel", ""),
    "keys": ("key_gradient_kernel", "HAS_DK"),
    "queries": ("query_gradient_kernel", ""),
    "values": ("key_gradient_kernel", "HAS_DV"),
}

# Rows, keys and stages worth measuring, then the least and most registers (of 255) that a thread's
# scores and sums take, by the kind of call (`plan.tiles_for`). A bias has no larger tiles; without
# tensor cores, tiles stay near those of `plan.SINGLE`.
GRIDS = {
    "16-bit": ((32, 64, 128), (32, 64, 128), (2, 3), 24, 224),
    "bias": ((32, 64), (32, 64), (2, 3), 24, 224),
    "bf16x6": ((32, 64, 128), (32, 64, 128), (1, 2), 24, 128),
    "ieee": ((16, 32, 64), (16, 32, 64), (1,), 8, 64),
    "decoding": ((plan.FEW_ROWS,), (16, 32, 64, 128), (2, 3, 4), 4, 128),
    "split-decoding": ((plan.FEW_ROWS,), (16, 32, 64, 128), (2, 3, 4), 4, 128),
}


class Candidate(NamedTuple):
    """One tile of one pass to measure."""

    kind: str  # one of GRIDS
    head_dim: int
    kernel: str  # one of plan.PASSES
    tile: plan.Tile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: what to tune and where to write."""
    integer(parser, "--head-dim", HEAD_DIMS, "head dims to tune, in elements")
    parser.add_argument(
        "--calls",
        choices=CALLS,
        nargs="+",
        default=list(CALLS),
        help=f"calls to tune (default: {' '.join(CALLS)})",
    )
    integer(parser, "--seq-len", 4096, "length of the measured sequences, in tokens")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="dtype of the measured calls but float32 (default: %(default)s)",
    )
    processes = default_processes(MOST_PROCESSES)
    integer(parser, "--processes", processes, "processes that compile the candidates")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="start no further pass after this time; the passes measured until then are kept "
        "(default: measure all)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the JSON file (default: the user's cache, where every process looks)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure the grid, print the fastest tile of each pass and write it at once."""
    if not torch.cuda.is_available():
        print("flashtile tune: no CUDA device here; tiles are measured on the GPU that uses them")
        return 1
    started = time.monotonic()
    dtype, folder = getattr(torch, args.dtype), args.output or plan.tuned_folder()
    gpu = AbsentGpu(torch.cuda.get_device_capability(), multiprocessors(torch.device("cuda")))
    name = plan.architecture(gpu.capability)
    every = [x for dim in args.head_dim for call in args.calls for x in in_use(name, dim, call)]
    compete = {now: list(dict.fromkeys([now, *grid(*now[:3])])) for now in every}
    compile_one = partial(compile_candidate, length=args.seq_len, dtype=dtype, gpu=gpu)
    path = None
    for number, now in enumerate(compiled(compete, compile_one, args), 1):
        kind, head_dim, kernel, tile = now
        what = f"{kind}, head dim {head_dim}, {kernel}"
        times = measure(compete[now], args.seq_len, dtype)
        took = f"pass {number} of {len(every)}, {time.monotonic() - started:.0f} s"
        if not times:
            print(f"{what}: no candidate fits ({took})", flush=True)
            continue
        winner = chosen(times, now)
        before = f"{tile}, {times[now]:.3f} ms" if now in times else f"{tile} does not fit"
        print(f"{what}: {winner.tile}, {times[winner]:.3f} ms; so far: {before} ({took})")
        path = write({f"{kind} {plan.column_of(head_dim)} {kernel}": list(winner.tile)}, folder)
        print(f"written: {path}", flush=True)
    return 0 if path else 1


def compiled(
    compete: dict[Candidate, list[Candidate]],
    compile_one: Callable[[Candidate], None],
    args: argparse.Namespace,
) -> Iterator[Candidate]:
    """The keys of `compete`, each when the candidates of its pass are compiled, so that measuring
    finds them on disk; those that do not fit fail again there. The processes go on with the next
    passes while the caller measures one.
    """
    candidates = [x for pass_of_all in compete.values() for x in pass_of_all]
    left = Counter(x[:3] for x in candidates)
    passes = {now[:3]: now for now in compete}
    seconds = None if args.minutes is None else 60 * args.minutes
    end = time.monotonic() + (seconds or 0)
    done = in_processes(compile_one, candidates, args.processes, seconds)
    for candidate, _ in with_progress(done, len(candidates), "compiled"):
        left[candidate[:3]] -= 1
        if left[candidate[:3]] == 0:
            yield passes.pop(candidate[:3])
        if seconds is not None and time.monotonic() > end:
            break
    if passes:
        word = "pass keeps its" if len(passes) == 1 else "passes keep their"
        print(f"\nout of time: {len(passes)} {word} tiles", flush=True)


def compile_candidate(
    candidate: Candidate, length: int, dtype: torch.dtype, gpu: AbsentGpu
) -> None:
    """Compile the kernels of a candidate, without a GPU of this process."""
    from ..gpu.launch import compiling_for

    with compiling_for(gpu, lambda key: True):
        for is_second in (False, True):
            for launch in launches_of(candidate, length, dtype, is_second):
                launch.run()


def in_use(name: str, head_dim: int, call: str) -> list[Candidate]:
    """The tile of each pass that one of CALLS uses now on architecture `name`."""
    kind = plan.exact_precision(name, head_dim) if call == "float32" else call
    tiles = plan.tiles_for(name, head_dim, kind)
    return [Candidate(kind, head_dim, *x) for x in zip(plan.PASSES, tiles, strict=False)]


def chosen(times: dict[Candidate, float], now: Candidate) -> Candidate:
    """The fastest candidate, or the one in use if it is as fast except for noise."""
    fastest = min(times, key=lambda candidate: times[candidate])
    is_as_fast = now in times and times[now] <= NOISE * times[fastest]
    return now if is_as_fast else fastest


def grid(kind: str, head_dim: int, kernel: str) -> Iterator[Candidate]:
    """Tiles worth measuring; those that do not fit the GPU fail to compile and are skipped."""
    rows, keys, every_stages, fewest, most = GRIDS[kind]
    for tile in map(plan.Tile._make, product(rows, keys, (4, 8), every_stages)):
        summed = tile.BLOCK_N if kernel in ("keys", "values") else tile.BLOCK_M
        numbers = summed * head_dim + tile.BLOCK_M * tile.BLOCK_N
        if fewest <= numbers // (32 * tile.warps) <= most:
            yield Candidate(kind, head_dim, kernel, tile)


def measure(candidates: list[Candidate], length: int, dtype: torch.dtype) -> dict[Candidate, float]:
    """Milliseconds of both calls of `launches_of`, in random order so that no tile benefits from a
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
    for is_second in (False, True):
        launches = launches_of(candidate, length, dtype, is_second)
        try:
            # B023: the lambda runs now, with this round's launches.
            total += do_bench(lambda: [x.run() for x in launches], warmup=5, rep=20)  # noqa: B023
        except (OutOfResources, PTXASError):
            return None
    return total


def launches_of(
    candidate: Candidate, length: int, dtype: torch.dtype, is_second: bool
) -> list[Any]:
    """The launches of the candidate's kernel in one of two calls: full and causal attention, or
    decoding with contiguous keys and with pages, whose indices need memory for more stages.
    """
    from ..backends.triton import kernel_launches, launch

    kind, head_dim = candidate.kind, candidate.head_dim
    if kind in plan.PRODUCTS:
        dtype = torch.float32
    length += -length % PAGE
    batch = DECODED if kind == "decoding" else max(1, TOKENS // length)
    shape = (batch, length, HIDDEN // head_dim, head_dim)
    # Without a GPU nothing reads the numbers, and empty tensors take no memory.
    make = partial(torch.randn, device="cuda") if current_target.gpu is None else torch.empty
    q, k, v, dout = (make(shape, dtype=dtype) for _ in range(4))
    keywords: dict[str, Any] = {"causal": is_second}
    layout: Dense | Cached = Dense()
    if kind == "bias":
        keywords["bias"] = make(1, 1, length, length, dtype=dtype)
    if kind.endswith("decoding"):
        q = q[:, :1]
        keywords["num_splits"] = 1 if kind == "decoding" else SPLITS
        if is_second:
            pages = torch.arange(batch * length // PAGE, dtype=torch.int32, device=q.device)
            k, v = (x.view(-1, PAGE, *x.shape[2:]) for x in (k, v))
            layout = Cached(cache_seqlens=length, page_table=pages.view(batch, -1))
    operands, options = describe((q, k, v), layout, keywords)
    problem = AttentionProblem.of(operands, options)
    with plan.forced_tile(candidate.kernel, candidate.tile):
        out, lse, *_ = buffers = launch.forward_buffers(problem, operands)
        launches = kernel_launches.forward_launches(problem, operands, buffers)
        if candidate.kernel != "forward":
            if current_target.gpu is None:
                launch.run(launches, q)
            gradients = launch.backward_buffers(problem, operands, dtype)
            saved = (*operands, out, lse, dout, None)
            launches = kernel_launches.backward_launches(problem, saved, gradients)
    name, makes = MARKS[candidate.kernel]
    return [x for x in launches if x.kernel.__name__ == name and x.arguments.get(makes, True)]


def write(tiles: dict[str, list[int]], folder: Path) -> Path:
    """Add the fastest tiles to the folder's file for this GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name()
    path = folder / (re.sub(r"\W+", "-", device) + ".json")
    earlier = plan.read_tuned(path).tiles if path.is_file() else {}
    content = {
        "device": device,
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "tiles": earlier | tiles,
    }
    whole = path.with_suffix(".new")  # other processes may read the file meanwhile
    whole.write_text(json.dumps(content, indent=1) + "\n")
    return whole.replace(path)
