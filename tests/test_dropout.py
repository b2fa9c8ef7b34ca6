"""Dropout against independent results: Random123's vectors, and Philox in plain integers.

The conformance suite gives the reference the mask that `keep_mask` draws, so an error in it would
agree with itself there.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch._functorch import config

import flashtile
from flashtile import attention, attention_varlen
from flashtile.dropout import (
    draw_rng_state,
    first_kept,
    keep_mask,
    keep_rate,
    philox4x32,
    philox_key,
    random_bits,
)
from flashtile.testing import generator, normal

# Random123 (Salmon et al. 2011), tests/kat_vectors, the lines "philox4x32 7":
# four counter words, two key words, four result words. The last counter is the digits of pi.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 5f6fb709 0d893f64 4f121f81 4f730a48",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 5207ddc2 45165e59 4d8ee751 8c52f662",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 4dfccaba 190a87f0 c47362ba b6b5242a",
]

# The bits of a number and the least one that is kept, worked out in decimal.
NUMBERS = {
    0.0: (8, 0),
    0.5: (8, 128),
    0.25: (8, 64),
    1 / 256: (8, 1),
    0.1: (8, 26),  # 25.6
    0.3: (8, 77),  # 76.8
    0.0625: (8, 16),
    0.999: (8, 255),  # 255.7, but some number is kept
    1 - 2.0**-40: (8, 255),
    0.05: (16, 3277),  # 3276.8
    0.02: (16, 1311),  # 1310.7
    0.0624: (16, 4089),  # 4089.4
    2.0**-16: (16, 1),
    1e-6: (16, 0),
}


def plain_philox(counter, key):
    """One block of Philox4x32-7 in Python's integers, as section 4.1 of the paper defines it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(7):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(line):
    words = [int(word, 16) for word in line.split()]
    counter, key, answer = words[:4], words[4:6], tuple(words[6:])
    as_tensors = (tuple(torch.tensor(word) for word in part) for part in (counter, key))
    assert tuple(int(word) for word in philox4x32(*as_tensors)) == answer
    assert plain_philox(counter, key) == answer


def plain_number(n, query, head, b, key, bits):
    """The random number of a score, in Python's integers: the byte of key `n` in the block that its
    column pair of 64 keys has, and the same byte of a second block below it.
    """
    e, column = n % 64 // 8, n % 8
    number = 0
    for added in (0, 2**30)[: bits // 8]:
        words = plain_philox((n // 64 * 4 + column // 2 + added, query, head, b), key)
        number = 256 * number + words[e // 2] // 256 ** (e % 2 * 2 + column % 2) % 256
    return number


@pytest.mark.parametrize("p", NUMBERS)
def test_numbers(p):
    bits, first = NUMBERS[p]
    assert (random_bits(p), first_kept(p)) == (bits, first)
    assert keep_rate(p) == 1 - first / 2**bits
    assert abs(1 - keep_rate(p) - p) <= max(p / 32, 2**-17) or p > 255 / 256


def test_a_rate_may_be_an_int():
    assert keep_rate(0) == 1.0


def test_key_is_a_block_of_seed_and_offset():
    seed, offset = 0x299F31D0A4093822, 0x05A308D3243F6A88
    key = philox_key(torch.tensor([seed, offset]))
    counter = (0x243F6A88, 0x05A308D3, 0, 0)
    wanted = plain_philox(counter, (0xA4093822, 0x299F31D0))
    assert tuple(int(word) for word in key) == wanted[:2]


ADJACENT_KEYS = [range(128), range(1), range(3, 4), range(5, 150), range(64, 70), range(7, 7)]


@pytest.mark.parametrize("p", [0.3, 0.02])
@pytest.mark.parametrize("keys", [*ADJACENT_KEYS, [60, 61, 190, 66], [3, 3, 0, 900], [2, 1]])
def test_mask_is_a_function_of_the_coordinates(keys, p, seed):
    """Every element by hand."""
    state = draw_rng_state(torch.device("cpu"), generator(seed))
    key = plain_philox(
        (int(state[1]) % 2**32, int(state[1]) >> 32, 0, 0),
        (int(state[0]) % 2**32, int(state[0]) >> 32),
    )[:2]
    batch, heads, queries = torch.tensor([4, 0]), torch.tensor([2, 70_000]), torch.tensor([0, 9, 1])
    columns = torch.tensor(list(keys), dtype=torch.int64)
    mask = keep_mask(state, p, batch, heads, queries, columns)
    assert mask.shape == (2, 2, 3, len(keys))
    bits, first = NUMBERS[p]
    for ib, b in enumerate(batch.tolist()):
        for ih, h in enumerate(heads.tolist()):
            for iq, q in enumerate(queries.tolist()):
                numbers = [plain_number(n, q, h, b, key, bits) for n in keys]
                assert mask[ib, ih, iq].tolist() == [number >= first for number in numbers]


@pytest.mark.parametrize(("bits", "count"), [(8, 128), (16, 2048)])
def test_a_number_below_the_first_one_is_dropped_and_one_equal_to_it_is_kept(bits, count, seed):
    """``number / 2**bits`` is exact, so any number that `bits` decide can be the first one."""
    state = draw_rng_state(torch.device("cpu"), generator(seed))
    zero, keys = torch.zeros(1, dtype=torch.int64), torch.arange(count)
    key = tuple(map(int, philox_key(state)))
    tried = 0
    for n in keys.tolist():
        number = plain_number(n, 0, 0, 0, key, bits)
        for first in (number, number + 1):
            p = first / 2**bits
            if p < 1 and random_bits(p) == bits:
                assert first_kept(p) == first
                kept = keep_mask(state, p, zero, zero, zero, keys[n : n + 1])
                assert kept.item() == (number >= first)
                tried += 1
    assert tried > 100


@pytest.mark.parametrize("p", [0.1, 0.25, 0.02])
def test_scores_are_dropped_independently(p, seed):
    """The share of kept scores, of each byte of a block, and of pairs of scores that a block, or
    neighbouring blocks, heads, sequences and seeds have, within 8 standard deviations.
    """
    dropped = 1 - keep_rate(p)
    state = draw_rng_state(torch.device("cpu"), generator(seed))
    sizes = (2, 3, 64, 1024)
    kept = keep_mask(state, p, *map(torch.arange, sizes))
    other = keep_mask(state + 1, p, *map(torch.arange, sizes))

    def is_near(events, probability):
        n = events.numel()
        assert abs(events.double().mean() - probability) < 8 * (probability / n) ** 0.5

    is_near(~kept, dropped)
    for n in range(64):
        is_near(~kept[..., n::64], dropped)
    both = dropped**2
    for dim in range(4):
        is_near((~kept).narrow(dim, 1, sizes[dim] - 1) & ~kept.narrow(dim, 0, sizes[dim] - 1), both)
    for distance in (2, 8, 16, 64):
        is_near(~kept[..., distance:] & ~kept[..., :-distance], both)
    is_near(~kept & ~other, both)


def test_a_call_drops_by_the_coordinates_of_many_heads_and_sequences(seed):
    """More heads than the other tests have, and more sequences than one segment: equal scores, and
    values that show every probability.
    """
    B, H, M, N, p = 7, 11, 3, 8, 0.3
    q, k = torch.zeros(B, M, H, N), torch.zeros(B, N, H, N)
    v = torch.eye(N)[None, :, None].repeat(B, 1, H, 1).requires_grad_()
    torch.manual_seed(seed)
    out = flashtile.attention(q, k, v, dropout_p=p, backend="cpu")
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.manual_seed(seed)
    key = tuple(int(x) for x in philox_key(draw_rng_state(torch.device("cpu"))))
    numbers = [
        plain_number(n, i, h, b, key, 8)
        for b, i, h, n in product(range(B), range(M), range(H), range(N))
    ]
    kept = torch.tensor(numbers).view(out.shape) >= NUMBERS[p][1]
    torch.testing.assert_close(out, kept / (N * keep_rate(p)))
    torch.testing.assert_close(dv, out.sum(1).mT[..., None].expand_as(dv))


def test_state_comes_from_the_generator_and_fills_both_words():
    """`torch.manual_seed` fixes the draws, every draw differs, and both halves of a word vary."""
    torch.manual_seed(5)
    first, second = (draw_rng_state(torch.device("cpu")) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(draw_rng_state(torch.device("cpu")), first)
    assert not torch.equal(first, second)
    states = torch.stack([draw_rng_state(torch.device("cpu")) for _ in range(64)])
    assert states.dtype == torch.int64
    assert states.min() >= 0
    assert states.max() >= 2**61  # words have 62 random bits
    for half in (states & 0xFFFFFFFF, states >> 32):
        assert half.unique().numel() == half.numel()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_generator_of_the_call(is_packed, seed):
    """It draws like PyTorch's own, which does not move."""
    q = normal(generator(seed), 5, 2, 8)
    lengths = torch.tensor([0, 5], dtype=torch.int32)

    def attend(**options):
        if is_packed:
            options |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
            return attention_varlen(q, q, q, max_seqlen_q=5, max_seqlen_k=5, **options)
        return attention(q[None], q[None], q[None], **options)

    torch.manual_seed(seed)
    wanted, state = attend(dropout_p=0.5), torch.get_rng_state()
    own = torch.Generator().manual_seed(seed)
    first, second = (attend(dropout_p=0.5, generator=own) for _ in range(2))
    assert torch.equal(first, wanted)
    assert not torch.equal(second, wanted)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_no_generator_of_the_device_is_refused():
    q = torch.zeros(1, 5, 2, 8)
    with pytest.raises(TypeError, match=r"^generator: got int, want a torch\.Generator"):
        attention(q, q, q, dropout_p=0.5, generator=3)
    q = q.to("meta")
    with pytest.raises(ValueError, match=r"^generator: got one of cpu, want one of meta"):
        attention(q, q, q, dropout_p=0.5, generator=torch.Generator())


def compiled_with_budget(budget: float, compiler: str) -> tuple[float, float]:
    """<dout, out> and <dv, v>, which are equal if both passes drop the same, because attention is
    linear in v.
    """
    torch._dynamo.reset()
    g = generator(0)
    w = normal(g, 16, 16)
    q, k, v = (normal(g, 2, 32, 2, 16, dtype=torch.float64).requires_grad_() for _ in range(3))
    w = w.double().requires_grad_()

    def attend(q, k, v):
        return flashtile.attention((q @ w).relu(), (k @ w).relu(), v, dropout_p=0.3)

    with config.patch(activation_memory_budget=budget):
        out = torch.compile(attend, backend=compiler, fullgraph=True)(q, k, v)
        dout = normal(g, *out.shape, dtype=torch.float64)
        (dv,) = torch.autograd.grad(out, v, dout)
    return float((dout * out).sum()), float((dv * v).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "compiler"),
    [*((budget, "aot_eager") for budget in (1.0, 0.5, 0.01, 0.0)), (0.0, "inductor")],
)
def test_a_graph_that_computes_again_drops_the_same(budget, compiler):
    of_out, of_values = compiled_with_budget(budget, compiler)
    assert of_out == pytest.approx(of_values, abs=1e-9)


def test_a_graph_without_a_backward_may_save_nothing():
    q = torch.randn(1, 20, 1, 8)
    with config.patch(activation_memory_budget=0.0):
        compiled = torch.compile(flashtile.attention, backend="aot_eager", fullgraph=True)
        assert compiled(q, q, q, dropout_p=0.3).shape == q.shape
