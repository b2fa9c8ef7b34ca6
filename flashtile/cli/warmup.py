"""``flashtile warmup``: compile the GPU kernels before the first call that needs them.

Kernels are compiled for a head dim, a dtype and the options in use, never for a length. Triton
stores them on disk, so one run serves every later process on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch

from ..backends import load
from ..call import dispatch
from ..call.layouts import Dense
from ..call.prepare import describe
from ..problem import AttentionProblem

LENGTH = 256  # any length, because kernels do not depend on it
DTYPES = ("bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the kernels."""
    parser.add_argument(
        "--head-dims",
        type=int,
        nargs="+",
        default=[64, 128],
        metavar="N",
        help="head dims to compile for, in elements (default: 64 128)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        metavar="DTYPE",
        help=f"dtypes to compile for (default: {' '.join(DTYPES)})",
    )
    parser.add_argument(
        "--group",
        type=int,
        default=1,
        metavar="N",
        help="query heads per key head (default: %(default)s)",
    )
    parser.add_argument(
        "--no-backward",
        action="store_true",
        help="compile only the forward pass (default: also the backward pass)",
    )


def run(args: argparse.Namespace) -> int:
    """Run each combination once, causal and full, on every backend that supports it."""
    if not torch.cuda.is_available():
        print(
            "flashtile warmup: no CUDA device here; kernels are compiled for the GPU that runs them"
        )
        return 1
    for dtype, head_dim, causal in itertools.product(args.dtypes, args.head_dims, (False, True)):
        # A batch so large that the kernels for large calls are compiled.
        q = torch.randn(
            256, LENGTH, args.group, head_dim, device="cuda", dtype=getattr(torch, dtype)
        )
        k = q[:, :, :1].contiguous()
        operands, options = describe((q, k, k), Dense(), {"causal": causal})
        problem = AttentionProblem.of(operands, options)
        mask = "causal" if causal else "full"
        for name in dispatch.ORDER:
            if dispatch.unsupported_reasons(name, problem):
                continue
            started = time.monotonic()
            backend = load(name)
            out, lse = backend.forward(problem, operands)
            if not args.no_backward:
                backend.backward(problem, operands, out, lse, out, None)
            torch.cuda.synchronize()
            took = time.monotonic() - started
            print(f"{name} {dtype} head dim {head_dim} {mask}: {took:.1f} s", flush=True)
    return 0
