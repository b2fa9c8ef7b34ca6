"""The serving example: more requests than slots, and the text that transformers makes."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the package transformers is not installed")
from tiny_models import build

from examples.demo import serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def requests(lengths: list[tuple[int, int]]) -> list[Any]:
    """Random prompts and answers of the given lengths."""
    g = torch.Generator().manual_seed(3)
    return [
        serve.Request(torch.randint(3, 97, (prompt,), generator=g).tolist(), answer)
        for prompt, answer in lengths
    ]


LENGTHS = [(40, 9), (3, 20), (17, 1), (16, 15), (1, 4), (33, 12)]


@pytest.mark.parametrize("pages", [None, 5], ids=["pages for all", "pages run out"])
@pytest.mark.parametrize("early", [False, True], ids=["to the end", "ends early"])
def test_the_text_is_that_of_transformers(model: Any, pages: int | None, early: bool):
    ours, theirs = requests(LENGTHS), requests(LENGTHS)
    end = None
    if early:
        serve.plain(model, theirs, batch=2)
        end = theirs[1].made[7]
    server = serve.Server(model, slots=3, longest=60, pages=pages)
    server.run(ours, end)
    serve.plain(model, theirs, batch=2, end=end)
    assert [request.made for request in ours] == [request.made for request in theirs]
    assert all(slot is None for slot in server.slots)
    assert len(server.free_pages.free) == server.free_pages.count


def test_a_long_prompt_comes_in_pieces(model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "CHUNK", 16)
    ours, theirs = requests([(50, 6)]), requests([(50, 6)])
    serve.Server(model, slots=1, longest=60).run(ours)
    serve.plain(model, theirs, batch=1)
    assert ours[0].made == theirs[0].made


def test_a_request_that_never_fits_is_refused(model: Any):
    with pytest.raises(ValueError, match="longer than 60 tokens"):
        serve.Server(model, slots=1, longest=60).run(requests([(50, 11)]))


def test_the_benchmark_of_requests(tmp_path: Any):
    """Every loop makes the text of transformers with sdpa, and the file has a line for each."""
    from benchmarks import serving

    path = tmp_path / "serving.csv"
    shape = ["--layers", "1", "--prompt", "20", "--tokens", "6", "--rounds", "1"]
    sizes = [*shape, "--requests", "1", "3"]
    assert serving.main([*sizes, "--device", "cpu", "--csv", str(path)]) == 0
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    in_both = ["transformers, sdpa", "transformers, flashtile"] * 2
    assert [row["loop"] for row in rows] == [*in_both, "server, eager", *in_both]
    assert [row["cache"] for row in rows[:4]] == ["dynamic"] * 2 + ["static"] * 2
    assert [row["same_tokens"] for row in rows] == ["6"] * 5 + ["18"] * 4
