"""Dropout whose mask is the same on every backend and for every tiling.

Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a pure function
from a counter and a key to four 32-bit words. Seven rounds, which flash-attention uses as well, are
the fewest that pass all tests of BigCrush (their table 2); with ten, the loop of the Triton forward
has 22 % more instructions. The counter of a score is (key // 4, query, head, batch) and its lane
is ``key % 4``, so the mask depends only on the coordinates: not on the tile size, the device, or
how sequences are packed.
The key is one Philox block of (seed, offset), so neighbouring seeds give unrelated masks.

An element is kept when its word is below ``keep_threshold(p)``, so p is exact to 2**-32.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four 32-bit words for each counter, Philox4x32-7.

    Args:
        counter: four int64 tensors that broadcast together, values in [0, 2**32).
        key: two int64 tensors that broadcast with them, values in [0, 2**32).

    Returns:
        Four int64 tensors, values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    c0, c2 = c0.clone(), c2.clone()  # overwritten; new memory takes longer than the arithmetic
    k0, k1 = key
    for round_index in range(ROUNDS):
        # A 32 x 32 bit product may wrap into the sign bit of int64. Its bits are still right, and
        # masking after the arithmetic shift takes exactly the upper 32. The lower ones are masked
        # in the next round, or at the end.
        product_0 = c0.mul_(MULTIPLIER_0)
        product_1 = c2.mul_(MULTIPLIER_1)
        round_k0 = (k0 + round_index * WEYL_0) & WORD
        round_k1 = (k1 + round_index * WEYL_1) & WORD
        c0 = xor_(xor_(product_1 >> 32, c1), round_k0).bitwise_and_(WORD)
        c2 = xor_(xor_(product_0 >> 32, c3), round_k1).bitwise_and_(WORD)
        c1, c3 = product_1, product_0
    return c0, c1.bitwise_and_(WORD), c2, c3.bitwise_and_(WORD)


def xor_(x: Tensor, y: Tensor) -> Tensor:
    """``x ^ y``, in the memory of `x` if it has room."""
    sizes = zip(x.shape[::-1], y.shape[::-1], strict=False)
    has_room = x.dim() >= y.dim() and all(n in (1, room) for room, n in sizes)
    return x.bitwise_xor_(y) if has_room else x ^ y


def philox_key(rng_state: Tensor) -> tuple[Tensor, Tensor]:
    """The two key words of a call, from its (seed, offset): one Philox block with the offset as
    counter.
    """
    seed, offset = rng_state.unbind(0)
    zero = torch.zeros_like(seed)
    counter = (offset & WORD, (offset >> 32) & WORD, zero, zero)
    words = philox4x32(counter, (seed & WORD, (seed >> 32) & WORD))
    return words[0], words[1]


def keep_threshold(dropout_p: float) -> int:
    """Words below this number are kept: ``round((1 - p) * 2**32)``, at least 1."""
    return max(round((1.0 - dropout_p) * 2**32), 1)


def last_kept_word(dropout_p: float) -> int:
    """The largest word that is kept, as the int32 of the same bits: kernels are compiled for the
    types of their arguments, and this type is the same for every p.
    """
    last = keep_threshold(dropout_p) - 1
    return last - 2**32 if last >= 2**31 else last


def keep_mask(rng_state: Tensor, dropout_p: float, *coordinates: Tensor) -> Tensor:
    """`keep_mask_of_key` for the (seed, offset) of a call, int64 (2,)."""
    return keep_mask_of_key(philox_key(rng_state), dropout_p, *coordinates)


def keep_mask_of_key(
    key: tuple[Tensor, Tensor],
    dropout_p: float,
    batch: Tensor,
    heads: Tensor,
    queries: Tensor,
    keys: Tensor,
) -> Tensor:
    """Which scores of a tile dropout keeps: bool (batch, heads, queries, keys).

    Args:
        key: the `philox_key` of the call.
        dropout_p: probability of dropping, in [0, 1).
        batch, heads, queries, keys: int64 1-D, the coordinates; in packed calls the batch is the
            index of the sequence, and queries and keys count from its start, so packed and dense
            calls agree.
    """
    # One counter gives four words, for four neighbouring keys.
    groups, group_of_key = torch.unique(keys // 4, return_inverse=True)
    counter = (
        groups[None, None, None, :],
        queries[None, None, :, None],
        heads[None, :, None, None],
        batch[:, None, None, None],
    )
    threshold = keep_threshold(dropout_p)
    kept = torch.stack([word < threshold for word in philox4x32(counter, key)], dim=-1).flatten(-2)
    columns = 4 * group_of_key + keys % 4
    first = int(columns[0]) if len(keys) > 0 else 0
    if torch.equal(columns, torch.arange(first, first + len(keys), device=keys.device)):
        return kept.narrow(-1, first, len(keys))  # takes a tenth of the time of an index
    return kept[..., columns]
