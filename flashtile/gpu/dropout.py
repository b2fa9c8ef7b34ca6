"""Dropout's random numbers in kernels: `flashtile.dropout` on tiles, in Triton and in Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import dropout as host
from .intrinsics import IS_INTERPRETED, compiles_to_ptx

ROUNDS = tl.constexpr(host.ROUNDS)
BLOCK_KEYS = tl.constexpr(host.BLOCK_KEYS)
LOWER_BITS = tl.constexpr(host.LOWER_BITS)


@triton.constexpr_function
def _philox_assembly() -> str:
    """Philox of the counter $4 to $7 and the key $8, $9.

    From Triton's own function the assembler makes two multiplications for the two halves of a
    product, and here one.
    """
    registers = ".reg .b32 c<4>, k<2>, low<2>, high<2>; .reg .b64 product;"
    start = " ".join(f"mov.b32 c{n}, ${n + 4};" for n in range(4)) + " mov.b32 k0, $8;"
    one_round = f"""
        mul.wide.u32 product, c0, {host.MULTIPLIER_0}; mov.b64 {{low0, high0}}, product;
        mul.wide.u32 product, c2, {host.MULTIPLIER_1}; mov.b64 {{low1, high1}}, product;
        lop3.b32 c0, high1, c1, k0, 0x96; lop3.b32 c2, high0, c3, k1, 0x96;
        mov.b32 c1, low1; mov.b32 c3, low0;"""
    next_key = f"add.u32 k0, k0, {host.WEYL_0}; add.u32 k1, k1, {host.WEYL_1};"
    rounds = next_key.join([one_round] * host.ROUNDS)
    end = " ".join(f"mov.b32 ${n}, c{n};" for n in range(4))
    return f"{{ {registers} {start} mov.b32 k1, $9; {rounds} {end} }}"


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
    """The four words of a Philox block, whose scores are those of `flashtile.dropout`."""
    zero = queries * 0 + groups * 0
    c0, c1 = (zero + groups).to(tl.uint32), (zero + queries).to(tl.uint32)
    c2, c3 = (zero + h).to(tl.uint32), (zero + b).to(tl.uint32)
    if IS_INTERPRETED:
        words = tl.philox(key, c0, c1, c2, c3, n_rounds=ROUNDS)
    elif compiles_to_ptx():
        words = tl.inline_asm_elementwise(
            _philox_assembly(),
            "=r,=r,=r,=r,r,r,r,r,r,r",
            [c0, c1, c2, c3, key.to(tl.uint32), (key >> 32).to(tl.uint32)],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        words = tl.philox(key, c0, c1, c2, c3, n_rounds=ROUNDS)
    return words


@triton.jit
def random_words(key, b, h, queries, groups):
    """The words of `philox_block`, from shape (...) to (..., 2, 2)."""
    w0, w1, w2, w3 = philox_block(key, b, h, queries, groups)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))
