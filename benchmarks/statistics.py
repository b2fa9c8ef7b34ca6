"""What statistics of causal and full attention cost, beside the forward alone.

    python -m benchmarks.statistics                                # on a GPU
    python -m benchmarks.statistics --device cpu --shapes 1,512,2,2,32 --dtype float32

A shape is the batch, tokens, query heads, key heads and head dim. A number is the median time of a
call without gradients, the L2 cache flushed before it. `flash-colreduce` is added where it is
installed and the key heads are as many as the query heads: it has column sums without an output.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import flashtile
from flashtile.cli.machine import provenance
from flashtile.cli.timing import Call, Timing, interleave, timer_for

SHAPES = "4,4096,16,16,128 1,16384,16,16,128 2,8192,32,8,128 4,4096,32,32,64 1,16384,32,32,64"
STATISTICS = ((), ("max_logit",), ("entropy",), ("column_sum",), flashtile.Statistics._fields)
COLUMNS = ("shape", "causal", "dtype", "call", "median_ms", "of_forward")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES.split())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budget", type=float, default=1000, help="milliseconds for a shape")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="CSV file to write (default: none)")
    args = parser.parse_args(argv)
    form = "{:>20} {:>6} {:>9} {:<45} {:>9} {:>10}"
    print(form.format(*COLUMNS))
    lines = []
    for shape in args.shapes:
        for causal in (True, False):
            sizes = tuple(map(int, shape.split(",")))
            of_shape = calls(sizes, causal, getattr(torch, args.dtype), args.device)
            with torch.no_grad():
                samples = interleave(of_shape, timer_for(args.device), budget_ms=args.budget)
            medians = {name: Timing.of(x).median_ms for name, x in samples.items()}
            for name, ms in medians.items():
                ratio = f"{ms / medians['forward']:.2f}"
                line = (shape, causal, args.dtype, name, f"{ms:.4f}", ratio)
                print(form.format(*map(str, line)), flush=True)
                lines.append(dict(zip(COLUMNS, line, strict=True)))
    if args.csv:
        here = provenance(args.device, " ".join(["python -m benchmarks.statistics", *argv]))
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, (*COLUMNS, *here), lineterminator="\n")
            writer.writeheader()
            writer.writerows({**line, **here} for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
