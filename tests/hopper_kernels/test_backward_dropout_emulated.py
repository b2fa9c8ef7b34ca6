"""Dropout in the Hopper backward, run in PyTorch (`emulator.py`): the mask is that of
`flashtile.dropout`, and the gradients are those of the reference with this mask.

The emulator has no threads within a tile. Which thread draws which block, and how threads
exchange what they drew, is tested on GPUs.
"""

from __future__ import annotations

import pytest
import torch
from configurations import one_kind_each, sample

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.testing import generator

from .inputs import DROPOUT, dense_inputs, random_mask, random_spans, with_draws
from .test_backward_emulated import (  # noqa: F401 -- pytest finds the fixture `of_lists` by its name
    dense,
    gradients,
    of_lists,
    packed,
)


@pytest.mark.parametrize(("option", "head_dim"), one_kind_each(DROPOUT, [64, 192, 88, 256, 128]))
def test_options(option: str, head_dim: int):
    dense(1, sizes={"D": head_dim, "M": 170, "N": 300}, **DROPOUT[option])


@pytest.mark.parametrize("head_dim", sample([64, 88, 192, 256], 2))
def test_deterministic(head_dim: int):
    dense(1, sizes={"D": head_dim, "M": 170, "N": 300}, dropout_p=0.1, deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 144])
def test_every_head_and_sequence_has_its_own_mask(head_dim: int):
    dense(2, sizes={"B": 2, "Hq": 4, "Hk": 2, "D": head_dim, "M": 130, "N": 90}, dropout_p=0.5)


@pytest.mark.parametrize(
    ("head_dim", "used"), one_kind_each([64, 96, 128, 160, 256], [False, True])
)
def test_coordinates_count_from_the_start_of_a_sequence(used: bool, head_dim: int):
    packed(5, used, head_dim, 1 + used, causal=True, dropout_p=0.3)


@pytest.mark.parametrize("head_dim", sample([64, 128, 256], 2))
def test_block_masks(head_dim: int):
    mask = random_mask((1, 2, 390, 430), (128, 128), head_dim)
    dense(3, sizes={"D": head_dim, "M": 390, "N": 430}, block_mask=mask, dropout_p=0.2)


@pytest.mark.usefixtures("of_lists")
@pytest.mark.parametrize(("head_dim", "intervals"), one_kind_each([64, 128, 256], [1, 2]))
def test_spans(intervals: int, head_dim: int):
    mask = random_spans(generator(head_dim), (1, 2, 290, intervals), 330)
    dense(4, sizes={"D": head_dim, "M": 290, "N": 330}, mask=mask, dropout_p=0.2)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_nan_reaches_every_gradient(head_dim: int):
    q, k, v = dense_inputs(6, "contiguous", {"M": 70, "N": 90, "D": head_dim})
    q[0, 3, 0] = torch.nan
    operands, options = describe((q, k, v), Dense(), {"dropout_p": 0.5})
    operands, _ = with_draws(operands, options, {}, 6)
    lse = torch.zeros(1, 2, 70)
    lse[0, 0, 3] = torch.nan
    zeros = torch.zeros_like(lse)
    dq, dk, dv = gradients(
        operands, options, torch.ones_like(q), lse, torch.ones_like(q), zeros, 6, 1
    )
    assert dq[0, 3, 0].isnan().all()
    assert dk.isnan().all()
    assert dv.isnan().all(-1).any(1).all()  # of the keys that are kept for this query
