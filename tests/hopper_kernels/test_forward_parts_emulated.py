"""The Hopper forward on parts of sequences, run in PyTorch (`emulator.py`)."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from configurations import one_kind_each, sample

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backend_interface import Results
from flashtile.testing import assert_close

from .pieces import OPTIONS, PIECES, PartCall, part_call
from .test_forward_emulated import emulate, intrinsics  # noqa: F401 -- a fixture of every test

DTYPES = (torch.float64, torch.bfloat16)


@pytest.mark.parametrize(
    ("tile", "option"), one_kind_each(product(PIECES, [64, 128, 256]), OPTIONS), ids=str
)
def test_parts_of_sequences(tile: tuple[str, int], option: str):
    check_pieces(tile[0], option, tile[1])


@pytest.mark.parametrize("head_dim", sample([64, 144, 192], 2))
def test_partial_outputs(head_dim: int):
    check_pieces("ragged", "causal", head_dim, is_partial=True)


def test_given_outputs():
    """They are some heads of a tensor, and rows of no sequence keep what they have."""
    call = part_call("ragged", "causal", 128, seed=5)
    q = call.operands.q
    rows, heads = len(q), q.shape[1]
    operands = call.operands._replace(q=torch.cat([q, q.new_full((3, *q.shape[1:]), torch.nan)]))
    out = torch.ones(rows + 3, 5, 128, dtype=torch.bfloat16)
    lse = torch.ones(5, rows + 3)
    given = out[:, 1 : 1 + heads], lse[1 : 1 + heads]
    emulate(operands, call.options, 5, into=given)
    compare(call, (given[0][:rows], given[1][:, :rows]), 5)
    for kept in (given[0][rows:], given[1][:, rows:], out[:, 0], out[:, 1 + heads :]):
        assert kept.eq(1).all()


def check_pieces(pieces: str, option: str, head_dim: int, is_partial: bool = False) -> None:
    """Compare with the whole sequences."""
    call = part_call(pieces, option, head_dim, seed=head_dim)
    found = emulate(call.operands, call.options, head_dim, is_partial=is_partial)
    assert found[0].dtype == (torch.float32 if is_partial else torch.bfloat16)
    compare(call, found, head_dim)


def compare(call: PartCall, found: Results, seed: int) -> None:
    """Compare with the whole sequences."""
    nothing = (torch.zeros_like(x, dtype=torch.float32) for x in found)
    truth, plain = map(partial(call.reference, dout=next(nothing), dlse=next(nothing)), DTYPES)
    for name, got in zip(("out", "lse"), found, strict=True):
        assert_close(name, got, truth[name], plain[name], dtype=torch.bfloat16, seed=seed)
