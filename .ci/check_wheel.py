"""Check the wheel in a folder: what it holds, what it requires, where its description links to."""

from __future__ import annotations

import re
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

WANTED = ("flashtile/__init__.py", "flashtile/__init__.pyi", "flashtile/py.typed")
MOST_BYTES = 1_000_000


def complaints(path: Path) -> list[str]:
    """What is wrong with the wheel at `path`."""
    found = []
    with ZipFile(path) as wheel:
        names = wheel.namelist()
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    tops = {name.split("/")[0] for name in names}
    if tops != {"flashtile", "flashtile_command.py", info}:
        found.append(f"it holds {sorted(tops)}, want flashtile and its command")
    licence = f"{info}/licenses/LICENSE"
    found += [f"it lacks {name}" for name in (*WANTED, licence) if name not in names]
    others = [name for name in names if name.startswith("flashtile/") and _is_foreign(name)]
    found += [f"it holds {name}" for name in others]
    required = [x for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x]
    if [re.match(r"[\w-]+", x)[0] for x in required] != ["torch"]:
        found.append(f"it requires {required}, want torch alone")
    text = metadata.get_payload()
    found += [f"the description links to {x}" for x in re.findall(r"\]\((?!https?:)[^)]+\)", text)]
    if re.search(r'src(?:set)?="(?!https:)', text) or len(text) < 1000:
        found.append("the description has a relative picture, or is empty")
    if path.stat().st_size > MOST_BYTES:
        found.append(f"it has {path.stat().st_size:,} bytes, want at most {MOST_BYTES:,}")
    return found


def _is_foreign(name: str) -> bool:
    return not name.endswith((".py", ".pyi", "py.typed", ".json"))


def main() -> int:
    wheels = list(Path(sys.argv[1]).glob("*.whl"))
    if len(wheels) != 1:
        print(f"there are {len(wheels)} wheels in {sys.argv[1]}, want one")
        return 1
    found = complaints(wheels[0])
    print(
        "\n".join(found) or f"{wheels[0].name}: {wheels[0].stat().st_size:,} bytes, as it should be"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
