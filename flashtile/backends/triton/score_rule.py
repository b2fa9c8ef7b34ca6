"""Softcap and score functions with their derivatives, and relative biases, on tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.intrinsics import load_each, tanh
from .positions import corners_of_scores, indices_of_scores, key_positions, query_positions


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
def product_gradient(
    ds, qk, rows, keys, visible, corners, b, h, positions, score, IS_MASKED: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """The gradient of the scaled products, from that of the scores, `ds`."""
    if cfg.SCORE_MOD is not None:
        s = capped_score(qk, score, cfg)
        values, integers = score.data.captured, score.data.captured_integers
        sequence, head, i, j = indices_of_scores(b, h, rows, keys, positions, cfg)
        indices = corners_of_scores(b, h, corners, positions, cfg)
        ds = cfg.SCORE_GRADIENT(s, sequence, head, i, j, indices, ds, values, integers)
        if IS_MASKED:
            ds = tl.where(visible, ds, 0.0)  # the derivative may be NaN elsewhere
    if cfg.HAS_SOFTCAP:
        ds = ds * score_slope(qk, score, cfg)
    return ds


@triton.jit
def add_relative_bias(s, data, h, rows, keys, corners, positions, cfg: tl.constexpr):
    """Scores plus a relative bias.

    Most tiles of a long sequence are farther from the diagonal than a short table reaches. All
    their scores add the same number, so the kernel loads it once instead of once for each score.
    The branch reads no scores, so its loads overlap the product that computes them.
    """
    R = data.table_reach
    middle = data.table_ptr + h * (2 * R + 1) + R
    first_i = query_positions(corners.first_row, positions, cfg)
    last_i = query_positions(corners.last_row, positions, cfg)
    first_j = key_positions(corners.first_key, positions, cfg)
    last_j = key_positions(corners.last_key, positions, cfg)
    nearest, farthest = first_j - last_i, last_j - first_i
    i, j = query_positions(rows, positions, cfg), key_positions(keys, positions, cfg)
    if (nearest >= R) | (farthest <= -R):
        bias = tl.load(middle + tl.where(nearest >= R, R, -R)).to(tl.float32)
        bias = tl.broadcast_to(bias, s.shape)
    else:
        d = (j - first_i) - (i - first_i)  # fewer instructions than j - i
        d = tl.minimum(tl.maximum(d, -R), R)
        bias = load_each(middle + d).to(tl.float32)
    return s + bias
