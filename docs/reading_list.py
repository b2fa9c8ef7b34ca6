"""The files that a reader of one file needs: itself and what it imports within its backend.

``python docs/reading_list.py flashtile/backends/hopper/forward/kernel.py`` prints them.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def imported(path: Path, root: Path) -> list[Path]:
    """The modules below `root` that a file imports by relative imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            candidates = [folder.with_suffix(".py"), *(folder / f"{n.name}.py" for n in node.names)]
            found += [file for file in candidates if file.is_file() and root in file.parents]
    return found


def reading_list(start: Path, root: Path) -> list[Path]:
    """`start`, then what it imports, then what those import; each file once."""
    files = [start]
    for path in files:
        files += [file for file in dict.fromkeys(imported(path, root)) if file not in files]
    return files


if __name__ == "__main__":
    start = Path(sys.argv[1])
    print(*reading_list(start, start.parents[1]), sep="\n")
