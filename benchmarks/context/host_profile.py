"""What the host does in calls of context parallelism: a profile of the functions on rank 0.

``torchrun --nproc-per-node 2 -m benchmarks.context.host_profile --case 1 --pass forward``
"""

from __future__ import annotations

import argparse

import torch.distributed as dist

from .case import DIRECTIONS, prepared_peer
from .cases import cases
from .timing import profile
from .together import Team, connected

CALLS = 50


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context.host_profile")
    parser.add_argument("--case", type=int, default=1)
    parser.add_argument("--pass", dest="direction", choices=DIRECTIONS, default="forward")
    parser.add_argument("--peer", default="flashtile-gather")
    parser.add_argument("--sort", default="tottime", help="a column of cProfile")
    args = parser.parse_args()
    device = connected()
    team = Team.of(device)
    call = prepared_peer(cases(device)[args.case - 1], args.peer, args.direction, team)
    if dist.get_rank() == 0:
        print(f"{args.peer}, {args.direction}, case {args.case}")
    profile(team, call, CALLS, args.sort)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
