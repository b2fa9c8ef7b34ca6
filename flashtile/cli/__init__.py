"""The commands: a module each, which `flashtile_command` finds by its name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def integer(
    parser: argparse.ArgumentParser, name: str, default: int | Sequence[int], meaning: str
) -> None:
    """Add an option that takes an integer, or several if its default is several."""
    several = not isinstance(default, int)
    shown = " ".join(map(str, default)) if isinstance(default, Sequence) else default
    parser.add_argument(
        name,
        type=int,
        nargs="+" if several else None,
        default=default,
        metavar="N",
        help=f"{meaning} (default: {shown})",
    )
