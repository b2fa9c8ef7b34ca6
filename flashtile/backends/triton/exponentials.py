"""Exponentials of scores relative to a pivot of their row: the running maximum in the forward, the
log-sum-exp in the backward.

A kernel that multiplies scores only by a scale, caps them or adds ALiBi keeps pivots in base 2. The
exponent ``s * factor - pivot`` is then one fused multiply-add. It multiplies exactly, but the pivot
has been rounded, so the exponent of the largest score is off by up to half of the pivot's last
digit. This is nothing for scores below 2**20, and infinity for those above 2**31.

Masks made of numbers, such as -1e30 or ``torch.finfo(dtype).min``, are that large. They come as a
bias or from a score function (HAS_LARGE_SCORES). Those kernels keep pivots in natural units and
subtract them first, which costs one more instruction for each score and is exact at the largest.
With HAS_LARGE_FLAGS, the backward does so only in heads with a large log-sum-exp (`row_sums.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.intrinsics import LN2, LOG2E


@triton.jit
def exponent_factor(score, cfg: tl.constexpr):
    """The positive factor that makes the results of `scores_of` exponents of 2."""
    factor = LOG2E
    if cfg.IS_LINEAR:
        factor = score.data.scale * LOG2E
    return factor


@triton.jit
def as_pivot(s, factor, cfg: tl.constexpr):
    """Scores in the units of pivots. `factor` is `exponent_factor`."""
    if not cfg.HAS_LARGE_SCORES:
        s = s * factor
    return s


@triton.jit
def exponentials(s, pivot, factor, cfg: tl.constexpr):
    """exp(s - pivot) of results of `scores_of`; `factor` is `exponent_factor`."""
    if cfg.HAS_LARGE_SCORES:
        p = tl.math.exp2((s - pivot) * LOG2E)
    else:
        p = tl.math.exp2(s * factor - pivot)
    return p


@triton.jit
def rescaling(old, new, cfg: tl.constexpr):
    """The factor that makes sums relative to the pivot `old` relative to `new`."""
    if cfg.HAS_LARGE_SCORES:
        factor = tl.math.exp2((old - new) * LOG2E)
    else:
        factor = tl.math.exp2(old - new)
    return factor


@triton.jit
def log_sum_exp(pivot, row_sum, cfg: tl.constexpr):
    """The log-sum-exp in natural units, of a sum of exponentials relative to `pivot`."""
    if cfg.HAS_LARGE_SCORES:
        lse = pivot + tl.math.log2(row_sum) * LN2
    else:
        lse = (pivot + tl.math.log2(row_sum)) * LN2
    return lse


@triton.jit
def pivot_of_lse(lse, HAS_LARGE_SCORES: tl.constexpr):
    """A log-sum-exp as a pivot. Rows that saw no key get +inf, which makes P zero."""
    pivot = lse
    if not HAS_LARGE_SCORES:
        pivot = lse * LOG2E
    return tl.where(lse == -float("inf"), float("inf"), pivot)
