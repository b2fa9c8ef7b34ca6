"""Float8 attention for 16-bit tensors in one call, with 16-bit gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Never

from ..api import attention, attention_varlen
from ..autocast import autocast_off, cast_inputs
from ..call import checks
from ..call.dispatch import BackendName
from ..call.layouts import Dense, Packed
from ..call.options import WindowSize
from ..call.prepare import prepare
from ..ops.quantize.formula import Quantized, Recipe, dequantized
from ..ops.quantize.hadamard import rotation
from ..problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK, default_scale
from .tensors import check, layout_of, quantized, rows_of

Options = dict[str, Any]


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    scales: str = "block",
    hadamard: bool = True,
    hadamard_v: bool = False,
    smooth_k: bool = False,
    seed: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    emulate: bool = False,
    backend: BackendName | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose matrix products are in float8 e4m3: `quantize_qkv`, then `attention`.

    Gradients are those of 16-bit attention on the quantised numbers, as if the derivative of
    quantising were 1 (a straight-through estimate). There is no second derivative.

    Args:
        q: (batch, seq_q, heads, head_dim), or (total_q, heads, head_dim) with `cu_seqlens_q`;
            float16, bfloat16 or float32.
        k, v: (batch, seq_k, kv_heads, head_dim), or (total_k, kv_heads, head_dim).
        softmax_scale, causal, window_size, softcap: as in `flashtile.attention`.
        scales, hadamard, hadamard_v, smooth_k, seed: as in `quantize_qkv`. Smoothing shifts the
            scores, so it cannot be combined with softcap.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: packed sequences, as in
            `flashtile.attention_varlen`.
        return_lse: return (out, lse).
        emulate: emulate the kernel's roundings on the CPU, slowly, whatever the tensors' device.
            Otherwise a device that has no float8 kernel is an error.
        backend: name of the backend to force.

    Returns:
        out, shaped as q with v's head dim, in q's dtype, and on request lse (batch, heads, seq_q)
        or (heads, total_q) in float32.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message lists each with its reasons.

    Source: FlashAttention-3 (Shah et al. 2024), section 3.3.
    """
    if unknown:
        raise checks.unexpected_keywords(unknown, attention_fp8)
    layout = layout_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    q, k, v = cast_inputs(q, k, v)
    recipe = Recipe(scales, hadamard, hadamard_v, smooth_k, seed)
    check(q, k, v, layout, recipe)
    return_lse, emulate = checks.flag("return_lse", return_lse), checks.flag("emulate", emulate)
    if smooth_k and softcap != 0.0:
        raise ValueError(f"smooth_k: got True with softcap={softcap}, want only one of them")
    options = {
        "softmax_scale": default_scale(q.shape[-1]) if softmax_scale is None else softmax_scale,
        "causal": checks.flag("causal", causal),
        "window_size": window_size,
        "softcap": softcap,
    }
    device = q.device
    if emulate:
        q, k, v = q.cpu(), k.cpu(), v.cpu()
        if layout is not None:
            layout = layout._replace(
                cu_seqlens_q=layout.cu_seqlens_q.cpu(), cu_seqlens_k=layout.cu_seqlens_k.cpu()
            )
    with autocast_off(q):
        out, lse = _Float8Attention.apply(q, k, v, recipe, layout, options, backend)
    out, lse = out.to(device), lse.to(device)
    return (out, lse) if return_lse else out


class _Float8Attention(torch.autograd.Function):
    """(out, lse) of float8 attention, from q, k and v before quantising."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        recipe: Recipe,
        layout: Packed | None,
        options: Options,
        backend: BackendName | None,
    ) -> tuple[Tensor, Tensor]:
        small = quantized(q, k, v, recipe, layout)
        out, lse = attend(small, layout, options, backend)
        ctx.set_materialize_grads(False)
        ctx.recipe, ctx.layout, ctx.options, ctx.dtype = recipe, layout, options, q.dtype
        ctx.save_for_backward(out, lse, *small)
        if recipe.hadamard_v:
            out = (out.float() @ rotation(v.shape[-1], recipe.seed, out.device).mT).to(out.dtype)
        if small.k_mean is not None:
            shift = shift_of(q, small.k_mean, layout) * options["softmax_scale"]
            lse = torch.where(lse == -torch.inf, lse, lse + shift)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # the saved tensors have no graph back to q, k and v
            raise NotImplementedError(
                "flashtile: the second derivative of attention_fp8 is not implemented (the first "
                "was asked for with create_graph=True)"
            )
        with autocast_off(ctx.saved_tensors[0]):
            return *_Float8Attention.gradients(ctx, dout, dlse), None, None, None, None

    @staticmethod
    def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
        """dq, dk and dv."""
        out, lse, *small = ctx.saved_tensors
        if dlse is not None:  # a row without a key has no gradient
            dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
        dq, dk, dv = in_16_bits(ctx, Quantized(*small), out, lse, dout, dlse)
        k_mean = small[-1]
        if k_mean is not None and dlse is not None:  # `forward` adds a shift to lse
            shift = shift_gradient(dlse, k_mean, small[0], ctx.layout)
            dq = dq + (shift * ctx.options["softmax_scale"]).to(dq.dtype)
        return dq, dk, dv


def attend(
    small: Quantized, layout: Packed | None, options: Options, backend: BackendName | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of quantised tensors."""
    q, k, v, *descales, _ = small
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    more = {**options, **named, "return_lse": True, "backend": backend}
    found: Any  # a pair, as `return_lse` asks
    if layout is None:
        found = attention(q, k, v, **more)
    else:
        found = attention_varlen(q, k, v, *layout[:4], **more)
    return found


def shift_of(q: Tensor, k_mean: Tensor, layout: Packed | None) -> Tensor:
    """q_i . k_mean, in the layout of the log-sum-exp."""
    means = means_of_queries(q, k_mean, layout)
    return (q.float() * means).sum(-1).transpose(-1, -2)


def shift_gradient(dlse: Tensor, k_mean: Tensor, q: Tensor, layout: Packed | None) -> Tensor:
    """The gradient of `shift_of` with respect to q."""
    return dlse.transpose(-1, -2)[..., None] * means_of_queries(q, k_mean, layout)


def means_of_queries(q: Tensor, k_mean: Tensor, layout: Packed | None) -> Tensor:
    """The mean of the keys of every query's sequence, which broadcasts to q's shape."""
    means = k_mean.repeat_interleave(q.shape[-2] // k_mean.shape[1], dim=1)
    if layout is None:
        return means[:, None]
    rows, _ = rows_of(q, q, layout)
    return torch.cat((means, means.new_zeros(1, *means.shape[1:])))[rows.sequence]


def in_16_bits(
    ctx: Any, small: Quantized, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> list[Tensor]:
    """dq, dk and dv of 16-bit attention on the quantised numbers, without the Hadamard rotation."""
    recipe, layout = ctx.recipe, ctx.layout
    # bfloat16 holds every e4m3 number times a power of two.
    dtype = torch.float32 if ctx.dtype == torch.float32 else torch.bfloat16
    rows_q, rows_k = rows_of(small.q, small.k, layout)
    q = dequantized(small.q, small.q_descale, rows_q, FLOAT8_QUERY_BLOCK, dtype)
    k = dequantized(small.k, small.k_descale, rows_k, FLOAT8_KEY_BLOCK, dtype)
    v = dequantized(small.v, small.v_descale, rows_k, FLOAT8_KEY_BLOCK, dtype)
    dout = torch.zeros_like(out) if dout is None else dout
    if recipe.hadamard_v:
        dout = dout.float() @ rotation(v.shape[-1], recipe.seed, v.device)
    with torch.enable_grad():  # so that the backend is chosen for its backward
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        problem, operands, *_ = prepare((q, k, v), layout or Dense(), ctx.options)
    dq, dk, dv, *_ = torch.ops.flashtile.attention_backward(
        dout.to(dtype), dlse, out.to(dtype), lse, False, *operands, *problem.options
    )
    if recipe.hadamard:
        matrix = rotation(q.shape[-1], recipe.seed, q.device)
        dq, dk = dq.float() @ matrix.mT, dk.float() @ matrix.mT
    if recipe.hadamard_v:
        dv = dv.float() @ rotation(v.shape[-1], recipe.seed, v.device).mT
    return [x.to(ctx.dtype) for x in (dq, dk, dv)]
