"""Softcap and score functions with their derivatives, and relative biases, on tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.intrinsics import LOG2E, tanh
from .positions import indices_of_scores


@triton.jit
def score_slope(qk, score, cfg: tl.constexpr):
    """The derivative of softcap, ``1 - tanh(s / cap)**2``; only for calls with a softcap."""
    t = tanh(qk * (score.data.scale / score.data.softcap))
    return 1.0 - t * t


@triton.jit
def capped_score(qk, score, cfg: tl.constexpr):
    """What a score function gets: the scaled product, after the softcap if there is one."""
    s = qk * score.data.scale
    if cfg.HAS_SOFTCAP:
        s = tanh(s / score.data.softcap) * score.data.softcap
    return s


@triton.jit
def product_gradient(ds, qk, rows, keys, visible, b, h, places, score, cfg: tl.constexpr):
    """The gradient of the scaled products, from that of the scores, `ds`."""
    if cfg.SCORE_MOD is not None:
        s = capped_score(qk, score, cfg)
        values, integers = score.data.captured, score.data.captured_integers
        sequence, head, i, j = indices_of_scores(b, h, rows, keys, places, cfg)
        ds = cfg.SCORE_GRADIENT(s, sequence, head, i, j, ds, values, integers)
        ds = tl.where(visible, ds, 0.0)  # the derivative may be NaN elsewhere
    if cfg.HAS_SOFTCAP:
        ds = ds * score_slope(qk, score, cfg)
    return ds


@triton.jit
def add_relative_bias(s_log2, data, h, i, j):
    """Scores in base 2 plus a relative bias, for queries at positions `i` and keys at `j`.

    Most tiles of a long sequence are farther from the diagonal than the table reaches. All their
    scores add the same number of the table, so that one load replaces one for each score.
    """
    R = data.table_reach
    middle = data.table_ptr + h * (2 * R + 1) + R
    nearest, farthest = tl.min(j) - tl.max(i), tl.max(j) - tl.min(i)
    if (nearest >= R) | (farthest <= -R):
        s_log2 += tl.load(middle + tl.where(nearest >= R, R, -R)).to(tl.float32) * LOG2E
    else:
        d = tl.minimum(tl.maximum(j - i, -R), R)
        s_log2 += tl.load(middle + d).to(tl.float32) * LOG2E
    return s_log2
