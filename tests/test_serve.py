"""The serving example: more requests than slots, and the text that transformers makes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the package transformers is not installed")
from tiny_models import build

PATH = Path(__file__).resolve().parents[1] / "examples" / "serve.py"


@pytest.fixture(scope="module")
def serve() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("serve", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serve"]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def requests(serve: Any, lengths: list[tuple[int, int]]) -> list[Any]:
    """Random prompts with so many tokens, and answers of so many."""
    g = torch.Generator().manual_seed(3)
    return [
        serve.Request(torch.randint(3, 97, (prompt,), generator=g).tolist(), answer)
        for prompt, answer in lengths
    ]


LENGTHS = [(40, 9), (3, 20), (17, 1), (16, 15), (1, 4), (33, 12)]


@pytest.mark.parametrize("pages", [None, 6], ids=["pages for all", "pages run out"])
@pytest.mark.parametrize("early", [False, True], ids=["to the end", "ends early"])
def test_the_text_is_that_of_transformers(serve: Any, model: Any, pages: int | None, early: bool):
    ours, theirs = requests(serve, LENGTHS), requests(serve, LENGTHS)
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


def test_a_long_prompt_comes_in_pieces(serve: Any, model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "CHUNK", 16)
    ours, theirs = requests(serve, [(50, 6)]), requests(serve, [(50, 6)])
    serve.Server(model, slots=1, longest=60).run(ours)
    serve.plain(model, theirs, batch=1)
    assert ours[0].made == theirs[0].made


def test_a_request_that_never_fits_is_refused(serve: Any, model: Any):
    with pytest.raises(ValueError, match="longer than 60 tokens"):
        serve.Server(model, slots=1, longest=60).run(requests(serve, [(50, 11)]))
