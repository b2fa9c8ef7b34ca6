"""What a release says of itself: one version, one date, one address in every place or in none."""

from __future__ import annotations

import datetime
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / ".ci"))

import address  # noqa: E402  # it is there
import release  # noqa: E402

ADDRESS = "https://github.com/someone/some.name"
FILES = sorted({place.file for place in address.PLACES})
VERSIONED = ("flashtile/__init__.py", "CHANGELOG.md", "CITATION.cff", "README.md")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that give a version, a date or the address."""
    for file in {*FILES, *VERSIONED}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / file, tmp_path / file)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {file: (folder / file).read_text("utf-8") for file in FILES}


def change(path: Path, edit: Callable[[str], str]) -> None:
    text = path.read_text("utf-8")
    assert edit(text) != text
    path.write_text(edit(text), "utf-8")


def test_the_repository_agrees_with_itself() -> None:
    assert release.disagreements() == []
    assert datetime.date.fromisoformat(release.date())


def test_the_changelog_of_a_version_is_one_page() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
    newest = re.split(r"^## ", text, flags=re.M)[1]
    assert len(newest.split()) <= 1200


def test_the_address_is_written_everywhere_and_taken_out_again(copy: Path) -> None:
    address.write("", copy)
    empty = contents(copy)
    assert not address.current(copy)
    for written in (ADDRESS, "https://github.com/other/name"):
        address.write(written, copy)
        assert address.current(copy) == written
        assert address.half_filled(copy) == []
        assert all(written in text for text in contents(copy).values())
    assert not any(ADDRESS in text for text in contents(copy).values())
    address.write("", copy)
    assert contents(copy) == empty


@pytest.mark.parametrize("place", address.PLACES[1:], ids=lambda place: place.file)
@pytest.mark.parametrize(
    ("stays", "comes"), [("", ADDRESS), (ADDRESS, ""), (ADDRESS, ADDRESS + 2 * "x")]
)
def test_a_half_filled_address_is_found(
    copy: Path, place: address.Place, stays: str, comes: str
) -> None:
    address.write("", copy)
    address.write(stays, copy)
    change(copy / place.file, lambda text: text.replace(place.text(stays), place.text(comes), 1))
    assert place.file in " ".join(address.half_filled(copy))
    with pytest.raises(ValueError, match=re.escape(place.file)):
        address.write("https://github.com/other/name", copy)


@pytest.mark.parametrize(
    "wrong", ["someone/name", "http://github.com/a/b", ADDRESS + "/tree/main", ADDRESS + ".git"]
)
def test_what_is_no_address_is_refused(copy: Path, wrong: str) -> None:
    before = contents(copy)
    with pytest.raises(ValueError, match="want https://github"):
        address.write(wrong, copy)
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("file", "pattern", "new"),
    [
        ("flashtile/__init__.py", r'__version__ = ".*"', '__version__ = "9.9.9"'),
        ("CHANGELOG.md", r"^## \[.*", "## [Unreleased]"),
        ("CHANGELOG.md", r"\d{4}-\d\d-\d\d", "1999-01-01"),
        ("CITATION.cff", r"^version: .*", "version: 9.9.9"),
        ("CITATION.cff", r"^date-released: .*", "date-released: 1999-01-01"),
        ("README.md", r"^  version = .*", "  version = {9.9.9},"),
    ],
)
def test_another_version_or_date_is_found(copy: Path, file: str, pattern: str, new: str) -> None:
    assert release.disagreements(copy) == []
    change(copy / file, lambda text: re.sub(pattern, new, text, count=1, flags=re.M))
    assert release.disagreements(copy)
