"""The Hopper backward's source run in PyTorch, roles as threads (`emulator.py`): index arithmetic,
masks, barriers and the reuse of buffers, without a GPU."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from configurations import one_kind_each, pairwise, sample
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.backward import launch
from flashtile.backends.hopper.backward.launch import (
    backward,
    backward_launches,
    config_of,
    lists_of,
    sink_gradient,
)
from flashtile.backends.hopper.backward.plan import Order, leaves_keys_unseen, swizzles
from flashtile.backends.hopper.shared.launch import readable
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.gpu.hardware import H100
from flashtile.masks import BlockMask, Spans
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import (
    alibi_slopes,
    assert_close,
    attention_reference,
    attention_varlen_reference,
    generator,
    normal,
    qkv,
)

from . import emulator
from .inputs import OF_LISTS, dense_inputs, packed_inputs, random_mask, random_spans, with_draws
from .pieces import OPTIONS as PIECE_OPTIONS
from .pieces import PIECES, part_call

NAMES = ("dq", "dk", "dv", "dsink")


def gradients(
    operands: Operands,
    options: Options,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    seed: int,
    parts: int,
    add_to: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What the emulated kernels write into poisoned outputs, and add to `add_to`, if given."""
    problem = AttentionProblem.of(operands, options)._replace(device_type="cuda", capability=(9, 0))
    problem = problem._replace(is_partial=add_to is not None)
    swizzle = swizzles(problem, parts, H100)[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "order_of_call", lambda *_: Order(parts, swizzle))
        programs = 1 + seed % 2  # of a persistent kernel
        patch.setattr(launch, "gpu_of", lambda _: H100._replace(multiprocessors=programs))
        found = launch.allocation(problem, operands).buffers()
        if add_to is not None:
            found = found._replace(dq=add_to)
        lists = lists_of(problem, config_of(problem, operands), operands)
        launches = backward_launches(
            problem, operands, out, lse, readable(dout), dlse, found, lists
        )
    before = 3 if found.of_spans else 0  # launches that list the blocks of spans
    of_spans, launches = launches[:before], launches[before:]
    assert len(launches) == (3 if parts == 1 else 4)
    for sums in (found.dk_parts, found.dv_parts):
        if sums is not None:
            sums.fill_(torch.nan)
    if add_to is None:
        found.dq.fill_(torch.nan)
    if not leaves_keys_unseen(problem) or (parts > 1 and problem.layout == "dense"):
        found.dk.fill_(torch.nan)
        found.dv.fill_(torch.nan)
    if of_spans:
        emulator.run_chain(of_spans, seed)
    added = emulator.run_chain(launches[:3], seed)
    if parts > 1:
        emulator.run_chain(launches[3:], seed)
    if options.deterministic:
        assert_ascending(added)
    if operands.sink is None:
        return found[:3]
    return *found[:3], sink_gradient(operands.sink, found.lse_log2, found.minus_delta)


def reference(
    operands: Operands, options: dict[str, Any], layout: Packed | None, dtype: torch.dtype,
    dout: Tensor, dlse: Tensor,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """(out, lse, gradients) in `dtype`."""
    inputs = [x.detach().clone().requires_grad_() for x in operands[:3]]
    if operands.sink is not None:
        options = options | {"sink": operands.sink.detach().clone().requires_grad_()}
        inputs.append(options["sink"])
    if layout is None:
        found = attention_reference(*inputs[:3], compute_dtype=dtype, **options)
    else:
        options = options | {"seqused_q": operands.seqused_q, "seqused_k": operands.seqused_k}
        found = attention_varlen_reference(*inputs[:3], *layout[:4], compute_dtype=dtype, **options)
    lse = found.lse.masked_fill(found.lse == -torch.inf, 0)
    rows = found.out.shape[0] if layout else None  # rows after the last sequence do not count
    wanted = (found.out * dout[:rows].to(dtype)).sum() + (lse * dlse[..., :rows].to(dtype)).sum()
    found_gradients = torch.autograd.grad(wanted, inputs)
    if layout is None:
        return found.out.detach(), found.lse.detach(), found_gradients
    spare = operands.q.shape[0] - found.out.shape[0]
    out = torch.cat([found.out.detach(), found.out.new_zeros(spare, *found.out.shape[1:])])
    lse = torch.cat([found.lse.detach(), found.lse.new_full((lse.shape[0], spare), -torch.inf)], 1)
    return out, lse, found_gradients


def check(
    operands: Operands, options: Options, given: dict[str, Any], layout: Packed | None = None,
    seed: int = 0, parts: int = 1,
) -> None:  # fmt: skip
    g = generator(seed + 1)
    dtype = operands.q.dtype
    shape = (*operands.q.shape[:-1], operands.v.shape[-1])
    dout = normal(g, *shape, dtype=dtype)
    rows = (shape[1], shape[0]) if layout else (shape[0], shape[2], shape[1])
    dlse = normal(g, *rows)
    given = {name: x for name, x in given.items() if name not in ("sink", "deterministic")}
    operands, given = with_draws(operands, options, given, seed)
    out, lse, truth = reference(operands, given, layout, torch.float64, dout, dlse)
    _, _, plain = reference(operands, given, layout, dtype, dout, dlse)
    found = gradients(operands, options, out.to(dtype), lse.float(), dout, dlse, seed, parts)
    for name, got, wanted, low in zip(NAMES, found, truth, plain, strict=False):
        assert_close(name, got, wanted, low, dtype=dtype, seed=seed)


def assert_ascending(added: list[tuple[int, int]]) -> None:
    """Every block of the workspace was added to by tiles of keys in ascending order."""
    adders = defaultdict(list)
    for block, tile in added:
        adders[block].append(tile)
    assert any(len(tiles) > 1 for tiles in adders.values())
    assert all(tiles == sorted(tiles) for tiles in adders.values())


def dense(
    seed: int = 0, style: str = "contiguous", sizes: dict[str, Any] | None = None, parts: int = 1,
    **given: Any,
) -> None:  # fmt: skip
    tensors = dense_inputs(seed, style, {"M": 150, "N": 200} | (sizes or {}))
    check(*describe(tensors, Dense(), given), given, seed=seed, parts=parts)


def packed(seed: int, used: bool = False, D: int = 128, parts: int = 1, **given: Any) -> None:
    seqused = {"seqused_q": [70, 0, 0, 60], "seqused_k": [101, 3, 0, 65]} if used else {}
    tensors, layout, counts = packed_inputs(seed, D, [70, 0, 1, 129], [130, 40, 0, 65], seqused)
    given |= counts
    check(*describe(tensors, layout, given), given, layout, seed, parts)


@pytest.mark.parametrize(
    ("head_dim", "causal"), one_kind_each([64, 80, 96, 128, 144, 160, 256], [False, True])
)
def test_head_dims(head_dim: int, causal: bool):
    dense(sizes={"D": head_dim}, causal=causal)


@pytest.mark.parametrize(
    "head_dims",
    sample(
        [
            (40, 40), (72, 72), (80, 96), (96, 40), (40, 88), (96, 104),
            (152, 136), (176, 176), (192, 192), (192, 128), (192, 72), (208, 208), (256, 176),
            (64, 200), (72, 200), (8, 200),
        ],
        3,
    ),
)  # fmt: skip
def test_padded_head_dims(head_dims: tuple[int, int]):
    dense(sizes={"D": head_dims[0], "Dv": head_dims[1]}, causal=True)


@pytest.mark.parametrize(
    ("lengths", "causal"),
    one_kind_each([(65, 1), (128, 128), (300, 77), (77, 300), (129, 257)], [True, False]),
)
def test_lengths(lengths: tuple[int, int], causal: bool):
    dense(sizes={"M": lengths[0], "N": lengths[1], "D": 64}, causal=causal)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (50, 20)},
    "left": {"window_size": (33, -1)},
    "causal window": {"window_size": (90, 0)},
    "chunk": {"attention_chunk": 48},
    "causal chunk": {"attention_chunk": 100, "causal": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi_slopes": alibi_slopes(generator(0), 2)},
    "sink": {"sink": normal(generator(0), 2), "causal": True},
    "negative scale": {"softmax_scale": -0.1, "causal": True},
    "everything": {
        "softcap": 3.0,
        "alibi_slopes": alibi_slopes(generator(0), 2, 1),
        "sink": normal(generator(0), 2),
        "window_size": (60, 10),
        "attention_chunk": 90,
    },
}


@pytest.mark.parametrize(("option", "head_dim"), one_kind_each(OPTIONS, [64, 192, 88, 256]))
def test_options(option: str, head_dim: int):
    dense(1, sizes={"D": head_dim, "M": 170, "N": 300}, **OPTIONS[option])


@pytest.mark.parametrize(
    ("option", "lengths"),
    one_kind_each(["left", "causal window", "causal chunk"], [(300, 300), (400, 270)]),
)
def test_every_key_has_a_query_where_there_are_no_more_keys(lengths: tuple[int, int], option: str):
    dense(2, sizes={"M": lengths[0], "N": lengths[1], "D": 64}, **OPTIONS[option])


@pytest.mark.parametrize(
    ("option", "head_dim"),
    one_kind_each(["left", "window", "causal window", "causal chunk"], [64, 128, 96]),
)
def test_short_loops_of_groups_and_batches(head_dim: int, option: str):
    """From head dim 65 on dQ goes to memory from the registers: the right block of every head and
    sequence, and no addition of the step before the first."""
    sizes = {"B": 2, "M": 170, "N": 300, "Hq": 3, "D": head_dim}
    dense(head_dim, sizes=sizes, **OPTIONS[option])


def test_no_queries_give_zero_gradients():
    inputs = qkv(generator(0), B=0, M=70, N=90, D=64, dtype=torch.bfloat16)
    operands, options = describe(inputs, Dense(), {"sink": normal(generator(0), 4)})
    problem = AttentionProblem.of(operands, options)
    lse = torch.zeros(0, 4, 70)
    found = backward(problem, operands, inputs[0], lse, inputs[0], lse)
    assert [x.shape for x in found[:3]] == [x.shape for x in inputs]
    assert found.dsink is not None
    assert found.dsink.eq(0).all()


def test_float16():
    dense(sizes={"dtype": torch.float16}, causal=True)


@pytest.mark.parametrize("style", ["transposed", "sliced", "offset"])
def test_strides(style: str):
    dense(style=style, sizes={"B": 2, "Hq": 4, "Hk": 2, "M": 70, "N": 90}, causal=True)


def test_large_inputs_stay_finite():
    g = generator(3)
    q, k, v = (5 * x for x in qkv(g, B=1, M=100, N=130, D=64, dtype=torch.bfloat16))
    given: dict[str, Any] = {"causal": True}
    check(*describe((q, k, v), Dense(), given), given, seed=3)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_keys_past_the_end_weigh_nothing(head_dim: int, is_packed: bool):
    """Their score is 0 where all others are at most -128, so that exp(0 - lse) is infinite."""
    layout = None
    if is_packed:
        (q, k, v), layout, _ = packed_inputs(6, head_dim, [100, 60], [200, 70], {})
    else:
        q, k, v = qkv(generator(6), B=1, M=100, N=200, D=head_dim, dtype=torch.bfloat16)
    inputs = q / 8 + 4, k / 8 - 4, v
    check(*describe(inputs, layout or Dense(), {}), {}, layout, seed=6)


@pytest.mark.parametrize(
    ("head_dim", "used_and_causal"),
    one_kind_each([64, 80, 96, 128, 144, 192, 256], product([False, True], repeat=2)),
)
def test_packed(used_and_causal: tuple[bool, bool], head_dim: int):
    used, causal = used_and_causal
    packed(4, used, head_dim, causal=causal)


def test_packed_values_with_fewer_columns():
    tensors, layout, given = packed_inputs(7, 192, [70, 0, 1, 129], [130, 40, 0, 65], {})
    q, k, v = tensors
    check(*describe((q, k, v[..., :128]), layout, given), given, layout, 7)


@pytest.mark.parametrize("head_dim", sample([96, 64], 2))
def test_packed_options(head_dim: int):
    packed(5, True, head_dim, window_size=(40, 10), sink=normal(generator(0), 4), softcap=2.0)


@pytest.mark.parametrize(("head_dim", "seed"), one_kind_each([64, 96, 128, 192, 256], range(2)))
def test_packed_long_loops(seed: int, head_dim: int):
    """More steps than any ring has slots, and sequences that have only queries or only keys."""
    tensors, layout, _ = packed_inputs(seed, head_dim, [333, 90, 0, 65], [290, 0, 70, 1], {})
    given = {"causal": seed == 1}
    check(*describe(tensors, layout, given), given, layout, seed)


@pytest.mark.parametrize(("head_dim", "seed"), one_kind_each([64, 96, 128, 192, 256], range(3)))
def test_meetings_in_any_order(seed: int, head_dim: int):
    dense(seed, sizes={"M": 400, "N": 300, "D": head_dim, "Hq": 1}, causal=seed % 2 == 1)


DETERMINISTIC = [*enumerate([64, 64, 80, 96, 128, 128, 144, 160, 192, 208, 256, 256])]


@pytest.mark.parametrize(
    ("case", "option"), one_kind_each(DETERMINISTIC, ["full", "causal", "causal window"]), ids=str
)
def test_deterministic_adds_in_order(case: tuple[int, int], option: str):
    seed, head_dim = case
    given = OPTIONS.get(option, {"causal": option == "causal"})
    sizes = {"M": 260, "N": 500, "D": head_dim, "Hq": 1}
    dense(seed, sizes=sizes, deterministic=True, **given)


@pytest.mark.parametrize(("head_dim", "seed"), one_kind_each([64, 96, 128, 160, 256], range(2)))
def test_deterministic_heads_of_a_group(seed: int, head_dim: int):
    """An odd number of blocks a head, so that a writer has even blocks of one and odd ones of the
    next."""
    sizes = {"M": 300, "N": 300, "D": head_dim, "Hq": 3, "Hk": 1}
    dense(seed, sizes=sizes, deterministic=True, causal=seed % 2 == 1)


@pytest.mark.parametrize("head_dim", sample([96, 128, 256], 2))
def test_deterministic_packed(head_dim: int):
    packed(6, D=head_dim, deterministic=True, causal=True)


@pytest.mark.parametrize(
    ("shares_and_mask", "head_dim"),
    one_kind_each(
        product([(2, 3, 1), (3, 4, 2), (2, 1, 1), (5, 2, 1)], [False, True]),
        [64, 96, 128, 192, 256],
    ),
    ids=str,
)
def test_parts(shares_and_mask: tuple[tuple[int, int, int], bool], head_dim: int):
    """Parts of unequal length, that start within a head or are empty."""
    shares, causal = shares_and_mask
    parts, *heads = shares
    sizes = {"B": 2, "Hq": heads[0], "Hk": heads[1], "M": 190, "N": 230, "D": head_dim}
    dense(parts, sizes=sizes, parts=parts, causal=causal)


@pytest.mark.parametrize(
    ("option", "head_dim", "parts"),
    [
        (option, *tile)
        for option, tile in one_kind_each(OPTIONS, [(256, 3), (64, 3), (192, 2), (128, 2)])
    ],
)
def test_parts_with_options(head_dim: int, parts: int, option: str):
    dense(1, sizes={"D": head_dim, "M": 170, "N": 300}, parts=parts, **OPTIONS[option])


@pytest.mark.parametrize(
    "head_dims", sample([(40, 128), (80, 80), (144, 144), (192, 128), (192, 80), (64, 200)], 2)
)
def test_parts_of_padded_head_dims(head_dims: tuple[int, int]):
    dense(sizes={"D": head_dims[0], "Dv": head_dims[1]}, parts=2, causal=True)


@pytest.mark.parametrize(
    ("head_dim", "parts", "option"),
    pairwise([64, 128, 256], [2, 3, 5], ["full", "causal", "causal window"]),
)
def test_deterministic_parts_add_in_order(head_dim: int, parts: int, option: str):
    given = OPTIONS.get(option, {"causal": option == "causal"})
    sizes = {"M": 260, "N": 300, "D": head_dim, "Hq": 3, "Hk": 1}
    dense(parts, sizes=sizes, parts=parts, deterministic=True, **given)


@pytest.mark.parametrize(
    ("head_dim", "used", "parts"), pairwise([64, 128, 192, 256], [False, True], [2, 3])
)
def test_packed_parts(parts: int, used: bool, head_dim: int):
    packed(4, used, head_dim, parts, causal=parts == 2, deterministic=not used)


@pytest.mark.parametrize(
    ("head_dims", "option", "parts"),
    pairwise([(192, 128), (168, 64)], ["full", "causal", "causal window"], [1, 3]),
)
def test_tiles_of_128_keys(head_dims: tuple[int, int], option: str, parts: int):
    """With 192 columns: an odd number of steps and of halves of tiles, parts that are empty."""
    given = OPTIONS.get(option, {"causal": option == "causal"})
    sizes = {"M": 330, "N": 330, "D": head_dims[0], "Dv": head_dims[1], "Hq": 3, "Hk": 1}
    dense(parts, sizes=sizes, parts=parts, **given)
    dense(parts, sizes=sizes | {"M": 66, "N": 190, "Hq": 1}, parts=parts)


BLOCK_MASKS: list[tuple[int, tuple[int, int], dict[str, Any]]] = [
    (128, (128, 128), {}),
    (128, (256, 128), {"causal": True}),
    (64, (128, 256), {"window_size": (200, 30)}),
    (64, (128, 128), {"sink": normal(generator(0), 2)}),
    (80, (128, 128), {"causal": True}),
    (96, (128, 128), {"alibi_slopes": alibi_slopes(generator(0), 2)}),
    (144, (128, 64), {"softcap": 3.0}),
    (192, (128, 128), {"softcap": 3.0}),
    (256, (128, 64), {"attention_chunk": 100}),
]


@pytest.mark.parametrize(("call", "shared"), one_kind_each(BLOCK_MASKS, ["shared", "own"]))
def test_block_masks(call: tuple[int, tuple[int, int], dict[str, Any]], shared: str):
    head_dim, tile_size, given = call
    batch, heads = (1, 1) if shared == "shared" else (2, 2)
    mask = random_mask((batch, heads, 390, 430), tile_size, head_dim)
    sizes = {"B": 2, "M": 390, "N": 430, "D": head_dim}
    dense(sizes=sizes, block_mask=mask, **given)


@pytest.mark.parametrize(
    ("kinds", "head_dim"), one_kind_each(["none", "one", "all"], [64, 128, 256])
)
def test_block_masks_of_whole_tiles(kinds: str, head_dim: int):
    """Tiles of keys that no query sees get zeros, and so do blocks of queries that see no key."""
    tiles = torch.full((3, 3), kinds == "all")
    tiles[1, 1] = kinds != "none"
    mask = BlockMask.from_tiles(tiles, (128, 128))
    dense(3, sizes={"M": 300, "N": 310, "D": head_dim}, block_mask=mask)


@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    one_kind_each([(65, 390), (500, 130), (128, 1), (257, 256)], [64, 128, 192]),
)
def test_block_masks_of_lengths(head_dim: int, lengths: tuple[int, int]):
    mask = random_mask((1, 1, 640, 640), (128, 128), head_dim + 1)
    sizes = {"M": lengths[0], "N": lengths[1], "D": head_dim}
    dense(4, sizes=sizes, block_mask=mask, causal=lengths[0] == 257)


@pytest.fixture
def of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_LISTS.items():
        monkeypatch.setitem(emulator.LANGUAGE, name, value)


@pytest.mark.usefixtures("of_lists")
@pytest.mark.parametrize(
    ("head_dim", "spans"),
    one_kind_each([64, 96, 128, 144, 256], product([1, 2], [(1, 1), (2, 4)])),
    ids=str,
)
def test_spans(spans: tuple[int, tuple[int, int]], head_dim: int):
    intervals, lead = spans
    mask = random_spans(generator(head_dim), (*lead, 290, intervals), 330)
    dense(sizes={"B": 2, "M": 290, "N": 330, "Hq": 4, "Hk": 2, "D": head_dim}, mask=mask)


@pytest.mark.usefixtures("of_lists")
@pytest.mark.parametrize(
    ("mask", "head_dim"), one_kind_each(["causal", "documents", "one row", "window"], [64, 128])
)
def test_spans_of_everyday_masks(mask: str, head_dim: int):
    """Full blocks, tiles of keys that no query sees, and mask rules besides the spans."""
    counts = torch.tensor([[130, 1, 200, 69]])
    masks = {
        "causal": Spans.prefix_lm(torch.tensor([0]), 400),
        "documents": Spans.documents_of_lengths(counts, 400, causal=False),
        "one row": Spans(*(torch.full((1, 1, 400, 1), x).int() for x in (130, 131))),
        "window": Spans.documents_of_lengths(counts, 400),
    }
    more = {"window_size": (60, 20)} if mask == "window" else {}
    dense(2, sizes={"M": 400, "N": 400, "D": head_dim}, mask=masks[mask], **more)


@pytest.mark.parametrize(
    ("head_dim", "kind"), one_kind_each([64, 96, 128, 256], [(1, False), (3, True)]), ids=str
)
def test_deterministic_block_masks_add_in_order(head_dim: int, kind: tuple[int, bool]):
    """Lists of unlike lengths, of which the longest start first, and for every head another one."""
    heads, causal = kind
    mask = random_mask((1, heads, 400, 640), (128, 128), head_dim + heads)
    sizes = {"M": 400, "N": 640, "D": head_dim, "Hq": 3}
    dense(heads, sizes=sizes, block_mask=mask, deterministic=True, causal=causal)


@pytest.mark.parametrize(
    ("tile", "option"), one_kind_each(product(PIECES, [64, 128, 192]), PIECE_OPTIONS), ids=str
)
def test_parts_of_sequences(tile: tuple[str, int], option: str):
    pieces, head_dim = tile
    check_pieces(pieces, option, head_dim)


@pytest.mark.parametrize(("head_dim", "parts"), one_kind_each([64, 96, 128, 144, 256], [1, 3]))
def test_partial_gradients(parts: int, head_dim: int):
    check_pieces("unseen keys", "causal window", head_dim, parts, is_partial=True)


@pytest.mark.parametrize("head_dim", sample([64, 128, 192], 2))
def test_deterministic_parts_of_sequences(head_dim: int):
    check_pieces("ragged", "causal", head_dim, is_partial=True, deterministic=True)


def check_pieces(
    pieces: str, option: str, head_dim: int, parts: int = 1, is_partial: bool = False, **more: Any
) -> None:
    """Compare with the whole sequences; dq of a partial problem is added to some heads of a tensor
    of ones."""
    call = part_call(pieces, option, head_dim, head_dim, **more)
    operands = call.operands
    g = generator(head_dim)
    dout, dlse = (
        normal(g, *operands.q.shape, dtype=torch.bfloat16),
        normal(g, *operands.q.shape[1::-1]),
    )
    truth, plain = (call.reference(x, dout, dlse) for x in (torch.float64, torch.bfloat16))
    add_to = torch.ones(len(operands.q), 5, head_dim)[:, 1:3] if is_partial else None
    found = gradients(
        operands, call.options, truth["out"].bfloat16(), truth["lse"].float(), dout, dlse,
        head_dim, parts, add_to,
    )  # fmt: skip
    if add_to is not None:
        assert all(x.dtype == torch.float32 for x in found[:3])
        found = (found[0] - 1, *found[1:])
    for name, got in zip(NAMES, found, strict=False):
        assert_close(name, got, truth[name], plain[name], dtype=torch.bfloat16, seed=head_dim)
