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
    keep_mask,
    keep_threshold,
    last_kept_word,
    philox4x32,
    philox_key,
)
from flashtile.rng_state import draw_rng_state
from flashtile.testing import generator, normal

# Random123 (Salmon et al. 2011), tests/kat_vectors, the lines "philox4x32 7":
# four counter words, two key words, four result words. The last counter is the digits of pi.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 5f6fb709 0d893f64 4f121f81 4f730a48",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 5207ddc2 45165e59 4d8ee751 8c52f662",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 4dfccaba 190a87f0 c47362ba b6b5242a",
]

# (1 - p) 2^32, rounded: worked out in decimal.
THRESHOLDS = {
    0.0: 4294967296,
    0.5: 2147483648,
    0.25: 3221225472,
    0.1: 3865470566,  # ...566.4
    0.3: 3006477107,  # ...107.2
    0.17: 3564822856,  # ...855.68
    2.0**-32: 4294967295,
    1 - 2.0**-32: 1,
    1 - 2.0**-40: 1,  # never 0: words are compared with the last one that is kept
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


@pytest.mark.parametrize("p", THRESHOLDS)
def test_threshold(p):
    assert keep_threshold(p) == THRESHOLDS[p]
    last = last_kept_word(p)
    assert -(2**31) <= last < 2**31
    assert last % 2**32 == THRESHOLDS[p] - 1


def test_key_is_a_block_of_seed_and_offset():
    seed, offset = 0x299F31D0A4093822, 0x05A308D3243F6A88
    key = philox_key(torch.tensor([seed, offset]))
    counter = (0x243F6A88, 0x05A308D3, 0, 0)
    wanted = plain_philox(counter, (0xA4093822, 0x299F31D0))
    assert tuple(int(word) for word in key) == wanted[:2]


ADJACENT_KEYS = [range(8), range(1), range(3, 4), range(5, 18), range(8, 11), range(7, 7)]


@pytest.mark.parametrize("keys", [*ADJACENT_KEYS, [6, 7, 20, 21, 22], [3, 3, 0, 9], [2, 1]])
def test_mask_is_a_function_of_the_coordinates(keys, seed):
    """Every element by hand: the word of (key // 4, query, head, batch), lane key % 4."""
    p = 0.3
    state = draw_rng_state(torch.device("cpu"), generator(seed))
    key = plain_philox(
        (int(state[1]) % 2**32, int(state[1]) >> 32, 0, 0),
        (int(state[0]) % 2**32, int(state[0]) >> 32),
    )[:2]
    batch, heads, queries = torch.tensor([4, 0]), torch.tensor([2, 70_000]), torch.tensor([0, 9, 1])
    columns = torch.tensor(list(keys), dtype=torch.int64)
    mask = keep_mask(state, p, batch, heads, queries, columns)
    assert mask.shape == (2, 2, 3, len(keys))
    for ib, b in enumerate(batch.tolist()):
        for ih, h in enumerate(heads.tolist()):
            for iq, q in enumerate(queries.tolist()):
                words = [plain_philox((n // 4, q, h, b), key)[n % 4] for n in keys]
                assert mask[ib, ih, iq].tolist() == [word < THRESHOLDS[p] for word in words]


def test_a_word_below_the_threshold_is_kept_and_one_equal_to_it_is_not(seed):
    """``1 - word / 2**32`` is exact, so every word of a block can be the threshold itself."""
    state = draw_rng_state(torch.device("cpu"), generator(seed))
    zero = torch.zeros(1, dtype=torch.int64)
    block = philox4x32((zero, zero, zero, zero), philox_key(state))
    for lane, word in enumerate(int(x) for x in block):
        for threshold in (word, word + 1):
            p = 1 - threshold / 2**32
            assert keep_threshold(p) == threshold
            assert keep_mask(state, p, zero, zero, zero, zero + lane).item() == (word < threshold)


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
    words = [
        word
        for counter in product(range(B), range(M), range(H), range(N // 4))
        for word in plain_philox((counter[3], counter[1], counter[2], counter[0]), key)
    ]
    kept = torch.tensor(words).view(out.shape) < THRESHOLDS[p]
    torch.testing.assert_close(out, kept / (N * (1 - p)))
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


def compiled_with_budget(budget: float) -> tuple[float, float]:
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
        out = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
        dout = normal(g, *out.shape, dtype=torch.float64)
        (dv,) = torch.autograd.grad(out, v, dout)
    return float((dout * out).sum()), float((dv * v).sum())


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.01])
def test_a_graph_that_computes_again_drops_the_same(budget):
    of_out, of_values = compiled_with_budget(budget)
    assert of_out == pytest.approx(of_values, abs=1e-9)


def test_a_graph_that_saves_nothing_is_refused():
    with pytest.raises(Exception, match="dropout_p: got a graph with activation_memory_budget"):
        compiled_with_budget(0.0)
