"""One process of `test_gpu_context`: the random cases of `cases` over NCCL, a GPU for each rank.

Run as ``python nccl_worker.py rank world_size rendezvous-file``.
"""

from __future__ import annotations

import sys

from random_draws import draws

CASES = 40


if __name__ == "__main__":
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    seeds = range(100 * world, 100 * world + CASES)
    if draws(rank, world, sys.argv[3], "nccl", seeds, only_decoding=False):
        sys.exit(1)
