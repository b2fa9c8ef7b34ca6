"""``python -m flashtile.as_flash_attn script.py args...`` runs a script that was written for
flash_attn, unchanged.

``-m module args...`` runs a module, as Python's own ``-m`` does. Before either, `--force` replaces
an installed flash-attn, too, and `--only` and `--version` choose what to provide, as the arguments
of `flashtile.integrations.flash_attn.install`.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from .cli.flash_attn import add_choice, chosen
from .integrations import flash_attn


def main(arguments: list[str]) -> None:
    """Run the script or module that the arguments name; it gets the other arguments as
    ``sys.argv``.
    """
    parser = argparse.ArgumentParser("python -m flashtile.as_flash_attn")
    parser.add_argument("--force", action="store_true", help="replace an installed flash-attn")
    add_choice(parser)
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module")
    parser.add_argument("program", help="script.py, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    arguments, is_module = [options.program, *options.args], options.is_module
    with flash_attn.install(options.force, **chosen(options)):
        sys.argv = arguments
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            return
        sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as Python does for a script
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
