"""The command ``flashtile``.

It stands beside the package, because importing the package imports PyTorch, which takes seconds,
and neither its help nor its version needs that.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# Each command is a module of flashtile/cli (with _ for -) with `add_arguments(parser)` and
# `run(args) -> int`. Only the requested command is imported.
COMMANDS = {
    "info": "show versions, devices, and which backends work here or why they do not",
    "check": "compare flashtile's results with float64 on this machine, and write a report",
    "tune": "measure tile sizes of the Triton backend on this GPU and keep the fastest",
    "warmup": "compile the GPU kernels before the first call that needs them",
    "flash-attn": "let every process of this environment import flashtile as flash_attn",
    "xformers": "let every process of this environment import flashtile as xformers",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``flashtile`` with `argv` (by default the command line) and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in COMMANDS:
        return run_command(argv[0], argv[1:])
    parser = argparse.ArgumentParser(
        prog="flashtile", description="Inspect, check and tune flashtile."
    )
    parser.add_argument("-V", "--version", action="version", version=f"flashtile {version()}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    parser.parse_args(argv)
    parser.print_help()
    return 0


def run_command(name: str, argv: Sequence[str]) -> int:
    """Run one command with its own flags."""
    module = import_module(f"flashtile.cli.{name.replace('-', '_')}")
    summary = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"flashtile {name}", description=f"{summary[0].upper()}{summary[1:]}."
    )
    module.add_arguments(parser)
    return module.run(parser.parse_args(argv))


def version() -> str:
    """The package's ``__version__``, read from its source."""
    spec = find_spec("flashtile")
    assert spec and spec.origin
    found = re.search(r'^__version__ = "(.*)"', Path(spec.origin).read_text("utf-8"), re.M)
    assert found
    return found[1]
