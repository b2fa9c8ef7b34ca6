"""The lists of a block mask that the Hopper forward walks, against the mask element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.backends.hopper.forward.block_lists import ALL, BlockLists, lists_of, make_lists
from flashtile.backends.hopper.forward.plan import KernelConfig, plan, unsupported_reasons
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.masks import BlockMask
from flashtile.problem import AttentionProblem, Operands
from flashtile.testing import generator, qkv


def call(
    M: int, N: int, D: int = 128, **options: Any
) -> tuple[AttentionProblem, KernelConfig, Operands]:
    operands, chosen = describe(qkv(generator(0), B=2, M=M, N=N, D=D, Hq=2, Hk=2), Dense(), options)
    problem = AttentionProblem.of(operands, chosen)
    problem = problem._replace(device_type="cuda", capability=(9, 0), dtype=torch.bfloat16)
    return problem, plan(problem), operands


def random_elements(shape: tuple[int, ...], seed: int) -> Tensor:
    """Visible elements of empty, full and random tiles of 64 x 64; the last rows see none."""
    random = generator(seed)
    tiles = [-(-size // 64) for size in shape[2:]]
    kinds = torch.randint(0, 3, (*shape[:2], *tiles), generator=random)
    kinds = kinds.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, : shape[2], : shape[3]]
    visible = (kinds == 1) | ((kinds == 2) & (torch.rand(shape, generator=random) < 0.5))
    visible[:, :, -150:] = False
    return visible


def listed_elements(lists: BlockLists, config: KernelConfig, mask: int, m: int, N: int) -> Tensor:
    """(BLOCK_M, N) the elements that the list of a tile makes visible."""
    tiles = lists.counts.flatten(0, 1)[mask], lists.entries.flatten(0, 1)[mask]
    (full, total), entries = tiles[0][m].tolist(), tiles[1][m]
    seen = torch.zeros(config.BLOCK_M, -(-N // config.BLOCK_N) * config.BLOCK_N, dtype=torch.bool)
    for i, (n0, tile) in enumerate(entries[:total].tolist()):
        assert i >= full or tile == ALL
        bits = lists.bits[tile][..., None] >> torch.arange(32) & 1
        assert not seen[:, n0 : n0 + config.BLOCK_N].any()  # no block is visited twice
        seen[:, n0 : n0 + config.BLOCK_N] = bits.flatten(1) != 0
    return seen[:, :N]


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"window_size": (100, 40)}])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("tile_size", [(128, 128), (256, 384)])
def test_lists_show_the_mask(
    D: int, rules: dict[str, Any], shape: tuple[int, int], tile_size: tuple[int, int]
):
    M, N = 700, 650
    elements = random_elements((*shape, M, N), D)
    problem, config, operands = call(
        M, N, D, block_mask=BlockMask.from_dense(elements, tile_size), **rules
    )
    lists = make_lists(problem, config, operands)
    allowed = torch.ones(M, N, dtype=torch.bool)
    position = torch.arange(M)[:, None] + N - M - torch.arange(N)
    if rules.get("causal"):
        allowed = position >= 0
    elif rules:
        allowed = (position <= 100) & (position >= -40)
    for b in range(2):
        for h in range(2):
            mask = b * lists.batch_step + h * lists.head_step
            wanted = elements[min(b, shape[0] - 1), min(h, shape[1] - 1)]
            for m in range(-(-M // config.BLOCK_M)):
                rows = slice(m * config.BLOCK_M, (m + 1) * config.BLOCK_M)
                seen = listed_elements(lists, config, mask, m, N)[: M - m * config.BLOCK_M]
                assert torch.equal(seen & allowed[rows], (wanted & allowed)[rows])


def test_full_blocks_need_no_mask():
    problem, config, operands = call(
        512, 512, block_mask=BlockMask.from_tiles(torch.ones(4, 4), (128, 128)), causal=True
    )
    lists = make_lists(problem, config, operands)
    # The diagonal is masked, blocks above it are not visited.
    assert lists.counts[0, 0].tolist() == [[m, m + 1] for m in range(4)]
    assert lists.entries[0, 0, 3, :4, 0].tolist() == [0, 128, 256, 384]


def test_longest_lists_come_first():
    kinds = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]])
    problem, config, operands = call(512, 512, block_mask=BlockMask.from_tiles(kinds, (128, 128)))
    lists = make_lists(problem, config, operands)
    assert lists.order[0, 0].tolist() == [2, 3, 0, 1]
    assert lists.counts[0, 0, 1].tolist() == [0, 1]  # a tile that sees nothing visits one block


def test_lists_are_kept_until_the_mask_changes():
    mask = BlockMask.from_tiles(torch.ones(4, 4), (128, 128))
    problem, config, operands = call(512, 512, block_mask=mask)
    lists = lists_of(problem, config, operands)
    assert lists_of(problem, config, operands) is lists
    assert operands.tile_kinds is not None
    operands.tile_kinds[..., 0] = 0
    changed = lists_of(problem, config, operands)
    assert changed is not lists
    assert changed.counts[0, 0].tolist() == [[3, 3]] * 4
    other = call(512, 512, block_mask=mask, causal=True)  # other rules, other lists
    assert lists_of(*other).counts[0, 0, 3].tolist() == [2, 3]


def test_inference_tensors_are_read_each_time():
    with torch.inference_mode():
        mask = BlockMask.from_tiles(torch.ones(4, 4), (128, 128))
        problem, config, operands = call(512, 512, block_mask=mask)
        assert operands.tile_kinds is not None
        before = lists_of(problem, config, operands)
        operands.tile_kinds[..., 0] = 0
        assert lists_of(problem, config, operands).counts.sum() < before.counts.sum()


@pytest.mark.parametrize(
    ("tile_size", "D", "reason"),
    [
        ((64, 64), 128, ["block_mask tiles of 64 x 64 (on this backend: multiples of 128 x 128)"]),
        ((128, 64), 256, []),
        ((128, 32), 256, ["block_mask tiles of 128 x 32 (on this backend: multiples of 128 x 64)"]),
        ((256, 128), 64, []),
    ],
)
def test_tiles_that_the_kernel_cannot_cut(tile_size: tuple[int, int], D: int, reason: list[str]):
    mask = BlockMask.from_tiles(torch.ones(8, 16), tile_size)
    problem, _, _ = call(512, 512, D, block_mask=mask)
    assert [r for r in unsupported_reasons(problem) if "block_mask" in r] == reason


def test_gradients_are_left_to_another_backend():
    mask = BlockMask.from_tiles(torch.ones(4, 4), (128, 128))
    problem, _, _ = call(512, 512, block_mask=mask)
    assert "gradients with block_mask (not on this backend)" in unsupported_reasons(
        problem._replace(needs_grad=True)
    )
