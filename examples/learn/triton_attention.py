"""Lesson 7: lessons 4 and 5 as Triton kernels, tuned by `triton.autotune`.

With TRITON_INTERPRET=1 in the environment they run on a CPU, with the first tile only.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# (BLOCK_M, BLOCK_N, warps, stages): the tiles that tuning tries.
TILES = ((64, 32, 4, 2), (64, 64, 8, 2), (128, 32, 8, 3), (128, 64, 8, 2))
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in (TILES[:1] if triton.knobs.runtime.interpret else TILES)
]
tuned = triton.autotune(CONFIGS, key=["M", "N", "D", "IS_CAUSAL"])


@triton.jit
def load_rows(ptr, rows, count, D: tl.constexpr):
    """Rows of a matrix of shape (count, D); zeros beyond its end."""
    columns = tl.arange(0, D)[None, :]
    return tl.load(ptr + rows[:, None] * D + columns, mask=rows[:, None] < count, other=0.0)


@triton.jit
def store_rows(ptr, rows, count, tile, D: tl.constexpr):
    """Write rows of a matrix of shape (count, D), as far as they exist."""
    columns = tl.arange(0, D)[None, :]
    tl.store(ptr + rows[:, None] * D + columns, tile, mask=rows[:, None] < count)


@triton.jit
def scores(q, k, rows, keys, M, N, scale, IS_CAUSAL: tl.constexpr):
    """A tile of S, -inf where it is hidden."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    visible = keys[None, :] < N
    if IS_CAUSAL:
        visible &= keys[None, :] <= rows[:, None] + N - M
    return tl.where(visible, s, -float("inf"))


@tuned
@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, M, N, scale,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """O and L of a tile of queries."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * M * D, rows, M, D)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    stop = N
    if IS_CAUSAL:  # no tile beyond the diagonal
        stop = tl.minimum(N, (tl.program_id(0) + 1) * BLOCK_M + N - M)
    for start in range(0, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr + head * N * D, keys, N, D)
        s = scores(q, k, rows, keys, M, N, scale, IS_CAUSAL)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        pivot = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row that has seen no key yet
        p = tl.exp(s - pivot[:, None])
        rescale = tl.exp(row_max - pivot)
        row_sum = rescale * row_sum + tl.sum(p, 1)
        v = load_rows(v_ptr + head * N * D, keys, N, D)
        acc = tl.dot(p.to(v.dtype), v, rescale[:, None] * acc, input_precision="ieee")
        row_max = new_max
    o = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    store_rows(o_ptr + head * M * D, rows, M, o, D)
    tl.store(l_ptr + head * M + rows, row_max + tl.log(row_sum), mask=rows < M)


@triton.jit
def gradient_of_scores(
    q, k, v, do, l_ptr, delta_ptr, rows, keys, M, N, scale, IS_CAUSAL: tl.constexpr
):
    """P and dS of a tile; P is computed again from L."""
    l = tl.load(l_ptr + rows, mask=rows < M, other=float("inf"))
    l = tl.where(l == -float("inf"), float("inf"), l)  # rows that see no key: P = exp(S - inf) = 0
    delta = tl.load(delta_ptr + rows, mask=rows < M, other=0.0)
    p = tl.exp(scores(q, k, rows, keys, M, N, scale, IS_CAUSAL) - l[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    ds = p * (dp - delta[:, None]) * scale
    return p.to(q.dtype), ds.to(q.dtype)


@tuned
@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, dk_ptr, dv_ptr, M, N, scale,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys: the loop goes over tiles of queries."""
    head = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr + head * N * D, keys, N, D)
    v = load_rows(v_ptr + head * N * D, keys, N, D)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    begin = 0
    if IS_CAUSAL:  # no tile above the diagonal
        begin = tl.maximum(0, tl.program_id(0) * BLOCK_N + M - N) // BLOCK_M * BLOCK_M
    for start in range(begin, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr + head * M * D, rows, M, D)
        do = load_rows(do_ptr + head * M * D, rows, M, D)
        p, ds = gradient_of_scores(
            q, k, v, do, l_ptr + head * M, delta_ptr + head * M, rows, keys, M, N, scale, IS_CAUSAL
        )
        dv = tl.dot(tl.trans(p), do, dv, input_precision="ieee")
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    store_rows(dk_ptr + head * N * D, keys, N, dk, D)
    store_rows(dv_ptr + head * N * D, keys, N, dv, D)


@tuned
@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr, M, N, scale,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries: the loop goes over tiles of keys."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * M * D, rows, M, D)
    do = load_rows(do_ptr + head * M * D, rows, M, D)
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    stop = N
    if IS_CAUSAL:
        stop = tl.minimum(N, (tl.program_id(0) + 1) * BLOCK_M + N - M)
    for start in range(0, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr + head * N * D, keys, N, D)
        v = load_rows(v_ptr + head * N * D, keys, N, D)
        _, ds = gradient_of_scores(
            q, k, v, do, l_ptr + head * M, delta_ptr + head * M, rows, keys, M, N, scale, IS_CAUSAL
        )
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    store_rows(dq_ptr + head * M * D, rows, M, dq, D)


class TritonAttention(torch.autograd.Function):
    """Attention of Q (heads, M, D), K and V (heads, N, D); D is a power of two from 16 to 128."""

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, causal: bool) -> Tensor:
        Q, K, V = (x.contiguous() for x in (Q, K, V))  # the kernels assume rows side by side
        heads, M, D = Q.shape
        N = K.shape[1]
        if K.shape != (heads, N, D) or V.shape != K.shape:
            raise ValueError(f"K, V: got {(*K.shape,)} and {(*V.shape,)}, want {(heads, N, D)}")
        O, L = torch.empty_like(Q), Q.new_empty(heads, M, dtype=torch.float32)
        sizes = (M, N, 1 / sqrt(D), D, causal)
        forward_kernel[lambda tile: (triton.cdiv(M, tile["BLOCK_M"]), heads)](Q, K, V, O, L, *sizes)
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.sizes = sizes
        return O

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        Q, K, V, O, L = ctx.saved_tensors
        dO = dO.contiguous()
        delta = (dO.float() * O.float()).sum(2)
        dQ, dK, dV = torch.empty_like(Q), torch.empty_like(K), torch.empty_like(V)
        heads, M, N = len(Q), Q.shape[1], K.shape[1]
        given = (Q, K, V, dO, L, delta)
        dk_dv_kernel[lambda tile: (triton.cdiv(N, tile["BLOCK_N"]), heads)](
            *given, dK, dV, *ctx.sizes
        )
        dq_kernel[lambda tile: (triton.cdiv(M, tile["BLOCK_M"]), heads)](*given, dQ, *ctx.sizes)
        return dQ, dK, dV, None
