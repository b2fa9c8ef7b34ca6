"""What context parallelism costs in the kernels alone, measured on one GPU.

``python -m benchmarks.context.kernels --ranks 2 4`` runs the ranks one after another, as threads
that exchange keys through memory, and records the calls that the executor makes of a backend. Then
it times these calls without the exchanges. One GPU's time with the whole sequence, divided by the
sum of the ranks' times, bounds the efficiency that as many GPUs can reach. Divided by the slowest
rank's time and the number of ranks, it also shows how well the ranks are balanced.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from flashtile.call import dispatch
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.cli import integer
from flashtile.cli.timing import Timing, interleave, timer_for
from flashtile.distributed import executor, partition
from flashtile.distributed.arguments import UsedTokens
from flashtile.distributed.executor import Plan
from flashtile.distributed.partition import ShardMap, Work
from flashtile.distributed.schedule import schedule, steps_of
from flashtile.distributed.strategy import Strategy
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing.wires import ThreadCommunicator, run_ranks

from ..command import Command
from .cases import ContextCase

Call = Callable[[], Any]
PASSES = ("forward", "backward")
SUBJECT = {"case": 30, "ranks x groups": 14, "backend": 14, "pass": 8}
SHARES = {"one GPU / sum": 13, "one GPU / ranks x slowest": 25}
COLUMNS = {
    **SUBJECT,
    "one GPU, ms": 11,
    "ranks, ms": 24,
    **SHARES,
    "out: largest difference, equal": 30,
}


class Calls(NamedTuple):
    """Calls of a backend, and its name."""

    forward: list[Call]
    backward: list[Call]
    names: set[str]


recorded: ContextVar[Calls] = ContextVar("recorded")  # of this thread's rank


class Recorder:
    """A backend that keeps the calls it gets."""

    def __init__(self, name: str) -> None:
        self.backend, self.name = dispatch.BACKENDS[name], name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forward(self, *given: Any) -> Any:
        recorded.get().names.add(self.name)
        recorded.get().forward.append(partial(self.backend.forward, *given))
        return self.backend.forward(*given)

    def backward(self, *given: Any, **more: Any) -> Any:
        recorded.get().backward.append(partial(self.backend.backward, *given, **more))
        return self.backend.backward(*given, **more)


class Whole(NamedTuple):
    """The call of one GPU."""

    operands: Operands
    options: Options
    dout: Tensor

    def calls(self) -> tuple[Calls, Tensor]:
        """Both passes, and the output."""
        problem = AttentionProblem.of(self.operands, self.options)._replace(needs_grad=True)
        name = dispatch.select(problem)
        backend = dispatch.BACKENDS[name]
        out, lse = backend.forward(problem, self.operands)
        forward = partial(backend.forward, problem, self.operands)
        given = (problem, self.operands, out, lse, self.dout, None)
        backend.backward(*given)
        return Calls([forward], [partial(backend.backward, *given)], {name}), out


def whole_call(case: ContextCase, lengths: list[int], device: str) -> Whole:
    """Random inputs."""
    dtype, tokens = getattr(torch, case.dtype), sum(lengths)
    torch.manual_seed(0)
    heads = (case.heads_q, case.heads_kv, case.heads_kv, case.heads_q)
    q, k, v, dout = (
        torch.randn(tokens, count, case.head_dim, device=device, dtype=dtype) for count in heads
    )
    if case.variant not in ("packed", "document"):
        q, k, v, dout = (x[None] for x in (q, k, v, dout))
        return Whole(*describe((q, k, v), Dense(), case.options), dout)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    layout = Packed(cu, cu, max(lengths), max(lengths))
    return Whole(*describe((q, k, v), layout, case.options), dout)


def ownership(case: ContextCase, lengths: list[int], ranks: int, options: Options) -> ShardMap:
    """The layout that `ContextParallel.layout` makes by default."""
    way = "documents" if case.variant == "packed" else "contiguous" if case.window else "zigzag"
    return partition.divided(way, Work([(options.facts, None, 1)], lengths), ranks)


def calls_of_ranks(
    whole: Whole, owned: ShardMap, head_groups: int, backend: str | None
) -> tuple[list[Calls], Tensor]:
    """What every rank calls, and the output of all ranks in the order of the whole."""
    packed = [x.flatten(0, -3) for x in (*whole.operands[:3], whole.dout)]
    starts = torch.tensor([0, *owned.lengths]).cumsum(0).tolist()

    def one_rank(comm: ThreadCommunicator) -> tuple[Calls, Tensor, Tensor]:
        recorded.set(Calls([], [], set()))
        rows = torch.cat(
            [torch.arange(*piece[1:]) + starts[piece.document] for piece in owned.pieces[comm.rank]]
        ).to(packed[0].device)
        q, k, v, dout = (x[rows] for x in packed)
        made = schedule(owned, owned, whole.options.facts, comm.rank)
        heads = q.shape[1], k.shape[1]
        plan = Plan(
            Strategy(1, 1, head_groups),
            None,
            made,
            steps_of(made, head_groups, heads),
            comm,
            whole.options,
            backend,
            first_head=0,
            gradient_dtype=None,
            used=UsedTokens(owned, owned),
        )
        out, lse = executor.forward(plan, Operands(q, k, v), True)
        executor.backward(plan, Operands(q, k, v), out, lse, dout, None, False)
        return recorded.get(), rows, out

    recorders = {name: Recorder(name) for name in dispatch.ORDER}
    with patch.object(dispatch, "BACKENDS", recorders):
        ranks = run_ranks(owned.ranks, one_rank)
    out = torch.empty_like(packed[0])
    for _, rows, part in ranks:
        out[rows] = part
    return [calls for calls, _, _ in ranks], out


def in_turn(calls: list[Call]) -> None:
    """Make all calls."""
    for call in calls:
        call()


def measured(
    case: ContextCase, ranks: int, head_groups: int, backend: str | None, device: str, ms: float
) -> Iterator[list[str]]:
    """The lines of a case, as `COLUMNS` says."""
    lengths = case.lengths(ranks)
    whole = whole_call(case, lengths, device)
    alone, want = whole.calls()
    owned = ownership(case, lengths, ranks, whole.options)
    of_ranks, out = calls_of_ranks(whole, owned, head_groups, backend)
    largest = (out.float() - want.flatten(0, -3).float()).abs().max().item()
    equal = (out == want.flatten(0, -3)).double().mean().item()
    for direction in PASSES:
        calls = {"one GPU": partial(in_turn, getattr(alone, direction))}
        for rank, of_rank in enumerate(of_ranks):
            calls[f"rank {rank}"] = partial(in_turn, getattr(of_rank, direction))
        samples = interleave(calls, timer_for(device), budget_ms=ms, min_rounds=3)
        full, *parts = (Timing.of(x).median_ms for x in samples.values())
        names = "+".join(sorted(set().union(*(x.names for x in of_ranks))))
        yield [
            f"{case.variant} {case.heads_q}:{case.heads_kv} x {case.head_dim}, {case.tokens}",
            f"{ranks} x {head_groups}",
            names,
            direction,
            f"{full:.2f}",
            ", ".join(f"{x:.2f}" for x in parts),
            f"{full / sum(parts):.3f}",
            f"{full / len(parts) / max(parts):.3f}",
            f"{largest:.2g}, {equal:.1%}",
        ]


def measured_cases(args: Namespace) -> Iterator[list[str]]:
    """The lines of all cases."""
    for variant, ranks, groups in product(args.variants, args.ranks, args.groups):
        # A document is a packed batch of one sequence: what packing costs one GPU.
        window = 1024 if variant == "window" else 0
        shape = (*args.heads, args.head_dim, args.seq_len, window)
        case = ContextCase(variant, args.dtype, *shape)
        yield from measured(case, ranks, groups, args.backend, args.device, args.budget_ms)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    command = Command("context.kernels", __doc__)
    integer(command, "--ranks", (2, 4), "numbers of ranks")
    integer(command, "--groups", (1, 2), "groups of key heads")
    command.add_argument(
        "--variants", nargs="+", default=["dense"], help="dense, window, packed, document"
    )
    integer(command, "--seq-len", 8192, "tokens of each rank")
    command.add_argument("--heads", type=int, nargs=2, default=[32, 8])
    integer(command, "--head-dim", 128, "size of a head")
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--backend", help="of the ranks; by default the one that runs their calls")
    command.add_argument(
        "--budget-ms", type=float, default=400.0, help="to measure a pass of a case"
    )
    return command.run(argv, COLUMNS, measured_cases)


if __name__ == "__main__":
    sys.exit(main())
