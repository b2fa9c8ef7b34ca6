"""Float8 attention for 16-bit tensors in one call, with 16-bit gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import autograd
from ..autocast import autocast_off, cast_inputs
from ..call import checks
from ..call.dispatch import BackendName
from ..call.layouts import DENSE, Packed
from ..call.options import (
    SCORE_NUMBERS,
    Float8Options,
    PaddedMaskOptions,
    accepts,
    refuse_unknown,
)
from ..call.prepare import prepare, read, with_dropout_seed
from ..operators import ops
from ..ops.quantize.formula import Recipe, Rows, dequantized, rotation
from ..problem import (
    DIFFERENTIABLE,
    FLOAT8_KEY_BLOCK,
    FLOAT8_QUERY_BLOCK,
    AttentionProblem,
    Operands,
    Options,
)
from .tensors import check, layout_of, quantized

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Options whose results change when all scores of a row grow by one number, as smoothing makes them.
NOT_SHIFTED = [*SCORE_NUMBERS - {"softmax_scale", "attention_chunk"}, "score_mod", "sink"]


@accepts(Float8Options)
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    generator: torch.Generator | None = None,
    backend: BackendName | None = None,
    **options: Unpack[Float8Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose matrix products are in float8 e4m3: `quantize_qkv`, then `attention`.

    Gradients are those of 16-bit attention on the quantised numbers, as if the derivative of
    quantising were 1 (a straight-through estimate). There is no second derivative.

    Args:
        q: (batch, seq_q, heads, head_dim), or (total_q, heads, head_dim) with `cu_seqlens_q`;
            float16, bfloat16 or float32.
        k, v: (batch, seq_k, kv_heads, head_dim), or (total_k, kv_heads, head_dim).
        scales, hadamard, hadamard_v, smooth_k, seed: as in `quantize_qkv`. Scales and means count
            all tokens, also those that a mask or `seqused_k` hides. Smoothing shifts the scores,
            so it cannot be combined with softcap, a score function or a sink.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: packed sequences, as in
            `flashtile.attention_varlen`.
        return_lse: return (out, lse).
        emulate: emulate the kernel's roundings on the CPU, slowly, whatever the tensors' device.
            Otherwise a device that has no float8 kernel is an error.
        generator, backend: as in `flashtile.attention`.

    Other arguments are those of `flashtile.attention`, without `qv` and scales; packed sequences
    take neither `attn_mask` nor `key_padding_mask`.

    Returns:
        out, shaped as q with v's head dim, in q's dtype, and on request lse (batch, heads, seq_q)
        or (heads, total_q) in float32.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message lists each with its reasons.

    Source: FlashAttention-3 (Shah et al. 2024), section 3.3.
    """
    refuse_unknown(options, Float8Options, attention_fp8)
    recipe = Recipe(scales, hadamard, hadamard_v, smooth_k, seed)
    layout = layout_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return_lse, emulate = checks.flag("return_lse", return_lse), checks.flag("emulate", emulate)
    out, lse = _attend((q, k, v), layout, recipe, options, emulate, generator, backend)
    return (out, lse) if return_lse else out


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    layout: Packed | None,
    recipe: Recipe,
    options: Any,  # `Float8Options`
    emulate: bool,
    generator: torch.Generator | None,
    backend: BackendName | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `attention_fp8`."""
    q, k, v = cast_inputs(*qkv)
    check(q, k, v, layout, recipe)
    _check_combinations(layout, recipe, options)
    device = q.device
    if generator is not None:
        checks.generator(generator, torch.device("cpu") if emulate else device)
    with autocast_off(q):
        tensors, found, given = read((q, k, v), layout or DENSE, options)
        if emulate:
            tensors, found, given = (_on_cpu(x) for x in (tensors, found, given))
        q, k, v = tensors
        with torch.no_grad():
            small = quantized(q, k, v, recipe, found if isinstance(found, Packed) else None)
            descales = {"q_descale": small[3], "k_descale": small[4], "v_descale": small[5]}
            call = prepare(small[:3], found, {**given, **descales}, backend, is_read=True)
        backward_options = None
        if torch.is_grad_enabled():
            dtype = _backward_dtype(q.dtype)
            wide = q.to(dtype), k.to(dtype), v.to(dtype)
            backward_options = prepare(wide, found, given, is_read=True).problem.options
        operands = call.operands
        if call.problem.options.dropout_p > 0:
            operands = with_dropout_seed(call.problem, operands, generator)
        how = call.problem, call.forward, backward_options, recipe
        inputs: Any = q, k, v, small.k_mean, *operands
        if torch.compiler.is_compiling():
            inputs = autograd.dealiased(inputs)
        out, lse = _Float8Attention.apply(how, *inputs)
    return out.to(device), lse.to(device)


def _check_combinations(layout: Packed | None, recipe: Recipe, options: Any) -> None:
    """Raise for options that exclude each other."""
    for name in PaddedMaskOptions.__optional_keys__ if layout is not None else ():
        if options.get(name) is not None:
            raise ValueError(f"{name}: got a mask and cu_seqlens_q, want only one of them")
    for name in NOT_SHIFTED if recipe.smooth_k else ():
        x = options.get(name)
        if x is not None and (isinstance(x, Tensor) or x != 0):
            raise ValueError(f"smooth_k: got True and {name}, want only one of them")


def _on_cpu(x: Any) -> Any:
    """Tensors and masks, alone or in tuples and dictionaries, on the CPU; others as they are."""
    if isinstance(x, dict):
        return {name: _on_cpu(part) for name, part in x.items()}
    if isinstance(x, tuple):
        parts = [_on_cpu(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x.to("cpu") if hasattr(x, "to") else x


def _backward_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the backward for inputs of `dtype`; bfloat16 holds every e4m3 number times a
    power of two.
    """
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


class _Float8Attention(torch.autograd.Function):
    """(how, q, k, v before quantising, k_mean, operands) -> (out, lse), where `how` is the problem,
    its prepared forward, the options of the backward in 16 bits and the recipe.
    """

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[AttentionProblem, Any, Options | None, Recipe],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_mean: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        problem, prepared_forward, ctx.options, ctx.recipe = how
        operands = Operands(*tensors)  # type: ignore[arg-type]  # its fields
        out, lse = autograd.attend(problem, operands, prepared_forward)
        ctx.set_materialize_grads(False)
        ctx.dtype = q.dtype
        lse = lse.contiguous()
        ctx.save_for_backward(out, lse, k_mean, *operands)
        if ctx.recipe.hadamard_v:
            out = (out.float() @ _rotation_of(v, ctx.recipe).mT).to(out.dtype)
        if k_mean is not None:
            means = _means_of_queries(k_mean, operands, problem.options)
            shift = (q.float() * means).sum(-1).transpose(-1, -2) * problem.options.softmax_scale
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
            dq, dk, dv, *others = _gradients(ctx, dout, dlse)
        needed = ctx.needs_input_grad[8 : 5 + DIFFERENTIABLE]
        wanted = (g if is_needed else None for g, is_needed in zip(others, needed, strict=True))
        rest = len(Operands._fields) - DIFFERENTIABLE
        return None, dq, dk, dv, None, None, None, None, *wanted, *[None] * rest


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> list[Tensor]:
    """The gradients of 16-bit attention on the quantised numbers: of q, k and v before they were
    rotated and quantised, and of the other operands.
    """
    out, lse, k_mean, *tensors = ctx.saved_tensors
    small, options, recipe = Operands(*tensors), ctx.options, ctx.recipe
    if dlse is not None:  # a row without a key has no gradient
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    dtype = _backward_dtype(ctx.dtype)
    rows_q, rows_k = _rows_of(small, options)
    of_q, of_k, of_v = small.q_descale, small.k_descale, small.v_descale
    assert of_q is not None and of_k is not None and of_v is not None
    operands = small._replace(
        q=dequantized(small.q, of_q, rows_q, FLOAT8_QUERY_BLOCK, dtype),
        k=dequantized(small.k, of_k, rows_k, FLOAT8_KEY_BLOCK, dtype),
        v=dequantized(small.v, of_v, rows_k, FLOAT8_KEY_BLOCK, dtype),
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    dout = torch.zeros_like(out) if dout is None else dout
    if recipe.hadamard_v:
        dout = dout.float() @ _rotation_of(small.v, recipe)
    needs_bias = ctx.needs_input_grad[5 + Operands._fields.index("bias")]
    dq, dk, dv, *others = ops.attention_backward(
        dout.to(dtype), dlse, out.to(dtype), lse, needs_bias, *operands, *options
    )
    if recipe.hadamard:
        matrix = _rotation_of(small.q, recipe)
        dq, dk = dq.float() @ matrix.mT, dk.float() @ matrix.mT
    if recipe.hadamard_v:
        dv = dv.float() @ _rotation_of(small.v, recipe).mT
    dq, dk, dv = (x.to(ctx.dtype) for x in (dq, dk, dv))
    if k_mean is not None and dlse is not None:  # `forward` adds a shift to lse
        means = _means_of_queries(k_mean, small, options)
        shift = dlse.transpose(-1, -2)[..., None] * means * options.softmax_scale
        dq = dq + shift.to(dq.dtype)
    return [dq, dk, dv, *others]


def _rotation_of(x: Tensor, recipe: Recipe) -> Tensor:
    """The matrix by which the rows of `x` are multiplied before they are quantised."""
    return rotation(x.shape[-1], recipe.seed, x.device)


def _rows_of(operands: Operands, options: Options) -> tuple[Rows, Rows]:
    """The rows of q and of k."""
    return (
        Rows.of(operands.q, operands.cu_seqlens_q, options.max_seqlen_q),
        Rows.of(operands.k, operands.cu_seqlens_k, options.max_seqlen_k),
    )


def _means_of_queries(k_mean: Tensor, operands: Operands, options: Options) -> Tensor:
    """The mean of the keys of every query's sequence, which broadcasts to q's shape."""
    means = k_mean.repeat_interleave(operands.q.shape[-2] // k_mean.shape[1], dim=1)
    if operands.cu_seqlens_q is None:
        return means[:, None]
    rows, _ = _rows_of(operands, options)
    return torch.cat((means, means.new_zeros(1, *means.shape[1:])))[rows.sequence]
