"""Derivatives in forward mode and second derivatives of causal attention, beside other ways.

    python -m benchmarks.derivatives                               # on a GPU
    python -m benchmarks.derivatives --device cpu --tokens 2048 --heads 4 --dtype float32

`jvp` has tangents of q, k and v. A double backward is the gradient of a gradient. The others are
PyTorch's math backend, which keeps all scores, and `jvp-flash-attention` if it is installed, which
has the first derivative in forward mode. A number is the median wall time, until the GPU is done.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile.cli.machine import provenance
from flashtile.cli.timing import Timing, interleave
from flashtile.problem import dtype_name

COLUMNS = ("tokens", "heads", "head_dim", "dtype", "library", "pass", "median_ms", "peak_mib")
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


def wall_timer(device: str) -> Callable[[Callable[[], object]], float]:
    """Milliseconds until the device is done."""

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def timer(call: Callable[[], object]) -> float:
        wait()
        start = time.perf_counter()
        call()
        wait()
        return (time.perf_counter() - start) * 1e3

    return timer


def peak_mib(call: Callable[[], object], device: str) -> str:
    """What a call allocates at most; "" on a CPU, "out of memory" if that is too much."""
    if device == "cpu":
        return ""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        call()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return "out of memory"
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


def measure(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str, budget_ms: float
) -> Iterator[dict[str, Any]]:
    """The lines of one size."""
    shape = (1, tokens, heads, head_dim)
    x, directions = (
        [torch.randn(shape, dtype=dtype, device=device) for _ in "qkv"] for _ in range(2)
    )
    calls = {
        (library, name): partial(run, name, attend, x, directions)
        for library, attend, passes in libraries(device)
        for name in passes
    }
    peaks = {key: peak_mib(call, device) for key, call in calls.items()}
    fit = {key: call for key, call in calls.items() if peaks[key] != "out of memory"}
    names = {" ".join(key): key for key in fit}
    samples = interleave(
        {name: fit[key] for name, key in names.items()}, wall_timer(device), budget_ms=budget_ms
    )
    medians = {key: Timing.of(samples[name]).median_ms for name, key in names.items()}
    for key in calls:
        ms = f"{medians[key]:.3f}" if key in medians else ""
        values = tokens, heads, head_dim, dtype_name(dtype), *key, ms, peaks[key]
        yield dict(zip(COLUMNS, values, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--budget", type=float, default=1000, help="milliseconds for a size")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="CSV file to write (default: none)")
    args = parser.parse_args(argv)
    form = "{:>8} {:>6} {:>9} {:>9} {:>20} {:>16} {:>10} {:>14}"
    print(form.format(*COLUMNS))
    lines = []
    for dtype in args.dtype:
        for tokens in args.tokens:
            sizes = tokens, args.heads, args.head_dim, getattr(torch, dtype)
            for line in measure(*sizes, args.device, args.budget):
                print(form.format(*line.values()), flush=True)
                lines.append(line)
    if args.csv:
        here = provenance(args.device, " ".join(["python -m benchmarks.derivatives", *argv]))
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, (*COLUMNS, *here), lineterminator="\n")
            writer.writeheader()
            writer.writerows({**line, **here} for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
