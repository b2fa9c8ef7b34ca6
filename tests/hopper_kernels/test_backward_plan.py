"""The columns and the order of tiles that the plan of the Hopper backward chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.backward.plan import backward_plan, phases_of, swizzles
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.gpu.hardware import H100
from flashtile.masks import BlockMask, Spans
from flashtile.problem import AttentionProblem
from flashtile.testing import generator, qkv

from .score_functions import FUNCTIONS, described

SPANS = Spans(*torch.zeros(2, 1, 1, 1, 1, dtype=torch.int32))
VISIBLE = BlockMask.from_dense(torch.ones(1, 1, dtype=torch.bool))


def problem(D: int = 128, Dv: int | None = None, **options: Any) -> AttentionProblem:
    sizes = {"B": 1, "M": 1, "N": 1, "Hq": 1, "Hk": 1, "D": D, "Dv": Dv or D}
    inputs = qkv(generator(0), **sizes, dtype=torch.bfloat16)
    return AttentionProblem.of(*describe(inputs, Dense(), options))


def test_directions():
    assert backward_plan(problem(causal=True)).IS_ASCENDING
    assert not backward_plan(problem(256, causal=True)).IS_ASCENDING
    options: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True, "deterministic": True},
        {"causal": True, "window_size": (100, 0)},
        {"causal": True, "attention_chunk": 100},
    )
    assert not any(backward_plan(problem(**given)).IS_ASCENDING for given in options)


@pytest.mark.parametrize(
    ("given", "cycles"),
    [
        ({}, (400, 0)),
        ({"causal": True}, (0, 0)),
        ({"mask": SPANS}, (0, 400)),
        ({"block_mask": VISIBLE}, (0, 400)),
        ({"block_mask": VISIBLE, "causal": True}, (0, 400)),
        ({"block_mask": VISIBLE, "deterministic": True}, (400, 0)),
    ],
)
def test_the_second_consumer_starts_later_once(given: dict[str, Any], cycles: tuple[int, int]):
    """At the start, or before the full blocks of a list, which follow its partial ones. Lists for
    deterministic gradients have no full blocks.
    """
    config = backward_plan(problem(**given))
    assert cycles == (config.STAGGER, config.FULL_STAGGER)


@pytest.mark.parametrize("D", [40, 64, 96, 128, 192])
@pytest.mark.parametrize(
    ("given", "columns"),
    [
        ({}, (64, 128)),
        ({"causal": True, "softcap": 20.0}, (64, 128)),
        ({"window_size": (100, 0)}, (64,)),  # at 128 consumers add dQ from their registers
        ({"deterministic": True}, ()),
        ({"mask": SPANS}, ()),
    ],
)
def test_persistent_programs(D: int, given: dict[str, Any], columns: tuple[int, ...]):
    config = backward_plan(problem(D, **given))
    assert (config.BLOCK_D + config.TAIL_D in columns) == config.IS_PERSISTENT
    assert not backward_plan(problem(D, **given), is_parted=True).IS_PERSISTENT


def test_score_functions_are_not_persistent():
    inputs = qkv(generator(0), B=1, M=1, N=1, Hq=4, Hk=4, D=64, dtype=torch.bfloat16)
    call = described(inputs, Dense(), {"score_mod": FUNCTIONS["table"]})
    assert not backward_plan(AttentionProblem.of(*call)).IS_PERSISTENT


@pytest.mark.parametrize(
    ("D", "causal", "longest"), [(64, False, 4096), (64, True, 8000), (128, False, 1280)]
)
def test_long_loops_are_not_persistent(D: int, causal: bool, longest: int):
    given = problem(D, causal=causal)
    assert backward_plan(given._replace(M=longest, N=longest)).IS_PERSISTENT
    assert not backward_plan(given._replace(M=longest + 200, N=longest + 200)).IS_PERSISTENT


@pytest.mark.parametrize(
    ("head_dims", "columns"),
    [
        ((72, 72), (80, 80)), ((96, 40), (96, 96)), ((40, 104), (128, 128)),
        ((136, 144), (144, 144)), ((160, 80), (160, 80)), ((80, 160), (160, 160)),
        ((192, 128), (192, 128)), ((256, 136), (256, 144)),
    ],
)  # fmt: skip
def test_values_have_fewer_columns_than_keys_above_128(
    head_dims: tuple[int, int], columns: tuple[int, int]
):
    config = backward_plan(problem(*head_dims))
    assert columns == (config.BLOCK_D + config.TAIL_D, config.BLOCK_DV + config.TAIL_DV)


@pytest.mark.parametrize(
    ("D", "in_registers"),
    [
        (64, (False, False)), (80, (False, True)), (96, (False, True)), (128, (False, False)),
        (144, (True, True)), (160, (True, True)), (192, (False, False)), (256, (False, False)),
    ],
)  # fmt: skip
def test_keys_and_values_in_registers(D: int, in_registers: tuple[bool, bool]):
    config = backward_plan(problem(D))
    assert in_registers == (config.HAS_K_IN_REGISTERS, config.HAS_V_IN_REGISTERS)


@pytest.mark.parametrize(
    ("head_dims", "given", "is_wide"),
    [
        ((192, 128), {"causal": True}, True), ((168, 64), {"window_size": (100, 0)}, True),
        ((192, 136), {}, False), ((192, 80), {}, False), ((176, 96), {}, False),
        ((160, 128), {}, False), ((256, 128), {}, False),
        ((192, 128), {"softcap": 20.0}, False), ((192, 128), {"deterministic": True}, False),
        ((192, 128), {"mask": SPANS}, False), ((192, 128), {"dropout_p": 0.1}, False),
    ],
)  # fmt: skip
def test_tiles_of_128_keys(head_dims: tuple[int, int], given: dict[str, Any], is_wide: bool):
    config = backward_plan(problem(*head_dims, **given))
    assert is_wide == (config.IS_SPLIT and config.BLOCK_N == 128)


TABLE = torch.zeros(1, 9)


@pytest.mark.parametrize(
    ("function", "queries"),
    [
        (lambda s, b, h, i, j: s - 0.5 * (i - j).abs(), 128),
        (lambda s, b, h, i, j: s + TABLE[h, j - i], 64),  # which needs registers for addresses
        (lambda s, b, h, i, j: 2.0 * s, 64),
        (lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s, -torch.inf), 64),
    ],
)
def test_a_function_that_adds_a_number_of_the_distance_keeps_the_tile(function: Any, queries: int):
    q, k, v = qkv(generator(0), B=1, M=1, N=1, Hq=1, Hk=1, D=64, Dv=64, dtype=torch.bfloat16)
    operands, options = described((q, k, v), Dense(), {"score_mod": function})
    assert queries == backward_plan(AttentionProblem.of(operands, options)).BLOCK_M


def test_ordered_additions_under_a_causal_mask_have_phases():
    assert backward_plan(problem(causal=True, deterministic=True)).HAS_PHASES
    options: tuple[dict[str, Any], ...] = (
        {"causal": True},
        {"deterministic": True},
        {"window_size": (100, 0), "deterministic": True},
        {"causal": True, "attention_chunk": 100, "deterministic": True},
        {"causal": True, "block_mask": VISIBLE, "deterministic": True},
    )
    assert not any(backward_plan(problem(**given)).HAS_PHASES for given in options)


@pytest.mark.parametrize(
    ("tiles", "heads", "swizzle", "wanted"),
    [
        (64, 64, 8, (2, 4)),
        (64, 9, 8, (2, 3)),  # groups of equal size
        (64, 8, 8, (1, 8)),  # all heads together
        (64, 3, 1, (2, 1)),
        (4, 64, 8, (1, 8)),  # short sequences
        (4, 9, 8, (1, 5)),
    ],
)
def test_phases_of_heads(tiles: int, heads: int, swizzle: int, wanted: tuple[int, int]):
    assert phases_of(tiles, heads, swizzle) == wanted


def test_full_masks_count_the_sum_for_dq_in_the_swizzle():
    """At head dim 256, dQ in float32 takes as many bytes as Q and dO."""

    def swizzle(**options: Any) -> int:
        sizes = {"M": 4096, "N": 4096}
        found = problem(256, deterministic=True, **options)._replace(**sizes)
        return swizzles(found, 1, H100)[0]

    assert [swizzle(), swizzle(causal=True), swizzle(window_size=(100, -1))] == [4, 8, 8]


def test_consumers_start_apart_where_most_tiles_are_full():
    """As under a full mask: masked steps separate the consumers of few tiles only."""

    def stagger(M: int, N: int, D: int = 128, **options: Any) -> int:
        return backward_plan(problem(D, causal=True, **options)._replace(M=M, N=N)).STAGGER

    assert stagger(1024, 16384) == backward_plan(problem()).STAGGER == 400
    assert stagger(1024, 2048) == 400 and stagger(1025, 2048) == stagger(16384, 16384) == 0
    assert stagger(1024, 16384, window_size=(100, 0)) == stagger(1024, 16384, D=64) == 0
