"""Gradients of `attention_fp8`: those of 16-bit attention on the dequantised inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from float8_numbers import descales, unscaled
from torch import Tensor

import flashtile
from flashtile import BlockMask, Spans
from flashtile.ops.quantize.formula import dequantized
from flashtile.problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from flashtile.quantize import attention_fp8, quantize_qkv, rotation
from flashtile.quantize.tensors import rows_of
from flashtile.testing import (
    assert_close,
    attention_reference,
    cu_seqlens,
    floor_of,
    generator,
    packed_qkv,
    qkv,
    rounding_variance,
    visible_keys,
)

Run = dict[str, Tensor]  # gradients by name

RECIPES: dict[str, dict[str, Any]] = {
    "plain": {"hadamard": False},
    "default": {},
    "a scale a head": {"scales": "head"},
    "one scale": {"scales": "tensor"},
    "all": {"smooth_k": True, "hadamard_v": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window_size": (30, 10)},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.4},
}
# Every option with the default, every recipe with and without a mask.
CASES = [("default", option) for option in OPTIONS]
CASES += [(recipe, option) for recipe in RECIPES for option in ("nothing", "causal")]
M, N, D = 70, 150, 32


def plain_gradients(
    given: tuple[Tensor, ...],
    grads: tuple[Tensor, Tensor],
    how: dict[str, Any],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> Run:
    """FlashAttention-2's backward in plain PyTorch in `dtype` on the dequantised inputs, with the
    output and the log-sum-exp of the float8 forward."""
    small = quantize_qkv(*given, **how)
    rounded, lse = flashtile.attention(*small[:3], **descales(small), **options, return_lse=True)
    R, R_v = rotations(how, dtype)
    tensors = (x.detach().to(dtype) for x in (*unscaled(small), rounded, *grads, lse[..., None]))
    q, k, v, out, dout, dlse, lse = tensors
    dout = dout @ R_v
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    mask = {name: options[name] for name in ("causal", "window_size") if name in options}
    hidden = ~visible_keys(torch.tensor([M]), torch.tensor([N]), M, N, **mask)[:, None]
    scale, cap = options.get("softmax_scale", D**-0.5), options.get("softcap", 0.0)
    s, slope = torch.einsum("bmhd,bnhd->bhmn", q * scale, k), 1.0
    if cap:
        bent = torch.tanh(s / cap)
        s, slope = cap * bent, 1 - bent.square()
    p = torch.exp(s.masked_fill(hidden, -torch.inf) - lse)
    delta = (out * dout).sum(-1).transpose(1, 2)[..., None] - dlse[..., None]
    ds = p * (torch.einsum("bmhd,bnhd->bhmn", dout, v) - delta) * slope * scale
    dq = torch.einsum("bhmn,bnhd->bmhd", ds, k)
    dk = torch.einsum("bhmn,bmhd->bnhd", ds, q).unflatten(2, (2, 2)).sum(3)
    dv = torch.einsum("bhmn,bmhd->bnhd", p, dout).unflatten(2, (2, 2)).sum(3)
    found = {"dq": dq @ R.mT, "dk": dk @ R.mT, "dv": dv @ R_v.mT}
    if small.k_mean is not None:  # the forward adds q . mean to the log-sum-exp
        mean = small.k_mean.to(dtype).repeat_interleave(2, 1)[:, None]
        found["dq"] += dlse.transpose(1, 2)[..., None] * mean * scale
    return found


def rotations(how: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotation matrices of q and k, and of v, before rounding."""
    rotated = how.get("hadamard", True), how.get("hadamard_v", False)
    return tuple((rotation(D) if x else torch.eye(D)).to(dtype) for x in rotated)


def floors(
    given: tuple[Tensor, ...],
    grads: tuple[Tensor, Tensor],
    how: dict[str, Any],
    options: dict[str, Any],
) -> Run:
    """The allowed float32 error of these gradients."""
    R, R_v = rotations(how, torch.float64)
    leaves = [x.double().requires_grad_() for x in unscaled(quantize_qkv(*given, **how))]
    found = attention_reference(*leaves, **options, attend=rounding_variance(torch.float32))
    cotangents = grads[0].double() @ R_v, grads[1].double()
    gradients = torch.autograd.grad((found.out, found.lse), leaves, cotangents)
    # A rotation adds up D of them, and their roundings.
    return {
        name: floor_of(2 * x @ matrix.mT.square())
        for name, x, matrix in zip(("dq", "dk", "dv"), gradients, (R, R, R_v), strict=True)
    }


@pytest.mark.parametrize(("recipe", "option"), sorted(set(CASES)))
def test_gradients_are_those_of_the_numbers_that_float8_holds(
    recipe: str, option: str, seed: int
) -> None:
    g = generator(seed)
    how, options = RECIPES[recipe], OPTIONS[option]
    given = qkv(g, M=M, N=N, D=D)
    grads = torch.randn(2, M, 4, D, generator=g), torch.randn(2, 4, M, generator=g)
    leaves = [x.clone().requires_grad_() for x in given]
    made = attention_fp8(*leaves, return_lse=True, **how, **options)
    got = torch.autograd.grad(made, leaves, grads)
    reference = partial(plain_gradients, given, grads, how, options)
    truth = reference(torch.float64)
    plain, floor = reference(torch.float32), floors(given, grads, how, options)
    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
        assert_close(name, x, truth[name], plain[name], floor=floor[name], seed=seed)


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_bfloat16_holds_what_float8_does(scales: str, seed: int) -> None:
    """Inputs that a backward in bfloat16 represents exactly."""
    given = [x * torch.logspace(-3, 3, x.shape[1]).view(1, -1, 1, 1) for x in qkv(generator(seed))]
    small = quantize_qkv(*given, scales=scales)
    rows_q, rows_k = rows_of(small.q, small.k, None)
    for x, descale, rows, block in (
        (small.q, small.q_descale, rows_q, FLOAT8_QUERY_BLOCK),
        (small.k, small.k_descale, rows_k, FLOAT8_KEY_BLOCK),
        (small.v, small.v_descale, rows_k, FLOAT8_KEY_BLOCK),
    ):
        wide, narrow = (
            dequantized(x, descale, rows, block, dtype) for dtype in (torch.float64, torch.bfloat16)
        )
        assert torch.equal(wide, narrow.double())


@pytest.mark.parametrize("recipe", ["default", "a scale a head", "all"])
def test_packed_sequences_have_their_own_gradients(recipe: str, seed: int) -> None:
    """Like each sequence by itself; tokens outside of sequences get no gradient."""
    g, how = generator(seed), RECIPES[recipe]
    lengths_q, lengths_k = [70, 0, 1, 130], [130, 40, 0, 265]
    leaves = packed_qkv(g, [*lengths_q, 5], [*lengths_k, 5], D=64)
    leaves = [x.requires_grad_() for x in leaves]
    dout = torch.randn(leaves[0].shape, generator=g)
    layout = {
        "cu_seqlens_q": cu_seqlens(lengths_q),
        "cu_seqlens_k": cu_seqlens(lengths_k),
        "max_seqlen_q": 140,
        "max_seqlen_k": 300,
    }
    out = attention_fp8(*leaves, **layout, **how, causal=True)
    got = torch.autograd.grad(out, leaves, dout)
    bounds = [torch.tensor([0, *lengths]).cumsum(0).tolist() for lengths in (lengths_q, lengths_k)]
    for x, end in zip(got, (bounds[0][-1], bounds[1][-1], bounds[1][-1]), strict=True):
        assert not x[end:].any()
    for b in range(4):
        rows, keys = (slice(*bound[b : b + 2]) for bound in bounds)
        parts = (rows, keys, keys)
        one = [
            x.detach()[None, part].requires_grad_() for x, part in zip(leaves, parts, strict=True)
        ]
        alone = torch.autograd.grad(attention_fp8(*one, **how, causal=True), one, dout[None, rows])
        for x, part, y in zip(got, parts, alone, strict=True):
            torch.testing.assert_close(x[None, part], y)


def test_queries_that_see_no_key_have_no_gradient(seed: int) -> None:
    leaves = [x.requires_grad_() for x in qkv(generator(seed), M=90, N=20)]
    out = attention_fp8(*leaves, causal=True)  # the last 20 rows see keys
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert not dq[:, :70].any()
    assert dq[:, 71:].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("number", [1.0, torch.nan])
def test_the_log_sum_exp_of_a_query_without_a_key_has_no_gradient(number: float, seed: int) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(generator(seed), B=1, M=6, N=4, D=16))
    out, lse = attention_fp8(q, k, v, causal=True, smooth_k=True, return_lse=True)
    cotangent = torch.where(lse == -torch.inf, number, 0.0)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.zeros_like(out), cotangent))
    assert not any(x.any() for x in (dq, dk, dv))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_have_the_dtype_of_their_inputs(dtype: torch.dtype, seed: int) -> None:
    leaves = [x.requires_grad_() for x in qkv(generator(seed), dtype=dtype)]
    out = attention_fp8(*leaves)
    assert out.dtype == dtype
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == dtype for x in leaves)


def scored(table: Tensor) -> dict[str, Any]:
    return {"score_mod": lambda s, b, h, i, j: s + table[h, (i - j) % 8]}


# The options beyond those above, of the tensors that have gradients.
SHAPES = {
    "bias": (1, 4, M, N),
    "attn_mask": (2, 1, 1, N),
    "sink": (4,),
    "alibi_slopes": (2, 4),
    "relative_bias": (4, 11),
    "captured": (4, 8),
}
ROWS = torch.arange(M, dtype=torch.int32).view(1, 1, M, 1)
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "chunk": {"attention_chunk": 40},
    "tiles": {
        "block_mask": BlockMask.from_tiles(torch.eye(3, 5) + torch.ones(3, 5).tril(), 2 * [32])
    },
    "spans": {
        "mask": Spans(torch.zeros(1, 1, M, 1).int(), 60 + torch.arange(M).int().view(1, 1, M, 1))
    },
    "padding": {"key_padding_mask": torch.arange(N) < torch.tensor([[N], [99]])},
    "lengths": {"seqused_q": torch.tensor([M, 9]).int(), "seqused_k": torch.tensor([40, N]).int()},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("option", [*SHAPES, *OTHER_OPTIONS])
def test_every_option_of_attention_counts_in_both_passes(option: str, seed: int) -> None:
    g = generator(seed)
    given, dout = qkv(g, M=M, N=N, D=D), torch.randn(2, M, 4, D, generator=g)
    tensors = [torch.randn(SHAPES[option], generator=g)] if option in SHAPES else []
    small = quantize_qkv(*given)

    def options(leaves: list[Tensor]) -> dict[str, Any]:
        found = OTHER_OPTIONS.get(option) or {option: leaves[0]}
        found = scored(leaves[0]) if option == "captured" else found
        if option == "alibi_slopes":  # the error of the float8 forward counts times the distance
            found["window_size"] = (4, 4)
        return {**found, "generator": torch.Generator().manual_seed(3)}

    leaves = [x.clone().requires_grad_() for x in (*given, *tensors)]
    out = attention_fp8(*leaves[:3], **options(leaves[3:]))
    want = flashtile.attention(*small[:3], **descales(small), **options(tensors))
    assert torch.equal(out.bfloat16(), want)

    got = torch.autograd.grad(out, leaves, dout)
    wide = [x.float().requires_grad_() for x in (*unscaled(small), *tensors)]
    exact = flashtile.attention(*wide[:3], **options(wide[3:]))
    wanted = list(torch.autograd.grad(exact, wide, dout))
    wanted[:2] = (x @ rotation(D).mT for x in wanted[:2])
    for x, y in zip(got, wanted, strict=True):  # the float8 forward has a relative error of 2 %
        assert (x - y).norm() < 0.1 * y.norm()


def test_emulation_has_gradients(seed: int) -> None:
    leaves = [x.requires_grad_() for x in qkv(generator(seed))]
    wanted, got = (
        torch.autograd.grad(attention_fp8(*leaves, emulate=emulate).sum(), leaves)
        for emulate in (False, True)
    )
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("recipe", ["default", "all"])
def test_a_second_derivative_is_an_error(recipe: str) -> None:
    leaves = [x.requires_grad_() for x in qkv(generator(0))]
    out = attention_fp8(*leaves, **RECIPES[recipe])
    with pytest.raises(NotImplementedError, match="second derivative of attention_fp8"):
        torch.autograd.grad(out.sum(), leaves, create_graph=True)
