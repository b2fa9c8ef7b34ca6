"""Masks as spans: packed and padded calls, and PyTorch's transformations."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashtile
from flashtile import Spans
from flashtile.call import prepare
from flashtile.testing import (
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    dense_spans,
    generator,
    normal,
    qkv,
)

from .harness import Sizes, compare, random_spans

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


def column(*numbers: int) -> Tensor:
    """One number for each query, int32 (1, 1, queries, 1)."""
    return torch.tensor(numbers, dtype=torch.int32).view(1, 1, -1, 1)


def test_a_mask_by_hand() -> None:
    """Equal keys: the output is the mean of the visible values."""
    q, k = torch.zeros(1, 5, 1, 4), torch.zeros(1, 6, 1, 4)
    v = torch.tensor([1.0, 2, 4, 8, 16, 32]).view(1, 6, 1, 1)
    starts = torch.cat((column(0, 0, -5, 3, 4), column(2, 1, 4, 3, 9)), -1)
    stops = torch.cat((column(1, 3, 2, 3, 2), column(3, 4, 99, 1, 12)), -1)
    out, lse = flashtile.attention(q, k, v, mask=Spans(starts, stops), return_lse=True)
    #       keys 0, 2    0 to 3 once    0, 1, 4, 5        none  none
    wanted = [5 / 2, 15 / 4, (1 + 2 + 16 + 32) / 4, 0.0, 0.0]
    torch.testing.assert_close(out.flatten(), torch.tensor(wanted))
    counts = torch.tensor([2.0, 4, 4, 0, 0])
    torch.testing.assert_close(lse.flatten(), counts.log())


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize(
    ("starts", "stops"), [((3, 3), (9, 10)), ((3, 4), (9, 9)), ((3, 4), (9, 10))]
)
def test_rows_whose_intervals_differ_by_one(starts, stops, options, backend, seed) -> None:
    """A single key is beside the keys that both rows see."""
    q, k, v = qkv(generator(seed), B=2, M=2, N=13)
    mask = Spans(column(*starts), column(*stops))
    compare(
        lambda x: flashtile.attention(**x, **options, mask=mask, return_lse=True, backend=backend),
        lambda x, **how: attention_reference(**x, **options, mask=mask, **how),
        {"q": q, "k": k, "v": v},
        seed=seed,
    )


@pytest.mark.parametrize("lead", [(1, 1), (3, 1), (1, 4), (3, 4)], ids=str)
def test_padded_queries_of_packed_keys(lead, backend, seed) -> None:
    """Rows of the mask are those of the padded queries."""
    g, s = generator(seed), Sizes(B=3, M=9, N=21, D=8)
    lengths = [21, 0, 13]
    leaves = {
        "q": normal(g, 3, 9, 4, 8),
        "k": normal(g, 34, 2, 8),
        "v": normal(g, 34, 2, 8),
    }
    cu = cu_seqlens(lengths)
    mask = random_spans(g, s, 2, lead)
    call = partial(flashtile.attention_varlen, cu_seqlens_k=cu, max_seqlen_k=21, backend=backend)
    compare(
        lambda x: call(**x, mask=mask, causal=True, return_lse=True),
        lambda x, **how: attention_varlen_reference(
            **x, cu_seqlens_q=None, cu_seqlens_k=cu, max_seqlen_q=9, max_seqlen_k=21,
            mask=mask, causal=True, **how,
        ),
        leaves,
        seed=seed,
    )  # fmt: skip


def test_a_padded_mask_of_other_queries_is_refused() -> None:
    q, k = torch.zeros(3, 9, 4, 8), torch.zeros(34, 2, 8)
    for shape in ((3, 1, 8, 1), (2, 1, 9, 1), (1, 1, 27, 1)):
        mask = Spans(*torch.zeros(2, *shape, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"mask\.starts: got shape"):
            flashtile.attention_varlen(
                q, k, k, cu_seqlens_k=cu_seqlens([21, 0, 13]), max_seqlen_k=21, mask=mask
            )


def test_vmap_over_masks(seed) -> None:
    g = generator(seed)
    q, k, v = qkv(g, B=2, M=5, N=6)
    masks = [random_spans(g, Sizes(B=2, M=5, N=6), 2, (2, 1)) for _ in range(3)]
    starts, stops = (torch.stack(x) for x in zip(*masks, strict=True))
    got = torch.vmap(lambda a, b: flashtile.attention(q, k, v, mask=Spans(a, b)))(starts, stops)
    for mask, out in zip(masks, got, strict=True):
        torch.testing.assert_close(out, flashtile.attention(q, k, v, mask=mask))


def test_export(seed) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, stops: Tensor) -> Tensor:
            out: Tensor = flashtile.attention(q, k, v, mask=Spans(starts, stops))
            return out

    g = generator(seed)
    call = (*qkv(g, B=2, M=5, N=6), *random_spans(g, Sizes(B=2, M=5, N=6), 2, (2, 1)))
    program = torch.export.export(Layer(), call)
    torch.testing.assert_close(program.module()(*call), Layer()(*call))


def test_the_mask_is_not_read_where_nothing_can_be_seen(backend, seed) -> None:
    """Two blocks of 640 keys, of which each half of the queries sees one: a tile of queries does
    not visit the tiles of the other block, whose keys may be NaN.
    """
    q, k, v = qkv(generator(seed), B=1, M=1024, N=1280, Hq=2, Hk=1)
    starts = (torch.arange(1024) // 512 * 640).int().view(1, 1, -1, 1)
    mask = Spans(starts, starts + 640)
    wanted = flashtile.attention(q, k, v, mask=mask, backend=backend)
    k[:, 640:], v[:, 640:] = torch.nan, torch.nan
    out = flashtile.attention(q, k, v, mask=mask, backend=backend)
    assert torch.equal(out[:, :512], wanted[:, :512])
    assert out[:, 512:].isnan().all()


def test_the_memo_knows_a_mask_by_its_shape(monkeypatch) -> None:
    """Masks of equal shapes share an entry; another mask, or new values in one, counts."""
    flashtile.clear_caches()
    checked = []
    describe = prepare.describe
    monkeypatch.setattr(prepare, "describe", lambda *call: checked.append(0) or describe(*call))
    q, k, v = qkv(generator(0), B=2, M=5, N=7)
    for seed in range(3):
        mask = random_spans(generator(seed), Sizes(M=5, N=7), 2, (1, 1))
        out = flashtile.attention(q, k, v, mask=mask)
        bias = torch.zeros(5, 7).masked_fill(~dense_spans(mask, 7), float("-inf"))
        torch.testing.assert_close(out, flashtile.attention(q, k, v, bias=bias))
        mask.starts.fill_(0)
        mask.stops.fill_(7)
        out = flashtile.attention(q, k, v, mask=mask)
        torch.testing.assert_close(out, flashtile.attention(q, k, v))
    assert len(checked) == 3  # one of each kind: with a mask, with a bias, with neither
    for shape in ((1, 1, 6, 2), (3, 1, 5, 2), (1, 1, 5, 9), (2, 1, 5, 2)):
        bad = Spans(mask.starts, mask.stops.new_ones(shape))
        with pytest.raises(ValueError, match=r"mask(\.stops)?: got"):
            flashtile.attention(q, k, v, mask=bad)


def test_probabilities(backend, seed) -> None:
    g, s = generator(seed), Sizes(B=2, M=19, N=27)
    q, k, v = qkv(g, B=2, M=19, N=27)
    mask = random_spans(g, s, 2, (2, 4))
    options = {"mask": mask, "causal": True, "backend": backend}
    out, _, probs = flashtile.attention(q, k, v, **options, return_attn_probs=True)
    assert probs[~dense_spans(mask, 27).expand(2, 4, 19, 27)].eq(0).all()
    values = v.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhmn,bnhd->bmhd", probs, values), out)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(-4, 12)] * 4), min_size=1, max_size=6))
def test_the_dense_form_of_the_reference(rows) -> None:
    """Key by key, against sets of integers."""
    numbers = torch.tensor(rows, dtype=torch.int32)
    mask = Spans(numbers[None, None, :, 0::2], numbers[None, None, :, 1::2])
    dense = dense_spans(mask, 9)[0, 0]
    for visible, (a, b, c, d) in zip(dense, rows, strict=True):
        assert set(visible.nonzero().flatten().tolist()) == {
            j for j in range(9) if j in range(a, b) or j in range(c, d)
        }
