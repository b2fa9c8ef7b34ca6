"""Score functions as source of Triton functions: what is written, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.backends.triton.captured_source import CAPTURED, SUMS, captured_source, kept_tiles
from flashtile.backends.triton.support import unsupported_reasons
from flashtile.call.layouts import Dense
from flashtile.call.prepare import prepare
from flashtile.gpu.score_source import (
    GLUON,
    GRADIENT,
    SCORE,
    TRITON,
    Corners,
    Facts,
    Language,
    Writer,
    source_of,
)
from flashtile.problem import AttentionProblem
from flashtile.score_mod import derivative, described
from flashtile.score_mod.program import VALUES, parsed

ScoreMod = Callable[..., Tensor]
TABLE = torch.zeros(4, 9)
CPU = torch.device("cpu")


def source(function: ScoreMod, language: Language = TRITON) -> str:
    """The last function of the source, without its first line."""
    text = described(function, torch.float32, torch.device("cpu")).program
    return source_of(text, SCORE, language).rpartition("integers_ptr):\n")[2]


def test_a_table() -> None:
    assert source(lambda s, b, h, i, j: s + TABLE[h, j - 2]).split("\n") == [
        "    t0 = (j) - (2)",
        "    t1_0 = wrapped(h, 4)",
        "    t1_1 = wrapped(t0, 9)",
        "    t1 = tl.load(values_ptr + 0 + t1_1.to(tl.int32) * 1 + t1_0.to(tl.int32) * 9, "
        "mask=(t1_0 >= 0) & (t1_0 < 4) & (t1_1 >= 0) & (t1_1 < 9), other=0).to(tl.float32)",
        "    t2 = (s) + (t1)",
        "    return t2",
        "",
    ]


def test_gluon_has_fewer_digits_of_a_score_only() -> None:
    text = described(
        lambda s, b, h, i, j: s.tanh() + torch.tanh(0.1 * (i - j)), torch.float32, CPU
    ).program
    gluon = source_of(text, SCORE, GLUON)
    assert "= tanh_of_scores(s)" in gluon and "= tanh(t2)" in gluon
    assert "tanh_of" not in source_of(text, SCORE)


def test_large_tables_have_64_bit_offsets() -> None:
    table = torch.zeros(1, 1).expand(2**16, 2**16)
    text = described(
        lambda s, b, h, i, j: s + table.to("meta")[i, j], torch.float32, torch.device("meta")
    ).program
    assert ".to(tl.int64) * 65536" in source_of(text, SCORE)


def test_equal_sources_have_equal_names() -> None:
    """So that compiled kernels are found on disk; others never are."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from flashtile.gpu.score_source import function_of

    texts = [
        described(lambda s, b, h, i, j, n=n: s * n, torch.float32, torch.device("cpu")).program
        for n in (2.0, 3.0)
    ]
    names = [function_of(source_of(x, SCORE)).__name__ for x in texts]
    function_of.cache_clear()
    assert names == [function_of(source_of(x, SCORE)).__name__ for x in texts]
    assert len(set(names)) == 2
    other = derivative(texts[0], torch.float32, of_captured=False)
    assert function_of(source_of(other, GRADIENT)).__name__ not in names


def reasons(function: ScoreMod, **options: Any) -> list[str]:
    """The Triton backend's reasons that name `score_mod`, for a call on a GPU."""
    q = torch.zeros(1, 5, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    problem: AttentionProblem = prepare(
        (q, q, q), Dense(), {"score_mod": function, **options}
    ).problem
    problem = problem._replace(device_type="cuda", capability=(9, 0))
    return [reason for reason in unsupported_reasons(problem) if "score_mod" in reason]


def test_what_the_kernels_have() -> None:
    assert reasons(lambda s, b, h, i, j: s.tanh() + TABLE[h, j]) == []
    for activation in (F.silu, F.mish, F.softplus, F.elu, F.selu, F.hardswish, F.logsigmoid):
        assert reasons(lambda s, b, h, i, j, f=activation: f(s)) == []


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda s, b, h, i, j: s.lgamma(), "lgamma.default in a score_mod or its derivative"),
        (lambda s, b, h, i, j: s**9, "pow.Tensor_Scalar in a score_mod or its derivative"),
        (lambda s, b, h, i, j: s ** TABLE[h, 0], "pow.Tensor_Tensor in a score_mod or its"),
        (lambda s, b, h, i, j: torch.inf**s, "pow.Scalar in a score_mod or its derivative"),
        (lambda s, b, h, i, j: s**torch.inf, "pow.Tensor_Scalar in a score_mod"),
        (lambda s, b, h, i, j: torch.erfinv(s), "erfinv.default in a score_mod or its derivative"),
    ],
)
def test_other_operations_are_refused_by_name(function, named) -> None:
    (reason,) = reasons(function)
    assert reason.startswith(named)


def test_only_deterministic_gradients_of_captured_tensors_are_refused() -> None:
    table = TABLE.clone().requires_grad_()
    assert reasons(lambda s, b, h, i, j: s + table[h, j]) == []
    (reason,) = reasons(lambda s, b, h, i, j: s + table[h, j], deterministic=True)
    assert reason == "deterministic gradients of what a score_mod captures (on a CPU)"
    assert reasons(lambda s, b, h, i, j: s + table.detach()[h, j], deterministic=True) == []


def derivative_of(function: ScoreMod) -> str:
    text = described(function, torch.float32, torch.device("cpu")).program
    return derivative(text, torch.float32, of_captured=True)


@pytest.mark.parametrize("by_difference", [True, False])
def test_gradients_are_summed_before_they_are_added(by_difference: bool) -> None:
    """Over keys, rows, diagonals or all scores, if these share the captured number."""
    numbers = torch.zeros(9)
    every, diagonal = "tl.sum(kept[0], 0)", "x0 = kept[0]"
    sums = {
        (every, True): lambda s, b, h, i, j: s * numbers[h],
        ("tl.sum(x0, 1)[:, None]", False): lambda s, b, h, i, j: s * numbers[i // 2],
        ("tl.sum(x0, 0)[None, :]", False): lambda s, b, h, i, j: s * numbers[j + b],
        (diagonal, by_difference): lambda s, b, h, i, j: s * numbers[(i - j).abs() + 1],
        ("", False): lambda s, b, h, i, j: s * numbers[i + j],
    }
    for (wanted, is_kept), function in sums.items():
        gradient = derivative_of(function)
        tile = captured_source(gradient, CAPTURED, by_difference)
        band = captured_source(gradient, SUMS, by_difference)
        assert kept_tiles(gradient, by_difference) == is_kept
        assert (wanted if is_kept or wanted != diagonal else "") in (band if is_kept else tile)
        added = [text.count("tl.atomic_add(total_ptr + ") for text in (tile, band)]
        assert added == [1 - is_kept, is_kept]


def facts(function: ScoreMod) -> tuple[Facts, str]:
    """The facts of a program, and the last index that it reads with."""
    text = described(function, torch.float32, torch.device("cpu")).program
    program = parsed(text)
    (read,) = (line for line in program.lines if line.op == VALUES)
    return Writer(program).facts, read.arguments[-1]


@pytest.mark.parametrize(
    ("index", "axes"),
    [
        (lambda i, j: i, "i"),
        (lambda i, j: i - j, "d"),
        (lambda i, j: (j - i).clamp(-4, 4) + 4, "d"),
        (lambda i, j: (j + 3) - (i - 1) // 1, "ij"),
        (lambda i, j: torch.add(j, i, alpha=-1), "d"),
        (lambda i, j: i - 2 * j, "ij"),
        (lambda i, j: (i - j) + j, "dj"),
        (lambda i, j: (i - j) * j, "dj"),
        (lambda i, j: i - i, "i"),
        (lambda i, j: i.to(torch.uint8) - j, "ij"),  # wraps around
        (lambda i, j: i.to(torch.int64) - j, "d"),
    ],
)
def test_on_what_an_index_depends(index: Callable[..., Tensor], axes: str) -> None:
    found, read = facts(lambda s, b, h, i, j: s + TABLE[h, index(i, j)])
    assert found.axes(read) == set(axes)


def test_bounds_hold_in_every_tile() -> None:
    """The bounds are those of the indices of a tile, for every operation that they know."""
    corners = Corners(7, 9, 4, 8)
    i, j = torch.meshgrid(torch.arange(7, 10), torch.arange(4, 9), indexing="ij")

    class Plain:
        """Triton's functions on Python's integers."""

        minimum, maximum = min, max

    for index in (
        lambda i, j: j - i,
        lambda i, j: (i - j).abs(),
        lambda i, j: (j - i).abs().neg() + 3,
        lambda i, j: (i - j - 2).clamp(-1, 1) + (j - i),
        lambda i, j: (i - j).clamp_min(0) - (j - i).clamp_max(-2),
    ):
        found, read = facts(lambda s, b, h, i, j, f=index: s + TABLE[h, f(i, j)])
        bounds = found.bounds(read)
        assert bounds is not None
        least, greatest = (eval(x, {"tl": Plain, "corners": corners}) for x in bounds)
        assert least <= int(index(i, j).min())
        assert greatest >= int(index(i, j).max())
    unknown, read = facts(lambda s, b, h, i, j: s + TABLE[h, (i - j) * (i - j)])
    assert unknown.bounds(read) is None


def test_tiles_that_read_one_number_or_need_no_checks_are_told_apart() -> None:
    """Where the bounds of an index are known."""

    def clamped(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + TABLE[h, (j - i).clamp(-4, 4) + 4]

    known = source(clamped)
    unknown = source(lambda s, b, h, i, j: s + TABLE[h, (j - i) * (j - i)])
    counts = [
        (x.count("tl.load("), x.count("load_each("), x.count("if ")) for x in (known, unknown)
    ]
    assert counts == [(1, 2, 2), (0, 1, 0)]
    assert "elif (t3_1_least >= 0) & (t3_1_greatest < 9):" in known
    gluon, of_head = source(clamped, GLUON), "(t3_0 >= 0) & (t3_0 < 4)"
    assert f"elif {of_head} & (t3_1_least >= 0) & (t3_1_greatest < 9):" in gluon
    assert gluon.count(of_head) == 3  # loads of a tile whose indices are inside check nothing


def test_a_forced_gpu_backend_says_why() -> None:
    q = torch.zeros(1, 5, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"hopper: .*a score_mod"):
        flashtile.attention(q, q, q, score_mod=lambda s, *ids: s - 1e9, backend="hopper")


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, i, j: s + torch.div(i.float(), 41.0, rounding_mode="floor"),
        lambda s, b, h, i, j: s + torch.div(i.half(), 41.0, rounding_mode="trunc"),
        lambda s, b, h, i, j: s + torch.remainder(i.float(), j),
    ],
)
def test_quotients_that_become_integers_are_rounded_exactly(function) -> None:
    """On a GPU; the interpreter divides so anyway."""
    text = described(function, torch.float32, torch.device("cpu")).program
    assert "tl.div_rn(" in source_of(text, SCORE)
