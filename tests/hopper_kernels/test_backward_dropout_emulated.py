"""Dropout in the Hopper backward, run in PyTorch (`emulator.py`): the mask is that of
`flashtile.dropout`, and the gradients are those of the reference with this mask.

The emulator has no threads within a tile. Which thread draws which group of keys, and how threads
exchange what they drew, is tested on GPUs.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.testing import generator

from .inputs import DROPOUT, random_mask, random_spans
from .test_backward_emulated import dense, of_lists, packed  # noqa: F401 -- one is a fixture


@pytest.mark.parametrize("head_dim", [64, 88, 128, 192, 256])
@pytest.mark.parametrize("option", DROPOUT)
def test_options(option: str, head_dim: int):
    dense(1, sizes={"D": head_dim, "M": 170, "N": 300}, **DROPOUT[option])


@pytest.mark.parametrize("head_dim", [64, 88, 192, 256])
def test_deterministic(head_dim: int):
    dense(1, sizes={"D": head_dim, "M": 170, "N": 300}, dropout_p=0.1, deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 144])
def test_every_head_and_sequence_has_its_own_mask(head_dim: int):
    dense(2, sizes={"B": 2, "Hq": 4, "Hk": 2, "D": head_dim, "M": 130, "N": 90}, dropout_p=0.5)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("used", [False, True])
def test_coordinates_count_from_the_start_of_a_sequence(used: bool, head_dim: int):
    packed(5, used, head_dim, 1 + used, causal=True, dropout_p=0.3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_block_masks(head_dim: int):
    mask = random_mask((1, 2, 390, 430), (128, 128), head_dim)
    dense(3, sizes={"D": head_dim, "M": 390, "N": 430}, block_mask=mask, dropout_p=0.2)


@pytest.mark.usefixtures("of_lists")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("intervals", [1, 2])
def test_spans(intervals: int, head_dim: int):
    mask = random_spans(generator(head_dim), (1, 2, 290, intervals), 330)
    dense(4, sizes={"D": head_dim, "M": 290, "N": 330}, mask=mask, dropout_p=0.2)
