"""Every option of every command has a help line, and one that takes a value gives its default."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from examples.demo import __main__ as demo
from flashtile_command import COMMANDS as FLASHTILE

COMMANDS = {
    **{
        f"flashtile {name}": import_module(f"flashtile.cli.{name.replace('-', '_')}").add_arguments
        for name in FLASHTILE
    },
    "python -m benchmarks": benchmarks.add_arguments,
    "python -m examples.demo": demo.add_arguments,
}

# Names that a flag once had in one of the commands, and its name in all of them.
OTHER_NAMES = {
    "--head-dims": "--head-dim",
    "--dtypes": "--dtype",
    "--passes": "--pass",
    "--direction": "--pass",
    "--length": "--seq-len",
    "--batch": "--batch-size",
    "--batches": "--batch-size",
    "--out": "--output",
    "--ms": "--budget-ms",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_described(command: str) -> None:
    assert undescribed(COMMANDS[command]) == []


def test_the_check_finds_what_is_missing() -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--silent", action="store_true")
        parser.add_argument("--flag", action="store_true", help="a flag")
        parser.add_argument("--length", type=int, help="in tokens")
        parser.add_argument("--width", type=int, default=3, help="in elements (default: 3)")
        parser.add_argument("--dims", nargs="+", default=[4, 8], help="(default: 4)")

    assert undescribed(add_arguments) == ["--silent", "--length", "--dims"]


@pytest.mark.parametrize("other", OTHER_NAMES)
def test_a_flag_has_one_name_everywhere(other: str) -> None:
    root = Path(__file__).resolve().parents[1]
    named = [
        str(path.relative_to(root))
        for folder in ("flashtile", "benchmarks", "examples", "training")
        for path in sorted((root / folder).rglob("*.py"))
        if f'"{other}"' in path.read_text(encoding="utf-8")
    ]
    assert named == [], f"want {OTHER_NAMES[other]}"


def undescribed(add_arguments: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """The options without a help line, or without the default that they have."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    formatter = parser._get_formatter()
    return [
        (action.option_strings or [action.dest])[-1]
        for action in parser._actions
        if not _is_described(action, formatter)
    ]


def _is_described(action: argparse.Action, formatter: argparse.HelpFormatter) -> bool:
    if not action.help:
        return False
    text = formatter._expand_help(action)
    if action.nargs == 0 or (action.required and action.default is None):
        return True
    default = action.default if isinstance(action.default, (list, tuple)) else [action.default]
    given = " ".join(map(str, default)) if action.default is not None else ""
    return "(default" in text and given in text
