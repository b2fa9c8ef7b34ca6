"""P again, from Q K^T and the log-sum-exp, for the backward pass.

A block of scores is transposed here, (64 keys, columns of queries): a thread of the layout
`accumulator` has two keys, and of every eight queries two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.softmax import LOG2E, bounds, tanh


@gluon.jit
def probabilities(s, lse_log2, keys, m0, slope, score, MASKED: gl.constexpr, cfg: gl.constexpr):
    """P of a block, and the factor of dP - delta that gives dS: P times the slope of softcap.

    `lse_log2` (columns,), +inf for rows that saw nothing; m0: row of the first column; `slope`:
    ALiBi's in base 2.
    """
    if cfg.HAS_SOFTCAP:
        t = tanh(s * (score.scale / score.softcap))
        exponent = t * (score.softcap * LOG2E) - lse_log2[None, :]
    else:
        exponent = s * (score.scale * LOG2E) - lse_log2[None, :]
    if cfg.HAS_ALIBI:
        distance = distances(keys.number - keys.shift - m0, s)
        exponent = exponent - slope * gl.abs(distance).to(gl.float32)
    if MASKED:
        exponent = masked_rows(exponent, -float("inf"), keys.start - m0, keys.stop - m0, cfg)
    p = gl.exp2(exponent)
    factor = p
    if cfg.HAS_SOFTCAP:
        factor = p * (1.0 - t * t)
        if MASKED and cfg.IS_PACKED:  # what lies behind the last row may be NaN
            factor = masked_rows(factor, 0.0, keys.start - m0, keys.stop - m0, cfg)
    return p, factor


@gluon.jit
def masked_rows(x, hidden, start, stop, cfg: gl.constexpr):
    """`hidden` where a column lies outside of its key's [start, stop), both (64,)."""
    COLUMNS: gl.constexpr = x.shape[1]
    by_eights = x.reshape([64, COLUMNS // 8, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    eight = eights(COLUMNS, LAYOUT)
    visible = eight >= bounds(start, LAYOUT)
    if cfg.HAS_LEFT or cfg.HAS_CHUNK or cfg.IS_PACKED:
        visible = visible & (eight < bounds(stop, LAYOUT))
    by_eights = gl.where(visible, by_eights, hidden)
    return gl.convert_layout(by_eights.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def distances(bound, s):
    """Columns less a bound (64,), laid out as the scores `s`."""
    COLUMNS: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.reshape([64, COLUMNS // 8, 8]).type.layout
    d = eights(COLUMNS, LAYOUT) - bounds(bound, LAYOUT)
    return gl.convert_layout(d.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def eights(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """(1, COLUMNS / 8, 1): where the eights of a block of queries start; see `softmax.eights`."""
    COUNT: gl.constexpr = COLUMNS // 8
    eight = 8 * gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return eight[None, :, None]
