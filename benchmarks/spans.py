"""Masks as spans next to the options that say the same: `causal=True`, and packed documents.

    python -m benchmarks.spans                                  # forward and backward
    python -m benchmarks.spans --head-dim 128 --csv spans.csv

16,384 tokens in all, a hidden size of 2,048, bfloat16. All calls of a line take turns in random
order; a number is the median time of the call, and the ratio is the time with spans over that
without. With `--triton` the Triton kernels run the spans too.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flashtile import Spans, attention, attention_varlen
from flashtile.cli import integer
from flashtile.cli.timing import Timing, interleave, timer_for

from .command import Command

TOKENS, HIDDEN = 16384, 2048
CASES = ("causal 1k", "causal 4k", "causal 16k", "documents 2k", "documents of all lengths")
SUBJECT = {"case": 26, "head_dim": 8, "pass": 9}
COLUMNS = {**SUBJECT, "call": 14, "median_ms": 9, "ratio": 7}


def calls_of(case: str, device: str) -> tuple[int, dict[str, Any]]:
    """The batch, and the calls with their arguments, of which the first one has no spans; those of
    `attention_varlen` take packed tensors.
    """
    if case.startswith("causal"):
        length = 1024 * int(case.split()[1].removesuffix("k"))
        mask = Spans.prefix_lm(torch.zeros(1, dtype=torch.int32, device=device), length)
        calls = {"causal": (attention, {"causal": True}), "spans": (attention, {"mask": mask})}
        return TOKENS // length, calls
    lengths = [2048] * 8
    if case.endswith("all lengths"):
        lengths = [300, 5000, 1000, 84, 2000, 6000, 500, 1500]
    counts = torch.tensor([lengths], dtype=torch.int32, device=device)
    cu = torch.nn.functional.pad(counts[0].cumsum(0, dtype=torch.int32), (1, 0))
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    given |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    mask = Spans.documents_of_lengths(counts, TOKENS)
    return 1, {"varlen": (attention_varlen, given), "spans": (attention, {"mask": mask})}


def measure(
    case: str, head_dim: int, backward: bool, triton: bool, device: str
) -> Iterator[tuple[object, ...]]:
    """A line for each call of a case."""
    batch, calls = calls_of(case, device)
    if triton:
        call, given = calls["spans"]
        calls["spans, triton"] = call, {**given, "backend": "triton"}
    shape = batch, TOKENS // batch, HIDDEN // head_dim, head_dim
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
    timed: dict[str, Callable[[], Any]] = {}
    for name, (call, given) in calls.items():
        *leaves, dout = (x[0] if call is attention_varlen else x for x in tensors)
        leaves = [x.detach().requires_grad_(backward) for x in leaves]

        def forward(call: Any = call, leaves: Any = leaves, given: Any = given) -> Tensor:
            return call(*leaves, **given)

        timed[name] = forward
        if backward:
            out = forward()

            def gradients(out: Tensor = out, leaves: Any = leaves, dout: Tensor = dout) -> Any:
                return torch.autograd.grad(out, leaves, dout, retain_graph=True)

            timed[name] = gradients
    samples = interleave(timed, timer_for(device), budget_ms=600)
    medians = {name: Timing.of(found).median_ms for name, found in samples.items()}
    base = next(iter(medians.values()))
    direction = "backward" if backward else "forward"
    for name, ms in medians.items():
        yield case, head_dim, direction, name, f"{ms:.4f}", f"{ms / base:.3f}"


def measure_all(args: Namespace) -> Iterator[tuple[object, ...]]:
    """The lines of all cases."""
    for direction, head_dim, case in product(args.passes, args.head_dim, args.cases):
        yield from measure(case, head_dim, direction == "backward", args.triton, args.device)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("spans", __doc__)
    integer(command, "--head-dim", (64, 128), "sizes of a head")
    command.add_argument("--pass", dest="passes", nargs="+", default=["forward", "backward"])
    command.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    command.add_argument("--triton", action="store_true", help="the Triton kernels too")
    return command.run(argv, COLUMNS, measure_all)


if __name__ == "__main__":
    sys.exit(main())
