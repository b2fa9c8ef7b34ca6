"""``flashtile warmup``: compile the GPU kernels before the first call that needs them.

Kernels are compiled for what docs/compilation.md lists, mostly the head dim, the dtype and the
options in use. Triton stores them on disk, so one run serves every later process on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..backends import BACKENDS
from ..call import dispatch
from ..call.layouts import Dense
from ..call.prepare import describe
from ..gpu.described import TARGETS, AbsentGpu
from ..gpu.hardware import TRITON_IS_INSTALLED
from ..problem import AttentionProblem
from . import integer
from .in_processes import default_processes, in_processes, with_progress
from .model_calls import CAPACITY, LENGTHS, PURPOSES, Call, calls_of, read_config

TOKENS = 65536  # of a batch so large that the kernels for large calls are compiled
DTYPES = ("bfloat16", "float16")


class Combination(NamedTuple):
    """Calls on every backend that supports them, for models without a config."""

    dtype: str
    head_dim: int
    causal: bool
    group: int
    has_backward: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.dtype}, head dim {self.head_dim}, {mask}, {self.group} heads a key head"

    def run(self, device: str) -> None:
        """Make the calls."""
        for length in LENGTHS:
            self._run(device, length)
        if device == "cuda":
            torch.cuda.synchronize()

    def _run(self, device: str, length: int) -> None:
        shape = (TOKENS // length, length, self.group, self.head_dim)
        q = torch.empty(shape, device=device, dtype=getattr(torch, self.dtype))
        k = q[:, :, :1].contiguous()
        operands, options = describe((q, k, k), Dense(), {"causal": self.causal})
        problem = AttentionProblem.of(operands, options)
        for name in dispatch.ORDER:
            if dispatch.BACKENDS[name].unsupported_reasons(problem):
                continue
            backend = BACKENDS[name]
            out, lse = backend.forward(problem, operands)
            if self.has_backward:
                backend.backward(problem, operands, out, lse, out, None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the kernels."""
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        help="compile what a model of Hugging Face needs: a config.json, a folder with one, or a "
        "name that transformers knows (default: none; use --head-dim, --dtype and --group)",
    )
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="compile for a GPU of this architecture, which need not be here (default: for the GPU "
        "of this machine)",
    )
    parser.add_argument(
        "--multiprocessors",
        type=int,
        default=0,
        metavar="N",
        help="those of the target, where it is not the usual card: 114 of an H100 with PCIe "
        "(default: those of an A100, A40, L40S, H100 with SXM or H200, B200, RTX 5090)",
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=PURPOSES,
        default="both",
        help="what the model does (default: %(default)s)",
    )
    of_cache = "tokens of a page of the model's cache; 0 is a contiguous cache"
    integer(parser, "--page-size", 0, of_cache)
    integer(parser, "--processes", default_processes(), "processes that compile")
    integer(parser, "--head-dim", (64, 128), "head dims to compile for, in elements")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        metavar="DTYPE",
        help=f"dtypes to compile for (default: {' '.join(DTYPES)})",
    )
    integer(parser, "--group", 1, "query heads per key head")
    parser.add_argument(
        "--no-backward",
        action="store_true",
        help="compile only the forward pass (default: also the backward pass)",
    )


def run(args: argparse.Namespace) -> int:
    """Make every call once, in several processes; the status is 1 if one of them failed."""
    try:
        calls = _calls(args)
    except ValueError as error:
        print(f"flashtile warmup: {error}")
        return 1
    for call in calls:
        print(call)
    if missing := _missing(args.target):
        print(f"flashtile warmup: {missing}")
        return 1
    gpu = TARGETS.get(args.target)
    if gpu is not None and args.multiprocessors:
        gpu = gpu._replace(multiprocessors=args.multiprocessors)
    started = time.monotonic()
    failed: dict[Any, Any] = {}
    one: Callable[[Any], Any] = partial(make, device="cuda")
    work: Sequence[Any] = calls
    if gpu is not None:
        kernels: dict[str, Call | Combination] = {}  # each with a call that needs it
        for call, keys in in_processes(partial(kernels_of, gpu=gpu), calls, args.processes):
            if isinstance(keys, Exception):
                failed[call] = keys
            else:
                kernels |= dict.fromkeys(keys, call)
        one, work = partial(compile_one, gpu=gpu), [*kernels.items()]
    done = in_processes(one, work, args.processes)
    for item, result in with_progress(done, len(work), "compiled"):
        if result is not None:
            failed[item if gpu is None else item[1]] = result
    took = time.monotonic() - started
    print(f"{len(calls) - len(failed)} of {len(calls)} calls ready in {took:.1f} s")
    for call, reason in failed.items():
        print(f"failed: {call}: {reason}")
    return 1 if failed else 0


def make(call: Call | Combination, device: str) -> None:
    """Make one call, which compiles its kernels."""
    call.run(device)


def kernels_of(call: Call | Combination, gpu: AbsentGpu) -> list[str]:
    """The keys in Triton's cache of the kernels that a call needs on a GPU that is not here."""
    from ..gpu.launch import compiling_for

    keys: list[str] = []
    with compiling_for(gpu, keys.append):
        call.run("cpu")
    return keys


def compile_one(kernel: tuple[str, Call | Combination], gpu: AbsentGpu) -> None:
    """Compile the kernel of a call that has a key in Triton's cache."""
    from ..gpu.launch import compiling_for

    key, call = kernel
    with compiling_for(gpu, key.__eq__):
        call.run("cpu")


def _missing(target: str | None) -> str | None:
    """What this machine lacks to compile for `target`, or for its own GPU."""
    if target is None and not torch.cuda.is_available():
        return "no CUDA device here; --target compiles for one that is not here"
    if target is not None and not TRITON_IS_INSTALLED:
        return f"--target {target} needs Triton: pip install 'flashtile[triton]'"
    return None


def _calls(args: argparse.Namespace) -> Sequence[Call | Combination]:
    if args.multiprocessors < 0 or (args.multiprocessors and args.target is None):
        raise ValueError(
            f"--multiprocessors: got {args.multiprocessors}, want a positive number and a --target"
        )
    if args.page_size < 0 or (args.page_size and CAPACITY % args.page_size):
        raise ValueError(f"--page-size: got {args.page_size}, want 0 or a divisor of {CAPACITY}")
    if args.model is not None:
        return calls_of(read_config(args.model), args.purpose, args.page_size)
    combined = itertools.product(args.dtype, args.head_dim, (False, True))
    return [Combination(*one, args.group, not args.no_backward) for one in combined]
