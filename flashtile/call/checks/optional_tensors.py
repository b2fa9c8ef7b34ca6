"""Checks of the optional tensors of a call: all except queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...masks import BlockMask
from ...problem import (
    DIFFERENTIABLE,
    FLOAT8,
    FLOAT8_KEY_BLOCK,
    FLOAT8_QUERY_BLOCK,
    Operands,
    batch_size,
)
from .tensors import floating, per_sequence, same_device, shape, shape_of, tensor


def extras(operands: Operands, M: int, N: int) -> None:
    """Check shapes, dtypes and devices of the optional tensors; `M`, `N`: the longest lengths."""
    q, k = operands.q, operands.k
    B, Hq, Hk = batch_size(operands), q.shape[-2], k.shape[-2]
    per_sequence("seqused_q", operands.seqused_q, q, B)
    per_sequence("seqused_k", operands.seqused_k, q, B)
    floating("sink", operands.sink, q)
    floating("alibi_slopes", operands.alibi_slopes, q)
    if operands.sink is not None:
        shape("sink", operands.sink, (Hq,), "one logit for each query head")
    if operands.alibi_slopes is not None:
        _alibi(operands.alibi_slopes, B, Hq)
    if operands.relative_bias is not None:
        _relative_bias(operands.relative_bias, q)
    if operands.bias is not None:
        broadcastable("bias", operands.bias, q, (B, Hq, M, N))
    if operands.tile_kinds is not None:
        block_mask_kinds(operands.tile_kinds, q, B)
    _descales(operands, B, Hk, M, N)


def broadcastable(name: str, x: Any, q: Tensor, sizes: tuple[int, ...]) -> None:
    """Check a floating tensor that broadcasts to `sizes`, (batch, heads, seq_q, seq_k)."""
    floating(name, x, q)
    _broadcasts(name, x, sizes)


def attn_mask(x: Any, q: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Check a bool or floating mask that broadcasts to `sizes`; return it with four dimensions."""
    tensor("attn_mask", x)
    if x.dtype != torch.bool and (not x.is_floating_point() or x.dtype in FLOAT8):
        raise TypeError(
            f"attn_mask: got dtype {x.dtype}, want torch.bool (True: the query sees the key) or a "
            "floating dtype (added to the scores)"
        )
    same_device("attn_mask", x, q)
    _broadcasts("attn_mask", x, sizes)
    return x[(None,) * (4 - x.dim())]


def key_padding_mask(x: Any, q: Tensor, sizes: tuple[int, int]) -> None:
    """Check a bool tensor (batch, seq_k)."""
    tensor("key_padding_mask", x)
    if x.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask: got dtype {x.dtype}, want torch.bool, True for the keys that are "
            "not padding"
        )
    same_device("key_padding_mask", x, q)
    shape("key_padding_mask", x, sizes, "(batch, seq_k)")


def _broadcasts(name: str, x: Tensor, sizes: tuple[int, ...]) -> None:
    aligned = sizes[max(0, len(sizes) - x.dim()) :]
    if x.dim() > 4 or any(
        size not in (1, full) for size, full in zip(x.shape, aligned, strict=True)
    ):
        raise ValueError(
            f"{name}: got shape {shape_of(x)}, want one that broadcasts to (batch, heads, seq_q, "
            f"seq_k) = {sizes}"
        )


def absorbed(qv: Any, q: Tensor, v: Tensor) -> None:
    """Check that qv has the shape of q with the head dim of v."""
    if qv is None:
        return
    tensor("qv", qv)
    same_device("qv", qv, q)
    if q.dtype in FLOAT8 or v.dtype in FLOAT8:
        raise NotImplementedError(
            "qv: cannot be combined with float8, whose keys and values have separate scales; "
            "convert q, k, v and qv to bfloat16"
        )
    if qv.dtype != q.dtype:
        raise TypeError(f"qv: got dtype {qv.dtype}, want {q.dtype}, the dtype of q")
    shape("qv", qv, (*q.shape[:-1], v.shape[-1]), "q's shape with v's head dim")


def _alibi(slopes: Tensor, B: int, Hq: int) -> None:
    if tuple(slopes.shape) not in ((Hq,), (B, Hq)):
        raise ValueError(
            f"alibi_slopes: got shape {shape_of(slopes)}, want ({Hq},) or ({B}, {Hq}): a slope for "
            "each query head, or for each batch and query head"
        )


def _relative_bias(table: Tensor, q: Tensor) -> None:
    floating("relative_bias", table, q)
    heads = q.shape[-2]
    if table.dim() != 2 or table.shape[0] != heads or table.shape[1] % 2 == 0:
        raise ValueError(
            f"relative_bias: got shape {shape_of(table)}, want ({heads}, 2 R + 1): for each query "
            "head, a number for each distance from -R to R"
        )


def block_mask_kinds(kinds: Tensor, q: Tensor, B: int) -> None:
    """Check the kinds of tiles, (batch or 1, heads or 1, ...), of a mask for `B` sequences of `q`
    (..., heads, head_dim)."""
    Hq = q.shape[-2]
    same_device("block_mask", kinds, q)
    batch, heads = kinds.shape[:2]
    if batch not in (1, B) or heads not in (1, Hq):
        raise ValueError(
            f"block_mask: got a mask for batch {batch} and {heads} heads, want batch 1 or {B}, and "
            f"1 or {Hq} (query) heads"
        )


def block_mask_lengths(block_mask: BlockMask, M: int, N: int) -> None:
    """Check that a block mask covers at least `M` queries and `N` keys."""
    queries, keys = block_mask.lengths
    if queries < M or keys < N:
        raise ValueError(
            f"block_mask: got a mask for {queries} queries and {keys} keys, want at least {M} and "
            f"{N}"
        )


def flex_mask(block_mask: Any) -> None:
    """Check that `block_mask` is a FlexAttention `BlockMask`, and that it can be converted now."""
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(
            f"block_mask: got {type(block_mask).__name__}, want flashtile.BlockMask or "
            "FlexAttention's BlockMask"
        )
    if torch.compiler.is_compiling():
        raise TypeError(
            "block_mask: got a FlexAttention BlockMask under torch.compile, which cannot convert "
            "it; call BlockMask.from_flex(...) outside of torch.compile and pass the result"
        )


def flex_mask_lengths(block_mask: Any, M: int, N: int) -> None:
    """Check that a FlexAttention `BlockMask` is for exactly `M` queries and `N` keys.

    Its function may count from the last key, so the upper left corner of the mask can be wrong for
    a shorter call.
    """
    lengths = getattr(block_mask, "seq_lengths", (M, N))
    if lengths[0] != M or lengths[1] != N:
        raise ValueError(
            f"block_mask: got a mask for {lengths[0]} queries and {lengths[1]} keys, want {M} and "
            f"{N}; for its upper left corner pass BlockMask.from_flex(block_mask)"
        )


def _descales(operands: Operands, B: int, Hk: int, M: int, N: int) -> None:
    for name in ("q_descale", "k_descale", "v_descale"):
        x = getattr(operands, name)
        if x is None:
            continue
        floating(name, x, operands.q)
        scaled = operands.q if name == "q_descale" else operands.k
        if scaled.dtype not in FLOAT8:
            raise ValueError(
                f"{name}: scales float8 inputs, but {name[0]} is {scaled.dtype}; multiply the "
                "inputs instead"
            )
        if x.dim() == 3 and operands.q.dtype in FLOAT8:
            _block_descale(name, x, operands, B, M, N)
        else:
            shape(name, x, (B, Hk), "a scale for each batch and key head")


def _block_descale(name: str, x: Tensor, operands: Operands, B: int, M: int, N: int) -> None:
    """Check a per-block scale; either all three tensors have per-block scales, or none."""
    of_queries = name == "q_descale"
    block = FLOAT8_QUERY_BLOCK if of_queries else FLOAT8_KEY_BLOCK
    heads, length = (operands.q.shape[-2], M) if of_queries else (operands.k.shape[-2], N)
    meaning = f"a scale for each batch, head and {block} rows"
    shape(name, x, (B, heads, -(-length // block)), meaning)
    if operands.leftpad_k is not None:
        raise ValueError(
            f"{name}: got per-block scales with a left pad, which shifts the blocks; want a scale "
            "for each batch and key head"
        )
    for other in ("q_descale", "k_descale", "v_descale"):
        y = getattr(operands, other)
        if y is None or y.dim() != 3:
            raise ValueError(
                f"{other}: got {'None' if y is None else 'shape ' + shape_of(y)}, want per-block "
                f"scales because {name} has them"
            )


def float8_forward_only(operands: Operands) -> None:
    """Raise if float8 inputs would need a backward, which they do not have."""
    records = operands.q.dtype in FLOAT8 and torch.is_grad_enabled()
    if records and any(x is not None and x.requires_grad for x in operands[3:DIFFERENTIABLE]):
        raise NotImplementedError("q: float8 attention has no backward; use bfloat16 to train")
