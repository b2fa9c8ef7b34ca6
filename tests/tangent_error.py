"""Tangents of the reference, and the error that is always allowed of tangents, as
`flashtile.testing.error_model` has it for results.

With ts the tangent of a score, mu the sum of P ts over a row, and [x] the variance of x,

    [ts]        (u/2 |scale| (|tq||k| + |q||tk|) |slope|)^2 + u^2 ts^2, and that of the slope
    [mu]        P^2 @ [ts] + [P] @ ts^2 + (u |P ts| @ 1)^2, which is that of the tangent of L
    [tangent]   the products of P ts with v and of P with tv, each with the variances of its factors
                and of its sum; and mu O, with [mu], [out] and the rounding of the stored output
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import vjp

from flashtile.testing import rounding_variance
from flashtile.testing.error_model import EXPONENTIAL
from flashtile.testing.reference import Attend, ScoreRule, scaled_products, softmax_weights


def tangents_of(
    function: Callable[..., Sequence[Tensor]], point: Sequence[Tensor], along: Sequence[Tensor]
) -> list[Tensor]:
    """The tangents of a function's results."""
    with dual_level():
        results = function(*(make_dual(x, t) for x, t in zip(point, along, strict=True)))
        pairs = [unpack_dual(x) for x in results]
    return [torch.zeros_like(x) if t is None else t for x, t in pairs]


def tangent_variance(dtype: torch.dtype) -> Attend:
    """An `attend` for the reference: the tangents of its results are the variances of the errors of
    the call's tangents, for inputs of `dtype`.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
        found: Any = _Variance.apply(q, k, v, rule.bias, rule.sink, rule, dtype)
        return found

    return attend


class _Variance(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any, rule: ScoreRule, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        (B, M, Hq, _), (N, Dv) = q.shape, (v.shape[1], v.shape[3])
        return q.new_zeros(B, M, Hq, Dv), q.new_zeros(B, Hq, M), q.new_zeros(B, Hq, M, N)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.rule, ctx.dtype = inputs
        ctx.save_for_forward(*tensors)

    @staticmethod
    def jvp(ctx: Any, tq: Any, tk: Any, tv: Any, tbias: Any, tsink: Any, *_: None) -> Any:
        saved = ctx.saved_tensors
        q, k, v, bias, sink = (None if x is None else unpack_dual(x).primal for x in saved)
        rule = ctx.rule._replace(bias=bias, sink=sink)
        u = torch.finfo(torch.promote_types(ctx.dtype, torch.float32)).eps / 2

        def scores(a: Tensor, b: Tensor) -> Tensor:
            return torch.einsum("bmhd,bnhd->bhmn", a, b)

        def product(a: Tensor, b: Tensor) -> Tensor:
            return torch.einsum("bhmn,bnhd->bmhd", a, b)

        def rows(x: Tensor) -> Tensor:
            return x.transpose(1, 2)[..., None]

        pairs = (q, tq), (k, tk), (v, tv)
        tq, tk, tv = (torch.zeros_like(x) if t is None else t for x, t in pairs)
        s = scaled_products(q, k, rule)
        slope, slope_var = torch.ones_like(s), torch.zeros_like(s)
        if rule.softcap > 0:
            slope = 1 - (s / rule.softcap).square()
            s_var = (u / 2 * rule.scale * scores(q.abs(), k.abs())).square()
            slope_var = 4 * (u**2 + s_var / rule.softcap**2)
        if rule.function is not None:
            slope = slope * vjp(rule.function, s)[1](torch.ones_like(s))[0]
        along = rule.scale * (scores(tq, k) + scores(q, tk))
        sizes = abs(rule.scale) * (scores(tq.abs(), k.abs()) + scores(q.abs(), tk.abs()))
        ts = slope * along
        ts_var = (u / 2 * sizes * slope).square() + along.square() * slope_var
        if tbias is not None:
            ts = ts + tbias
        ts_var = ts_var + (u * ts).square()
        weights, lse, signed = softmax_weights(q, k, rule)
        P = signed.abs()
        out = product(weights, v)
        out_var, L_var, P_var = rounding_variance(ctx.dtype)(q, k, v, rule)
        ts, ts_var = (x.masked_fill(P == 0, 0.0) for x in (ts, ts_var))
        terms, terms_var = P * ts, P.square() * ts_var + P_var * ts.square()
        mu, mu_var = terms.sum(-1), terms_var.sum(-1) + (u * terms.abs().sum(-1)).square()
        if tsink is not None:
            from_lse = sink[..., 0] - lse
            term = torch.exp(from_lse) * tsink[..., 0]
            mu = mu + term
            mu_var = mu_var + term.square() * (u**2 * (4 + EXPONENTIAL + from_lse**2) + L_var)
        kept = rule.factor.square()
        stored = torch.finfo(ctx.dtype).eps / 12**0.5 if ctx.dtype.itemsize == 2 else 0.0
        tangent_var = (
            product(terms_var * kept, v.square())
            + product(P_var * kept, tv.square())
            + (u * product((terms * rule.factor).abs(), v.abs())).square()
            + (u * product(weights, tv.abs())).square()
            + rows(mu_var) * out.square()
            + rows(mu).square() * (out_var + (u**2 + stored**2) * out.square())
        )
        return tangent_var.nan_to_num(), mu_var.nan_to_num(), torch.zeros_like(P)
