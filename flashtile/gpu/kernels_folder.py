"""The folder `FLASHTILE_KERNELS`, with kernels that were compiled elsewhere.

`flashtile warmup --target` fills it as Triton's cache. It may then be moved and be read-only, which
Triton's cache may not: it names its files by their absolute paths, and Triton writes to it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from triton import knobs

from ..lru import memoised


@memoised(1)
def read_kernels_folder() -> None:
    """Copy the kernels that Triton's cache lacks into it, once in a process.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    named = os.environ.get("FLASHTILE_KERNELS")
    if not named:
        return
    if not Path(named).is_dir():
        raise FileNotFoundError(f"FLASHTILE_KERNELS: got {named!r}, want a folder")
    cache = Path(knobs.cache.dir)
    cache.mkdir(parents=True, exist_ok=True)
    for kernel in Path(named).iterdir():
        place = cache / kernel.name
        if kernel.is_dir() and not place.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                made = shutil.copytree(kernel, Path(folder, kernel.name))
                for group in made.glob("__grp__*"):
                    names = json.loads(group.read_text())["child_paths"]
                    moved = {name: str(place / name) for name in names}
                    group.write_text(json.dumps({"child_paths": moved}))
                with suppress(OSError):  # another process or thread was faster
                    made.rename(place)
