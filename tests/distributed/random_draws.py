"""Random calls over processes that gloo or NCCL connects: lengths, documents, heads, options and
strategies, each compared with one process; in every fifth draw decoding, too.

    python tests/distributed/random_draws.py --ranks 4 --draws 200 --backend nccl

starts the processes, with NCCL a GPU for each; with ``--decoding`` all draws are of decoding, and
of nothing else. A draw that fails is printed with its seed, and the
next one follows; the exit status is 1 if any has failed. A hang ends after two minutes, and its
seed is the last one printed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from caches import CacheCase
from caches import compare as compare_caches
from caches import compare_rounded as compare_caches_rounded
from cases import Case, compare, compare_rounded, on_one_generator

from flashtile.distributed import ContextParallel

LONG = (0, 1, 5, 64, 129, 700, 1500)  # of documents, in half of the draws


def draw(seed: int, world: int, backend: str) -> str | None:
    """What is wrong with a draw, on rank 0; None if nothing is."""
    rng = random.Random(seed)
    dtype = torch.bfloat16 if backend == "nccl" else torch.float64
    case = Case(seed, world, lengths=rng.choice([None, LONG]))
    if backend == "nccl":
        case = case.rounded(dtype)
    ways = rng.choice(
        [{"ulysses": case.ulysses, "stages": case.stages}, {}, {"ulysses": 1, "stages": world}]
    )
    if dist.get_rank() == 0:
        print(f"seed {seed}: {ways or 'chosen'}, {case.described()}", flush=True)
    mine: dict[str, Any] | str
    try:
        mine = case.on_rank(ContextParallel(**ways), dtype, "cuda" if backend == "nccl" else "cpu")
    except Exception:  # whatever it is, the other ranks wait to be told
        mine = traceback.format_exc()
    results: list[Any] = [None] * world
    dist.all_gather_object(results, mine)
    if dist.get_rank():
        return None
    failed = [x for x in results if isinstance(x, str)]
    if failed:
        return failed[0]
    try:
        if backend == "nccl":
            compare_rounded(case, results, dtype)
        else:
            compare(case, results)
    except AssertionError as error:
        return str(error)
    return None


def decode(seed: int, world: int, backend: str) -> str | None:
    """What is wrong with a draw of decoding, on rank 0; None if nothing is."""
    on_gpu = backend == "nccl"
    has_int = random.Random(seed).random() < 0.5
    case = CacheCase(seed, world, torch.bfloat16 if on_gpu else None, has_int)
    if on_gpu:
        case.options.pop("alibi_slopes", None)  # only on CPUs
    if dist.get_rank() == 0:
        lengths = case.before[0] if has_int else case.before
        print(f"seed {seed}: decoding after {lengths} tokens, {case.steps}", flush=True)
    results: list[Any] = [None] * world
    dist.all_gather_object(results, case.on_rank(ContextParallel(), "cuda" if on_gpu else "cpu"))
    if dist.get_rank():
        return None
    try:
        (compare_caches_rounded if on_gpu else compare_caches)(case, results)
    except AssertionError as error:
        return f"decoding: {error}"
    return None


def draws(
    rank: int, world: int, rendezvous: str, backend: str, seeds: range, only_decoding: bool
) -> int:
    """The number of draws that fail, on rank 0; run by each process."""
    device = None
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
        device_id=device,
    )
    failures = 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_one_generator(monkeypatch)
        for seed in seeds:
            problem = None if only_decoding else draw(seed, world, backend)
            if only_decoding or seed % 5 == 0:
                of_decoding = decode(seed, world, backend)  # on all, whatever rank 0 has found
                problem = problem or of_decoding
            if problem is not None:
                failures += 1
                print(f"seed {seed} FAILED: {problem}", flush=True)
    dist.destroy_process_group()
    return failures


def main() -> int:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first draw")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--decoding", action="store_true", help="only decoding")
    parser.add_argument("--rank", type=int, help="of a process that this script has started")
    parser.add_argument("--rendezvous")
    given = parser.parse_args()
    if given.rank is not None:
        seeds = range(given.first, given.first + given.draws)
        group = given.rank, given.ranks, given.rendezvous, given.backend
        failures = draws(*group, seeds, given.decoding)
        if given.rank == 0:
            print(f"{given.draws} draws on {given.ranks} ranks, {failures} failed", flush=True)
        os._exit(failures > 0)  # as `processes` ends a rank
    with tempfile.TemporaryDirectory() as folder:
        common = [sys.executable, __file__, *sys.argv[1:], "--rendezvous", f"{folder}/file"]
        started = [subprocess.Popen([*common, "--rank", str(r)]) for r in range(given.ranks)]
        return max(abs(process.wait()) for process in started)


if __name__ == "__main__" and main():
    sys.exit(1)
