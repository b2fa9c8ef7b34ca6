"""Write the address of the repository in every place of it that gives it.

    python .ci/address.py https://github.com/OWNER/NAME  # or none, which takes it out again

`PLACES` has, for each file, the text without an address and the text with one. `pyproject.toml`
says which address is written; a file with another one, or with none, is half filled.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
FORM = re.compile(r"https://github\.com/[\w-]+/(?!.*\.git$)[\w.-]*\w")


class Place(NamedTuple):
    """A file, and its text in both states; ADDRESS stands for the address."""

    file: str
    without: str
    filled: str

    def text(self, address: str) -> str:
        """The text with `address`, or without one if it is empty."""
        if not address:
            return self.without
        raw = address.replace("github.com", "raw.githubusercontent.com")
        return self.filled.replace("RAW", raw).replace("ADDRESS", address)


PLACES = (
    Place(
        "pyproject.toml",
        "[project.urls]\n",
        '[project.urls]\nRepository = "ADDRESS"\nDocumentation = "ADDRESS/tree/main/docs"\n'
        'Changelog = "ADDRESS/blob/main/CHANGELOG.md"\nIssues = "ADDRESS/issues"\n',
    ),
    # The README on the package index, where a relative link or picture leads nowhere.
    Place(
        "pyproject.toml",
        "pattern = '(?s)<picture>.*?</picture>\\n\\n?'\nreplacement = ''\n",
        "pattern = '(src|srcset)=\"(?!https?:)'\nreplacement = '\\1=\"RAW/v$HFPR_VERSION/'\n",
    ),
    Place(
        "pyproject.toml",
        "pattern = '\\[([^\\]]+)\\]\\((?!https?:)[^)]+\\)'\nreplacement = '\\1'\n",
        "pattern = '\\]\\((?!https?:)'\nreplacement = '](ADDRESS/blob/v$HFPR_VERSION/'\n",
    ),
    Place(
        "README.md",
        "# flashtile\n\n",
        "# flashtile\n\n[![ci](ADDRESS/actions/workflows/ci.yml/badge.svg)]"
        "(ADDRESS/actions/workflows/ci.yml)\n\n",
    ),
    Place(
        "README.md",
        "pip install .  # in a copy of this repository; ",
        "pip install git+ADDRESS  # ",
    ),
    Place(
        "README.md",
        "  license = {Apache-2.0}\n",
        "  license = {Apache-2.0},\n  url     = {ADDRESS}\n",
    ),
    Place(
        "docs/install.md",
        "Nothing is published yet. In a copy of the repository:\n\n"
        "```console\n$ pip install .\n```\n",
        "```console\n$ pip install git+ADDRESS\n```\n\n"
        "Tests, examples and the demo are in a copy of the repository:\n\n"
        "```console\n$ git clone ADDRESS flashtile && cd flashtile\n$ pip install .\n```\n",
    ),
    Place(
        "CITATION.cff",
        "license: Apache-2.0\n",
        "license: Apache-2.0\nrepository-code: ADDRESS\n",
    ),
    Place(
        "SECURITY.md",
        "Report a security problem privately to the maintainers, not",
        "Report a security problem [privately](ADDRESS/security/advisories/new), not",
    ),
    Place(
        ".github/ISSUE_TEMPLATE/config.yml",
        "blank_issues_enabled: true\n",
        "blank_issues_enabled: true\ncontact_links:\n  - name: Security problem\n"
        "    url: ADDRESS/security/advisories/new\n    about: Report it in private.\n",
    ),
)


def current(root: Path = REPOSITORY) -> str:
    """The address in `pyproject.toml`, or "" if there is none."""
    found = re.search(r'^Repository = "(.*)"', (root / "pyproject.toml").read_text("utf-8"), re.M)
    return found[1] if found else ""


def half_filled(root: Path = REPOSITORY) -> list[str]:
    """What does not agree with the address in `pyproject.toml`."""
    address = current(root)
    state = repr(address) if address else "no address"
    return [
        f"{place.file}: not as with {state}, the address in pyproject.toml"
        for place in PLACES
        if not _is_written(place, (root / place.file).read_text("utf-8"), address)
    ]


def write(address: str, root: Path = REPOSITORY) -> None:
    """Replace the address of all places by `address`.

    Raises:
        ValueError: it is no address of a repository on github.com, or a place is half filled.
    """
    if address and not FORM.fullmatch(address):
        raise ValueError(f"ADDRESS: got {address!r}, want https://github.com/OWNER/NAME")
    if wrong := half_filled(root):
        raise ValueError("\n".join(wrong))
    before = current(root)
    for place in PLACES:
        path = root / place.file
        text = path.read_text("utf-8").replace(place.text(before), place.text(address), 1)
        path.write_text(text, "utf-8")


def _is_written(place: Place, text: str, address: str) -> bool:
    """Whether `text` has the place once, in the state of `address` and not in the other one."""
    if address:
        return text.count(place.text(address)) == 1
    any_address = re.escape(place.filled).replace("RAW", "ADDRESS").replace("ADDRESS", r"\S+")
    return text.count(place.without) == 1 and not re.search(any_address, text)


if __name__ == "__main__":
    try:
        write("" if sys.argv[1] == "none" else sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
    print(f"the address is {current()}" if current() else "no address")
