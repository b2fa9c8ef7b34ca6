"""Say whether this commit can be released, and print the commands that its owner runs.

    python .ci/release.py DIST

DIST is the folder with the wheel and the source archive. Nothing is published here.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import address

REPOSITORY = address.REPOSITORY


def version(root: Path = REPOSITORY) -> str:
    """The version of the package."""
    text = (root / "flashtile" / "__init__.py").read_text("utf-8")
    return re.search(r'^__version__ = "(.*)"', text, re.M)[1]


def date(root: Path = REPOSITORY) -> str:
    """The date of the newest section of the changelog, which has to be that of the version.

    Raises:
        ValueError: it is another section, or it has no date.
    """
    newest = re.search(r"^## .*", (root / "CHANGELOG.md").read_text("utf-8"), re.M)[0]
    dated = re.fullmatch(rf"## \[{re.escape(version(root))}\] - (\d{{4}}-\d\d-\d\d)", newest)
    if dated is None:
        raise ValueError(
            f"CHANGELOG.md: the first section is {newest!r}, want '## [{version(root)}] - DATE'"
        )
    return dated[1]


def disagreements(root: Path = REPOSITORY) -> list[str]:
    """The places that give another version, date or address than the package and its changelog."""
    try:
        released = date(root)
    except ValueError as error:
        return [str(error)]
    lines = {
        "CITATION.cff": (f"version: {version(root)}", f"date-released: {released}"),
        "README.md": (f"  version = {{{version(root)}}},", f"  year    = {{{released[:4]}}},"),
    }
    return [
        f"{file}: lacks the line {line.strip()!r}"
        for file, wanted in lines.items()
        for line in wanted
        if line not in (root / file).read_text("utf-8").splitlines()
    ] + address.half_filled(root)


def obstacles() -> list[str]:
    """Why this copy cannot be released now."""
    found = disagreements()
    if not address.current():
        found.append("no address: make address ADDRESS=https://github.com/OWNER/NAME, then commit")
    if not found and date() != (today := str(datetime.date.today())):
        found.append(f"CHANGELOG.md and CITATION.cff give {date()} as the date, want {today}")
    if _git("status", "--porcelain"):
        found.append("there are changes that are not committed")
    if _git("tag", "--list", f"v{version()}"):
        found.append(f"the tag v{version()} exists")
    return found


def commands(folder: Path) -> str:
    """What the owner runs, in this order."""
    number, where = version(), address.current()
    files = " ".join(str(path) for path in sorted(folder.glob(f"flashtile-{number}*")))
    return f"""\
git tag -a v{number} -m "flashtile {number}"
git push {where}.git HEAD:main v{number}
# When {where}/actions is green, try the upload on the test index, then publish:
python -m twine upload --repository testpypi {files}
pip install --index-url https://test.pypi.org/simple/ --no-deps flashtile=={number}
python -m twine upload {files}
gh release create v{number} {files} --repo {where} --notes-file CHANGELOG.md
"""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    if found := obstacles():
        sys.exit("not ready:\n" + "\n".join(f"- {line}" for line in found))
    print(f"flashtile {version()} of {date()} is ready. The owner runs:\n")
    print(commands(Path(sys.argv[1])), end="")
