"""How many variants of each kernel a process compiles for calls in fifty unusual layouts.

    PYTHONPATH=.:tests python tests/compiled_variants.py HEAD_DIM

Every call runs forward and backward on each GPU backend that supports it. The numbers are those in
Triton's own cache; `kernels/test_variants.py` counts the same without a GPU or a compiler.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import triton
from kernels.unusual_layouts import Call, calls

from flashtile import backends
from flashtile.backends.triton.plan import FEW_ROWS
from flashtile.call import dispatch
from flashtile.problem import AttentionProblem

MOST = 4
BACKENDS = ("triton", "hopper")


def kernels() -> Iterator[Any]:
    """Every kernel that this process has imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("flashtile."):
            yield from (x for x in vars(module).values() if isinstance(x, triton.JITFunction))


def compiled() -> Counter[str]:
    """The variants of each kernel, by its name with that of its module."""
    found = {kernel.fn: kernel for kernel in kernels()}  # modules import kernels of others
    return Counter(
        {
            f"{function.__module__}.{function.__name__}": sum(
                len(cache[0]) for cache in kernel.device_caches.values()
            )
            for function, kernel in found.items()
        }
    )


def run(call: Call) -> None:
    """Forward and backward."""
    operands, options = call
    problem = AttentionProblem.of(operands, options)
    for name in BACKENDS:
        if not dispatch.BACKENDS[name].unsupported_reasons(problem):
            out, lse = backends.BACKENDS[name].forward(problem, operands)
            backends.BACKENDS[name].backward(
                problem, operands, out, lse, torch.ones_like(out), None
            )


def variants(named: Iterator[tuple[str, Call]]) -> Counter[str]:
    """The variants that the calls add, by kernel and by what the manual says that kernels are
    compiled for, among what the calls differ in: packed sequences, and tiles of few queries."""
    found: Counter[str] = Counter()
    for name, call in named:
        before, operands = compiled(), call[0]
        run(call)
        kind = "packed" if operands.cu_seqlens_q is not None else "dense"
        few = ", few queries" if operands.q.shape[-3] <= FEW_ROWS else ""
        for kernel, count in (compiled() - before).items():
            found[f"{kernel}, {kind}{few}"] += count
            print(f"{name}: {count} of {kernel}", flush=True)
    return found


def main(head_dim: int) -> int:
    """Print the numbers; the status is 1 if one of them is too large."""
    with torch.device("cuda"):
        found = variants(calls(head_dim))
        torch.cuda.synchronize()
    for what, count in sorted(found.items()):
        print(f"{count}  {what}")
    return 0 if found and max(found.values()) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
