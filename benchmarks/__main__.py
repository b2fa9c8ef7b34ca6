"""``python -m benchmarks``: time, memory and error of attention on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from textwrap import fill

import torch

from flashtile.cli.machine import busy, missing_device, provenance

from . import small_calls, targets
from .ahead import compile_ahead
from .context import run as context
from .markdown import page
from .measure import default_device
from .peers import FAILED, PEERS
from .plots import draw
from .presets import PRESETS, SEED, preset_cases
from .report import plain_table, print_table, show
from .rows import (
    Provenance,
    Row,
    append_csv,
    read_folder,
    recorded,
    start_csv,
    write_csv,
    write_json,
)
from .run import Settings, measure_case, with_progress
from .shapes import VARIANTS, Case, vary

CPU_TARGETS = {"cpu-targets": targets, "cpu-small": small_calls}  # each alternates with PyTorch
CONTEXT = "context"  # under torchrun
DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
DEFAULT_PEERS = {
    "cpu": ("flashtile", "sdpa-flash", "sdpa-math", "standard"),
    "cuda": ("flashtile", "fa2", "cudnn", "sdpa-efficient", "sdpa-math", "fa3", "fa4"),
}
PASSES = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
    "step": ("both",),
    "all": ("forward", "backward", "both"),
}
CAUSAL = {"true": (True,), "false": (False,), "both": (False, True)}
LENGTHS, HEAD_DIMS, NUM_HEADS = (1024, 2048, 4096), (64,), (8,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run with `argv` (by default the command line); returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure attention on this machine: time, memory, error.",
    )
    add_arguments(parser)
    return run(parser.parse_args(argv, argparse.Namespace(command_line=argv)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags; those that take several values measure every combination."""
    drawn = [name for name, preset in PRESETS.items() if preset.draws]
    parser.add_argument(
        "--preset",
        choices=[*CPU_TARGETS, CONTEXT, *PRESETS],
        metavar="NAME",
        help="a predefined measurement, listed below (default: none, the flags describe it); "
        "--seq-len, --head-dim, --use-causal, --dtype, --cases and --part keep a part of its "
        "cases, so that a long one can be split into several commands",
    )
    parser.add_argument(
        "--seed",
        type=_positive,
        metavar="N",
        help=f"seed that draws the cases of {', '.join(drawn)} (default: {SEED})",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        type=_positive,
        metavar="N",
        help="numbers of cases of the preset, as in the column index (default: all)",
    )
    parser.add_argument(
        "--part",
        type=_part,
        default="1/1",
        metavar="I/N",
        help="every N-th case from the I-th on, such as 2/3 (default: 1/1, which is all)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="measure nothing; make a page and pictures of its CSV files (default: measure)",
    )
    _add_shapes(parser.add_argument_group("what to measure"))
    _add_settings(parser.add_argument_group("libraries, device and duration"))
    _add_files(parser.add_argument_group("results"))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of these lists
    parser.epilog = _names()


def _add_shapes(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--functions",
        nargs="+",
        choices=VARIANTS,
        metavar="NAME",
        help="kinds of attention, listed below (default: dense)",
    )
    for name, meaning in (
        ("--seq-len", "lengths of queries and keys, in tokens (default: 1024 2048 4096)"),
        ("--batch-size", "sequences of a call (default: 1)"),
        ("--num-heads", "query heads (default: 8)"),
        ("--head-dim", "sizes of a head, in elements (default: 64)"),
    ):
        what.add_argument(name, nargs="+", type=_positive, metavar="N", help=meaning)
    what.add_argument(
        "--num-heads-kv",
        type=_positive,
        metavar="N",
        help="key and value heads (default: as many as --num-heads)",
    )
    what.add_argument(
        "--use-causal",
        nargs="?",
        const="true",
        choices=CAUSAL,
        help="whether a causal mask is on; without a value: true (default: false)",
    )
    what.add_argument(
        "--dtype",
        nargs="+",
        type=_dtype,
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)} (default: fp32 on a CPU, bf16 on a GPU)",
    )
    what.add_argument(
        "--pass",
        dest="passes",
        choices=PASSES,
        help="both: forward and backward apart; step: the two as one call; all: all three "
        "(default: forward)",
    )


def _add_settings(how: argparse._ArgumentGroup) -> None:
    usual = "; ".join(f"{device}: {' '.join(names)}" for device, names in DEFAULT_PEERS.items())
    how.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        metavar="NAME",
        help=f"libraries, listed below (default on {usual})",
    )
    how.add_argument(
        "--ahead",
        type=_positive,
        metavar="N",
        help="processes that first run all cases once, to compile the kernels (default: none)",
    )
    how.add_argument("--device", help="cpu or cuda:N (default: a GPU if there is one)")
    how.add_argument(
        "--seconds",
        type=float,
        help=f"seconds of timing, for each peer and pass (default: {Settings.seconds})",
    )
    how.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    how.add_argument("--no-accuracy", action="store_true", help="do not compare with float64")
    how.add_argument("--host", action="store_true", help="also measure the host's time of a call")
    how.add_argument("--cuda-graph", action="store_true", help="time the forward as a CUDA graph")


def _add_files(out: argparse._ArgumentGroup) -> None:
    for name, metavar, meaning in (
        ("--csv", "FILE", "CSV file, written case by case"),
        ("--json", "FILE", "JSON file, written at the end"),
        ("--output", "DIR", "folder for CSV, JSON and pictures"),
    ):
        out.add_argument(name, type=Path, metavar=metavar, help=f"{meaning} (default: none)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 0 if something was measured and no call of flashtile failed."""
    if args.report:
        return _report(args.report)
    for name in ("functions", "batch_size", "num_heads", "num_heads_kv"):
        if args.preset and getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            print(f"{flag}: the cases of --preset {args.preset} have their own", file=sys.stderr)
            return 2
    if args.preset == CONTEXT:
        return context.run(args)
    groups = args.num_heads_kv or 1
    if any(heads % groups for heads in args.num_heads or NUM_HEADS):
        print(f"--num-heads-kv {groups} does not divide every one of --num-heads", file=sys.stderr)
        return 2
    draws = args.preset in PRESETS and PRESETS[args.preset].draws
    if args.seed and not draws:
        print(f"--seed {args.seed}: nothing here is drawn", file=sys.stderr)
        return 2
    if args.cases and args.preset not in PRESETS:
        print("--cases needs a preset with numbered cases", file=sys.stderr)
        return 2
    if args.preset in CPU_TARGETS:
        args.device = "cpu"
    device = args.device or default_device()
    if args.preset in PRESETS and device == "cpu" and not args.device:
        print(f"--preset {args.preset} wants a GPU; --device cpu insists", file=sys.stderr)
        return 2
    if missing := missing_device(device):
        print(f"--device {device}: {missing}", file=sys.stderr)
        return 2
    origin = provenance(device, recorded(["python", "-m", "benchmarks"], args.command_line))
    print(f"{origin['device']}, torch {origin['torch']}")
    if warning := busy():
        print(warning)
    if args.preset in CPU_TARGETS:
        return _run_targets(args, origin)
    grid = cases(args, device)
    if not grid:
        print("these flags leave no case", file=sys.stderr)
        return 2
    if draws:
        print(f"{len(grid)} of the cases that --seed {grid[0].seed} draws")
    settings = _settings(args, device)
    if args.ahead:
        took = compile_ahead(grid, settings, args.ahead)
        print(f"compiled ahead in {took:.0f} s", flush=True)
    rows = list(_measured(args, with_progress(grid), settings, origin))
    show(rows)
    if args.output:
        _draw(args.output, rows, origin)
    for path in _files(args, args.json, "json"):
        write_json(path, rows, origin)
        print(f"wrote {path}")
    broken = any(row.skipped.startswith(FAILED) for row in rows)
    return 0 if any(not row.skipped for row in rows) and not broken else 1


def _measured(
    args: argparse.Namespace, grid: Iterable[Case], settings: Settings, origin: Provenance
) -> Iterator[Row]:
    """The rows of all cases; each is written to its file at once."""
    paths = _files(args, args.csv, "csv")
    for path in paths:
        start_csv(path, origin)
    for case in grid:
        rows = measure_case(case, settings)
        for path in paths:
            append_csv(path, rows, origin)
        yield from rows
    for path in paths:
        print(f"wrote {path}")


def _files(args: argparse.Namespace, file: Path | None, suffix: str) -> list[Path]:
    """The CSV files to write: the one of --csv, and one in the folder of --output."""
    inside = args.output and args.output / f"{args.preset or 'results'}.{suffix}"
    return [path for path in (file, inside) if path]


def _run_targets(args: argparse.Namespace, origin: Provenance) -> int:
    """The targets of a preset of `CPU_TARGETS`, with a line for each job."""
    group = CPU_TARGETS[args.preset]
    outcomes = [o for base in with_progress(group.cases()) for o in group.measure(base)]
    headings, lines = group.summary(outcomes)
    print_table(headings, lines)
    print(f"{sum(o.met for o in outcomes)} of {len(outcomes)} times within their limit")
    rows = [*targets.native_rows(outcomes), *(outcome.row for outcome in outcomes)]
    for path in _files(args, args.csv, "csv"):
        write_csv(path, rows, origin)
        print(f"wrote {path}")
    for path in _files(args, args.json, "json"):
        write_json(path, rows, origin)
        print(f"wrote {path}")
    if args.output:
        (args.output / f"{args.preset}.txt").write_text(plain_table(headings, lines) + "\n")
    return 0


def _report(folder: Path) -> int:
    """A page and pictures of all the CSV files in a folder, written beside them."""
    rows, origin = read_folder(folder)
    if not rows:
        print(f"no CSV file of python -m benchmarks in {folder}", file=sys.stderr)
        return 2
    pictures = [path.name for path in _draw(folder, rows, origin)]
    path = folder / "report.md"
    path.write_text(page(rows, origin, pictures))
    print(f"wrote {path}")
    return 0


def _draw(folder: Path, rows: list[Row], origin: Provenance) -> list[Path]:
    """Draw the pictures if matplotlib is installed."""
    try:
        pictures = draw(folder, rows, origin)
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install -e '.[bench]')")
        return []
    for path in pictures:
        print(f"wrote {path}")
    return pictures


def _settings(args: argparse.Namespace, device: str) -> Settings:
    """The preset's settings or the defaults, with the changes of the flags."""
    usual = Settings(peers=DEFAULT_PEERS[torch.device(device).type])
    settings = PRESETS[args.preset].settings if args.preset else usual
    return replace(
        settings,
        device=device,
        peers=tuple(args.peers or settings.peers),
        directions=PASSES[args.passes] if args.passes else settings.directions,
        seconds=settings.seconds if args.seconds is None else args.seconds,
        memory=settings.memory and not args.no_memory,
        accuracy=settings.accuracy and not args.no_accuracy,
        host=settings.host or args.host,
        cuda_graph=settings.cuda_graph or args.cuda_graph,
    )


def cases(args: argparse.Namespace, device: str) -> list[Case]:
    """Every combination of the flags, or the cases of the preset that the flags select; of these
    the part that --part names."""
    first, step = args.part
    if args.preset:
        found = preset_cases(args.preset, args.seed or SEED)
        return [case for case in found if _is_asked_for(case, args)][first - 1 :: step]
    return _combinations(args, device)[first - 1 :: step]


def _combinations(args: argparse.Namespace, device: str) -> list[Case]:
    dtypes = args.dtype or ["float32" if torch.device(device).type == "cpu" else "bfloat16"]
    grid = product(
        args.functions or ["dense"],
        dtypes,
        args.head_dim or HEAD_DIMS,
        args.num_heads or NUM_HEADS,
        args.batch_size or [1],
        CAUSAL[args.use_causal or "false"],
        args.seq_len or LENGTHS,
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


def _is_asked_for(case: Case, args: argparse.Namespace) -> bool:
    return (
        case.head_dim in (args.head_dim or [case.head_dim])
        and case.seqlen_k in (args.seq_len or [case.seqlen_k])
        and case.causal in CAUSAL[args.use_causal or "both"]
        and case.dtype in (args.dtype or [case.dtype])
        and case.index in (args.cases or [case.index])
    )


def _names() -> str:
    """The values of the flags that have many."""
    return "\n".join(
        [
            fill(f"functions: {', '.join(VARIANTS)}", subsequent_indent="  "),
            fill(f"peers: {', '.join(PEERS)}", subsequent_indent="  "),
            "presets:",
            *(f"  {name:<20} {preset.about}" for name, preset in PRESETS.items()),
            f"  {CONTEXT:<20} attention over the processes of torchrun, against one process",
        ]
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, want an integer of at least 1")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    """Which one of how many parts.

    >>> _part("2/3")
    (2, 3)
    """
    part, slash, parts = text.partition("/")
    if not slash or _positive(part) > _positive(parts):
        raise argparse.ArgumentTypeError(f"got {text}, want a part such as 1/3")
    return int(part), int(parts)


def _dtype(text: str) -> str:
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"got {text}, want one of {', '.join(DTYPES)}")
    return name


if __name__ == "__main__":
    sys.exit(main())
