"""Score functions as source of Triton functions: what is written, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.backends.triton.score_source import CAPTURED, GRADIENT, SCORE, source_of
from flashtile.backends.triton.support import unsupported_reasons
from flashtile.call.layouts import Dense
from flashtile.call.prepare import prepare
from flashtile.problem import AttentionProblem
from flashtile.score_mod import derivative, described

ScoreMod = Callable[..., Tensor]
TABLE = torch.zeros(4, 9)


def source(function: ScoreMod) -> str:
    """The last function of the source, without its first line."""
    text = described(function, torch.float32, torch.device("cpu")).program
    return source_of(text, SCORE).rpartition("integers_ptr):\n")[2]


def test_a_table() -> None:
    assert source(lambda s, b, h, i, j: s + TABLE[h, j - 2]).split("\n") == [
        "    t0 = (j) - (2)",
        "    t1_1 = wrapped(t0, 9)",
        "    t1_0 = wrapped(h, 4)",
        "    t1 = tl.load(values_ptr + 0 + t1_1.to(tl.int32) * 1 + t1_0.to(tl.int32) * 9, "
        "mask=(t1_1 >= 0) & (t1_1 < 9) & (t1_0 >= 0) & (t1_0 < 4), other=0).to(tl.float32)",
        "    t2 = (s) + (t1)",
        "    return tl.zeros_like(s) + t2",
        "",
    ]


def test_large_tables_have_64_bit_offsets() -> None:
    table = torch.zeros(1, 1).expand(2**16, 2**16)
    text = described(
        lambda s, b, h, i, j: s + table.to("meta")[i, j], torch.float32, torch.device("meta")
    ).program
    assert ".to(tl.int64) * 65536" in source_of(text, SCORE)


def test_equal_sources_have_equal_names() -> None:
    """So that compiled kernels are found on disk; others never are."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from flashtile.backends.triton.score_function import function_of

    texts = [
        described(lambda s, b, h, i, j, n=n: s * n, torch.float32, torch.device("cpu")).program
        for n in (2.0, 3.0)
    ]
    names = [function_of(x, SCORE).__name__ for x in texts]
    function_of.cache_clear()
    assert names == [function_of(x, SCORE).__name__ for x in texts]
    assert len(set(names)) == 2
    other = derivative(texts[0], torch.float32, of_captured=False)
    assert function_of(other, GRADIENT).__name__ not in names


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


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda s, b, h, i, j: s.expm1(), "expm1.default in a score_mod or its derivative"),
        (lambda s, b, h, i, j: s**7, "pow.Tensor_Scalar in a score_mod or its derivative"),
        (lambda s, b, h, i, j: torch.atan(s), "atan.default in a score_mod or its derivative"),
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


def test_gradients_are_summed_before_they_are_added() -> None:
    """Over keys, rows or both, if these share the captured number."""
    numbers = torch.zeros(9)
    sums = {
        "tl.sum(tl.sum(x0, 1), 0)": lambda s, b, h, i, j: s * numbers[h],
        "tl.sum(x0, 1)[:, None]": lambda s, b, h, i, j: s * numbers[i // 2],
        "tl.sum(x0, 0)[None, :]": lambda s, b, h, i, j: s * numbers[j + b],
        "x0 = x0": lambda s, b, h, i, j: s * numbers[i - j],
    }
    for wanted, function in sums.items():
        text = described(function, torch.float32, torch.device("cpu")).program
        gradient = derivative(text, torch.float32, of_captured=True)
        written = source_of(gradient, CAPTURED)
        assert wanted in written
        assert written.count("tl.atomic_add(total_ptr + ") == 1


def test_a_forced_gpu_backend_says_why() -> None:
    q = torch.zeros(1, 5, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"hopper: .*a score_mod"):
        flashtile.attention(q, q, q, score_mod=lambda s, *ids: s * 2, backend="hopper")
