"""What `batch_invariant` costs: one answer next to the free choice of kernels, tiles and splits.

    python -m benchmarks.batch_invariance --csv batch-invariance.csv
    python -m benchmarks.batch_invariance --device cpu --tokens 2048 --heads 4 --kv-heads 4 \\
        --head-dim 64 --dtype float32 --cases "forward 2048" "backward 64" "decode 1 x 2048"

By default 32 query heads on 8 key heads of 128, bfloat16, causal: training on 16,384 tokens in all,
and decoding one token of each sequence from a cache, on a GPU captured in CUDA graphs. All calls of
a line take turns in random order; the ratio is the median time over that of the free call. "sdpa"
is PyTorch's flash attention, whose bits depend on the batch, and which cannot decode so.
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
from flashtile.cli import integer
from flashtile.cli.timing import Timing, interleave, timer_for

from .command import Command
from .measure import captured

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


def free(device: str) -> dict[str, dict[str, Any]]:
    """The options of flashtile's calls."""
    return {name: x for name, x in FREE.items() if device != "cpu" or "triton" not in name}


def sdpa(q: Any, k: Any, v: Any) -> Any:
    """Causal attention by PyTorch's flash attention."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def training(length: int, backward: bool, args: Namespace) -> Calls:
    """Forwards, or backwards, of equally long sequences."""
    heads = args.heads, args.kv_heads, args.kv_heads
    q, k, v = (_random(args.tokens // length, length, n, args=args) for n in heads)
    dout, leaves = torch.randn_like(q), [x.requires_grad_(backward) for x in (q, k, v)]

    def timed(run: Callable[[], Any]) -> Callable[[], Any]:
        if not backward:
            return run
        out = run()
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    named = free(args.device).items()
    calls = {n: timed(partial(attention, q, k, v, causal=True, **x)) for n, x in named}
    return calls | {"sdpa": timed(lambda: sdpa(q, k, v))}


def decoding(batch: int, length: int, args: Namespace) -> Calls:
    """One query of each sequence over a full cache."""
    k, v = (_random(batch, length, args.kv_heads, args=args) for _ in range(2))
    q = _random(batch, 1, args.heads, args=args)
    used = torch.full((batch,), length, dtype=torch.int32, device=args.device)
    calls = {
        name: partial(attention_with_kvcache, q, k, v, cache_seqlens=used, **x)
        for name, x in free(args.device).items()
    }
    if args.device == "cpu":
        return dict(calls)
    return {name: captured(call) for name, call in calls.items()}


def _random(*shape: int, args: Namespace) -> torch.Tensor:
    dtype = getattr(torch, args.dtype)
    return torch.randn(*shape, args.head_dim, device=args.device, dtype=dtype)


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """A line for each call of each case."""
    for case in args.cases:
        kind, size, *rest = case.split()
        if kind == "decode":
            calls = decoding(int(size), int(rest[-1]), args)
        else:
            calls = training(int(size), kind == "backward", args)
        samples = interleave(calls, timer_for(args.device), budget_ms=args.budget)
        medians = {name: Timing.of(found).median_ms for name, found in samples.items()}
        for name, ms in medians.items():
            yield case, name, f"{ms:.4f}", f"{ms / medians['free']:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("batch_invariance", __doc__, budget_ms=400.0)
    integer(command, "--tokens", 16384, "tokens of all sequences in training")
    integer(command, "--heads", 32, "query heads")
    integer(command, "--kv-heads", 8, "key heads")
    integer(command, "--head-dim", 128, "size of a head")
    command.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    lengths = "forward LENGTH, backward LENGTH or decode BATCH x LENGTH"
    command.add_argument("--cases", nargs="+", default=CASES, metavar="CASE", help=lengths)
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
