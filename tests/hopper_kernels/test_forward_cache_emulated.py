"""The Hopper forward over caches, run in PyTorch (`emulator.py`): pages, rows in any order, left
pads and packed queries. Slots that hold no token are NaN, and so are pages of no sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configurations import one_kind_each
from kernels.decoding import make_decoding
from kernels.reference import reference
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.problem import Operands, Options
from flashtile.testing import assert_close

from .test_forward_emulated import emulate, say_more, tiles_of_more_keys  # noqa: F401  (a fixture)

# Sequences have 0, 1, 128 and 177 keys.
CASES: dict[str, dict[str, Any]] = {
    "pages of 16": {"page_size": 16, "causal": True},
    "pages of 32": {"page_size": 32},
    "pages of 48": {"page_size": 48, "causal": True},
    "pages of 64": {"page_size": 64, "window_size": (50, 20)},
    "pages of 96": {"page_size": 96, "attention_chunk": 48, "causal": True},
    "pages of 128": {"page_size": 128, "softcap": 3.0},
    "pages of 256": {"page_size": 256, "causal": True, "Hq": 4, "Hk": 2},
    "pages, packed queries": {"page_size": 16, "packed": True, "causal": True},
    "packed queries": {"packed": True, "causal": True, "sink": True},
    "cache rows": {"rows": True, "causal": True},
    "left pads": {"leftpad": True, "causal": True},
    "left pads of rows": {"leftpad": True, "rows": True, "window_size": (30, 0)},
}
HEAD_DIMS = (64, 80, 128, 256)


@pytest.fixture(autouse=True)
def intrinsics(monkeypatch: pytest.MonkeyPatch) -> None:
    say_more(monkeypatch)


def made(case: str, head_dim: int, seed: int) -> tuple[Operands, Options]:
    sizes = {"D": head_dim, "Dv": head_dim} | CASES[case]
    return make_decoding("queries of many tiles", torch.bfloat16, seed, **sizes)


@pytest.mark.parametrize(("case", "head_dim"), one_kind_each(CASES, HEAD_DIMS))
def test_caches(case: str, head_dim: int, seed: int):
    operands, options = made(case, head_dim, seed)
    truth, plain = (
        reference(operands, options, compute_dtype=dtype)
        for dtype in (torch.float64, torch.bfloat16)
    )
    found = emulate(operands, options, seed)
    for name, x in zip(("out", "lse"), found, strict=True):
        wanted, low = getattr(truth, name), getattr(plain, name)
        assert_close(name, x, wanted, low, dtype=torch.bfloat16, seed=seed)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("pages of")])
def test_pages_change_no_bit(case: str, seed: int):
    operands, options = made(case, 64, seed)
    found = emulate(operands, options, seed)
    rows = operands._replace(
        k=gathered(operands.k, operands), v=gathered(operands.v, operands), page_table=None
    )
    for x, wanted in zip(found, emulate(rows, options, seed), strict=True):
        assert torch.equal(x, wanted)


def gathered(pages: Tensor, operands: Operands) -> Tensor:
    assert operands.page_table is not None
    return pages[operands.page_table.long()].flatten(1, 2)


def test_a_table_of_only_the_pages_in_use(seed: int):
    """The last block of keys has more pages than the table; other entries may be any number."""
    operands, options = made("pages of 16", 64, seed)
    assert operands.page_table is not None and operands.seqused_k is not None
    used = (operands.seqused_k + 15) // 16
    table = operands.page_table[:, : used.max()].clone()
    table[torch.arange(used.max()) >= used[:, None].clamp(1)] = -7
    short = operands._replace(page_table=table.contiguous())
    pairs = zip(emulate(short, options, seed), emulate(operands, options, seed), strict=True)
    assert all(torch.equal(x, wanted) for x, wanted in pairs)
