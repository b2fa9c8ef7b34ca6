"""``flashtile bench``: time, memory and error of attention on this machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from itertools import product
from pathlib import Path

import torch

from ..bench import targets
from ..bench.machine import busy, provenance
from ..bench.peers import PEERS
from ..bench.plots import draw
from ..bench.report import (
    Provenance,
    Row,
    plain_table,
    print_table,
    show,
    write_csv,
    write_json,
)
from ..bench.run import Settings, measure_case, with_progress
from ..bench.shapes import VARIANTS, Case, vary

DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
DEFAULT_PEERS = {
    "cpu": ("flashtile", "sdpa-flash", "sdpa-math", "standard"),
    "cuda": ("flashtile", "sdpa-flash", "sdpa-cudnn", "fa2", "fa3", "fa4"),
}
PASSES = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}
CAUSAL = {"true": (True,), "false": (False,), "both": (False, True)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags; those that take several values measure every combination."""
    parser.add_argument(
        "--preset", choices=["cpu-targets"], help="measure the project's targets instead"
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--functions", nargs="+", choices=VARIANTS, default=["dense"], metavar="NAME")
    what.add_argument(
        "--seq-len", nargs="+", type=_positive, metavar="N", default=[1024, 2048, 4096]
    )
    what.add_argument("--batch-size", nargs="+", type=_positive, metavar="N", default=[1])
    what.add_argument("--num-heads", nargs="+", type=_positive, metavar="N", default=[8])
    what.add_argument(
        "--num-heads-kv", type=_positive, metavar="N", help="by default as --num-heads"
    )
    what.add_argument("--head-dim", nargs="+", type=_positive, metavar="N", default=[64])
    what.add_argument("--use-causal", nargs="?", const="true", default="false", choices=CAUSAL)
    what.add_argument("--dtype", nargs="+", type=_dtype, metavar="DTYPE")
    what.add_argument("--pass", dest="passes", choices=PASSES, default="forward")
    who = parser.add_argument_group("who, where and how long")
    who.add_argument("--peers", nargs="+", choices=PEERS, metavar="NAME")
    who.add_argument("--device", help="cpu or cuda:N; by default a GPU if there is one")
    who.add_argument("--seconds", type=float, default=0.5, help="of timing, each peer and pass")
    who.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    who.add_argument("--no-accuracy", action="store_true", help="do not compare with float64")
    who.add_argument("--cuda-graph", action="store_true", help="time the forward as a CUDA graph")
    out = parser.add_argument_group("results")
    out.add_argument("--csv", type=Path, metavar="FILE")
    out.add_argument("--json", type=Path, metavar="FILE")
    out.add_argument("--output", type=Path, metavar="DIR", help="CSV, JSON and pictures, in here")
    parser.epilog = f"functions: {', '.join(VARIANTS)}. peers: {', '.join(PEERS)}."


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 0 when something was measured."""
    groups = args.num_heads_kv or 1
    if any(heads % groups for heads in args.num_heads):
        print(f"--num-heads-kv {groups} does not divide every one of --num-heads", file=sys.stderr)
        return 2
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.preset:
        device = "cpu"
    origin = provenance(device, "flashtile " + shlex.join(args.command_line))
    print(f"{origin['device']}, torch {origin['torch']}")
    if warning := busy():
        print(warning)
    if args.preset:
        outcomes = [o for base in with_progress(targets.cases()) for o in targets.measure(base)]
        headings, lines = targets.summary(outcomes)
        print_table(headings, lines)
        met = sum(outcome.met for outcome in outcomes)
        print(f"{met} of {len(outcomes)} times within their limit")
        rows = [*targets.native_rows(outcomes), *(outcome.row for outcome in outcomes)]
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
            (args.output / "cpu-targets.txt").write_text(plain_table(headings, lines) + "\n")
    else:
        settings = _settings(args, device)
        grid = with_progress(cases(args, device))
        rows = [row for case in grid for row in measure_case(case, settings)]
        show(rows)
    _write(args, rows, origin)
    return 0 if any(not row.skipped for row in rows) else 1


def _settings(args: argparse.Namespace, device: str) -> Settings:
    return Settings(
        device=device,
        peers=tuple(args.peers or DEFAULT_PEERS[torch.device(device).type]),
        directions=PASSES[args.passes],
        seconds=args.seconds,
        memory=not args.no_memory,
        accuracy=not args.no_accuracy,
        cuda_graph=args.cuda_graph,
    )


def cases(args: argparse.Namespace, device: str) -> list[Case]:
    """Every combination of the flags."""
    dtypes = args.dtype or ["float32" if torch.device(device).type == "cpu" else "bfloat16"]
    grid = product(
        args.functions,
        dtypes,
        args.head_dim,
        args.num_heads,
        args.batch_size,
        CAUSAL[args.use_causal],
        args.seq_len,
    )
    return [
        vary(
            Case(
                dtype=dtype,
                head_dim=head_dim,
                head_dim_v=head_dim,
                heads_q=heads,
                heads_kv=args.num_heads_kv or heads,
                batch=batch,
                causal=causal,
                seqlen_q=length,
                seqlen_k=length,
            ),
            function,
        )
        for function, dtype, head_dim, heads, batch, causal, length in grid
    ]


def _write(args: argparse.Namespace, rows: list[Row], origin: Provenance) -> None:
    """Every file that was asked for."""
    name = args.preset or "results"
    for path in filter(None, (args.csv, args.output and args.output / f"{name}.csv")):
        write_csv(path, rows, origin)
        print(f"wrote {path}")
    for path in filter(None, (args.json, args.output and args.output / f"{name}.json")):
        write_json(path, rows, origin)
        print(f"wrote {path}")
    if args.output and not args.preset:
        try:
            pictures = draw(args.output, rows, origin)
        except ImportError:
            print("no pictures: matplotlib is not installed (pip install 'flashtile[bench]')")
            return
        for path in pictures:
            print(f"wrote {path}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, want at least 1")
    return number


def _dtype(text: str) -> str:
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"got {text}, want one of {', '.join(DTYPES)}")
    return name
