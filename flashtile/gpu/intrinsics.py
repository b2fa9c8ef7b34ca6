"""Constants and small functions that Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# Programmatic dependent launch (Hopper and newer): the programs of a kernel that is launched early
# are ready when the previous kernel ends. Until they have waited, they touch nothing that the
# previous kernel writes.


@triton.jit
def wait_for_earlier_kernels():
    """Wait until all earlier launches have ended and their writes are visible."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start():
    """Let the next kernel, if launched early, occupy free multiprocessors and wait there."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rows_base(x, batch, row, head):
    """Pointer to one head of one row of `x`; 64-bit, as tensors may have over 2**31 elements."""
    return (
        x.ptr + batch.to(tl.int64) * x.batch + row.to(tl.int64) * x.row + head.to(tl.int64) * x.head
    )
