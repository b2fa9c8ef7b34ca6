"""The Hopper forward's source run in PyTorch, roles as threads (`emulator.py`): index arithmetic,
masks, ping-pong barriers and the reuse of buffers, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configurations import one_kind_each, sample
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backend_interface import Results
from flashtile.backends.hopper.forward import plan as forward_plan
from flashtile.backends.hopper.forward.launch import (
    config_of,
    forward_launch,
    lists_of,
    outputs,
    tile_list,
    with_lists,
)
from flashtile.backends.hopper.forward.plan import plan
from flashtile.backends.hopper.shared.schedule import PARTS
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.masks import Spans
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
from .inputs import (
    OF_LISTS,
    UNWRITTEN,
    dense_inputs,
    packed_inputs,
    random_mask,
    random_spans,
    unwritten_spans,
    with_draws,
)

PROGRAMS = 3
SINK = normal(generator(0), 2)


@pytest.fixture(autouse=True)
def tiles_of_more_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emulated problems are small, and most tiles are for larger ones.
    `test_forward_few_keys_emulated.py` has the others.
    """
    plan.cache_clear()
    monkeypatch.setattr(forward_plan, "_sees_few_keys", lambda problem: False)
    yield
    plan.cache_clear()


class Bits:
    """16 bits of a register."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def to(self, dtype: torch.dtype, bitcast: bool) -> Tensor:
        return emulator.tile(self.value.view(dtype))


def inline_asm(asm: str, constraints: str, args: list[Any], **more: Any) -> Any:
    if asm.startswith("barrier.cta.arrive"):
        number, threads = emulator.barrier_of(asm, args)
        key, seen = (emulator.context.program, number), emulator.named_barriers.threads
        seen[key] = seen.get(key, 0) + 128
        assert seen[key] % threads in (0, 128), "a ping-pong barrier passed twice"
        return 0
    if asm.startswith("cvt.rn"):
        dtype = torch.bfloat16 if "bf16x2" in asm else torch.float16
        pairs = torch.stack([x.to(dtype).as_subclass(Tensor) for x in args], -1)
        return emulator.tile(pairs.view(torch.int32).squeeze(-1))
    if asm.startswith("mov.b32 {$0, $1}, $2"):
        return tuple(
            Bits(half) for half in args[0].view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
        )
    if asm.startswith("lg2"):
        return torch.log2(args[0])
    if "nanosleep" in asm:
        return 0
    if "vote.sync" in asm:
        return args[0] * args[1]
    return emulator.inline_asm(asm, constraints, args, **more)


def warpgroup_mma(
    a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False
) -> emulator.Product:
    """Also on an accumulator in flight: products follow each other."""
    if not isinstance(acc, emulator.Product):
        return PRODUCT(a, b, acc, use_acc, is_async)
    last = PRODUCT(a, b, torch.zeros(()), False, is_async)
    compute = last.compute

    def add() -> Tensor:
        acc.finish()
        return compute() + acc.value

    last.compute = add
    return last


PRODUCT = emulator.warpgroup_mma


@pytest.fixture(autouse=True)
def intrinsics(monkeypatch: pytest.MonkeyPatch) -> None:
    say_more(monkeypatch)


def say_more(patch: pytest.MonkeyPatch) -> None:
    """What the forward says and the backward does not."""
    more = {
        "int16": torch.int16,
        **OF_LISTS,
        "split": lambda x: x.unbind(-1),
        "inline_asm_elementwise": inline_asm,
    }
    for name, value in more.items():
        patch.setitem(emulator.LANGUAGE, name, value)
    patch.setattr(emulator, "warpgroup_mma", warpgroup_mma)


def emulate(
    operands: Operands, options: Options, seed: int, into: Results | None = None, **facts: bool
) -> tuple[Tensor, ...]:
    """(out, lse) and statistics that the emulated kernel writes into poisoned outputs; rows of no
    sequence keep what they have in the tensors `into`. `facts` of the problem may be set."""
    problem = AttentionProblem.of(operands, options)._replace(device_type="cuda", capability=(9, 0))
    problem = problem._replace(**facts)
    counter = torch.zeros(2, dtype=torch.int32)
    config = config_of(problem)
    out, lse, *rows = into or [allocate() for allocate in outputs(operands, config)]
    tiles = next((allocate() for allocate in tile_list(problem, config, operands)), None)
    if tiles is not None:
        tiles.fill_(UNWRITTEN)
    launch = forward_launch(problem, config, operands, out, lse, PROGRAMS, counter, tiles, *rows)
    launch.arguments["blocks"] = lists_of(problem, config, operands)
    if problem.spans > 0:
        launch.arguments["blocks"] = unwritten_spans(problem, config, operands)
    if into is None:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
    if not config.IS_RAGGED:  # where rows of no sequence have been filled
        for x in rows:
            x.fill_(torch.nan)
    launch = launch._replace(grid=(PROGRAMS,))  # also more programs than tiles
    *before, launch = with_lists(problem, config, operands, launch, fills=into is None)
    parts = (PARTS.value, 1)[seed % 2]
    if tiles is not None:
        before[0] = before[0]._replace(grid=(problem.B, parts))
    emulator.run_chain([*before, launch], seed)
    assert counter.tolist() == [0, 0]  # as the next launch wants them
    return out, lse, *rows


def check(
    operands: Operands, options: Options, given: dict[str, Any], layout: Packed | None = None,
    seed: int = 0,
) -> None:  # fmt: skip
    operands, given = with_draws(operands, options, given, seed)
    out, lse = emulate(operands, options, seed)
    found = SimpleNamespace(out=out, lse=lse)
    if layout is None:
        truth, plain = (
            attention_reference(*operands[:3], compute_dtype=dtype, **given)
            for dtype in (torch.float64, operands.q.dtype)
        )
    else:
        used = {"seqused_q": operands.seqused_q, "seqused_k": operands.seqused_k}
        truth, plain = (
            attention_varlen_reference(
                *operands[:3], *layout[:4], compute_dtype=dtype, **(given | used)
            )
            for dtype in (torch.float64, operands.q.dtype)
        )
        rows = truth.out.shape[0]
        assert not out[rows:].any() and (lse[:, rows:] == -torch.inf).all()  # nobody's
        found = SimpleNamespace(out=out[:rows], lse=lse[:, :rows])
    for name in ("out", "lse"):
        wanted, low = getattr(truth, name), getattr(plain, name)
        assert_close(name, getattr(found, name), wanted, low, dtype=operands.q.dtype, seed=seed)


def dense(
    seed: int = 0, style: str = "contiguous", sizes: dict[str, Any] | None = None, **given: Any
) -> None:
    tensors = dense_inputs(seed, style, {"M": 290, "N": 330} | (sizes or {}))
    check(*describe(tensors, Dense(), given), given, seed=seed)


def packed(seed: int, used: bool = False, D: int = 128, **given: Any) -> None:
    seqused = {"seqused_q": [70, 0, 0, 250], "seqused_k": [101, 3, 0, 129]} if used else {}
    tensors, layout, counts = packed_inputs(seed, D, [70, 0, 1, 260], [130, 40, 0, 265], seqused)
    operands, options = describe(tensors, layout, {**given, **counts})
    check(operands, options, given, layout, seed)


@pytest.mark.parametrize(
    ("head_dim", "causal"), one_kind_each([64, 80, 128, 144, 160, 256], [False, True])
)
def test_head_dims(head_dim: int, causal: bool):
    dense(sizes={"D": head_dim}, causal=causal)


@pytest.mark.parametrize(
    "head_dims",
    sample(
        [(40, 40), (72, 80), (80, 96), (96, 96), (136, 152), (192, 192), (192, 128), (64, 200)], 2
    ),
)
def test_padded_head_dims(head_dims: tuple[int, int]):
    dense(sizes={"D": head_dims[0], "Dv": head_dims[1]}, causal=True)


@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    one_kind_each([(65, 1), (128, 128), (300, 77), (77, 300), (193, 600), (200, 1030)], [64, 256]),
)
def test_lengths(lengths: tuple[int, int], head_dim: int):
    dense(sizes={"M": lengths[0], "N": lengths[1], "D": head_dim}, causal=True)


# (keys of the last block, head dim, keys of its step)
LAST_BLOCKS = [
    (1, 64, 16), (16, 128, 16), (17, 80, 32), (32, 192, 32), (33, 96, 64), (64, 64, 64),
    (65, 64, 80), (80, 96, 80), (81, 64, 128), (33, 128, 128), (33, 256, 64),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "head_dim", "width"), LAST_BLOCKS)
def test_last_blocks_have_their_own_width(keys: int, head_dim: int, width: int):
    sizes = {"M": 290, "N": 256 + keys, "D": head_dim}  # one consumer has no rows
    operands, options = describe(dense_inputs(0, "contiguous", sizes), Dense(), {})
    assert width == plan(AttentionProblem.of(operands, options)).LAST_KEYS
    dense(keys, sizes=sizes)
    dense(keys, sizes=sizes, softcap=3.0, sink=SINK)


@pytest.mark.parametrize("rows", [70, 200])
def test_full_masks_of_two_consumers(rows: int):
    dense(sizes={"M": rows, "N": rows + 57, "D": 64})


@pytest.fixture
def long_from_64_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lengths of an emulation count as long."""
    plan.cache_clear()
    monkeypatch.setattr(forward_plan, "SHORT_CAUSAL", 0)
    monkeypatch.setattr(forward_plan, "LONG_CAUSAL", 64)
    yield
    plan.cache_clear()


@pytest.mark.usefixtures("long_from_64_keys")
@pytest.mark.parametrize(
    ("lengths", "seed"), one_kind_each([(65, 65), (290, 330), (128, 384), (400, 190)], range(2))
)
def test_from_the_first_block_to_the_last(seed: int, lengths: tuple[int, int]):
    sizes = {"M": lengths[0], "N": lengths[1]}
    problem = AttentionProblem.of(
        *describe(dense_inputs(0, "contiguous", sizes), Dense(), {"causal": True})
    )
    assert plan(problem).IS_ASCENDING
    dense(seed, sizes=sizes, causal=True, sink=SINK)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (50, 20)},
    "left": {"window_size": (33, -1)},
    "causal window": {"window_size": (90, 0)},
    "chunk": {"attention_chunk": 48},
    "causal chunk": {"attention_chunk": 100, "causal": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi_slopes": alibi_slopes(generator(0), 2)},
    "sink": {"sink": SINK, "causal": True},
    "negative scale": {"softmax_scale": -0.1, "causal": True},
}


@pytest.mark.parametrize(("option", "head_dim"), one_kind_each(OPTIONS, [64, 128, 256]))
def test_options(option: str, head_dim: int):
    dense(1, sizes={"D": head_dim, "M": 330, "N": 500, "Hq": 2}, **OPTIONS[option])


def test_float16():
    dense(sizes={"dtype": torch.float16}, causal=True)


@pytest.mark.parametrize(
    ("rise", "dtype"), one_kind_each([1.0, 7.0, 25.0, 300.0], [torch.float16, torch.bfloat16])
)
def test_scores_that_rise_from_block_to_block(rise: float, dtype: torch.dtype):
    """A maximum is raised in steps (`softmax.lazy_max`): by `rise`, in base 2, in each block."""
    q, k, v = qkv(generator(3), B=1, M=70, N=640, Hq=1, Hk=1, D=64, dtype=dtype)
    block = torch.arange(640) // 128
    q[..., 0] = 8.0
    k[..., 0] = ((4 - block)[:, None] * rise * math.log(2.0)).to(dtype)  # the last come first
    given = {"softmax_scale": 0.125}
    check(*describe((q, k, v), Dense(), given), given, seed=3)


@pytest.mark.parametrize("style", ["transposed", "sliced", "offset"])
def test_strides(style: str):
    dense(style=style, sizes={"B": 2, "Hq": 4, "Hk": 2, "M": 70, "N": 90}, causal=True)


@pytest.mark.parametrize(
    ("head_dim", "used_and_causal"),
    one_kind_each([64, 80, 128, 144, 160, 192, 256], product([False, True], repeat=2)),
)
def test_packed(used_and_causal: tuple[bool, bool], head_dim: int):
    used, causal = used_and_causal
    packed(4, used, head_dim, causal=causal)


@pytest.mark.parametrize(
    ("sides", "head_dim"),
    one_kind_each([("seqused_q",), ("seqused_k",), ("seqused_q", "seqused_k")], [64, 128, 256]),
)
def test_dense_batch_with_lengths(sides: tuple[str, ...], head_dim: int):
    q, k, v = dense_inputs(6, "contiguous", {"B": 4, "M": 210, "N": 290, "D": head_dim})
    lengths = {"seqused_q": [210, 0, 1, 129], "seqused_k": [290, 40, 0, 128]}
    used = {name: torch.tensor(lengths[name], dtype=torch.int32) for name in sides}
    for name, tensors in (("seqused_q", [q]), ("seqused_k", [k, v])):
        for x in tensors if name in used else []:
            for row, length in zip(x, lengths[name], strict=True):
                row[length:] = torch.nan
    given = {"causal": True, **used}
    check(*describe((q, k, v), Dense(), given), given, seed=6)


@pytest.mark.parametrize("seed", sample(range(2), 2))
def test_packed_lengths_of_many_tiles_and_of_none(seed: int):
    lengths = [0, 0, 130, 1, 0, 129, 128, 257, 0, 0]
    tensors, layout, counts = packed_inputs(seed, 128, lengths, lengths, {})
    operands, options = describe(tensors, layout, {"causal": True, **counts})
    check(operands, options, {"causal": True}, layout, seed)


@pytest.mark.parametrize("seed", sample([1, 3, 5], 2))
def test_the_list_of_tiles_is_awaited(seed: int):
    """So few sequences that all programs of the kernel before run when the forward starts."""
    tensors, layout, counts = packed_inputs(seed, 64, [70, 65], [65, 80], {})
    operands, options = describe(tensors, layout, counts)
    check(operands, options, {}, layout, seed)


def test_packed_window():
    packed(5, True, 64, window_size=(40, 10), sink=normal(generator(0), 4), softcap=2.0)


@pytest.mark.parametrize(("seed", "head_dim"), one_kind_each(range(4), [64, 128, 256]))
def test_meetings_in_any_order(seed: int, head_dim: int):
    dense(seed, sizes={"M": 400, "N": 400, "D": head_dim, "B": 2}, causal=seed % 2 == 1)


BLOCK_MASKS: list[tuple[int, tuple[int, int], dict[str, Any]]] = [
    (128, (128, 128), {}),
    (128, (256, 128), {"causal": True}),
    (64, (128, 256), {"window_size": (200, 30)}),
    (256, (128, 64), {"attention_chunk": 100}),
    (96, (128, 128), {"alibi_slopes": alibi_slopes(generator(0), 2)}),
    (144, (128, 64), {}),
]


@pytest.mark.parametrize(("call", "shared"), one_kind_each(BLOCK_MASKS, ["shared", "own"]))
def test_block_masks(call: tuple[int, tuple[int, int], dict[str, Any]], shared: str):
    head_dim, tile_size, given = call
    batch, heads = (1, 1) if shared == "shared" else (2, 2)
    mask = random_mask((batch, heads, 390, 430), tile_size, head_dim)
    sizes = {"B": 2, "M": 390, "N": 430, "D": head_dim}
    dense(sizes=sizes, block_mask=mask, **given)


@pytest.mark.parametrize(
    ("spans", "head_dim"),
    one_kind_each(product([1, 2], [(1, 1), (2, 1), (1, 4), (2, 4)]), [64, 128, 144, 256]),
    ids=str,
)
def test_spans(spans: tuple[int, tuple[int, int]], head_dim: int):
    intervals, lead = spans
    mask = random_spans(generator(head_dim), (*lead, 290, intervals), 330)
    dense(sizes={"B": 2, "Hq": 4, "Hk": 2, "D": head_dim}, mask=mask)


MASKS = {
    "causal": Spans.prefix_lm(torch.tensor([0]), 460),
    "prefix": Spans.prefix_lm(torch.tensor([300, 70]), 460),
    "documents": Spans.documents_of_lengths(torch.tensor([[130, 1, 200, 90]]), 460, causal=False),
    "shared prefix": Spans.shared_prefix(torch.tensor([129]), torch.tensor([[200, 40]]), 460),
    "block diffusion": Spans.block_diffusion(230, 40),
}


@pytest.mark.parametrize(("mask", "head_dim"), one_kind_each(MASKS, [64, 128]))
def test_spans_of_everyday_masks(mask: str, head_dim: int):
    dense(sizes={"B": 2, "M": 460, "N": 460, "D": head_dim}, mask=MASKS[mask])


@pytest.mark.parametrize(
    ("option", "kind"), one_kind_each(OPTIONS, [(1, 64), (1, 128), (2, 128)]), ids=str
)
def test_spans_with_other_options(option: str, kind: tuple[int, int]):
    intervals, head_dim = kind
    mask = random_spans(generator(5), (1, 1, 330, intervals), 500)
    sizes = {"M": 330, "N": 500, "Hq": 2, "D": head_dim}
    dense(1, sizes=sizes, mask=mask, **OPTIONS[option])


@pytest.mark.parametrize("lead", [(1, 1), (4, 2)], ids=str)
def test_spans_of_a_batch_with_lengths(lead: tuple[int, int]):
    mask = random_spans(generator(7), (*lead, 210, 2), 290)
    tensors = dense_inputs(6, "contiguous", {"B": 4, "M": 210, "N": 290, "Hq": 2})
    used = torch.tensor([290, 40, 0, 128], dtype=torch.int32)
    given = {"seqused_k": used, "mask": mask}
    check(*describe(tensors, Dense(), given), given, seed=6)


@pytest.mark.parametrize(("used", "heads"), one_kind_each([False, True], [1, 4]))
def test_spans_of_packed_sequences(used: bool, heads: int):
    mask = random_spans(generator(8), (1, heads, 336, 2), 265)  # five rows are spare
    packed(4, used, mask=mask, causal=True)


def test_consumers_skip_the_blocks_of_others():
    """A consumer with 64 rows computes no block that only other rows of its tile see: an infinite
    value there would make NaN of a weight of 0."""
    q, k, v = dense_inputs(10, "contiguous", {"M": 128, "N": 512, "D": 64})
    starts = (torch.arange(128) // 64 * 256).int().view(1, 1, -1, 1)
    v[:, 256:] = torch.inf
    operands, options = describe((q, k, v), Dense(), {"mask": Spans(starts, starts + 128)})
    out, _ = emulate(operands, options, seed=10)
    assert out[:, :64].isfinite().all()


def test_blocks_begin_with_the_first_visible_key():
    """A document that begins inside of a multiple of the block size needs no more blocks: the
    neighbours of its keys may be NaN."""
    q, k, v = dense_inputs(11, "contiguous", {"M": 128, "N": 512, "D": 64})
    k[:, :100], v[:, :100], k[:, 356:], v[:, 356:] = (torch.nan,) * 4
    starts = torch.full((1, 1, 128, 1), 100, dtype=torch.int32)
    operands, options = describe((q, k, v), Dense(), {"mask": Spans(starts, starts + 256)})
    out, lse = emulate(operands, options, seed=11)
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_tiles_that_spans_hide_are_not_visited():
    """Keys that no query sees may be NaN, if no query of their blocks' tiles sees a neighbour."""
    q, k, v = dense_inputs(9, "contiguous", {"M": 256, "N": 512})
    starts = (torch.arange(256) // 128 * 256).int().view(1, 1, -1, 1)
    mask = Spans(starts, starts + 128)
    k[:, 128:256], v[:, 128:256] = torch.nan, torch.nan
    k[:, 384:], v[:, 384:] = torch.nan, torch.nan
    operands, options = describe((q, k, v), Dense(), {"mask": mask})
    out, lse = emulate(operands, options, seed=9)
    assert not out.isnan().any()
    assert not lse.isnan().any()
