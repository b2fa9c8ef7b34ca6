"""Dropout whose mask is the same on every backend and for every tiling.

Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a pure function
from a counter and a key to four 32-bit words. Seven rounds, which flash-attention uses as well, are
the fewest that pass all tests of BigCrush (their table 2); with ten, the loop of the Triton forward
has 22 % more instructions. The key is one Philox block of (seed, offset), so neighbouring seeds
give unrelated masks.

The 16 bytes of a block are random numbers of 16 scores: those of one query and of the keys
64 i + 8 e + 2 c and 64 i + 8 e + 2 c + 1, for e = 0 to 7. The counter is (4 i + c, query, head,
batch), and bytes 2 e and 2 e + 1 are of these keys. In the result of a product of tensor cores, one
thread has exactly these scores of a query. So the mask depends only on the coordinates: not on the
tile size, the device, or how sequences are packed.

A score is kept if its number is at least ``first_kept(p)``. Where 256 numbers are too few for p, a
second block gives the scores eight lower bits each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operators import library, ops, register_fake

ROUNDS = 7
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF

BLOCK_KEYS = 64  # keys whose scores of a query belong to the same four Philox blocks
LOWER_BITS = 2**30  # added to the counter's first word: the block of the lower bytes

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


def random_bits(dropout_p: float) -> int:
    """The bits of a score's random number: 8 as in flash-attention, or 16 where rounding p to a
    multiple of 1/256 would change it by more than a 32nd.
    """
    return 8 if dropout_p >= 1 / 16 or (256.0 * dropout_p).is_integer() else 16


def first_kept(dropout_p: float) -> int:
    """The least number that is kept: p times the count of all numbers, rounded. The largest number
    is always kept.
    """
    numbers = 2 ** random_bits(dropout_p)
    return min(round(dropout_p * numbers), numbers - 1)


def keep_rate(dropout_p: float) -> float:
    """The probability with which a score is kept: 1 - p, with p rounded as in `first_kept`. What is
    kept is divided by it, so that the output's mean is exact.
    """
    return 1.0 - first_kept(dropout_p) / 2 ** random_bits(dropout_p)


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
    blocks, block_of_key = torch.unique(keys // BLOCK_KEYS, return_inverse=True)
    groups = (4 * blocks[:, None] + torch.arange(4, device=keys.device)).flatten()
    others = queries[None, None, :, None], heads[None, :, None, None], batch[:, None, None, None]
    numbers = _bytes(philox4x32((groups[None, None, None, :], *others), key))
    if random_bits(dropout_p) == 16:
        lower = _bytes(philox4x32((groups[None, None, None, :] + LOWER_BITS, *others), key))
        numbers = 256 * numbers.int() + lower
    # (batch, heads, queries, blocks, 4, 8 pairs); it takes a twentieth of the time to move pairs
    pairs = (numbers >= first_kept(dropout_p)).view(torch.int16).unflatten(-2, (-1, 4))
    kept = pairs.transpose(-2, -1).flatten(-3).view(torch.bool)
    columns = BLOCK_KEYS * block_of_key + keys % BLOCK_KEYS
    first = int(columns[0]) if len(keys) > 0 else 0
    if torch.equal(columns, torch.arange(first, first + len(keys), device=keys.device)):
        return kept.narrow(-1, first, len(keys))  # takes a tenth of the time of an index
    return kept[..., columns]


def _bytes(words: Words) -> Tensor:
    """The 16 bytes of each block, the lowest of a word first: uint8 (..., 16)."""
    return torch.stack(words, dim=-1).to(torch.int32).view(torch.uint8)


def draw_rng_state(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """(seed, offset) as int64 (2,) from `generator`, or PyTorch's own for `device`, so that
    ``torch.manual_seed`` applies.
    """
    if torch.compiler.is_compiling() and generator is None:
        drawn: Tensor = ops.draw_rng_state(device)
        return drawn
    return _draw(device=device, generator=generator)


def _draw(*, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device, generator=generator)


library.define("draw_rng_state(Device device) -> Tensor")
library.define(
    "draw_rng_state_again(*, Device device) -> Tensor", tags=[torch.Tag.nondeterministic_seeded]
)


def _draw_once(device: torch.device) -> Tensor:
    """`draw_rng_state` in a graph: both passes must have the same result. A partitioner takes a
    random integer for cheap to compute again, but a second draw drops other probabilities, so it
    must save the first one. With a memory budget of 0 it saves nothing but the inputs. It then
    draws again from the state that the generator had, provided that the draw is an op of its own:
    inductor makes the random integers of PyTorch's ops itself, from another state.
    """
    # Both take long to import, and tracers have imported them.
    from torch._functorch import config
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.utils.checkpoint import CheckpointPolicy

    mode = get_proxy_mode()
    if mode is None:
        return _draw(device=device)
    graph = mode.tracer.graph
    has_backward = any("tangents" in node.name for node in graph.find_nodes(op="placeholder"))
    if has_backward and config.activation_memory_budget == 0:
        drawn: Tensor = ops.draw_rng_state_again(device=device)
        policy = CheckpointPolicy.MUST_RECOMPUTE
    else:
        drawn = _draw(device=device)
        policy = CheckpointPolicy.MUST_SAVE
    next(iter(reversed(graph.nodes))).meta["recompute"] = policy
    return drawn


def _drawn_shape(*, device: torch.device) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


library.impl("draw_rng_state", _draw_once, "CompositeImplicitAutograd")
library.impl("draw_rng_state_again", _draw, "BackendSelect")
register_fake("draw_rng_state_again", _drawn_shape)
