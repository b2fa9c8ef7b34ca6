"""Dropout in the Hopper forward, run in PyTorch (`emulator.py`): the mask is that of
`flashtile.dropout`, and the result is that of the reference with this mask.

The emulator has no threads within a tile. Which thread draws which block is tested on GPUs.
"""

from __future__ import annotations

import pytest
import torch
from configurations import one_kind_each, sample

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.masks import Spans
from flashtile.testing import generator

from .inputs import DROPOUT, random_mask, random_spans
from .test_forward_emulated import (  # noqa: F401 -- two are fixtures
    dense,
    intrinsics,
    long_from_64_keys,
    packed,
)


@pytest.mark.parametrize(("option", "head_dim"), one_kind_each(DROPOUT, [64, 128, 256]))
def test_options(option: str, head_dim: int):
    dense(1, sizes={"D": head_dim, "N": 500}, **DROPOUT[option])


@pytest.mark.parametrize("head_dim", [64, 144])
def test_every_head_and_sequence_has_its_own_mask(head_dim: int):
    dense(2, sizes={"B": 2, "Hq": 4, "Hk": 2, "D": head_dim, "M": 130, "N": 90}, dropout_p=0.5)


@pytest.mark.parametrize(("head_dim", "used"), one_kind_each([64, 80, 144, 192], [False, True]))
def test_coordinates_count_from_the_start_of_a_sequence(used: bool, head_dim: int):
    packed(5, used, head_dim, causal=True, dropout_p=0.3)


@pytest.mark.usefixtures("long_from_64_keys")
def test_from_the_first_block_to_the_last():
    dense(5, causal=True, dropout_p=0.2)


@pytest.mark.parametrize("head_dim", sample([64, 128, 256], 2))
def test_block_masks(head_dim: int):
    mask = random_mask((1, 2, 390, 430), (128, 128), head_dim)
    dense(3, sizes={"D": head_dim, "M": 390, "N": 430}, block_mask=mask, dropout_p=0.2)


@pytest.mark.parametrize(("head_dim", "intervals"), one_kind_each([64, 128, 256], [1, 2]))
def test_spans(intervals: int, head_dim: int):
    mask = random_spans(generator(head_dim), (1, 2, 290, intervals), 330)
    dense(4, sizes={"D": head_dim}, mask=mask, dropout_p=0.2)


@pytest.mark.parametrize("start", sample([71, 64, 101, 130], 2))
def test_tiles_that_begin_inside_a_block_of_keys(start: int):
    """At head dim 64, with one interval for each query, a tile begins at the first key it sees."""
    starts = (start + torch.arange(290) // 3).int().view(1, 1, -1, 1)
    dense(6, sizes={"D": 64}, mask=Spans(starts, starts + 150), dropout_p=0.2)
