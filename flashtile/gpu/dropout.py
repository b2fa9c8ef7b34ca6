"""Dropout's random numbers in kernels: `flashtile.dropout` on tiles, in Triton and in Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import ROUNDS as HOST_ROUNDS

ROUNDS = tl.constexpr(HOST_ROUNDS)


@triton.jit
def dropout_key(rng_ptr):
    """The two key words of a call: one Philox block of (seed, offset)."""
    seed = tl.load(rng_ptr)
    offset = tl.load(rng_ptr + 1)
    low = (offset & 0xFFFFFFFF).to(tl.uint32)
    high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = (offset & 0).to(tl.uint32)
    k0, k1, _, _ = tl.philox(seed, low, high, zero, zero, n_rounds=ROUNDS)
    return k0.to(tl.uint64) | (k1.to(tl.uint64) << 32)


@triton.jit
def philox_block(key, b, h, queries, groups):
    """The words of four neighbouring keys, the group of four `groups`."""
    zero = queries * 0 + groups * 0
    return tl.philox(
        key,
        (zero + groups).to(tl.uint32),
        (zero + queries).to(tl.uint32),
        (zero + h).to(tl.uint32),
        (zero + b).to(tl.uint32),
        n_rounds=ROUNDS,
    )
