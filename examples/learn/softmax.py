"""Lesson 2: the softmax of a row in three passes, in two and in one.

Plain Python on lists, so that each pass over the numbers is a visible loop. A row whose scores are
all -inf sees no key and gives zeros. A NaN makes its whole row NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf


def three_passes(scores: Sequence[float]) -> list[float]:
    """Safe softmax: one pass for the maximum, one for the sum, one for the division."""
    m = -inf
    for s in scores:
        m = max(m, s)
    l = 0.0
    for s in scores:
        l += shifted_exp(s, m)
    return [shifted_exp(s, m) / l if l != 0 else 0.0 for s in scores]


def two_passes(scores: Sequence[float]) -> list[float]:
    """Online softmax: one pass keeps the maximum and the sum up to date, one divides."""
    m, l = -inf, 0.0
    for s in scores:
        m_new = max(m, s)
        l = shifted_exp(m, m_new) * l + shifted_exp(s, m_new)
        m = m_new
    return [shifted_exp(s, m) / l if l != 0 else 0.0 for s in scores]


def one_pass(scores: Sequence[float], values: Sequence[float]) -> float:
    """The average of `values` with the softmax of `scores` as weights. The weights themselves are
    never finished, so nothing has to be read again.
    """
    m, l, o = -inf, 0.0, 0.0
    for s, v in zip(scores, values, strict=True):
        m_new = max(m, s)
        rescale, p = shifted_exp(m, m_new), shifted_exp(s, m_new)
        l = rescale * l + p
        o = rescale * o + p * v
        m = m_new
    return o / l if l != 0 else 0.0


def shifted_exp(s: float, m: float) -> float:
    """exp(s - m), and 0 for a masked score; -inf - (-inf) would be NaN."""
    return 0.0 if s == -inf else exp(s - m)
