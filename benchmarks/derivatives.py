"""Derivatives in forward mode and second derivatives of causal attention, beside other ways.

    python -m benchmarks.derivatives                               # on a GPU
    python -m benchmarks.derivatives --device cpu --tokens 2048 --heads 4 --dtype float32

`jvp` has tangents of q, k and v. A double backward is the gradient of a gradient. The others are
PyTorch's math backend, which keeps all scores, and `jvp-flash-attention` if it is installed, which
has the first derivative in forward mode. A number is the median wall time, until the GPU is done.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile.cli import integer
from flashtile.cli.timing import Timing, interleave

from .command import Command
from .measure import peak_bytes, wall_timer

SIZES = {"tokens": 8, "heads": 6, "head_dim": 9, "dtype": 9}
COLUMNS = {**SIZES, "library": 20, "pass": 16, "median_ms": 10, "peak_mib": 14}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_heads(attend: Attend) -> Attend:
    """`attend` of (batch, heads, tokens, head_dim) for the layout of flashtile."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(*(x.transpose(1, 2) for x in (q, k, v)))

    return call


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def libraries(device: str) -> Iterator[tuple[str, Attend, tuple[str, ...]]]:
    """Name, attention, and the passes that it has."""
    passes = ("forward", "jvp", "jvp of q", "double backward")
    yield "flashtile", partial(flashtile.attention, causal=True), passes
    yield "math", in_heads(math), passes
    if device != "cpu" and find_spec("jvp_flash_attention"):
        module = import_module("jvp_flash_attention.jvp_attention")
        options: dict[str, Any] = {"causal": True, "warp_specialize": False, "USE_TMA": False}
        yield (
            "jvp-flash-attention",
            in_heads(partial(module.JVPAttn.fwd_dual, **options)),
            ("forward", "jvp"),
        )


def run(name: str, attend: Attend, x: Sequence[Tensor], directions: Sequence[Tensor]) -> None:
    """One pass."""
    if name == "forward":
        attend(*x)
    elif name == "double backward":
        x = [y.detach().requires_grad_() for y in x]
        first = torch.autograd.grad(attend(*x).square().sum(), x, create_graph=True)
        products = [(g * t).sum() for g, t in zip(first, directions, strict=True)]
        torch.autograd.grad(torch.stack(products).sum(), x)
    else:
        with forward_ad.dual_level():
            moved = 1 if name == "jvp of q" else 3
            pairs = zip(x[:moved], directions, strict=False)
            out = attend(*(forward_ad.make_dual(y, t) for y, t in pairs), *x[moved:])
            assert forward_ad.unpack_dual(out).tangent is not None


def peak_mib(call: Callable[[], object], device: str) -> str:
    """What a call allocates at most, or "out of memory"."""
    try:
        return f"{peak_bytes(call, device) / 2**20:.0f}"
    except torch.OutOfMemoryError:
        return "out of memory"


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """The lines."""
    for dtype, tokens in product(args.dtype, args.tokens):
        shape = (1, tokens, args.heads, args.head_dim)
        make = partial(torch.randn, shape, dtype=getattr(torch, dtype), device=args.device)
        x, directions = ([make() for _ in "qkv"] for _ in range(2))
        calls = {
            (library, name): partial(run, name, attend, x, directions)
            for library, attend, passes in libraries(args.device)
            for name in passes
        }
        peaks = {key: peak_mib(call, args.device) for key, call in calls.items()}
        fit = {key: call for key, call in calls.items() if peaks[key] != "out of memory"}
        samples = interleave(fit, wall_timer(args.device), budget_ms=args.budget)
        for key in calls:
            ms = f"{Timing.of(samples[key]).median_ms:.3f}" if key in samples else ""
            yield tokens, args.heads, args.head_dim, dtype, *key, ms, peaks[key]


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("derivatives", __doc__, budget_ms=1000.0)
    integer(command, "--tokens", (1024, 4096, 16384), "lengths of the sequence")
    integer(command, "--heads", 16, "heads of q, k and v")
    integer(command, "--head-dim", 64, "size of a head")
    command.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
