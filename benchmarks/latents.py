"""Decoding over latents (MLA): 576 columns of keys, of which the first 512 are the values.

    python -m benchmarks.latents --csv latents.csv

A call has one key head, and each row of queries its causal mask. The number is the median time of a
call in a CUDA graph of ten, for the backends that have such a call; the error is that of the output
against float32, relative to its norm.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import flashtile
from flashtile.cli.timing import Timing, interleave, timer_for

from .command import Command
from .measure import captured

# sequences, keys, query heads, queries, tokens of a page (0: contiguous)
SHAPES = (
    "64,4096,128,1,0 64,4096,128,1,64 64,4096,128,2,0 64,4096,64,1,0 64,4096,16,1,0 "
    "16,16384,128,1,0 1,65536,128,1,0"
)
COLUMNS = {"shape": 18, "backend": 8, "median_us": 9, "tflops": 7, "gbps": 6, "error": 8}
KEYS, VALUES, SCALE, CALLS = 576, 512, 192**-0.5, 10


def truth(q: Tensor, latents: Tensor) -> Tensor:
    """The output in float32, one sequence at a time."""
    M, N = q.shape[1], latents.shape[1]
    hidden = torch.ones(M, N, dtype=torch.bool, device=q.device).triu(N - M + 1)
    rows = []
    for x, keys in zip(q.float(), latents.float(), strict=True):
        scores = torch.einsum("mhd,nd->hmn", x, keys[:, 0]) * SCALE
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hmn,nd->mhd", weights, keys[:, 0, :VALUES]))
    return torch.stack(rows)


def repeated(call: Callable[[], object]) -> None:
    """What a graph has."""
    for _ in range(CALLS):
        call()


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """The lines."""
    for shape in args.shapes:
        B, N, heads, M, page = map(int, shape.split(","))
        q = torch.randn(B, M, heads, KEYS, dtype=torch.bfloat16, device=args.device)
        latents = torch.randn(B, N, 1, KEYS, dtype=torch.bfloat16, device=args.device)
        wanted, cache, table = truth(q, latents), latents, None
        if page:
            pages = torch.randperm(B * N // page, device=args.device)
            cache, table = latents.view(-1, page, 1, KEYS)[pages], pages.argsort().view(B, -1).int()
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        for backend in args.backends:
            call = partial(
                flashtile.attention_with_kvcache, q, cache, cache[..., :VALUES], cache_seqlens=N,
                page_table=table, softmax_scale=SCALE, causal=True, backend=backend,
            )  # fmt: skip
            errors[backend] = float((call().float() - wanted).norm() / wanted.norm())
            calls[backend] = partial(repeated, call)
            if args.device != "cpu":
                calls[backend] = captured(calls[backend])
        samples = interleave(calls, timer_for(args.device), budget_ms=args.budget)
        for backend, times in samples.items():
            us = 1000 * Timing.of(times).median_ms / CALLS
            tflops = 2 * B * M * N * heads * (KEYS + VALUES) / us / 1e6
            gbps = 2 * B * N * KEYS / us / 1e3
            yield (
                shape,
                backend,
                f"{us:.1f}",
                f"{tflops:.0f}",
                f"{gbps:.0f}",
                f"{errors[backend]:.1e}",
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("latents", __doc__, budget_ms=500.0)
    command.add_argument("--shapes", nargs="+", default=SHAPES.split())
    command.add_argument("--backends", nargs="+", default=["hopper", "triton"])
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
