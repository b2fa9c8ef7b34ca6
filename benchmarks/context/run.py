"""Measure the preset on all ranks that torchrun started."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from flashtile.cli.machine import busy, provenance

from ..measure import default_device
from ..report import print_table
from ..rows import recorded
from .case import measured
from .cases import cases
from .memory import memory_rows
from .plot import draw
from .rows import ContextRow, write
from .together import Stuck, Team

HEADINGS = ["case", "pass", "peer", "alone, ms", "in a row, ms", "host, ms", "efficiency"]
HEADINGS += ["error", "MiB"]


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 prints each row, and writes all rows after each case. 2 if torchrun did not
    start this process or a case does not exist, 1 if a GPU hung, which ends the run."""
    if "RANK" not in os.environ:
        command = "torchrun --nproc-per-node 2 -m benchmarks --preset context"
        print(f"--preset context: got one process, want several: {command}", file=sys.stderr)
        return 2
    device = args.device or default_device()
    every = cases(device)
    numbers = args.cases or range(1, len(every) + 2)
    if any(number > len(every) + 1 for number in numbers):
        print(f"--cases: --preset context has {len(every) + 1} cases", file=sys.stderr)
        return 2
    bound = None
    if device == "cuda":
        bound = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(bound)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=bound, timeout=timedelta(minutes=4))
    team = Team.of(device)
    groups = [partial(measured, case, team) for case in every]
    if device == "cuda":  # the peak of a CPU's memory is not known
        groups.append(partial(memory_rows, every[0], team))
    chosen = [groups[number - 1] for number in numbers if number <= len(groups)]
    rows: list[ContextRow] = []
    try:
        for group in chosen:
            for row in _shown(group()):
                rows.append(row)
            _keep(args, rows, device)
    except Stuck as stuck:
        if dist.get_rank() == 0:
            print(f"stopped, since a GPU does not answer: {stuck}", flush=True)
            _keep(args, rows, device)
            print_table(HEADINGS, [_line(row) for row in rows])
        sys.stdout.flush()
        os._exit(1)  # neither NCCL nor the GPU ends otherwise
    if dist.get_rank() == 0:
        _report(args, rows)
    dist.destroy_process_group()
    return 0


def _shown(rows: Iterator[ContextRow]) -> Iterator[ContextRow]:
    """The rows, which rank 0 prints with the seconds since the last one."""
    last = time.monotonic()
    for row in rows:
        if dist.get_rank() == 0:
            now = time.monotonic()
            print(*_line(row), f"+{now - last:.0f} s", sep=" | ", flush=True)
            last = now
        yield row


def _line(row: ContextRow) -> list[str]:
    heads = f"{row.heads_q}:{row.heads_kv}"
    subject = f"{row.variant} {row.dtype}, {heads} x {row.head_dim}, {row.tokens} a rank"
    if row.skipped:
        return [subject, row.direction, row.peer, row.skipped, *[""] * 5]
    return [
        subject,
        row.direction,
        row.peer,
        _number(row.single_ms, ".2f"),
        _number(row.steady_ms, ".2f"),
        _number(row.host_ms, ".2f"),
        f"{_number(row.single_efficiency, '.2f')} / {_number(row.efficiency, '.2f')}",
        _number(row.worst_error_ratio, ".3f"),
        _number(row.peak_mib, ".0f"),
    ]


def _number(x: float | None, form: str) -> str:
    return "-" if x is None else format(x, form)


def _keep(args: argparse.Namespace, rows: list[ContextRow], device: str) -> None:
    """Write what there is so far."""
    if args.output and not args.csv:
        args.csv = args.output / "context.csv"
    if args.csv and dist.get_rank() == 0:
        ranks = dist.get_world_size()
        program = ["torchrun", "--nproc-per-node", str(ranks), "-m", "benchmarks"]
        write(args.csv, rows, provenance(device, recorded(program, args.command_line)))


def _report(args: argparse.Namespace, rows: list[ContextRow]) -> None:
    if warning := busy():
        print(warning)
    print_table(HEADINGS, [_line(row) for row in rows])
    print("efficiency: one process / (ranks x slowest rank), of a call alone / of calls in a row")
    print("error: the largest quotient of an error from float64 and that of one process")
    if args.csv:
        print(f"wrote {args.csv}")
    if args.output and any(row.efficiency for row in rows):
        print(f"wrote {draw(args.csv, args.output / 'context.png')}")
