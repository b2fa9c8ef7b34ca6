"""The lists of a block mask in the Hopper kernels, against the mask element by element."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.backends.hopper import unsupported_reasons
from flashtile.backends.hopper.backward.plan import BackwardConfig, backward_plan
from flashtile.backends.hopper.forward.plan import KernelConfig, plan
from flashtile.backends.hopper.shared import block_lists
from flashtile.backends.hopper.shared.block_lists import (
    ALL,
    SPARE_MARKS,
    BlockLists,
    lists_by_keys,
    lists_by_queries,
)
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.masks import BlockMask
from flashtile.problem import AttentionProblem, Operands
from flashtile.testing import generator, qkv

pytestmark = pytest.mark.slow

SWIZZLE = 3  # heads whose tiles of keys run at the same time


def call(
    M: int, N: int, D: int = 128, **options: Any
) -> tuple[AttentionProblem, KernelConfig, Operands]:
    operands, chosen = describe(qkv(generator(0), B=2, M=M, N=N, D=D, Hq=2, Hk=2), Dense(), options)
    problem = AttentionProblem.of(operands, chosen)
    problem = problem._replace(device_type="cuda", capability=(9, 0), dtype=torch.bfloat16)
    return problem, plan(problem), operands


def call_with_gradients(
    M: int, N: int, D: int, heads: tuple[int, int] = (2, 2), **options: Any
) -> tuple[AttentionProblem, BackwardConfig, Operands]:
    inputs = qkv(generator(0), B=2, M=M, N=N, D=D, Hq=heads[0], Hk=heads[1])
    operands, chosen = describe(inputs, Dense(), options)
    problem = AttentionProblem.of(operands, chosen)
    problem = problem._replace(device_type="cuda", capability=(9, 0), dtype=torch.bfloat16)
    return problem, backward_plan(problem), operands


def query_lists(problem: AttentionProblem, config: KernelConfig, operands: Operands) -> BlockLists:
    return lists_by_queries(problem, operands, config.BLOCK_M, config.BLOCK_N)


def key_lists(problem: AttentionProblem, config: BackwardConfig, operands: Operands) -> BlockLists:
    tile = config.BLOCK_M, config.BLOCK_N
    return lists_by_keys(problem, operands, *tile, SWIZZLE, config.IS_ORDERED)


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
    lists = query_lists(problem, config, operands)
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
    lists = query_lists(problem, config, operands)
    # The diagonal is masked, blocks above it are not visited.
    assert lists.counts[0, 0].tolist() == [[m, m + 1] for m in range(4)]
    assert lists.entries[0, 0, 3, :4, 0].tolist() == [0, 128, 256, 384]


def test_longest_lists_come_first():
    kinds = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]])
    problem, config, operands = call(512, 512, block_mask=BlockMask.from_tiles(kinds, (128, 128)))
    lists = query_lists(problem, config, operands)
    assert lists.order[0, 0].tolist() == [2, 3, 0, 1]
    assert lists.counts[0, 0, 1].tolist() == [0, 1]  # a tile that sees nothing visits one block


def test_lists_are_kept_until_the_mask_changes():
    mask = BlockMask.from_tiles(torch.ones(4, 4), (128, 128))
    problem, config, operands = call(512, 512, block_mask=mask)
    lists = query_lists(problem, config, operands)
    assert query_lists(problem, config, operands) is lists
    assert operands.tile_kinds is not None
    operands.tile_kinds[..., 0] = 0
    changed = query_lists(problem, config, operands)
    assert changed is not lists
    assert changed.counts[0, 0].tolist() == [[3, 3]] * 4
    other = call(512, 512, block_mask=mask, causal=True)  # other rules, other lists
    assert query_lists(*other).counts[0, 0, 3].tolist() == [2, 3]


@pytest.mark.parametrize("by_keys", [False, True])
def test_lists_are_made_on_the_device(by_keys: bool, monkeypatch: pytest.MonkeyPatch):
    """A graph captures neither a copy from the host nor a number that the host reads, which a
    tensor without memory does not have."""
    kinds = torch.ones(4, 4)
    problem, config, operands = call(
        500, 500, block_mask=BlockMask.from_tiles(kinds, (128, 128)), causal=True
    )
    mask = BlockMask.from_tiles(kinds.to("meta"), (128, 128))
    operands = operands._replace(
        tile_kinds=mask.kinds, partial_index=mask.partial_index, partial_tiles=mask.partial_tiles
    )
    monkeypatch.setattr(torch, "tensor", None)
    if by_keys:
        lists = key_lists(problem, backward_plan(problem), operands)
    else:
        lists = query_lists(problem, config, operands)
    assert all(x.is_meta for x in lists.tensors)


def test_inference_tensors_are_read_each_time():
    with torch.inference_mode():
        mask = BlockMask.from_tiles(torch.ones(4, 4), (128, 128))
        problem, config, operands = call(512, 512, block_mask=mask)
        assert operands.tile_kinds is not None
        before = query_lists(problem, config, operands)
        operands.tile_kinds[..., 0] = 0
        assert query_lists(problem, config, operands).counts.sum() < before.counts.sum()


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


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 1), (2, 4)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_lists_of_tiles_of_keys_show_the_mask(D: int, shape: tuple[int, int], deterministic: bool):
    M, N, group = 650, 700, 2
    elements = random_elements((*shape, M, N), D)
    elements[..., :128] = False
    problem, config, operands = call_with_gradients(
        M, N, D, (4, 2), block_mask=BlockMask.from_dense(elements, (128, 128)),
        deterministic=deterministic,
    )  # fmt: skip
    lists = key_lists(problem, config, operands)
    tiles = range(-(-N // config.BLOCK_N))
    programs = [tuple(program[:3]) for program in lists.order.tolist()]
    assert sorted(programs) == sorted(product(range(2), range(4 // group), tiles))
    added: dict[Any, int] = defaultdict(int)
    for b, kv_head, n, steps in lists.order.tolist():  # as programs start
        for h in range(kv_head * group, (kv_head + 1) * group):
            mask = b * lists.batch_step + h * lists.head_step
            wanted = elements[min(b, shape[0] - 1), min(h, shape[1] - 1)]
            blocks = blocks_of_keys(lists, config, mask, n, wanted)
            steps -= len(blocks)
            for m, predecessors in blocks:
                assert predecessors == added[b, h, m]
                added[b, h, m] += 1
        assert steps == 0


def test_programs_of_tiles_of_keys_start_by_length():
    """Five heads in runs of two and three; a tile that all queries see comes before all runs."""
    kinds = torch.eye(8)[None, None].repeat(1, 5, 1, 1)
    kinds[:, :, 3:5, 5] = 1  # three of eight tiles see this one, and all see the next
    kinds[:, :, :, 2] = 1
    kinds[:, :, 0, 0] = 0
    inputs = qkv(generator(0), B=1, M=1024, N=1024, D=64, Hq=5, Hk=5)
    mask = BlockMask.from_tiles(kinds, (128, 128))
    operands, chosen = describe(inputs, Dense(), {"block_mask": mask})
    order = lists_by_keys(AttentionProblem.of(operands, chosen), operands, 128, 128, 3, False).order
    wanted = [(0, h, 2, 8) for h in range(5)]
    for run in (range(2), range(2, 5)):
        wanted += [(0, h, 5, 3) for h in run]
        wanted += [(0, h, n, 1) for n in (1, 3, 4, 6, 7) for h in run]
        wanted += [(0, h, 0, 0) for h in run]
    assert [tuple(program) for program in order.tolist()] == wanted


def blocks_of_keys(
    lists: BlockLists, config: BackwardConfig, mask: int, n: int, wanted: Tensor
) -> list[tuple[int, int]]:
    """(block, predecessors) of each entry of a list of a tile of keys, which shows its part of
    `wanted`.
    """
    full, total = lists.counts.flatten(0, 1)[mask][n].tolist()
    entries = lists.entries.flatten(0, 1)[mask][n][:total].tolist()
    seen = torch.zeros(-(-wanted.shape[0] // config.BLOCK_M) * config.BLOCK_M, config.BLOCK_N)
    for i, (m, tile, _) in enumerate(entries):
        assert i >= full or tile == ALL
        bits = lists.bits[tile][..., None] >> torch.arange(32) & 1
        rows = slice(m * config.BLOCK_M, (m + 1) * config.BLOCK_M)
        assert not seen[rows].any()  # no block is visited twice
        seen[rows] = bits.flatten(1).T.float()
    part = wanted[:, n * config.BLOCK_N : (n + 1) * config.BLOCK_N]
    assert torch.equal(seen[: part.shape[0], : part.shape[1]] != 0, part)
    blocks = [m for m, _, _ in entries]
    # The lists are visited from the end: ordered ones downwards, others upwards.
    if config.IS_ORDERED:
        assert blocks == sorted(blocks)
        assert full == 0
    else:
        masked = blocks[full:]
        assert blocks[:full] == sorted(blocks[:full], reverse=True)
        assert masked == sorted(masked, reverse=True)
    return [(m, predecessors) for m, _, predecessors in entries]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_head_dims_without_tiles_have_their_own_reason(needs_grad: bool):
    mask = BlockMask.from_tiles(torch.ones(4, 4), (128, 128))
    problem, _, _ = call(512, 512, block_mask=mask)
    reasons = unsupported_reasons(problem._replace(D=320, needs_grad=needs_grad))
    assert "head_dim=320 (at most 256)" in reasons
    assert not any("block_mask" in reason for reason in reasons)


def test_full_blocks_of_queries_need_no_mask():
    mask = BlockMask.from_tiles(torch.ones(4, 4), (128, 128))
    problem, config, operands = call_with_gradients(512, 450, 128, block_mask=mask, causal=True)
    lists = key_lists(problem, config, operands)
    # Row 62 is the first that sees key 0, row 189 the first that sees keys 0 to 127 and so on. The
    # last tile reaches past the last key.
    assert lists.counts[0, 0].tolist() == [[5, 8], [3, 6], [1, 4], [0, 2]]


def test_lists_of_tiles_of_keys_are_kept_until_the_mask_changes():
    mask = BlockMask.from_tiles(torch.ones(4, 4), (128, 128))
    problem, config, operands = call_with_gradients(512, 512, 128, block_mask=mask)
    lists = key_lists(problem, config, operands)
    assert key_lists(problem, config, operands) is lists
    assert query_lists(problem, plan(problem), operands) is not lists
    assert operands.tile_kinds is not None
    operands.tile_kinds[..., 0] = 0
    changed = key_lists(problem, config, operands)
    assert changed.counts[0, 0].tolist() == [[0, 0], *[[8, 8]] * 3]
    assert lists.unseen.count_nonzero() == 0
    assert changed.unseen[0, 0].tolist() == [1] * 128 + [0] * (384 + SPARE_MARKS)
    assert query_lists(problem, plan(problem), operands).unseen is changed.unseen
    for other in ({"causal": True}, {"deterministic": True}, {"heads": (2, 1)}):
        known = call_with_gradients(512, 512, 128, block_mask=mask, **other)
        assert key_lists(*known) is not changed


def test_the_backward_finds_the_mask_of_the_call():
    """What autograd saves is the same tensor, by which the kept lists are found."""
    mask = BlockMask.from_tiles(torch.ones(2, 2), (64, 64))
    q, k, v = (x.requires_grad_() for x in qkv(generator(0), B=1, M=128, N=128, D=8))
    out = flashtile.attention(q, k, v, block_mask=mask)
    assert any(x is mask.kinds for x in out.grad_fn.saved_tensors)


@pytest.mark.parametrize(
    ("tile_size", "head_dims", "tile"),
    [
        ((128, 128), (40, 96), None),
        ((128, 64), (256, 256), None),
        ((128, 64), (40, 96), "64 x 128"),
    ],
)
def test_tiles_that_the_backward_cannot_cut(
    tile_size: tuple[int, int], head_dims: tuple[int, int], tile: str | None
):
    mask = BlockMask.from_tiles(torch.ones(8, 16), tile_size)
    problem, _, _ = call(512, 512, head_dims[0], block_mask=mask)
    problem = problem._replace(Dv=head_dims[1])
    assert [r for r in unsupported_reasons(problem) if "block_mask" in r] == []
    found = unsupported_reasons(problem._replace(needs_grad=True))
    wanted = f"gradients with block_mask tiles of 128 x 64 (on this backend: multiples of {tile})"
    assert [r for r in found if "block_mask" in r] == ([wanted] if tile else [])


@pytest.mark.parametrize(
    "options", [{}, {"window_size": (60, 5)}, {"attention_chunk": 90}], ids=str
)
def test_keys_that_no_query_sees_are_marked_in_slices(options, monkeypatch):
    """As many tiles as fit are looked at together: one at a time, or all."""
    marks = []
    for most in (1, block_lists.MOST_ELEMENTS):
        monkeypatch.setattr(block_lists, "MOST_ELEMENTS", most)
        visible = random_elements((2, 2, 300, 400), 1)
        visible[:, :, 128:256, 128:384] = True  # two full tiles
        problem, _, operands = call(300, 400, block_mask=BlockMask.from_dense(visible), **options)
        marks.append(block_lists.unseen_keys(problem, operands))
    start, stop = block_lists.key_ranges(problem, torch.arange(300)[:, None])
    seen = visible & (torch.arange(400) >= start) & (torch.arange(400) < stop)
    for found in marks:
        assert torch.equal(found[..., :400] == 0, seen.any(2))
