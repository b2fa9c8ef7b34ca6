"""One process of `test_gpu_context`: the random cases of `cases` over NCCL, a GPU for each rank.

Run as ``python nccl_worker.py rank world_size rendezvous-file``.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import Case, compare_rounded, on_one_generator

from flashtile.distributed import ContextParallel

CASES = 40


def random_cases(world: int) -> None:
    """Every rank sees that the ranks together compute what one process does."""
    dtype = torch.bfloat16
    for seed in range(100 * world, 100 * world + CASES):
        case = Case(seed, world).rounded(dtype)
        context = ContextParallel(ulysses=case.ulysses, stages=case.stages)
        mine = case.on_rank(context, dtype, "cuda")
        results: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
        dist.all_gather_object(results, mine)
        compare_rounded(case, results, dtype)


if __name__ == "__main__":
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{sys.argv[3]}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
        device_id=torch.device("cuda", rank),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_one_generator(monkeypatch)
        random_cases(world)
    dist.destroy_process_group()
