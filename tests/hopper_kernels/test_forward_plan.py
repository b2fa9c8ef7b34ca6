"""The plan of the Hopper forward: the tiles for a pair of head dims, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashtile.backends.hopper.float8.plan import float8_reasons
from flashtile.backends.hopper.forward.plan import describe_forward, plan, unsupported_reasons
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.score_mod import derivative, described

NUMBERS = torch.zeros(4)


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
    assert columns == (config.BLOCK_D + config.TAIL_D, config.BLOCK_DV + config.TAIL_DV)


@pytest.mark.parametrize(
    ("layout", "D", "N", "window", "keys"),
    [
        ("dense", 96, 9000, (400, 111), 64), ("dense", 96, 9000, (400, 112), 128),
        ("dense", 96, 9000, (20, None), 128), ("dense", 96, 512, (None, None), 128),
        ("dense", 64, 512, (None, 0), 64), ("dense", 64, 513, (None, 0), 128),
        ("dense", 128, 1024, (None, 0), 64), ("dense", 128, 1025, (None, 0), 128),
        ("packed", 96, 100, (None, None), 128),
        ("packed", 96, 1024, (None, 0), 64), ("packed", 96, 1025, (None, 0), 128),
        ("packed", 96, 9000, (511, 0), 64),
    ],
)  # fmt: skip
def test_tiles_that_see_few_keys_have_narrow_blocks(
    layout: str, D: int, N: int, window: tuple[int | None, int | None], keys: int
):
    q = torch.empty(1, 300, 2, D, dtype=torch.bfloat16, device="meta")
    problem = AttentionProblem.of(Operands(q, q, q), Options(300, 300, 1.0))
    left, right = window
    options = problem.options._replace(window_left=left, window_right=right)
    problem = problem._replace(layout=layout, N=N, options=options)
    assert keys == plan(problem).BLOCK_N
    assert plan(problem._replace(runs=2)).BLOCK_N == 128  # parts of sequences


def test_full_masks_have_few_rows_beyond_the_last_query():
    """577 queries of a vision transformer: 640 rows instead of 768."""

    def rows(M: int, D: int = 64, **options: Any) -> int:
        q = torch.empty(1, M, 2, D, dtype=torch.bfloat16, device="meta")
        return plan(AttentionProblem.of(Operands(q, q, q), Options(M, M, 1.0, **options))).BLOCK_M

    assert [rows(M) for M in (192, 193, 256, 257, 512, 576, 577, 640, 641)] == [
        192, 128, 128, 192, 192, 192, 128, 128, 192,
    ]  # fmt: skip
    assert rows(577, 128) == 128 and rows(577, window_right=300) == 192
    q = torch.empty(1, 577, 2, 64, dtype=torch.bfloat16, device="meta")
    problem = AttentionProblem.of(Operands(q, q, q), Options(577, 577, 1.0))
    assert plan(problem._replace(layout="packed")).BLOCK_M == 192


def full(N: int, D: int = 64, **options: Any) -> AttentionProblem:
    """A problem in which all queries see all keys."""
    q, k = (torch.empty(1, rows, 2, D, dtype=torch.bfloat16, device="meta") for rows in (300, N))
    return AttentionProblem.of(Operands(q, k, k), Options(300, N, 1.0, **options))


@pytest.mark.parametrize(
    ("D", "lengths", "widths"),
    [
        (64, (77, 128, 129, 144, 145, 161, 193, 209, 577), (128, 128, 16, 16, 32, 64, 80, 128, 80)),
        (96, (193, 1029), (80, 16)),
        (128, (1029, 1056, 1057, 193), (16, 32, 128, 128)),  # wider ones would spill
        (256, (65, 96, 97, 1029), (16, 32, 64, 16)),
        (64, (3600, 3713, 513, 590, 1500), (16, 128, 16, 80, 128)),  # what saves too little
    ],
)
def test_the_last_block_of_keys_has_its_own_width(
    D: int, lengths: tuple[int, ...], widths: tuple[int, ...]
):
    assert tuple(plan(full(N, D)).LAST_KEYS for N in lengths) == widths


def test_explain_says_how_many_keys_of_the_last_block_are_multiplied():
    assert "tiles of 192 x 128, 16 keys of the last block, head dim" in describe_forward(full(1029))
    assert "keys of the last block" not in describe_forward(full(1024))


@pytest.mark.parametrize(
    "change",
    [{"layout": "packed"}, {"has_lengths": True}, {"runs": 1}, {"spans": 1}, {"has_alibi": True}],
    ids=lambda change: next(iter(change)),
)
def test_other_problems_multiply_whole_blocks(change: dict[str, Any]):
    assert plan(full(1029)._replace(**change)).LAST_KEYS == 128
    counting = {"dropout_p": 0.1}, {"score_mod": "return s"}
    for options in ({"window_right": 0}, {"window_left": 900}, *counting):
        config = plan(full(1029, **options))
        assert config.LAST_KEYS == config.BLOCK_N


@pytest.mark.parametrize(
    "part",
    [{"runs": 1}, {"has_sequences": True}, {"is_partial": True}],
    ids=lambda part: str(*part),
)
def test_dropout_is_for_whole_sequences(part: dict[str, Any]):
    """The kernels draw by indices in a tensor, which are coordinates in whole sequences only."""
    q = torch.empty(1, 300, 2, 64, dtype=torch.bfloat16, device="meta")
    options = Options(300, 300, 1.0)
    whole = AttentionProblem.of(Operands(q, q, q), options)
    reason = "dropout on parts of sequences (on this backend: whole sequences)"
    for problem in (whole, whole._replace(**part)):
        without = unsupported_reasons(problem)
        with_dropout = unsupported_reasons(
            problem._replace(options=options._replace(dropout_p=0.1))
        )
        refused = [] if problem is whole else [reason]
        assert sorted(with_dropout) == sorted(without + refused)


CACHES: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 16}, ""),
    ({"page_size": 528}, ""),
    ({"page_size": 8}, "pages of 8 tokens (on this backend: multiples of 16)"),
    ({"page_size": 16, "has_cache_rows": True}, "left pads of pages (not on this backend)"),
    ({"page_size": 16, "spans": 1}, "a mask of spans over a cache (not on this backend)"),
    ({"has_cache_rows": True}, ""),
    ({"has_cache_rows": True, "needs_grad": True}, "gradients of a cache (not on this backend)"),
    ({"layout": "packed_queries"}, ""),
]


@pytest.mark.parametrize(("change", "reason"), CACHES, ids=str)
def test_caches(change: dict[str, Any], reason: str):
    problem = full(1029)._replace(**{"layout": "packed", **change})
    found = unsupported_reasons(problem)
    assert [x for x in found if x not in unsupported_reasons(full(1029))] == [reason][: reason > ""]
    assert any("cache" in x for x in float8_reasons(problem))


def refusals(**options: Any) -> list[str]:
    """The reasons against a call with these options, without those against a call with none."""
    q = torch.empty(1, 300, 2, 64, dtype=torch.bfloat16, device="meta")
    plain = Options(300, 300, 1.0)
    call = AttentionProblem.of(Operands(q, q, q), plain)
    known = unsupported_reasons(call)
    found = unsupported_reasons(call._replace(options=plain._replace(**options)))
    return [reason for reason in found if reason not in known]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf), ""),
        (lambda s, b, h, i, j: torch.where(i >= j, s, -1e9), "huge"),
        (lambda s, b, h, i, j: s - 100_000 * j, "huge"),
        (lambda s, b, h, i, j: s + NUMBERS[h], ""),
        (lambda s, b, h, i, j: s + NUMBERS[(i - j).abs() % 4], ""),
        (lambda s, b, h, i, j: s + NUMBERS[j % 4], "huge"),
        (lambda s, b, h, i, j: torch.where(NUMBERS.int()[j % 4] > 0, s, -torch.inf), ""),
        (lambda s, b, h, i, j: s + torch.lgamma(s), "lgamma"),
    ],
)
def test_score_functions_that_the_kernels_refuse(function: Any, reason: str):
    """Numbers that masks are made of keep their differences on the Triton backend."""
    program = described(function, torch.float32, torch.device("cpu")).program
    found = refusals(score_mod=program)
    assert len(found) == bool(reason) and all(reason in x for x in found)


def test_what_a_score_function_does_not_meet():
    program = described(lambda s, b, h, i, j: s * NUMBERS[h], torch.float32, NUMBERS.device).program
    gradient = derivative(program, torch.float32, of_captured=True)
    given: dict[str, Any] = {"score_mod": program, "score_mod_gradient": gradient}
    assert not refusals(**given)  # another backend adds the gradients of what it captures
    assert "deterministic" in refusals(**given, deterministic=True)[0]
    assert "dropout" in refusals(score_mod=program, dropout_p=0.1)[0]
    assert "parts" in refusals(score_mod=program, first_head=2)[0]
    of_keys, of_score = (
        described(function, torch.float32, NUMBERS.device).program
        for function in (lambda s, b, h, i, j: s - j, lambda s, b, h, i, j: s * s)
    )
    assert "parts" in refusals(score_mod=of_keys, first_head=2)[0]
    assert not refusals(score_mod=of_score, first_head=2)
    q = torch.empty(1, 300, 2, 64, dtype=torch.float8_e4m3fn, device="meta")
    call = AttentionProblem.of(Operands(q, q, q), Options(300, 300, 1.0, score_mod=program))
    reasons = {
        text: float8_reasons(call._replace(options=call.options._replace(score_mod=text)))
        for text in (program, of_score)
    }
    reason = "a score_mod that reads more than the score (not in float8 on this backend)"
    assert reason in reasons[program]
    assert not any("score_mod" in x for x in reasons[of_score])


def test_tiles_of_score_functions():
    """Three consumers lack the registers for addresses."""

    def consumers(function: Any) -> int:
        program = described(function, torch.float32, torch.device("cpu")).program
        q = torch.empty(1, 3000, 2, 64, dtype=torch.bfloat16, device="meta")
        options = Options(3000, 3000, 1.0, score_mod=program)
        return plan(AttentionProblem.of(Operands(q, q, q), options)).CONSUMERS

    assert consumers(lambda s, b, h, i, j: s - NUMBERS[h] * (i - j)) == 3
    assert consumers(lambda s, b, h, i, j: s + NUMBERS[(i - j).abs() % 4]) == 2
