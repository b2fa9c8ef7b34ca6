"""Score functions that hide keys as a window does become one."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.call.layouts import Dense, Layout, Packed
from flashtile.call.prepare import describe, read
from flashtile.problem import Options
from flashtile.score_mod import described, windowed
from flashtile.testing import cu_seqlens, generator, qkv

Function = Callable[..., Tensor]
where = torch.where
TABLE = torch.arange(40.0)
DOCUMENTS = torch.arange(40) // 7

# Functions, what j - i is within, and whether they change what they show.
WINDOWS: dict[str, tuple[Function, tuple[float, float], bool]] = {
    "causal": (lambda s, b, h, i, j: where(i >= j, s, -inf), (-inf, 0), False),
    "hidden after": (lambda s, b, h, i, j: where(j > i, -inf, s), (-inf, 0), False),
    "filled": (lambda s, b, h, i, j: s.masked_fill(i < j, -inf), (-inf, 0), False),
    "not": (lambda s, b, h, i, j: where(~(i < j), s, torch.full_like(s, -inf)), (-inf, 0), False),
    "both sides": (
        lambda s, b, h, i, j: where((i >= j) & (i - j < 5), s, -inf), (-4, 0), False,
    ),
    "either side": (
        lambda s, b, h, i, j: where((i - j > 4) | (i + 1 < j), -inf, s), (-4, 1), False,
    ),
    "distance": (lambda s, b, h, i, j: where((i - j).abs() <= 3, s, -inf), (-3, 3), False),
    "shifted": (
        lambda s, b, h, i, j: where(torch.logical_and(j + 2 > i, -i < 3 - j), s, -inf),
        (-1, 2), False,
    ),
    "nested": (
        lambda s, b, h, i, j: where(i >= j, where(j >= i - 6, s.tanh(), -inf), -inf), (-6, 0), True,
    ),
    "with a table": (
        lambda s, b, h, i, j: where(j <= i, s + TABLE[i - j], -inf), (-inf, 0), True,
    ),
}  # fmt: skip
OTHERS: dict[str, Function] = {
    "finite": lambda s, b, h, i, j: where(i >= j, s, -1e4),
    "documents": lambda s, b, h, i, j: where(DOCUMENTS[i] == DOCUMENTS[j], s, -inf),
    "blocks": lambda s, b, h, i, j: where(i // 2 >= j // 2, s, -inf),
    "of a head": lambda s, b, h, i, j: where(i + h >= j, s, -inf),
    "far keys": lambda s, b, h, i, j: where((i - j).abs() > 3, s, -inf),
    "either of two": lambda s, b, h, i, j: where((i >= j) | (j < 4), s, -inf),
    "sums": lambda s, b, h, i, j: where(i + j < 30, s, -inf),
    "twice": lambda s, b, h, i, j: where(2 * i >= 2 * j, s, -inf),
    "fractions": lambda s, b, h, i, j: where(i - j >= 0.5, s, -inf),
    "of the score": lambda s, b, h, i, j: where(s > 0, s, -inf),
    "added later": lambda s, b, h, i, j: where(i >= j, s, -inf) + 1,
    "other side": lambda s, b, h, i, j: where(i >= j, s, inf),
}


def text_of(function: Function) -> str:
    return described(function, torch.float32, torch.device("cpu")).program


@pytest.mark.parametrize("name", WINDOWS)
def test_functions_that_are_windows(name: str) -> None:
    function, bounds, changes = WINDOWS[name]
    program, *found = windowed(text_of(function))
    assert tuple(found) == bounds
    assert bool(program) == changes
    assert "where" not in program and "ge" not in program


@pytest.mark.parametrize("name", OTHERS)
def test_functions_that_are_none(name: str) -> None:
    text = text_of(OTHERS[name])
    assert windowed(text) == (text, -inf, inf)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("keys", [24, 22])
def test_results_are_those_of_the_function(name: str, keys: int) -> None:
    """A second condition, on the score, keeps it a function."""
    function = WINDOWS[name][0]

    def as_function(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return where(s < inf, function(s, b, h, i, j), -inf)

    tensors = qkv(generator(0), B=2, M=24, N=keys, Hq=2, Hk=2, D=16, Dv=16, dtype=torch.float64)
    tensors = [x.requires_grad_() for x in tensors]
    cases = []
    for score_mod in (function, as_function):
        out, lse = flashtile.attention(*tensors, score_mod=score_mod, return_lse=True)
        cases.append((out, lse, *torch.autograd.grad(out.square().sum(), tensors)))
    for one, other in zip(*cases, strict=True):
        torch.testing.assert_close(one, other)


def options_of(function: Function, layout: Layout, M: int, N: int, **given: Any) -> Options:
    sizes = {"B": 1, "M": M, "N": N, "Hq": 1, "Hk": 1, "D": 16, "Dv": 16}
    q, k, v = qkv(generator(0), **sizes)
    if isinstance(layout, Packed):
        q, k, v = (x[0] for x in (q, k, v))
    return describe(*read((q, k, v), layout, {"score_mod": function, **given}))[1]


def sides(options: Options) -> tuple[Any, ...]:
    return options.window_left, options.window_right, bool(options.score_mod)


def test_options_of_the_call() -> None:
    causal, near = WINDOWS["causal"][0], WINDOWS["both sides"][0]
    assert sides(options_of(causal, Dense(), 20, 20)) == (None, 0, False)
    assert sides(options_of(near, Dense(), 20, 20, window_size=(2, 9))) == (2, 0, False)
    assert sides(options_of(near, Dense(), 20, 20, window_size=(9, 3))) == (4, 0, False)
    assert sides(options_of(near, Dense(), 20, 20, causal=True)) == (4, 0, False)
    # Windows count from the last query and key, functions from the first ones.
    assert sides(options_of(causal, Dense(), 25, 20)) == (None, 5, False)
    assert sides(options_of(WINDOWS["shifted"][0], Dense(), 20, 21)) == (2, 1, False)
    starts = cu_seqlens([12, 8])
    assert sides(options_of(causal, Packed(starts, starts, 12, 12), 20, 20)) == (None, 0, False)


def test_calls_that_keep_the_function() -> None:
    causal = WINDOWS["causal"][0]
    assert sides(options_of(causal, Dense(), 20, 25)) == (None, None, True)  # no query's own key
    assert sides(options_of(causal, Dense(), 20, 20, window_size=(-2, 9)))[2]
    used = torch.tensor([9], dtype=torch.int32)
    assert sides(options_of(causal, Dense(), 20, 20, seqused_k=used)) == (None, None, True)
    layout = Packed(cu_seqlens([12, 8]), cu_seqlens([12, 8]), 12, 12)  # which may differ
    assert sides(options_of(causal, layout, 20, 20)) == (None, None, True)


def test_explain_says_how_often_the_function_was_traced() -> None:
    q = torch.zeros(1, 6, 1, 16)
    text = str(
        flashtile.explain(q, q, q, score_mod=lambda s, b, h, i, j: where(i >= j, s * 3, -inf))
    )
    assert "score_mod: 1 operations, traced 1 times" in text
