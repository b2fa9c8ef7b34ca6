"""Block masks from functions, and what combines, moves and draws block masks."""

from __future__ import annotations

import operator

import pytest
import torch
from test_block_masks import check
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import flashtile
from flashtile import BlockMask
from flashtile.masks import block_mask
from flashtile.testing import generator, qkv

SIZES = [((1, 1), (1, 1)), ((5, 7), (2, 4)), ((6, 4), (3, 2)), ((3, 300), (128, 128))]


def random_dense(seed, lengths, lead=(1, 1)):
    """Bool (batch, heads, M, N) with some tiles empty and some full."""
    g = generator(seed)
    dense = torch.rand(*lead, *lengths, generator=g) < 0.5
    dense[..., : lengths[0] // 2, : lengths[1] // 2] = False
    dense[..., lengths[0] // 2 :, lengths[1] // 2 :] = True
    return dense


def from_dense_function(dense, tile_size):
    batch, heads, *lengths = dense.shape
    return BlockMask.from_function(
        lambda b, h, i, j: dense[b, h, i, j],
        tuple(lengths),
        batch=batch,
        heads=heads,
        tile_size=tile_size,
    )


@pytest.mark.parametrize(("lengths", "tile_size"), SIZES, ids=str)
@pytest.mark.parametrize("lead", [(1, 1), (2, 3)], ids=str)
def test_from_function(lengths, tile_size, lead, seed, monkeypatch):
    monkeypatch.setattr(block_mask, "CPU_ELEMENTS", 3 * tile_size[0] * tile_size[1])
    dense = random_dense(seed, lengths, lead)
    check(from_dense_function(dense, tile_size), dense, tile_size)


def test_few_tiles_are_evaluated_at_once(monkeypatch):
    monkeypatch.setattr(block_mask, "CPU_ELEMENTS", 64)
    seen = []
    evaluated = block_mask.function_of_tiles

    def counted(*asked):
        evaluate = evaluated(*asked)
        return lambda where: seen.append(evaluate(where)) or seen[-1]

    monkeypatch.setattr("flashtile.masks.block_mask.function_of_tiles", counted)
    BlockMask.from_function(lambda b, h, i, j: i >= j, (40, 40), tile_size=(4, 4))
    assert len(seen) == 25
    assert max(x.numel() for x in seen) == 64


def test_functions_of_scalars():
    """Not only pointwise ones: each call sees one query and one key."""
    points = torch.rand(9, 3, generator=generator(0))
    mask = BlockMask.from_function(
        lambda b, h, i, j: (points[i] - points[j]).norm() < 0.5, (9, 9), tile_size=(4, 4)
    )
    assert torch.equal(mask.to_dense(9, 9)[0, 0], torch.cdist(points, points) < 0.5)


def test_constant_functions():
    for value in (False, True):
        mask = BlockMask.from_function(
            lambda b, h, i, j, value=value: torch.tensor(value), (5, 6), tile_size=(4, 4)
        )
        check(mask, torch.full((1, 1, 5, 6), value), (4, 4))


def test_flex_attention_gets_the_same_mask():
    def window(b, h, i, j):
        return (i - j).abs() < 40 * (h + 1)

    flex = create_block_mask(window, None, 2, 300, 280, "cpu", (64, 64))
    mask = BlockMask.from_function(window, (300, 280), heads=2, tile_size=(64, 64))
    assert torch.equal(mask.to_dense(300, 280), BlockMask.from_flex(flex).to_dense(300, 280))
    # FlexAttention counts elements: tiles past the end, too, which makes its number smaller.
    whole = create_block_mask(window, None, 2, 256, 320, "cpu", (64, 64))
    assert whole.sparsity() == pytest.approx(BlockMask.from_flex(whole).sparsity())


def test_attention_with_a_mask_from_a_function(backend, seed):
    q, k, v = qkv(generator(seed), B=2, M=150, N=170)
    document = torch.arange(170) // 40
    mask = BlockMask.from_function(
        lambda b, h, i, j: (document[i] == document[j]) | (j < 10), (150, 170), tile_size=(32, 64)
    )
    out = flashtile.attention(q, k, v, block_mask=mask, backend=backend)
    wanted = flashtile.attention(q, k, v, attn_mask=mask.to_dense(150, 170), backend=backend)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("operation", [operator.and_, operator.or_])
@pytest.mark.parametrize("leads", [((1, 1), (1, 1)), ((2, 1), (1, 3)), ((2, 3), (1, 1))], ids=str)
@pytest.mark.parametrize(("lengths", "tile_size"), SIZES, ids=str)
def test_and_or(operation, leads, lengths, tile_size, seed):
    a, b = (random_dense(seed + n, lengths, lead) for n, lead in enumerate(leads))
    b = b.flip(-1)
    made = from_dense_function, BlockMask.from_dense
    masks = (make(dense, tile_size) for make, dense in zip(made, (a, b), strict=True))
    check(operation(*masks), operation(a, b), tile_size)


@pytest.mark.parametrize(("lengths", "tile_size"), SIZES, ids=str)
def test_not(lengths, tile_size, seed):
    dense = random_dense(seed, lengths, (2, 1))
    for mask in (BlockMask.from_dense(dense, tile_size), from_dense_function(dense, tile_size)):
        check(~mask, ~dense, tile_size)
        check(~~mask, dense, tile_size)
        check(mask & ~mask, torch.zeros_like(dense), tile_size)
        check(mask | ~mask, torch.ones_like(dense), tile_size)


def test_what_is_past_the_end_does_not_count():
    a, b = (BlockMask.from_dense(torch.tensor([x]).bool(), (2, 4)) for x in ([1, 0], [0, 1]))
    for left, right in ((a, b), (~a, ~b)):
        check(left & right, torch.zeros(1, 1, 1, 2).bool(), (2, 4))
        check(left | right, torch.ones(1, 1, 1, 2).bool(), (2, 4))


def test_masks_of_whole_tiles_combine():
    tiles = torch.tensor([[1, 0], [1, 1]]).bool()
    a, b = (BlockMask.from_tiles(x, (2, 2)) for x in (tiles, tiles.T))
    assert torch.equal((a & b).to_dense(4, 4)[0, 0], torch.block_diag(*torch.ones(2, 2, 2)).bool())
    assert (a | b).sparsity() == 0


def test_only_equal_lengths_and_tiles_combine():
    mask = BlockMask.from_dense(torch.ones(4, 4).bool(), (2, 2))
    for other in (((4, 5), (2, 2)), ((4, 4), (2, 1))):
        with pytest.raises(ValueError, match="block masks: got lengths"):
            mask & BlockMask.from_dense(torch.ones(other[0]).bool(), other[1])
    with pytest.raises(TypeError, match="unsupported operand"):
        mask | torch.ones(4, 4).bool()


@pytest.mark.parametrize(
    ("error", "function"),
    [
        (TypeError, lambda b, h, i, j: True),
        (TypeError, lambda b, h, i, j: (i >= j).int()),
        (TypeError, lambda b, h, i, j: None),
        (ValueError, lambda b, h, i, j: (i >= j)[None]),
        (ValueError, lambda b, h, i, j: torch.arange(3) < i),
    ],
)
def test_wrong_results_are_refused(error, function):
    with pytest.raises(error, match=r"mask_mod: got a result of .*, want a"):
        BlockMask.from_function(function, (5, 5), tile_size=(2, 2))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("__bool__", lambda b, h, i, j: torch.tensor(True) if i >= j else torch.tensor(False)),
        ("__bool__", lambda b, h, i, j: (i >= j) and (i - j < 3)),
        ("item", lambda b, h, i, j: torch.tensor(b.item() == 0)),
        ("__index__", lambda b, h, i, j: [i > j, i < j][h]),
    ],
)
def test_functions_that_read_their_arguments_are_refused(name, function):
    with pytest.raises(NotImplementedError, match=rf"mask_mod: {name} reads the value .* use"):
        BlockMask.from_function(function, (5, 5), tile_size=(2, 2))


def test_captured_numbers_may_be_read():
    size, is_causal = torch.tensor(3), torch.tensor(True)

    def function(b, h, i, j):
        return (i >= j) & (i - j < size.item()) if is_causal else j >= 0

    mask = BlockMask.from_function(function, (9, 9), tile_size=(4, 4))
    assert mask.to_dense(9, 9).sum() == 3 * 9 - 3


@pytest.mark.parametrize(
    "bad",
    [
        {"lengths": (5, 0)},
        {"lengths": 5},
        {"tile_size": (0, 4)},
        {"tile_size": 64},
        {"batch": 0},
        {"batch": None},
        {"heads": 1.5},
    ],
    ids=str,
)
def test_wrong_sizes_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name}: got"):
        BlockMask.from_function(lambda b, h, i, j: i >= j, **{"lengths": (5, 5), **bad})


def test_errors_of_the_function_are_not_hidden():
    def broken(b, h, i, j):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        BlockMask.from_function(broken, (5, 5))


def test_to_another_device():
    mask = BlockMask.from_function(lambda b, h, i, j: i >= j, (300, 300)).to("meta")
    tensors = (mask.kinds, mask.partial_index, mask.partial_tiles)
    assert {x.device.type for x in tensors} == {"meta"}
    assert (mask.lengths, mask.tile_size) == ((300, 300), (128, 128))
    assert str(mask) == repr(mask)


def test_print():
    mask = BlockMask.from_function(lambda b, h, i, j: i >= j, (5, 6), heads=3, tile_size=(2, 2))
    assert str(mask).splitlines() == [
        "BlockMask(batch=1, heads=3, lengths=(5, 6), tile_size=(2, 2), device='cpu'), "
        "33.3 % of the tiles are empty",
        "░░    ",
        "██░░  ",
        "████░░",
    ]
    assert "\n" not in repr(mask)


def test_a_mask_of_fake_tensors_is_not_drawn():
    with FakeTensorMode():
        mask = BlockMask.from_tiles(torch.ones(2, 2), (4, 4))
    assert str(mask) == repr(mask)


def test_large_masks_are_drawn_small():
    tiles = torch.ones(100, 70).bool().tril()
    lines = str(BlockMask.from_tiles(tiles, (1, 1))).splitlines()[1:]
    assert [len(line) for line in lines] == [2 * 24] * 25
    assert lines[0] == "░░░░" + " " * 44
    assert lines[-1] == "█" * 48
