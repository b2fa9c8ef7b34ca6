"""Measure the preset on all ranks that torchrun started."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import flashtile
from flashtile.cli.machine import busy, provenance
from flashtile.testing import generator, normal

from ..report import print_table
from .cases import ContextCase, cases
from .peers import PEERS, Ready, Unsupported
from .plot import draw
from .rows import ContextRow, write

ROUNDS = 7
DIRECTIONS = ("forward", "both")
MOST_ERROR = 0.05  # of out: a peer that attends to other keys is further away


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 prints and writes. 2 if torchrun did not start this process."""
    if "RANK" not in os.environ:
        command = "torchrun --nproc-per-node 2 -m benchmarks --preset context"
        print(f"--preset context: got one process, want several: {command}", file=sys.stderr)
        return 2
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        rows = [row for case in cases(device) for row in _measured(case, device)]
        if dist.get_rank() == 0:
            _report(args, rows, device)
    finally:
        dist.destroy_process_group()
    return 0


def _report(args: argparse.Namespace, rows: list[ContextRow], device: str) -> None:
    ranks = dist.get_world_size()
    command = f"torchrun --nproc-per-node {ranks} -m benchmarks {shlex.join(args.command_line)}"
    origin = provenance(device, command)
    if warning := busy():
        print(warning)
    headings = ["case", "pass", "peer", "one process, ms", "slowest rank, ms", "efficiency"]
    lines = []
    for row in rows:
        heads = f"{row.heads_q}:{row.heads_kv}"
        subject = f"{row.variant} {row.dtype}, {heads} heads of {row.head_dim}, {row.tokens} tokens"
        if row.efficiency is None:
            lines.append([subject, row.direction, row.peer, row.skipped, "", ""])
        else:
            times = [f"{row.one_process_ms:.1f}", f"{row.slowest_rank_ms:.1f}"]
            lines.append([subject, row.direction, row.peer, *times, f"{row.efficiency:.2f}"])
    print_table(headings, lines)
    if args.output:
        args.csv = args.csv or args.output / "context.csv"
    if args.csv:
        write(args.csv, rows, origin)
        print(f"wrote {args.csv}")
    if args.output:
        print(f"wrote {draw(args.csv, args.output / 'context.png')}")


def _measured(case: ContextCase, device: str) -> Iterator[ContextRow]:
    """The rows of a case. All peers take turns, and so does one process on the whole sequence."""
    ranks = dist.get_world_size()
    lengths = case.lengths(ranks)
    whole = _inputs(case, device, ranks)
    row = ContextRow(
        "", "", documents=len(lengths), ranks=ranks, process_group=dist.get_backend(),
        **case._asdict(),
    )  # fmt: skip
    with torch.no_grad():
        want = _alone(case, lengths)(*whole)
    ready, errors, reasons = {}, {}, {}
    for name, make in PEERS.items():
        try:
            ready[name] = make(case, lengths)
            errors[name] = _error(ready[name], case, whole, want)
        except Unsupported as reason:
            reasons[name] = str(reason)
        except (RuntimeError, NotImplementedError, AssertionError) as failure:
            reasons[name] = f"failed: {str(failure).splitlines()[0]}"
            ready.pop(name, None)
    for name, error in errors.items():
        if not error <= MOST_ERROR:
            reasons[name] = f"wrong result: an error of {error:.2g}"
            del ready[name]
    for direction in DIRECTIONS:
        alone, slowest = _times(case, direction, ready, lengths, whole)
        for name in PEERS:
            mine = replace(row, peer=name, direction=direction)
            if name not in ready:
                yield replace(mine, skipped=reasons[name])
                continue
            yield replace(
                mine,
                way=ready[name].way,
                one_process_ms=alone,
                slowest_rank_ms=slowest[name],
                efficiency=alone / ranks / slowest[name],
                largest_error=errors[name],
            )


def _inputs(case: ContextCase, device: str, ranks: int) -> list[Tensor]:
    """q, k, v and the gradient of out, of the whole, the same on all ranks."""
    batch = () if case.variant == "packed" else (1,)
    g = generator(1)
    return [
        normal(g, *batch, case.tokens * ranks, heads, case.head_dim).to(
            device, getattr(torch, case.dtype)
        )
        for heads in (case.heads_q, case.heads_kv, case.heads_kv, case.heads_q)
    ]


def _alone(case: ContextCase, lengths: list[int]) -> Callable[..., Tensor]:
    """Attention of the whole in one process."""
    if case.variant != "packed":
        return lambda q, k, v, *_: flashtile.attention(q, k, v, **case.options)

    def call(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        ends = torch.tensor([0, *lengths], device=q.device).cumsum(0).int()
        most = max(lengths)
        return flashtile.attention_varlen(q, k, v, ends, ends, most, most, **case.options)

    return call


def _error(ready: Ready, case: ContextCase, whole: list[Tensor], want: Tensor) -> float:
    """The largest distance of out from one process, on any rank."""
    shards = [ready.layout.shard(x) for x in whole[:3]]
    with torch.no_grad(), ready.around():
        out = ready.call(*shards)
    error = (out.double() - ready.layout.shard(want).double()).abs().max().cpu()
    errors = ready.layout.wire.all_gather(error.reshape(1))
    return max(float(x) for x in errors)


def _times(
    case: ContextCase, direction: str, ready: dict[str, Ready], lengths: list[int],
    whole: list[Tensor],
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """Median milliseconds of one process on the whole, and of the slowest rank with each peer."""
    alone = _pass(_alone(case, lengths), whole, direction)
    calls = {
        name: _pass(peer.call, [peer.layout.shard(x) for x in whole], direction)
        for name, peer in ready.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in ("", *calls)}
    for round_ in range(ROUNDS + 1):
        for name in samples:
            with ready[name].around() if name else nullcontext():
                _synchronise()
                start = time.perf_counter()
                if name:
                    calls[name]()
                elif dist.get_rank() == 0:  # the others wait at the barrier
                    alone()
                _wait_for_device()
                mine = (time.perf_counter() - start) * 1e3
            if round_:  # the first one warms up
                samples[name].append(_largest(mine))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return medians.pop(""), medians


def _pass(call: Callable[..., Tensor], inputs: list[Tensor], direction: str) -> Callable[[], None]:
    q, k, v, dout = inputs
    if direction == "forward":

        def forward() -> None:
            with torch.no_grad():
                call(q, k, v)

        return forward
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def both() -> None:
        with torch.enable_grad():
            torch.autograd.grad(call(*leaves), leaves, dout)

    return both


def _synchronise() -> None:
    _wait_for_device()
    dist.barrier()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _largest(milliseconds: float) -> float:
    """The largest of all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.tensor(milliseconds, dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)
