"""How long it takes to make a block mask from a function, next to FlexAttention.

    python -m benchmarks.block_masks                            # 65,536 queries and keys
    python -m benchmarks.block_masks --csv block-masks.csv

Both libraries get the same functions and make tiles of 128 x 128. FlexAttention's function forms
the whole matrix unless it is compiled. The makers take turns, and medians are reported; the first
call, which may compile, is reported on its own. The host waits for the GPU after each.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flashtile.cli.machine import provenance
from flashtile.masks import BlockMask

from .measure import peak_bytes

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
COLUMNS = ("mask", "maker", "length", "rounds", "first_ms", "median_ms", "peak_mib")


def functions(length: int, device: str) -> dict[str, Function]:
    """Masks of `length` tokens by name: 16 documents, a prefix and a window of a sixteenth."""
    part = length // 16
    document = torch.arange(length, device=device) // part
    return {
        "causal": lambda b, h, i, j: i >= j,
        "documents": lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
        "prefix": lambda b, h, i, j: (i >= j) | (j < part),
        "window": lambda b, h, i, j: (i >= j) & (i - j < part),
    }


def makers(function: Function, length: int, device: str) -> dict[str, Callable[[], object]]:
    """What is timed."""
    sizes = length, length
    compiled = torch.compile(create_block_mask, dynamic=False)
    return {
        "flashtile": lambda: BlockMask.from_function(function, sizes, device=device),
        "flex": lambda: create_block_mask(function, None, None, *sizes, device=device),
        "flex, compiled": lambda: compiled(function, None, None, *sizes, device=device),
    }


def measure(name: str, function: Function, length: int, rounds: int, device: str) -> list[dict]:
    """A line for each maker of the mask."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def milliseconds(make: Callable[[], object]) -> float:
        wait()
        start = time.perf_counter()
        make()
        wait()
        return (time.perf_counter() - start) * 1e3

    timed = makers(function, length, device)
    first, peak = {}, {}
    for maker in list(timed):
        try:
            first[maker] = milliseconds(timed[maker])
            peak[maker] = peak_bytes(timed[maker], device) / 2**20
        except Exception as error:  # one of FlexAttention costs only its line
            if maker == "flashtile":
                raise
            print(f"{name}, {maker}: {str(error).strip().partition(chr(10))[0]}")
            del timed[maker]
    samples: dict[str, list[float]] = {maker: [] for maker in timed}
    for _ in range(rounds):
        for maker in random.sample(list(timed), len(timed)):
            samples[maker].append(milliseconds(timed[maker]))
    lines = []
    for maker, found in samples.items():
        numbers = (first[maker], statistics.median(found), peak[maker])
        values = (name, maker, length, rounds, *(f"{x:.4g}" for x in numbers))
        lines.append(dict(zip(COLUMNS, values, strict=True)))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for name, default, meaning in (
        ("--seq-len", 65536, "queries and keys, at least 16"),
        ("--rounds", 5, "how often each maker runs"),
    ):
        help = f"{meaning} (default: {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=help)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, help="CSV file to write (default: none)")
    args = parser.parse_args(argv)
    lines = []
    print(f"{'mask':10} {'maker':15} {'first, ms':>10} {'median, ms':>11} {'peak, MiB':>10}")
    for name, function in functions(args.seq_len, args.device).items():
        for line in measure(name, function, args.seq_len, args.rounds, args.device):
            numbers = (line["first_ms"], line["median_ms"], line["peak_mib"])
            print(
                f"{name:10} {line['maker']:15} {numbers[0]:>10} {numbers[1]:>11} {numbers[2]:>10}"
            )
            lines.append(line)
    if args.csv:
        here = provenance(args.device, " ".join(["python -m benchmarks.block_masks", *argv]))
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, (*COLUMNS, *here), lineterminator="\n")
            writer.writeheader()
            writer.writerows({**line, **here} for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
