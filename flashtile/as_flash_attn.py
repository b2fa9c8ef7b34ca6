"""``python -m flashtile.as_flash_attn script.py args...`` runs a script that was written for
flash_attn, unchanged.

``-m module args...`` runs a module, as Python's own ``-m`` does. With `--force` before either,
flashtile also replaces an installed flash-attn.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .integrations import flash_attn

USAGE = "usage: python -m flashtile.as_flash_attn [--force] (script.py | -m module) [args...]"


def main(arguments: list[str]) -> None:
    """Run the script or module that the arguments name; it gets the other arguments as
    ``sys.argv``.
    """
    force = arguments[:1] == ["--force"]
    arguments = arguments[force:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments or (arguments[0].startswith("-") and not is_module):
        sys.exit(USAGE)
    with flash_attn.install(force):
        sys.argv = arguments
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            return
        sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as Python does for a script
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
