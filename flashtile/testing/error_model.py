"""The error that is always allowed: a floor under the error that plain PyTorch makes.

Plain PyTorch's error on few numbers is a matter of luck, and where terms cancel it may be 0:
a row that sees one key has dQ = 0. A kernel that adds up the same terms in another order is then
not wrong, although its error is more than twice as large. So the rule (`tolerance.py`) never allows
less than a few roundings of the terms themselves.

`rounding_variance` makes the reference compute the variance of the error that these roundings add
up to, if each is independent of the others. `u` is the largest rounding error of the number 1 (of
float32; of float64 for float64 inputs), `e` is `EXPONENTIAL` and `l` is `LOGARITHM`. With P the
probabilities, L the log-sum-exp and [x] the variance of x:

    [S]      (u/2 |scale| |q||k|)^2 + u^2 (S^2 + alibi^2 + bias^2 + relative bias^2)
    [L]      P^2 @ [S] + u^2 (2 L^2 + m^2 + 4 + l (L - m)^2), m the largest score of the row;
             2 L^2 because L is multiplied by ln 2 when stored and by log2 e when read
    [P]      P^2 ([S] + u^2 (2 + e + (S - L)^2)), and P^2 [L] of the whole row
    [out]    ([P] @ v^2) and so on: every product has the variances of its factors ...
    [x @ y]  ... and, of its sum, (u/2 |x| @ |y|)^2; of dK and dV also u^2/3 times the sum of the
             squares of all partial sums, row after row

The last term is for keys that a few rows see almost alone, such as the first ones under a causal
mask: hundreds of small terms are then added to a partial sum that is already large. Adding up n
terms of random signs one after the other causes an error of 0.4 u times the sum of their
magnitudes (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 2.8 and chapter 4).

What a score function captures has no formula here, because the function may be any. Errors of the
gradients of the scores are drawn with these variances, those of delta and L once for each row, and
autograd takes them to the captured tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reference import (
    Attend,
    RelativeBias,
    ScoreRule,
    scaled_products,
    softmax_weights,
)

# The floor in standard deviations. A single rounding error is at most 1.7 standard deviations.
DEVIATIONS = 6.0

# The variances, in u^2, of the relative errors of a GPU's base-2 exponential and logarithm. All
# errors up to the largest count as equally likely: largest^2 / 3.
# - Triton compiles exp2 to ex2.approx. It is within 2 ulp of the correctly rounded result, so
#   within 2.5 ulp of the exact one, and an ulp is at most 2 u.
#   https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
# - The Hopper kernels call lg2.approx, with an error of at most 2^-22 = 4 u: absolute for numbers
#   from 0.5 to 2, which the 4 in [L] covers ((4 u ln 2)^2 / 3 = 2.6 u^2), else relative. Triton
#   compiles log2 to libdevice's logarithm, which is within 2 u.
#   https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-lg2
EXPONENTIAL = 5**2 / 3
LOGARITHM = 4**2 / 3


def floor_of(variance: Tensor) -> Tensor:
    """The error that is always allowed."""
    return DEVIATIONS * variance.sqrt()


def rounding_variance(dtype: torch.dtype, errors: torch.Generator | None = None) -> Attend:
    """An `attend` for the reference that returns variances instead of results, for inputs of
    `dtype`.

    Args:
        errors: draws rounding errors of the gradients of the scores. What a score function captures
            then gets the error that follows from them, not a variance; without `errors` it gets 0.

    Called in float64, the reference's `out`, `lse` and `probs` are then the variances of their
    rounding errors, and autograd's gradients are the variances of the gradients' errors: the code
    of the reference around `attend` only moves numbers and adds them up.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
        slopes = None if rule.alibi is None else rule.alibi.slopes
        table = None if rule.relative_bias is None else rule.relative_bias.table
        scores = None
        if errors is not None and rule.function is not None:
            scores = rule.function(scaled_products(q.detach(), k.detach(), rule))
        differentiable = q, k, v, rule.bias, rule.sink, slopes, table, scores
        results = _Variance.apply(*differentiable, rule, dtype, errors)
        return results[0], results[1], results[2]

    return attend


def combine_variance(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """The variances of `combine_reference` in float32 for the same parts."""
    u = _unit(torch.float32)
    parts, lse = out_partial.double(), lse_partial.double()
    total = lse.logsumexp(0)
    unseen = total == -torch.inf
    shifted = (lse - total.masked_fill(unseen, 0)).unsqueeze(-1)
    sizes = torch.where(shifted > -torch.inf, shifted.exp() * parts.abs() * (2 + shifted.abs()), 0)
    return (u * sizes.sum(0)).square(), (u * (total.abs() + 2)).masked_fill(unseen, 0).square()


def attention_in_float8(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch in float8, an `attend` for the reference: the factors of v, 256 exp(S - row
    maximum), are rounded to e4m3.
    """
    weights, lse, probs = softmax_weights(q, k, rule)
    dead = (lse == -torch.inf)[..., None]
    largest = weights.amax(-1, keepdim=True)
    if rule.sink is not None:
        largest = torch.maximum(largest, torch.exp(rule.sink - lse[..., None]).masked_fill(dead, 1))
    unit = largest / 256
    rounded = (weights / unit).float().to(torch.float8_e4m3fn).to(weights.dtype) * unit
    out = torch.einsum("bhmn,bnhd->bmhd", rounded, v)
    return out.masked_fill(dead.transpose(1, 2), 0), lse, probs


def _unit(dtype: torch.dtype) -> float:
    """The largest rounding error of 1; twice that in float64, where the truth is rounded, too."""
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return eps if dtype == torch.float64 else eps / 2


class _Scores(NamedTuple):
    """Scores with the sink's column, their variances, and the slope of the softcap with its own."""

    S: Tensor  # (B, Hq, M, N or N + 1)
    variance: Tensor
    slope: Tensor  # (B, Hq, M, N)
    slope_variance: Tensor


class _ScoreGradients(NamedTuple):
    """Gradients of the scores, (B, Hq, M, N), and what the variance of their errors is made of:
    those of delta and L, (B, Hq, M, 1), are shared by whole rows."""

    dS: Tensor
    variance: Tensor  # without those of delta and L
    P: Tensor
    delta_variance: Tensor
    L_variance: Tensor

    def bias_variance(self, shape: torch.Size, u: float) -> Tensor:
        """The variance of the gradient of a bias: dS, summed over the dimensions in which the bias
        is broadcast."""
        keys = (*self.dS.shape[:3], *shape[-1:])
        return (
            self.variance.sum_to_size(shape)
            + self._of_rows(lambda x: x.sum_to_size(keys)).sum_to_size(shape)
            + (u * self.dS.abs().sum_to_size(shape)).square()
        )

    def table_variance(self, relative_bias: RelativeBias, u: float) -> Tensor:
        """The variance of the gradient of a relative bias: dS, summed over equal columns of its
        table."""
        width = relative_bias.table.shape[1]

        def by_column(x: Tensor) -> Tensor:
            column = relative_bias.column.expand(x.shape)
            return x.new_zeros(*x.shape[:3], width).scatter_add(-1, column, x)

        rounding = (u * by_column(self.dS.abs()).sum((0, 2))).square()
        return (by_column(self.variance) + self._of_rows(by_column)).sum((0, 2)) + rounding

    def _of_rows(self, summed: Callable[[Tensor], Tensor]) -> Tensor:
        of_delta = summed(self.P).square() * self.delta_variance
        return of_delta + summed(self.dS).square() * self.L_variance

    def random_errors(self, g: torch.Generator) -> Tensor:
        """Errors with these variances."""

        def of(variance: Tensor) -> Tensor:
            signs = 2 * torch.randint(0, 2, variance.shape, generator=g, device=g.device) - 1
            return variance.sqrt() * signs.to(variance)

        return of(self.variance) + self.P * of(self.delta_variance) + self.dS * of(self.L_variance)


class _Variance(torch.autograd.Function):
    """The variances of the module's docstring, in float64."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        slopes: Tensor | None,
        table: Tensor | None,
        scores: Tensor | None,
        rule: ScoreRule,
        dtype: torch.dtype,
        errors: torch.Generator | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        u, N = _unit(dtype), k.shape[1]
        S, S_var, slope, slope_var = _scores(q, k, bias, sink, rule, u)
        if sink is not None:  # one more key, of value zero
            v = torch.cat((v, v.new_zeros(v.shape[0], 1, *v.shape[2:])), dim=1)
        factor = _with_sink(rule.factor.expand(S[..., :N].shape), sink, 1.0)
        dead = torch.isneginf(S).all(-1, keepdim=True)
        L = S.masked_fill(dead, 0).logsumexp(-1, keepdim=True)
        P = torch.exp(S - L).masked_fill(dead, 0)
        from_L = torch.where(P > 0, S - L, 0)
        largest = S.amax(-1, keepdim=True) if S.shape[-1] else L
        L_var = (P.square() * S_var).sum(-1, keepdim=True) + u**2 * (
            2 * L.square() + largest.square() + 4
        )
        L_var = L_var + u**2 * LOGARITHM * (L - largest).square()
        L_var = L_var.masked_fill(dead, 0)
        # Without the variance of the row's L, which is added below.
        P_var = P.square() * (S_var + u**2 * (2 + EXPONENTIAL + from_L.square()))
        out = torch.einsum("bhmn,bnhd->bmhd", P * factor, v)
        out_var = (
            torch.einsum("bhmn,bnhd->bmhd", P_var * factor.square(), v.square())
            + out.square() * P_var.sum(-1).transpose(1, 2)[..., None]
            + (u * torch.einsum("bhmn,bnhd->bmhd", P * factor, v.abs())).square()
        )
        ctx.save_for_backward(q, k, v, P, P_var, L_var, factor, out, out_var, slope, slope_var)
        ctx.u, ctx.scale, ctx.bias, ctx.sink = u, rule.scale, bias, sink
        ctx.alibi, ctx.relative_bias = rule.alibi, rule.relative_bias
        ctx.errors, ctx.has_scores = errors, scores is not None
        ctx.stored = torch.finfo(dtype).eps / 12**0.5 if dtype.itemsize == 2 else 0.0  # on average
        return out_var, L_var[..., 0], (P_var + P.square() * L_var)[..., :N]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        dO, dL = cotangents[:2]
        q, k, v, P, P_var, L_var, factor, out, out_var, slope, slope_var = ctx.saved_tensors
        u, N = ctx.u, k.shape[1]

        def rows(x: Tensor) -> Tensor:  # (B, M, Hq, Dv) summed over Dv
            return x.sum(-1).transpose(1, 2)[..., None]

        dP = torch.einsum("bmhd,bnhd->bhmn", dO, v) * factor
        sizes = torch.einsum("bmhd,bnhd->bhmn", dO.abs(), v.abs()) * factor
        dP_var = (u / 2 * sizes).square() + (u * dP).square()
        delta = rows(dO * out) - dL[..., None]
        delta_var = (
            rows(dO.square() * (out_var + (ctx.stored * out).square()))  # `out` is stored rounded
            + (u / 2 * rows((dO * out).abs())).square()
            + u**2 * (delta.square() + dL.square()[..., None])
        )
        dS = P * (dP - delta)
        dS_var = P_var * (dP - delta).square() + P.square() * dP_var + 2 * (u * dS).square()
        row_var = P.square() * delta_var + dS.square() * L_var
        dsink = (dS_var + row_var)[..., N:].sum(-1, keepdim=True)
        dS, dS_var, row_var, P_seen = (x[..., :N] for x in (dS, dS_var, row_var, P))
        gradients = _ScoreGradients(dS, dS_var, P_seen, delta_var, L_var)
        dbias = dslopes = dtable = dscores = None
        if ctx.bias is not None:
            dbias = gradients.bias_variance(ctx.bias.shape, u)
        if ctx.alibi is not None:  # those of a bias whose dS is multiplied by distances
            d = ctx.alibi.distance
            of_slopes = gradients._replace(dS=d * dS, variance=d * d * dS_var, P=d * P_seen)
            dslopes = of_slopes.bias_variance(ctx.alibi.slopes.shape, u)
        if ctx.relative_bias is not None:
            dtable = gradients.table_variance(ctx.relative_bias, u)
        if ctx.has_scores:
            dscores = gradients.random_errors(ctx.errors)
        product = dS * slope
        product_var = dS_var * slope.square() + dS.square() * slope_var
        dq = torch.einsum("bhmn,bnhd->bmhd", product_var, k.square()) + (
            torch.einsum("bhmn,bnhd->bmhd", P_seen * slope, k).square() * delta_var.transpose(1, 2)
            + torch.einsum("bhmn,bnhd->bmhd", product, k).square() * L_var.transpose(1, 2)
            + (u * torch.einsum("bhmn,bnhd->bmhd", product.abs(), k.abs())).square()
        )
        product_var = product_var + row_var * slope.square()
        dk = (
            torch.einsum("bhmn,bmhd->bnhd", product_var, q.square())
            + (u * torch.einsum("bhmn,bmhd->bnhd", product.abs(), q.abs())).square()
            + _partial_sums(product, q, u)
        )
        P_var = (P_var + P.square() * L_var)[..., :N]
        weights, kept = P_seen * factor[..., :N], factor[..., :N].square()
        dv = (
            torch.einsum("bhmn,bmhd->bnhd", P_var * kept, dO.square())
            + (u * torch.einsum("bhmn,bmhd->bnhd", weights, dO.abs())).square()
            + _partial_sums(weights, dO, u)
        )
        scale = ctx.scale**2
        return (
            scale * dq,
            scale * dk,
            dv,
            dbias,
            dsink if ctx.sink is not None else None,
            dslopes,
            dtable,
            dscores,
            *(None,) * 3,
        )


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, sink: Tensor | None, rule: ScoreRule, u: float
) -> _Scores:
    S = torch.einsum("bmhd,bnhd->bhmn", q, k) * rule.scale
    sizes = torch.einsum("bmhd,bnhd->bhmn", q.abs(), k.abs()) * rule.scale
    variance = (u / 2 * sizes).square() + (u * S).square()
    slope, slope_variance = torch.ones_like(S), torch.zeros_like(S)
    if rule.softcap > 0:
        bent = torch.tanh(S / rule.softcap)
        S, slope = rule.softcap * bent, 1 - bent.square()
        slope_variance = 4 * (u**2 + variance * torch.square(slope / rule.softcap))
        variance = variance * slope.square() + (u * rule.softcap) ** 2
    if rule.function is not None:
        of, first, second = _derivatives(rule.function, S)
        slope_variance = slope_variance * first.square() + variance * torch.square(slope * second)
        slope_variance = slope_variance + torch.square(u * slope * first)
        variance = variance * first.square() + 2 * u**2 * (S.square() + of.square())
        S, slope = of, slope * first
    by_distance = [x.term() for x in (rule.alibi, rule.relative_bias) if x is not None]
    for term in (*by_distance, bias):
        if term is not None:
            variance = variance + (u * term).square()
            S = S + term
    S = S.masked_fill(rule.hidden, -torch.inf)
    S = _with_sink(S, sink, sink)
    variance = _with_sink(variance, sink, 0.0) + (u * S).square()
    return _Scores(S, variance.masked_fill(torch.isneginf(S), 0), slope, slope_variance)


def _derivatives(function: Callable[[Tensor], Tensor], S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A function of every score, and its first and second derivative."""
    with torch.enable_grad():
        S = S.detach().requires_grad_()
        of = function(S)
        first, second = torch.zeros_like(S), torch.zeros_like(S)
        if of.requires_grad:
            (first,) = torch.autograd.grad(of.sum(), S, create_graph=True)
        if first.requires_grad:
            (second,) = torch.autograd.grad(first.sum(), S)
    return of.detach(), first.detach(), second


def _with_sink(x: Tensor, sink: Tensor | None, column: Tensor | float | None) -> Tensor:
    """`x` (B, Hq, M, N) with the sink's column, if there is a sink."""
    if sink is None:
        return x
    return torch.cat((x, torch.as_tensor(column, dtype=x.dtype).expand(sink.shape)), dim=-1)


def _partial_sums(x: Tensor, y: Tensor, u: float) -> Tensor:
    """u^2 / 3 times the squares of the partial sums of x^T @ y, (B, N, Hq, D), over rows that are
    added one after the other. Rows share the partial sum after every `step` of them.

    Args:
        x: (B, Hq, M, N).
        y: (B, M, Hq, D).
    """
    step = 32
    partial = total = torch.zeros((), dtype=x.dtype, device=x.device)
    for m0 in range(0, x.shape[2], step):
        rows = slice(m0, m0 + step)
        partial = partial + torch.einsum("bhmn,bmhd->bnhd", x[:, :, rows], y[:, rows])
        additions = min(step, x.shape[2] - m0) - (m0 == 0)
        total = total + additions * partial.square()
    return u**2 / 3 * total
