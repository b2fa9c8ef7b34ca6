"""Inspect, check and tune flashtile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# Each command is a module of this folder (with _ for -) with `add_arguments(parser)` and
# `run(args) -> int`. Only the requested command is imported, because imports take seconds.
COMMANDS = {
    "info": "show versions, devices, and which backends work here or why they do not",
    "check": "compare flashtile's results with float64 on this machine, and write a report",
    "tune": "measure tile sizes of the Triton backend on this GPU and keep the fastest",
    "warmup": "compile the GPU kernels before the first call that needs them",
    "flash-attn": "let every process of this environment import flashtile as flash_attn",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``flashtile`` with `argv` (by default the command line) and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="flashtile", description=__doc__)
    parser.add_argument(
        "-V", "--version", action=_Version, nargs=0, help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    first_word = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=description)
        if name == first_word:
            module = import_module(f".{name.replace('-', '_')}", __name__)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(argv, argparse.Namespace(command_line=argv))
    if args.command is None:
        parser.print_help()
        return 0
    return args.run(args)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        from .. import __version__

        print(f"flashtile {__version__}")
        parser.exit()
