"""The manual: short guides, in its navigation, and current tables."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashtile_command import COMMANDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GENERATED = re.compile(r"<!-- (?P<name>[\w -]+): begin -->.*?<!-- (?P=name): end -->", re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_guide_is_longer_than_1200_words(page):
    """As `wc -w` counts. Tables that a script writes do not count."""
    assert len(GENERATED.sub("", page.read_text()).split()) <= 1200


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^([\w/-]+)$", (DOCS / "index.md").read_text(), re.M)
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.glob("**/*.md")}
    generated = {page for page in pages if page.startswith("examples/")}
    assert pages - generated - {"index"} == set(listed)


def test_every_command_is_explained():
    page = (DOCS / "command-line.md").read_text()
    assert [name for name in COMMANDS if f"| `flashtile {name}`" not in page] == []


def test_the_masks_are_drawn_from_the_calls_beside_them(monkeypatch: pytest.MonkeyPatch):
    """A row of the tables that the drawing does not read would have no picture."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS))
    found = dict(importlib.import_module("gallery").weights())
    page = (DOCS / "masks-and-scores.md").read_text()
    assert list(found) == re.findall(r"figures/(\w+)\.png", page)
    for name, weights in found.items():
        total = weights.sum(-1)
        assert torch.where(total > 0, total, 1).allclose(torch.ones_like(total)), name
    causal = torch.ones(12, 12).tril()
    torch.testing.assert_close(found["seen_causal"], causal / causal.sum(-1, keepdim=True))
    shown = (found["seen_combined"] > 0).nonzero().tolist()
    assert shown == [[i, j] for i in range(12) for j in range(12) if i - 4 <= j <= i and j > 2]


def test_wide_pictures_get_a_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    figure = pytest.importorskip("matplotlib.figure")
    nodes = pytest.importorskip("docutils.nodes")
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS))
    wide_pictures = importlib.import_module("wide_pictures")
    sizes = {"narrow.png": 6, "wide.png": 8, "narrow.svg": 6, "wide.svg": 8}  # inches
    page = nodes.section()
    for name, inches in sizes.items():
        figure.Figure(figsize=(inches, 1)).savefig(tmp_path / name, dpi=144)
        assert wide_pictures.width(tmp_path / name) == inches * 144
        page += nodes.paragraph("", "", nodes.image(uri=name))
    wide_pictures.box(SimpleNamespace(srcdir=tmp_path), page, "page")
    boxed = {x.children[0]["uri"] for x in page if x["classes"] == ["wide-picture"]}
    assert boxed == {"wide.png", "wide.svg"}
    assert [image["uri"] for image in page.findall(nodes.image)] == list(sizes)


@pytest.mark.parametrize("page", sorted(DOCS.glob("log/*.md")), ids=lambda page: page.stem)
def test_logs_begin_with_the_newest_entry(page: Path):
    dates = re.findall(r"^## .*(\d{4}-\d\d-\d\d)", page.read_text(), re.M)
    assert dates == sorted(dates, reverse=True)


def test_logs_are_short():
    """One paragraph for each experiment; tables of superseded runs are in the history of a log."""
    assert sum(len(page.read_text().split()) for page in DOCS.glob("log/*.md")) <= 22_000


LINK = re.compile(r"\]\((?P<page>[\w./-]*\.md)?#(?P<anchor>[\w-]+)\)")
HEADING = re.compile(r"^#{1,3} (?P<title>.+)$", re.M)


def anchors(page: Path) -> set[str]:
    """Of the headings that conf.py's `myst_heading_anchors` gives one."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    titles = [match["title"].lower() for match in HEADING.finditer(text)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


PAGES = sorted([*DOCS.parent.glob("*.md"), *DOCS.glob("**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_anchor_exists(page: Path):
    """The check-list of the lessons, and every other link to a heading."""
    for link in LINK.finditer(page.read_text()):
        target = (page.parent / (link["page"] or page.name)).resolve()
        assert link["anchor"] in anchors(target), link[0]


def test_the_checklist_covers_all_lessons():
    """Every lesson of the index has a topic, and every page of the folder is a lesson."""
    learn = DOCS / "learn"
    lessons, _, topics = (learn / "index.md").read_text().partition("\n## ")
    listed = set(re.findall(r"^\| (?:\d\. )?\[\]\(([\w-]+\.md)\)", lessons, re.M))
    assert listed == set(re.findall(r"\]\(([\w-]+\.md)", topics))
    assert {page.name for page in learn.glob("*.md")} - listed == {"index.md", "visualiser.md"}


def test_the_tour_of_the_cuda_source_leads_to_our_code():
    """The last column of its first table: files, and functions or classes in them."""
    package = DOCS.parent / "flashtile"
    page = (DOCS / "learn" / "cuda-source.md").read_text()
    table = page.split("## mha_fwd")[0]
    ours = [row.rsplit("|", 2)[1] for row in re.findall(r"^\| .* \|$", table, re.M)]
    found = [re.findall(r"`([\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", cell) for cell in ours]
    places = [place for cell in found for place in cell]
    assert len(places) > 12
    for path, names in places:
        source = (package / re.sub("^triton/", "backends/triton/", path)).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(?:def|class) {name}\b", source, re.M), (path, name)
