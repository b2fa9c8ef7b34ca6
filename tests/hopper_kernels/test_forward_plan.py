"""The tiles that the plan of the Hopper forward chooses for a pair of head dims."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends.hopper.forward.plan import plan
from flashtile.problem import AttentionProblem, Operands, Options


@pytest.mark.parametrize(
    ("head_dims", "columns"),
    [
        ((72, 80), (80, 80)), ((88, 96), (96, 96)), ((136, 144), (144, 144)),
        ((152, 160), (160, 160)), ((192, 104), (192, 128)), ((168, 184), (192, 192)),
        ((80, 96), (96, 96)), ((144, 128), (192, 128)), ((144, 160), (192, 192)),
        ((160, 80), (192, 96)), ((64, 200), (64, 256)),
    ],
)  # fmt: skip
def test_head_dims_have_as_few_columns_as_a_tile_allows(
    head_dims: tuple[int, int], columns: tuple[int, int]
):
    q, v = (torch.empty(1, 300, 2, D, dtype=torch.bfloat16, device="meta") for D in head_dims)
    config = plan(AttentionProblem.of(Operands(q, q, v), Options(300, 300, 1.0)))
    assert columns == (config.BLOCK_D + config.TAIL_D, config.USED_DV + config.TAIL_DV)
