"""The mask rules: tiles, intervals and block masks against their dense form."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from flashtile.masks import EMPTY, FULL, Chunk, Visibility, Window, as_kernel_number, structure
from flashtile.testing import visible_keys

SIDES = (None, -2, -1, 0, 1, 2, 4)
WINDOWS = [Window(*sides) for sides in product(SIDES, SIDES) if None in sides or sum(sides) >= 0]
CHUNKS = [Chunk(size) for size in (1, 2, 3, 5)]
SIZES = [(M, N) for M in (1, 2, 3, 5) for N in (1, 2, 4, 6)]


def spans(size):
    """Every non-empty interval in [0, size)."""
    return [(a, b) for a in range(size) for b in range(a + 1, size + 1)]


def classified(visibility):
    """Every tile with its kind, and with what `dense` says: whether it has visible and hidden
    elements."""
    dense = visibility.dense()
    for (m0, m1), (n0, n1) in product(spans(visibility.M), spans(visibility.N)):
        tile = dense[m0:m1, n0:n1]
        yield visibility.classify(m0, m1, n0, n1), bool(tile.any()), bool(tile.all())


@pytest.mark.parametrize("facts", [(fact,) for fact in (*WINDOWS, *CHUNKS)], ids=str)
def test_a_tile_of_one_rule_is_what_its_elements_say(facts):
    """Empty tiles are skipped, full ones not masked: for one rule, neither is ever missed."""
    for M, N in SIZES:
        for kind, some, every in classified(Visibility(facts, M, N)):
            assert (kind == EMPTY) == (not some)
            assert (kind == FULL) == every


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_a_tile_of_two_rules_is_never_skipped_nor_left_unmasked(chunk):
    """With two rules an empty tile may be classified as partial, which costs only time."""
    for window, (M, N) in product(WINDOWS, ((3, 4), (5, 2))):
        for kind, some, every in classified(Visibility((window, chunk), M, N)):
            assert not (kind == EMPTY and some)
            assert (kind == FULL) == every


def test_without_rules_every_tile_is_full():
    for kind, _, every in classified(Visibility((), 3, 4)):
        assert every
        assert kind == FULL


@pytest.mark.parametrize("size", [0, 1, 3])
def test_dense_and_key_range_are_the_reference(size):
    """Both forms of every rule against the reference, which shares no code with them."""
    for left, right in product(SIDES, SIDES):
        window = Window(left, right)
        if left is not None and right is not None and left + right < 0:
            continue  # `Window.under` ignores these windows
        facts = (window, *((Chunk(size),) if size else ()))
        for M, N in SIZES:
            visibility = Visibility(facts, M, N)
            lengths = (torch.tensor([M]), torch.tensor([N]))
            wanted = visible_keys(*lengths, M, N, window_size=window, attention_chunk=size)[0]
            assert torch.equal(visibility.dense(), wanted)
            assert torch.equal(visibility.dense((M - 1, M), (N // 2, N)), wanted[M - 1 :, N // 2 :])
            for i in range(M):
                start, stop = visibility.key_range(i)
                inside = torch.zeros(N, dtype=torch.bool)
                inside[start : max(start, stop)] = True
                assert torch.equal(inside, wanted[i])


@pytest.mark.parametrize(
    ("size", "number"),
    [(None, 0), (0, 0), (7, 7), (-7, -7), (2**30, 2**30), (2**40, 2**30), (-(2**40), -(2**30))],
)
def test_kernels_get_sizes_that_fit_into_32_bits(size, number):
    assert as_kernel_number(size) == number


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_that_holds_no_key_is_ignored(causal):
    """Seen from the middle of a sequence, far from both of its ends."""
    for left, right in product(SIDES, SIDES):
        window = Window(left, 0 if causal else right)
        start, stop = Visibility((window,), 20, 20).key_range(10)
        ignored = Window(None, 0 if causal else None)
        assert Window(left, right).under(causal) == (window if start < stop else ignored)


@pytest.mark.parametrize(
    ("numbers", "rules"),
    [
        ((None, None, 0), ()),
        ((0, None, 0), (Window(0, None),)),
        ((None, 0, 0), (Window(None, 0),)),
        ((None, None, 1), (Chunk(1),)),
        ((3, -1, 2), (Window(3, -1), Chunk(2))),
    ],
)
def test_rules_of_a_call(numbers, rules):
    assert structure(*numbers) == rules
