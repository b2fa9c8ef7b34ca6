"""What `batch_invariant` costs: one answer next to the free choice of kernels, tiles and splits.

    python -m benchmarks.batch_invariance --csv batch-invariance.csv

32 query heads on 8 key heads of 128, bfloat16, causal: training on 16,384 tokens in all, and
decoding one token of each sequence from a cache, captured in CUDA graphs. All calls of a line take
turns in random order; the ratio is the median time over that of the free call. "sdpa" is PyTorch's
FlashAttention-2, whose bits depend on the batch, and which cannot decode so.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashtile import attention, attention_with_kvcache
from flashtile.cli.timing import Timing, interleave, timer_for

from .command import Command
from .measure import captured

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 16384, 32, 8, 128
CASES = (
    *(f"{way} {length}" for way in ("forward", "backward") for length in (1024, 4096, 16384)),
    *(f"decode {batch} x {length}" for length in (4096, 16384) for batch in (1, 16, 64)),
)
COLUMNS = {"case": 18, "call": 16, "median_ms": 9, "ratio": 7}
FREE: dict[str, dict[str, Any]] = {
    "free": {},
    "free, triton": {"backend": "triton"},
    "batch_invariant": {"batch_invariant": True},
}
Calls = dict[str, Callable[[], Any]]


def sdpa(q: Any, k: Any, v: Any) -> Any:
    """Causal attention by PyTorch's FlashAttention-2."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def training(length: int, backward: bool, device: str) -> Calls:
    """Forwards, or backwards, of equally long sequences."""
    shapes = [(TOKENS // length, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)
    dout, leaves = torch.randn_like(q), [x.requires_grad_(backward) for x in (q, k, v)]

    def timed(run: Callable[[], Any]) -> Callable[[], Any]:
        if not backward:
            return run
        out = run()
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    calls = {n: timed(partial(attention, q, k, v, causal=True, **x)) for n, x in FREE.items()}
    return calls | {"sdpa": timed(lambda: sdpa(q, k, v))}


def decoding(batch: int, length: int, device: str) -> Calls:
    """One query of each sequence over a full cache."""
    shapes = [(batch, length, KV_HEADS, HEAD_DIM)] * 2
    k, v = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    used = torch.full((batch,), length, dtype=torch.int32, device=device)
    return {
        name: captured(partial(attention_with_kvcache, q, k, v, cache_seqlens=used, **x))
        for name, x in FREE.items()
    }


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """A line for each call of each case."""
    for case in args.cases:
        kind, size, *rest = case.split()
        if kind == "decode":
            calls = decoding(int(size), int(rest[-1]), args.device)
        else:
            calls = training(int(size), kind == "backward", args.device)
        samples = interleave(calls, timer_for(args.device), budget_ms=args.budget)
        medians = {name: Timing.of(found).median_ms for name, found in samples.items()}
        for name, ms in medians.items():
            yield case, name, f"{ms:.4f}", f"{ms / medians['free']:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("batch_invariance", __doc__, budget_ms=400.0)
    command.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
