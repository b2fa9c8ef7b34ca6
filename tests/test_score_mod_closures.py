"""What a score function reads without naming it itself may change between two calls."""

from __future__ import annotations

import functools
import math
import sys
from types import FunctionType, ModuleType

import pytest
import torch
import torch.nn.functional as F

import flashtile
from flashtile.score_mod.closure import dependencies

_factor = 1.0


def imported(score, b, h, i, j):
    from settings_of_test import number

    return score * number


def imported_inside(score, b, h, i, j):
    def times():
        import settings_of_test

        return score * settings_of_test.number

    return times()


def by_name(score, b, h, i, j):
    return score * globals()["_fac" + "tor"]


def read_inside(score, b, h, i, j):
    def times():
        return score * _factor

    return times()


@pytest.mark.parametrize("function", [imported, imported_inside, by_name, read_inside])
def test_new_values(function, monkeypatch):
    module = ModuleType("settings_of_test")
    monkeypatch.setitem(sys.modules, "settings_of_test", module)
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    for new in (1.0, 2.0, 3.0):
        monkeypatch.setattr(module, "number", new, raising=False)
        monkeypatch.setattr(sys.modules[__name__], "_factor", new)
        out = flashtile.attention(q, k, v, score_mod=function)
        torch.testing.assert_close(out, flashtile.attention(q * new, k, v))


def without_a_module(number):
    """A function that `exec` has made, whose ``__module__`` is None."""
    names = {"number": number}
    exec("def function(score, b, h, i, j): return score * number", names)
    return names["function"], names


def with_a_name_of_torch(number):
    names = {"number": number}

    @functools.wraps(torch.tanh)
    def function(score, b, h, i, j):
        return score * names["number"]

    function.__module__ = "torch.nn.functional"
    return function, names


def with_a_helper_of_that_name(number):
    helper, names = with_a_name_of_torch(number)
    return lambda score, b, h, i, j: helper(score, b, h, i, j), names


def with_globals_of_torch(number):
    """Its globals are PyTorch's, but its code is not."""
    names = {"number": number}

    def inner(score, b, h, i, j):
        return score * names["number"]

    closure = inner.__closure__
    return FunctionType(inner.__code__, vars(torch), "tanh", None, closure), names


def with_a_module_of_that_name(number):
    module = ModuleType("math")
    module.number = number
    return lambda score, b, h, i, j: score * module.number, vars(module)


@pytest.mark.parametrize(
    "make",
    [
        without_a_module,
        with_a_name_of_torch,
        with_a_helper_of_that_name,
        with_globals_of_torch,
        with_a_module_of_that_name,
    ],
)
def test_new_values_of_functions_that_look_like_parts_of_pytorch(make):
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    function, names = make(1.0)
    for new in (1.0, 2.0, 3.0):
        names["number"] = new
        out = flashtile.attention(q, k, v, score_mod=function)
        torch.testing.assert_close(out, flashtile.attention(q * new, k, v))


@pytest.mark.parametrize("x", [torch.where, F.relu, math.exp, torch, math, F, torch.Tensor, dict])
def test_parts_of_python_and_pytorch_are_not_looked_into(x):
    described = dependencies(lambda score, b, h, i, j: x)
    assert described is not None
    assert x in described[0]
