"""The files of tiles that `flashtile tune` has measured: one for each name of a GPU.

A file is used only on GPUs of its name, because those of one architecture differ in the numbers
that decide which tile is fastest: multiprocessors, memory and clocks of an H100 and an H200, of an
A10 and an RTX 3090. Machines of a cluster that share a folder each find their own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from ..lru import memoised


class Tuned(NamedTuple):
    """What a file says."""

    path: Path
    device: str  # PyTorch's name of the GPU that it was measured on
    capability: tuple[int, int]
    tiles: dict[str, list[int]]  # {kind, head dim and pass: tile}


def folder() -> Path:
    """The folder that `flashtile tune` writes to: FLASHTILE_CACHE, or the user's cache folder."""
    chosen = os.environ.get("FLASHTILE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flashtile"


@memoised(1)
def files() -> tuple[Tuned, ...]:
    """All files in `folder`."""
    return tuple(read(path) for path in sorted(folder().glob("*.json")))


def read(path: Path) -> Tuned:
    """One file.

    Raises:
        ValueError: it is damaged, or of a version that did not tell GPUs of an architecture apart.
    """
    try:
        found = json.loads(path.read_text())
        major, minor = found["capability"]
        tiles = {name: [*map(int, tile)] for name, tile in found["tiles"].items()}
        if any(len(tile) != 4 or min(tile) < 1 for tile in tiles.values()):
            raise ValueError("a tile is not four positive numbers")
        return Tuned(path, found["device"], (major, minor), tiles)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is no file of this version's `flashtile tune` ({error!r}): delete it"
        ) from error
