"""How long it takes to make a block mask from a function, next to FlexAttention.

    python -m benchmarks.block_masks                            # 65,536 queries and keys
    python -m benchmarks.block_masks --csv block-masks.csv

Both libraries get the same functions and make tiles of 128 x 128. FlexAttention's function forms
the whole matrix unless it is compiled. The makers take turns, and medians are reported; the first
call, which may compile, is reported on its own. The host waits for the GPU after each.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flashtile.cli import integer
from flashtile.cli.timing import Timing, interleave
from flashtile.masks import BlockMask

from .command import Command
from .measure import default_device, peak_bytes, wall_timer

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TIMES = {"first_ms": 10, "median_ms": 10, "peak_mib": 10}
COLUMNS = {"mask": 10, "maker": 15, "length": 8, "rounds": 6, **TIMES}


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


def measure(
    name: str, function: Function, length: int, rounds: int, device: str
) -> Iterator[tuple[object, ...]]:
    """A line for each maker of the mask."""
    timer, timed = wall_timer(device), makers(function, length, device)
    first, peak = {}, {}
    for maker in list(timed):
        try:
            first[maker] = timer(timed[maker])
            peak[maker] = peak_bytes(timed[maker], device) / 2**20
        except Exception as error:  # one of FlexAttention costs only its line
            if maker == "flashtile":
                raise
            print(f"{name}, {maker}: {str(error).strip().partition(chr(10))[0]}")
            del timed[maker]
    for maker, samples in interleave(timed, timer, budget_ms=0, min_rounds=rounds).items():
        numbers = (first[maker], Timing.of(samples).median_ms, peak[maker])
        yield name, maker, length, rounds, *(f"{x:.4g}" for x in numbers)


def measure_all(args: Namespace) -> Iterator[tuple[object, ...]]:
    """The lines of every mask."""
    for name, function in functions(args.seq_len, args.device).items():
        yield from measure(name, function, args.seq_len, args.rounds, args.device)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("block_masks", __doc__, device=default_device())
    integer(command, "--seq-len", 65536, "queries and keys, at least 16")
    integer(command, "--rounds", 5, "how often each maker runs")
    return command.run(argv, COLUMNS, measure_all)


if __name__ == "__main__":
    sys.exit(main())
