"""What statistics of causal and full attention cost, beside the forward alone.

    python -m benchmarks.statistics                                # on a GPU
    python -m benchmarks.statistics --device cpu --shapes 1,512,2,2,32 --dtype float32

A shape is the batch, tokens, query heads, key heads and head dim. A number is the median time of a
call without gradients, the L2 cache flushed before it. `flash-colreduce` is added where it is
installed and the key heads are as many as the query heads: it has column sums without an output.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch

import flashtile
from flashtile.cli.timing import Call, Timing, interleave, timer_for

from .command import Command

SHAPES = "4,4096,16,16,128 1,16384,16,16,128 2,8192,32,8,128 4,4096,32,32,64 1,16384,32,32,64"
STATISTICS = ((), ("max_logit",), ("entropy",), ("column_sum",), flashtile.Statistics._fields)
COLUMNS = {"shape": 20, "causal": 6, "dtype": 9, "call": 45, "median_ms": 9, "of_forward": 10}


def calls(sizes: Sequence[int], causal: bool, dtype: torch.dtype, device: str) -> dict[str, Call]:
    """The calls of a shape, by name."""
    B, N, Hq, Hk, D = sizes
    # (batch, tokens, heads, head dim)
    q, k, v = (torch.randn(B, N, heads, D, dtype=dtype, device=device) for heads in (Hq, Hk, Hk))
    attend: Any = partial(flashtile.attention, q, k, v, causal=causal)
    found: dict[str, Call] = {
        " + ".join(("forward", *names)): partial(attend, return_stats=names) if names else attend
        for names in STATISTICS
    }
    if device != "cpu" and Hq == Hk and find_spec("flash_colreduce"):
        heads_first = (x.transpose(1, 2).contiguous() for x in (q, k))
        colreduce = import_module("flash_colreduce").flash_colreduce
        found["flash-colreduce"] = partial(colreduce, *heads_first, "sum", is_causal=causal)
    return found


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """The lines."""
    for shape, causal in product(args.shapes, (True, False)):
        sizes = tuple(map(int, shape.split(",")))
        of_shape = calls(sizes, causal, getattr(torch, args.dtype), args.device)
        with torch.no_grad():
            samples = interleave(of_shape, timer_for(args.device), budget_ms=args.budget)
        medians = {name: Timing.of(x).median_ms for name, x in samples.items()}
        for name, ms in medians.items():
            yield shape, causal, args.dtype, name, f"{ms:.4f}", f"{ms / medians['forward']:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("statistics", __doc__, budget_ms=1000.0)
    command.add_argument("--shapes", nargs="+", default=SHAPES.split())
    command.add_argument("--dtype", default="bfloat16")
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
