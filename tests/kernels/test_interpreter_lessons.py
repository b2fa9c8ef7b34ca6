"""The kernels of the lessons and the blocks of their pages that use them, interpreted."""

from __future__ import annotations

import importlib
import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lessons import LENGTHS, assert_both_passes

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from examples.learn import first_kernels, triton_attention
from flashtile.testing import generator

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("gpu-programming", "triton-kernels")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_shows(page: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(DOCS))
    snippets = importlib.import_module("snippets")
    text = (DOCS / "learn" / f"{page}.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": page}
    compared = 0
    for block in snippets.BLOCK.finditer(text):
        if block["mark"] == "no-run":
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(block["code"], f"{page}.md", "exec"), names)
        if block["mark"] == "interpreter" and printed.getvalue():
            shown = text[block.end() :].removeprefix("\n```text\n").partition("```\n")[0]
            assert printed.getvalue() == shown
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("size", [1, 16, 100])
def test_add(size: int):
    x, y = torch.randn(2, size, generator=generator(0))
    assert torch.equal(first_kernels.add(x, y, block=16), x + y)


@pytest.mark.parametrize("layout", ["rows", "columns", "a part"])
def test_softmax(layout: str):
    x = torch.randn(7, 20, generator=generator(0), dtype=torch.float64)
    x = {"rows": x, "columns": x.T, "a part": x[::2, 3:]}[layout]
    torch.testing.assert_close(first_kernels.softmax(x), torch.softmax(x, 1))


def test_matmul():
    a = torch.randn(40, 50, generator=generator(0))
    b = torch.randn(33, 50, generator=generator(1)).T
    found = first_kernels.matmul(a, b, block_m=16, block_n=32, block_k=16)
    torch.testing.assert_close(found, a @ b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(("M", "N"), LENGTHS)
def test_attention(M: int, N: int, dtype: torch.dtype, causal: bool, seed: int):
    assert_both_passes("cpu", M, N, dtype, causal, seed)


def test_attention_refuses_other_shapes():
    Q, K = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    with pytest.raises(ValueError, match=r"K, V: got \(2, 7, 16\) and \(2, 5, 16\), want"):
        triton_attention.TritonAttention.apply(Q, K, Q, False)
