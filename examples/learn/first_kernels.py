"""Lesson 6: three kernels in Triton, from the sum of two vectors to the product of two matrices.

With TRITON_INTERPRET=1 in the environment, Triton runs them on a CPU, program after program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out = x + y; each program adds BLOCK numbers."""
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < size  # the last program may have fewer numbers
    x = tl.load(x_ptr + offsets, mask=is_inside)
    y = tl.load(y_ptr + offsets, mask=is_inside)
    tl.store(out_ptr + offsets, x + y, mask=is_inside)


def add(x: Tensor, y: Tensor, block: int = 1024) -> Tensor:
    """x + y for two vectors whose numbers lie side by side in memory."""
    out = torch.empty_like(x)
    programs = triton.cdiv(len(x), block)
    add_kernel[(programs,)](x, y, out, len(x), BLOCK=block)
    return out


@triton.jit
def softmax_kernel(
    x_ptr, out_ptr, x_row_stride, x_column_stride, out_row_stride, width, BLOCK: tl.constexpr
):
    """The softmax of each row; each program has one row, of at most BLOCK numbers."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    x = tl.load(
        x_ptr + row * x_row_stride + columns * x_column_stride, mask=is_inside, other=-float("inf")
    )
    p = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * out_row_stride + columns, p / tl.sum(p, 0), mask=is_inside)


def softmax(x: Tensor) -> Tensor:
    """The softmax of the rows of a matrix, which may be transposed or a part of another one."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    softmax_kernel[(rows,)](x, out, *x.stride(), out.stride(0), width, BLOCK=block)
    return out


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr,
    a_row_stride, a_column_stride, b_row_stride, b_column_stride, c_row_stride,
    M, N, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c = a @ b; each program has one tile of c and loops over the tiles of a and b."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    steps = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + steps
        a_tile = tl.load(
            a_ptr + rows * a_row_stride + k[None, :] * a_column_stride,
            mask=(rows < M) & (k[None, :] < depth),
            other=0.0,
        )
        b_tile = tl.load(
            b_ptr + k[:, None] * b_row_stride + columns * b_column_stride,
            mask=(k[:, None] < depth) & (columns < N),
            other=0.0,
        )
        acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
    tl.store(c_ptr + rows * c_row_stride + columns, acc, mask=(rows < M) & (columns < N))


def matmul(a: Tensor, b: Tensor, block_m: int = 64, block_n: int = 64, block_k: int = 32) -> Tensor:
    """a @ b, (M, K) times (K, N); the three blocks are powers of two, 16 or more."""
    (M, depth), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, block_m), triton.cdiv(N, block_n))
    matmul_kernel[grid](
        a, b, c, *a.stride(), *b.stride(), c.stride(0), M, N, depth,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return c
