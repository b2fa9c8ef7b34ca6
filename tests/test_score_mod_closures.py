"""What a score function reads without naming it itself may change between two calls."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import flashtile

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
