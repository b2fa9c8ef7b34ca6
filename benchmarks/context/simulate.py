"""Efficiency on up to 4,096 GPUs by the cost model: a prediction, nothing is measured.

``python -m benchmarks.context.simulate --csv benchmarks/results/model/context.csv`` prices the
schedules that the executor would run for one causal sequence, with the rates and links of a machine
of `flashtile.distributed.strategy`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from flashtile.distributed import partition
from flashtile.distributed.strategy import MACHINES, Machine, Strategy
from flashtile.masks import Window

from ..command import Command
from .cost_model import CostEstimate, CostModel, Shape, fastest

SHAPE = Shape(query_heads=32, key_heads=8, head_dim=128, value_head_dim=128, element_size=2)
TOKENS = (4096, 8192, 16384)  # of each rank
RANKS = [1 << n for n in range(13)]
GRAIN = 128


class Prediction(NamedTuple):
    """The efficiency of one way to run a causal sequence."""

    machine: str
    heads: str
    head_dim: int
    tokens: int  # of each rank
    ranks: int
    strategy: str
    way: str
    forward: float  # one process / (ranks x slowest rank)
    both: float


def predictions(machine: Machine, tokens: int, ranks: int) -> Iterator[Prediction]:
    """Of a ring, of gathering, and of what the model chooses."""
    shards = partition.zigzag([tokens * ranks], ranks, GRAIN)
    model = CostModel(machine, SHAPE, shards, shards, (Window(None, 0),))
    whole = partition.contiguous([tokens * ranks], 1, GRAIN)
    alone = CostModel(machine, SHAPE, whole, whole, model.facts).slowest(Strategy(1, 1, 1))
    ways = {
        "ring": Strategy(1, ranks, 1),
        "gather": Strategy(1, 1, 1),
        "chosen by the model": fastest(model),
    }
    for name, way in ways.items():
        slowest = model.slowest(way)
        forward, both = _efficiencies(alone, slowest, ranks)
        yield Prediction(
            machine.name,
            f"{SHAPE.query_heads}:{SHAPE.key_heads}",
            SHAPE.head_dim,
            tokens,
            ranks,
            name,
            str(way),
            forward,
            both,
        )


def _efficiencies(alone: CostEstimate, slowest: CostEstimate, ranks: int) -> tuple[float, float]:
    """Of the forward, and of both passes."""
    return alone.forward / ranks / slowest.forward, alone.seconds / ranks / slowest.seconds


def predict_all(args: Namespace) -> Iterator[list[object]]:
    """The predictions for every length and number of ranks."""
    for tokens, ranks in product(TOKENS, RANKS):
        for line in predictions(MACHINES["H200"], tokens, ranks):
            yield [f"{x:.4f}" if isinstance(x, float) else x for x in line]


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the predictions."""
    command = Command("context.simulate", __doc__, device=None)
    return command.run(argv, dict.fromkeys(Prediction._fields, 20), predict_all)


if __name__ == "__main__":
    sys.exit(main())
