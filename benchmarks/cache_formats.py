"""Caches of packed rows next to 16-bit ones: errors on random data, and the time of decoding.

    python -m benchmarks.cache_formats --csv benchmarks/results/cpu/cache-formats.csv
    python -m benchmarks.cache_formats --device cuda --csv cache-formats.csv   # and times

An error is the root mean square over the output, against attention in float64 over the numbers that
were stored, divided by the root mean square of that output: of queries in bfloat16 over 2,048 keys
of head dim 128, normal or with outliers as in table 3 of FlashAttention-3 (Shah et al. 2024).
Decoding: one query of 32 heads for each of 16 sequences, over 65,536 keys of 8 key heads, captured
in CUDA graphs; the speed is that over a bfloat16 cache divided by it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from flashtile import CacheFormat, attention_with_kvcache, cache_formats
from flashtile.cli import integer
from flashtile.cli.timing import Timing, interleave, timer_for
from flashtile.testing import attention_reference

from .command import Command
from .fp8_accuracy import inputs
from .measure import captured

HEAD_DIM, KEYS, QUERIES = 128, 2048, 256
BATCH, CACHED, HEADS, KV_HEADS = 16, 65536, 32, 8
ERRORS = {"normal": 9, "outliers": 9}
TIMES = {"decode_ms": 9, "speed": 6, "by_head_ms": 10, "by_head_speed": 13}
COLUMNS = {"format": 30, "bytes": 5, **ERRORS, **TIMES}
FORMATS: dict[str, CacheFormat | None] = {
    "bfloat16": None,
    "e5m2": cache_formats.e5m2(HEAD_DIM),
    "int8, a scale for a token": cache_formats.int8(HEAD_DIM),
    "int8, a scale for 32 elements": cache_formats.int8(HEAD_DIM, 32),
    "int4, a scale for a token": cache_formats.int4(HEAD_DIM, None),
    "int4, a scale for 32 elements": cache_formats.int4(HEAD_DIM),
    "nvfp4": cache_formats.nvfp4(HEAD_DIM),
}


def stored(x: Tensor, cache_format: CacheFormat | None) -> Tensor:
    """Keys or values as a cache holds them."""
    return x if cache_format is None else cache_format.packed(x)


def error(cache_format: CacheFormat | None, outliers: float, seeds: int, device: str) -> float:
    """The mean relative error of some draws."""
    total = 0.0
    for seed in range(seeds):
        q, k, v = (x.bfloat16() for x in inputs(seed, QUERIES, KEYS, HEAD_DIM, outliers))
        truth = attention_reference(q, k, v).out
        caches = (stored(x.to(device), cache_format) for x in (k, v))
        out = attention_with_kvcache(q.to(device), *caches, cache_format=cache_format)
        total += float((out.cpu().double() - truth).norm() / truth.norm())
    return total / seeds


def times(names: Sequence[str], budget_ms: float, by_head: bool) -> dict[str, float]:
    """The median time of a decoding step over a cache of each format, in whose memory the tokens of
    a head follow each other, or the heads of a token.
    """
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, calls = make(BATCH, 1, HEADS, HEAD_DIM), {}
    used = torch.full((BATCH,), CACHED, dtype=torch.int32, device="cuda")
    for name in names:
        rows = [torch.cat([stored(make(1, CACHED, KV_HEADS, HEAD_DIM), FORMATS[name])
                           for _ in range(BATCH)]) for _ in "kv"]  # fmt: skip
        if by_head:
            rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows]
        options = {"cache_seqlens": used, "cache_format": FORMATS[name]}
        calls[name] = captured(partial(attention_with_kvcache, q, *rows, **options))
    samples = interleave(calls, timer_for("cuda"), budget_ms=budget_ms)
    return {name: Timing.of(found).median_ms for name, found in samples.items()}


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """A line for each format."""
    orders = (False, True) if args.device == "cuda" else ()
    found = [times(list(FORMATS), args.budget, by_head) for by_head in orders]
    for name, cache_format in FORMATS.items():
        size = 2 * HEAD_DIM if cache_format is None else cache_format.bytes_per_row
        errors = (error(cache_format, x, args.seeds, args.device) for x in (0.0, 0.001))
        ms = [x for y in found for x in (f"{y[name]:.4f}", f"{y['bfloat16'] / y[name]:.2f}")]
        yield name, size, *(f"{x:.3g}" for x in errors), *(ms or [""] * len(TIMES))


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write a line for each format."""
    command = Command("cache_formats", __doc__, device="cpu", budget_ms=2000.0)
    integer(command, "--seeds", 4, "draws")
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
