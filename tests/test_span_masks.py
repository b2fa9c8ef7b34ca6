"""The makers of masks as spans, each compared with the same mask written row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashtile
from flashtile import Spans
from flashtile.masks import FAR_LEFT, MAX_INTERVALS
from flashtile.testing import attention_reference, dense_spans, generator, normal

pytestmark = pytest.mark.slow

often = settings(max_examples=100, deadline=None)
lengths = st.lists(st.integers(0, 7), min_size=1, max_size=4)


def dense(rows: int, keys: int, sees: Callable[[int, int], bool]) -> Tensor:
    """The mask of which `sees` says the elements."""
    return torch.tensor([[sees(i, j) for j in range(keys)] for i in range(rows)]).view(rows, keys)


def assert_is(mask: Spans, wanted: list[Tensor]) -> None:
    """Each sequence of the batch has the `wanted` mask; shapes and dtypes fit a call."""
    assert mask.starts.dtype == mask.stops.dtype == torch.int32
    assert mask.starts.shape == mask.stops.shape
    assert mask.starts.shape[:3] == (len(wanted), 1, wanted[0].shape[0])
    assert torch.equal(dense_spans(mask, wanted[0].shape[1])[:, 0], torch.stack(wanted))


@often
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(0, 9))
def test_prefix_lm(prefixes, n) -> None:
    mask = Spans.prefix_lm(torch.tensor(prefixes), n)
    assert_is(mask, [dense(n, n, lambda i, j: j <= i or j < p) for p in prefixes])  # noqa: B023  # called at once


@often
@given(st.integers(1, 3), st.integers(0, 9), st.booleans(), st.data())
def test_documents(batch, n, causal, data) -> None:
    """Numbers may come again later, and are another document then."""
    ids = [[data.draw(st.integers(-1, 2)) for _ in range(n)] for _ in range(batch)]

    def sees(row, i, j):
        low, high = min(i, j), max(i, j)
        same = all(row[x] == row[i] for x in range(low, high + 1))
        return row[i] >= 0 and same and (j <= i or not causal)

    mask = Spans.documents(torch.tensor(ids).view(batch, n).int(), causal)
    assert_is(mask, [dense(n, n, lambda i, j: sees(row, i, j)) for row in ids])  # noqa: B023  # called at once


@often
@given(lengths, st.integers(0, 20), st.booleans())
def test_documents_of_lengths(parts, n, causal) -> None:
    """Also where the documents are longer than the sequence, and without any."""
    ids = [number for number, length in enumerate(parts) for _ in range(length)][:n]
    ids += [-1] * (n - len(ids))
    mask = Spans.documents_of_lengths(torch.tensor([parts]), n, causal)
    wanted = dense(n, n, lambda i, j: ids[i] == ids[j] >= 0 and (j <= i or not causal))
    assert_is(mask, [wanted])


@often
@given(st.lists(st.tuples(st.integers(0, 6), st.tuples(*[st.integers(0, 5)] * 3)), min_size=1))
def test_shared_prefix(batch) -> None:
    n = max(prefix + sum(answers) for prefix, answers in batch) + 2
    wanted = []
    for prefix, answers in batch:
        owner = [-1] * prefix + [a for a, length in enumerate(answers) for _ in range(length)]

        def sees(i, j, owner=owner):
            if i >= len(owner) or j > i:
                return False
            return owner[j] in (-1, owner[i])

        wanted.append(dense(n, n, sees))
    prefixes, answers = (torch.tensor(x) for x in zip(*batch, strict=True))
    assert_is(Spans.shared_prefix(prefixes, answers, n), wanted)


@often
@given(st.integers(1, 3), st.integers(0, 9), st.data())
def test_image_blocks(batch, n, data) -> None:
    ids = [[data.draw(st.integers(-2, 2)) for _ in range(n)] for _ in range(batch)]

    def sees(row, i, j):
        return j <= i or (row[i] >= 0 and all(row[x] == row[i] for x in range(i, j + 1)))

    mask = Spans.image_blocks(torch.tensor(ids).view(batch, n).int())
    assert_is(mask, [dense(n, n, lambda i, j: sees(row, i, j)) for row in ids])  # noqa: B023  # called at once


@often
@given(st.integers(0, 12), st.integers(1, 14))
def test_block_diffusion(n, size) -> None:
    def sees(i, j):
        ours, theirs = i % n // size, j % n // size
        if i < n:  # a noisy query
            return ours == theirs if j < n else theirs < ours
        return j >= n and theirs <= ours

    assert_is(Spans.block_diffusion(n, size), [dense(2 * n, 2 * n, sees)])


@often
@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=9), st.integers(0, 5))
def test_tree(draws, before) -> None:
    """Any tree, whatever the order of its tokens, after any number of tokens."""
    parents = [draw % (node + 1) - 1 for node, draw in enumerate(draws)]

    def sees(i, j):
        while i > j >= 0:
            i = parents[i]
        return j < 0 or i == j

    wanted = dense(len(draws), len(draws) + before, lambda i, j: sees(i, j - before))
    mask = Spans.tree(parents)
    assert_is(mask.shifted(before), [wanted])
    assert_is(mask.shifted(torch.tensor([before])), [wanted])
    assert_is(Spans.tree(torch.tensor([parents] * 2)).shifted(before), [wanted] * 2)


@pytest.mark.parametrize(("parents", "batch"), [([], 1), ([[], []], 2)])
def test_a_tree_without_tokens(parents, batch) -> None:
    assert [x.shape for x in Spans.tree(parents)] == 2 * [(batch, 1, 0, 1)]


def test_a_tree_has_as_many_intervals_as_its_worst_path() -> None:
    chain = Spans.tree([-1, 0, 1, 2])
    assert chain.starts.shape == (1, 1, 4, 1)
    #    0 - 1 - 2
    #     \\- 3 - 4
    assert Spans.tree([-1, 0, 1, 0, 3]).starts.shape[3] == 2
    zigzag = [-1, *(node for pair in range(MAX_INTERVALS - 1) for node in (2 * pair, 2 * pair))]
    assert Spans.tree(zigzag).starts.shape[3] == MAX_INTERVALS
    with pytest.raises(ValueError, match="parents: got a tree with a path of 9 intervals"):
        Spans.tree([*zigzag, len(zigzag) - 1, len(zigzag) - 1])


def test_a_tree_behind_a_cache(backend, seed) -> None:
    """Each sequence of the batch has a cache of its own length, of which all is seen."""
    g = generator(seed)
    parents, filled = [-1, 0, 1, 1, 0, 4], [7, 0, 19]
    q, k, v = normal(g, 3, 6, 4, 8), normal(g, 3, 6, 2, 8), normal(g, 3, 6, 2, 8)
    caches = [normal(g, 3, 32, 2, 8) for _ in range(2)]
    used = torch.tensor(filled, dtype=torch.int32)
    mask = Spans.tree(parents).shifted(used)
    out = flashtile.attention_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=used,
        backend=backend,
        mask=mask,
    )
    for b, n in enumerate(filled):
        for node in range(6):
            path, at = [], node
            while at >= 0:
                path, at = [n + at, *path], parents[at]
            keys = [*range(n), *path]
            wanted = attention_reference(
                q[b : b + 1, node : node + 1], *(cache[b : b + 1, keys] for cache in caches)
            ).out
            torch.testing.assert_close(out[b, node], wanted[0, 0].float(), rtol=1e-4, atol=1e-4)


def test_bounds_beyond_32_bits_are_beyond_every_key() -> None:
    everything = torch.tensor([0, 2**31 - 1], dtype=torch.int32).view(2, 1, 1, 1, 1)
    for by in (2, torch.tensor([2]), torch.tensor([2], dtype=torch.int32)):
        assert_is(Spans(*everything).shifted(by), [torch.arange(9)[None] >= 2])
    assert_is(Spans.prefix_lm(torch.tensor([2**31 + 5]), 9), [torch.ones(9, 9, dtype=torch.bool)])


def test_far_left_stays_left_of_every_key() -> None:
    far = Spans.tree([-1]).shifted(2**30 - 1)
    assert far.starts.item() < 0 < far.stops.item() == 2**30
    assert FAR_LEFT + 2**30 <= 0


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Spans.prefix_lm(torch.tensor([1.0]), 3), "prefix_lengths: got dtype"),
        (lambda: Spans.prefix_lm(torch.tensor(2), 3), "prefix_lengths: got shape"),
        (lambda: Spans.prefix_lm(2, 3), "prefix_lengths: got int"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Spans.documents(torch.tensor([True])), "ids: got dtype"),
        (lambda: Spans.documents(torch.tensor([1, 2])), "ids: got shape"),
        (lambda: Spans.documents_of_lengths(torch.tensor([1]), 3), "lengths: got shape"),
        (lambda: Spans.image_blocks(torch.zeros(1, 2)), "ids: got dtype"),
        (lambda: Spans.shared_prefix(torch.ones(1), torch.ones(1, 1), 2), "prefix_lengths: got"),
        (
            lambda: Spans.shared_prefix(torch.ones(1).int(), torch.ones(1), 2),
            "answer_lengths: got",
        ),
        (lambda: Spans.block_diffusion(3, 0), "seq_len, block_size: got"),
        (lambda: Spans.block_diffusion(-1, 2), "seq_len, block_size: got"),
        (lambda: Spans.tree([0]), "parents: got 0 for token 0"),
        (lambda: Spans.tree([-1, 2, 0]), "parents: got 2 for token 1"),
        (lambda: Spans.tree([-2]), "parents: got -2"),
        (lambda: Spans.tree(torch.tensor([0.5])), "parents: got dtype"),
        (lambda: Spans.tree(torch.tensor(3)), "parents: got shape"),
    ],
)
def test_bad_arguments_are_named(make, error) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        make()


@pytest.mark.parametrize("dynamic", [False, True])
def test_makers_compile_without_a_break(dynamic) -> None:
    def masks(lengths: Tensor, ids: Tensor) -> list[Tensor]:
        n = ids.shape[1]
        made = (
            Spans.prefix_lm(lengths[:, 0], n),
            Spans.documents(ids, causal=False),
            Spans.documents_of_lengths(lengths, n),
            Spans.shared_prefix(lengths[:, 0], lengths[:, 1:], n),
            Spans.image_blocks(ids),
            Spans.block_diffusion(n, 3),
        )
        return [x for mask in made for x in mask]

    compiled = torch.compile(masks, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n in (8, 11):
        given = torch.tensor([[2, 3, 1], [0, 4, 2]]), torch.randint(-1, 2, (2, n))
        for got, wanted in zip(compiled(*given), masks(*given), strict=True):
            assert torch.equal(got, wanted)
