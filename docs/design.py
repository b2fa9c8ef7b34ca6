"""The line numbers and the counts of DESIGN.md: `python docs/design.py` corrects and prints them;
with `--check` it only says whether the line numbers are current.

A reference is written as `path:line` (`text`). Its line is the one that defines `text`, or the only
one that contains it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "DESIGN.md"
REFERENCE = re.compile(r"`(?P<path>[\w/.]+\.py):(?P<line>\d+)` \(`(?P<text>[^`]+)`\)")
COUNT = re.compile(r"^\| (?P<what>[^|]+) \| (?P<most>\d+) \| `(?P<command>.+)` \|$", re.M)


def line_of(path: str, text: str) -> int:
    """The line number of a reference.

    Raises:
        ValueError: the file does not define `text`, and not exactly one line contains it.
    """
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    definition = re.compile(rf"\s*(def|class) {re.escape(text)}\b|{re.escape(text)}( =|:)")
    found = [number for number, line in enumerate(lines, start=1) if definition.match(line)]
    found = found or [number for number, line in enumerate(lines, start=1) if text in line]
    if len(found) != 1:
        raise ValueError(f"{path}: {len(found)} lines for {text!r}, want one")
    return found[0]


def corrected(page: str) -> str:
    """The page with current line numbers."""

    def update(old: re.Match[str]) -> str:
        return f"`{old['path']}:{line_of(old['path'], old['text'])}` (`{old['text']}`)"

    return REFERENCE.sub(update, page)


def counts(page: str) -> list[tuple[str, int, int]]:
    """What is counted, how many there may be, and how many its command counts now."""
    rows = COUNT.findall(page)
    return [(what, int(most), int(_output(command))) for what, most, command in rows]


def _output(command: str) -> str:
    """What a command prints; in a table, | is written \\|."""
    command = command.replace("\\|", "|")
    # `python` is this one, and imports this copy of the package.
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    found_first = {
        name: f"{path}{os.pathsep}{os.environ.get(name, '')}" for name, path in paths.items()
    }
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env=os.environ | found_first,
        check=True,
        capture_output=True,
        text=True,
    )
    return run.stdout


def main(arguments: list[str]) -> str | None:
    """Correct the page and print the counts; with `--check`, only return what is wrong."""
    given = PAGE.read_text(encoding="utf-8")
    page = corrected(given)
    if "--check" in arguments:
        return None if page == given else f"{PAGE.name}: run `python docs/design.py`"
    PAGE.write_text(page, encoding="utf-8")
    for what, most, count in counts(page):
        print(f"{what}: {count} (at most {most})")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
