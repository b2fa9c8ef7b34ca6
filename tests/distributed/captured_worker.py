"""One process of `test_gpu_context`: a step of decoding in a CUDA graph, over NCCL.

Run as ``python captured_worker.py rank world_size rendezvous-file``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from flashtile.distributed import ContextParallel

STEPS = 40


def captured_steps(parallel: ContextParallel, ranks: int) -> None:
    """Compare replays of one graph, in which lengths and tokens change, with calls.

    Raises:
        AssertionError: they differ.
    """
    g = torch.Generator("cuda").manual_seed(1)  # the same on all ranks

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    caches = [draw(3, 256 // ranks, 2, 64) for _ in range(2)]
    copies = [x.clone() for x in caches]
    q, k, v = draw(3, 2, 8, 64), draw(3, 2, 2, 64), draw(3, 2, 2, 64)
    lengths = torch.tensor([0, 7, 100], dtype=torch.int32, device="cuda")

    def step(caches: list[torch.Tensor]) -> Any:
        given: Any = {"block": 16, "window_size": (50, 0), "return_lse": True}
        return parallel.decode(q, *caches, k, v, cache_seqlens=lengths, **given)

    for _ in range(5):  # compile, and let the ranks agree
        step(caches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step(caches)
    for _ in range(STEPS):
        for x in (q, k, v):
            x.copy_(draw(*x.shape))
        graph.replay()
        wanted = step(copies)
        for got, want in zip((*results, *caches), (*wanted, *copies), strict=True):
            assert torch.equal(got, want)
        lengths += 2


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{sys.argv[3]}",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    captured_steps(ContextParallel(), world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
