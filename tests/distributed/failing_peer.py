"""One process of `test_bench_context`: the preset with a peer that fails on rank 1 alone, and one
that attends to other keys.

Run as ``python failing_peer.py rank world_size rendezvous-file``; rank 0 prints the reasons.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.context import case, peers
from benchmarks.context.cases import ContextCase
from benchmarks.context.together import Team

CASE = ContextCase("dense", "float32", 2, 1, 16, 64)


def sees_other_keys(given: ContextCase, lengths: list[int]) -> peers.Ready:
    """Its keys are those of other tokens."""
    ready = peers.gather(given, lengths)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ready.call(q, k.flip(1), v)

    return ready._replace(call=call)


def main(rank: int, world: int, rendezvous: str) -> None:
    """Measure, and check the rows."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    makers: dict[str, Any] = {"gather": peers.gather, "wrong": sees_other_keys}
    with patch.object(case, "PEERS", makers):
        rows = list(case.measured(CASE, Team.of("cpu")))
    found = {(row.peer, row.direction): row for row in rows}
    assert len(found) == 6
    for direction in case.DIRECTIONS:
        good = found["gather", direction]
        assert good.efficiency is not None
        assert good.worst_error_ratio is not None
        assert good.worst_error_ratio < 2
        assert found["wrong", direction].skipped.startswith("wrong result")
    # A peer that raises on one rank before it has sent anything is a row on all ranks.
    with patch.object(case, "PEERS", {"failing": lambda *given: _unless(rank)}):
        rows = list(case.measured(CASE, Team.of("cpu")))
    reasons = {row.skipped for row in rows if row.peer == "failing"}
    assert len(reasons) == 1
    assert "rank 1: ValueError: only here" in reasons.pop()
    dist.destroy_process_group()


def _unless(rank: int) -> peers.Ready:
    if rank == 1:
        raise ValueError("only here")
    return peers.Ready(lambda q, k, v: q + k.mean() + v.mean(), None)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
