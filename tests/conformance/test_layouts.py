"""`attention_varlen` with either side packed, padded or in pages, and lengths left out or given as
tensors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import flashtile
from flashtile.testing import (
    attention_varlen_reference,
    attention_with_kvcache_reference,
    cu_seqlens,
    generator,
    normal,
    paged,
)

from .harness import Sizes, compare, dropout_keep, judge_outputs, resolve, split_options

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

LENGTHS_Q, LENGTHS_K = [9, 0, 3, 1], [5, 12, 0, 7]
SIZES = Sizes(B=4, M=9, N=12, Hq=4, Hk=2, D=16, Dv=12)


def side(g, lengths, heads, head_dim, form):
    """Tokens of sequences of `lengths` in layout `form`; slots that must not be read hold NaN."""
    tokens = normal(g, sum(lengths), heads, head_dim)
    if form == "packed":
        return tokens
    rows = torch.full((len(lengths), max(lengths), heads, head_dim), torch.nan)
    for row, sequence in zip(rows, tokens.split(lengths), strict=True):
        row[: len(sequence)] = sequence
    return rows if form == "padded" else normal(g, *rows.shape)


def call_of(g, form_q, form_k):
    """q, k, v and the layout arguments. "full" is padded and every token is used."""
    s = SIZES
    leaves = {
        "q": side(g, LENGTHS_Q, s.Hq, s.D, form_q),
        "k": side(g, LENGTHS_K, s.Hk, s.D, form_k),
        "v": side(g, LENGTHS_K, s.Hk, s.value_dim, form_k),
    }
    layout = {}
    for name, lengths, form in (("q", LENGTHS_Q, form_q), ("k", LENGTHS_K, form_k)):
        if form == "packed":
            layout[f"cu_seqlens_{name}"] = cu_seqlens(lengths)
        if form == "padded":
            layout[f"seqused_{name}"] = torch.tensor(lengths, dtype=torch.int32)
    return leaves, layout


FORMS = [("packed", "padded"), ("packed", "full"), ("padded", "packed"), ("full", "packed")]
FORMS += [("padded", "padded"), ("packed", "packed")]


@pytest.mark.parametrize("options", ["nothing", "causal + sink", "window + alibi", "dropout"])
@pytest.mark.parametrize(("form_q", "form_k"), FORMS)
def test_packed_and_padded_sides(form_q, form_k, options, backend, seed):
    g = generator(seed)
    leaves, layout = call_of(g, form_q, form_k)
    options, for_reference, extra = split_options(resolve(options, g, SIZES, torch.float32))
    keep = dropout_keep(seed, options.get("dropout_p", 0.0), SIZES, backend)
    packing = {"cu_seqlens_q": None, "cu_seqlens_k": None} | layout
    packing |= {"max_seqlen_q": SIZES.M, "max_seqlen_k": SIZES.N}

    def attend(x):
        return flashtile.attention_varlen(
            **x, **layout, **options, return_lse=True, backend=backend
        )

    compare(
        attend,
        lambda x, **how: attention_varlen_reference(
            **x, **packing, **for_reference, keep=keep, **how
        ),
        leaves | extra,
        seed=seed,
    )
    out, lse = attend(leaves | extra)
    shape = leaves["q"].shape
    assert out.shape == (*shape[:-1], SIZES.value_dim)
    assert lse.shape == ((4, 4, 9) if len(shape) == 4 else (4, 13))


@pytest.mark.parametrize("form", ["packed", "full"])
def test_pages_without_cumulative_lengths(form, backend, seed):
    g = generator(seed)
    q = side(g, LENGTHS_Q, 4, 16, form)
    cu = cu_seqlens(LENGTHS_Q) if form == "packed" else None
    k, table = paged(generator(seed), normal(g, 4, 12, 2, 16), 4)
    v, _ = paged(generator(seed), normal(g, 4, 12, 2, 16), 4)
    for used in (torch.tensor(LENGTHS_K, dtype=torch.int32), None):
        given = {"page_table": table, "seqused_k": used}
        out, lse = flashtile.attention_varlen(
            q, k, v, cu, causal=True, **given, return_lse=True, backend=backend
        )
        judge_outputs(
            {"out": out, "lse": lse},
            partial(attention_varlen_reference, q, k, v, cu, None, 9, 12, causal=True, **given),
            q.dtype,
            seed,
        )


def test_out_and_probabilities_of_padded_queries(backend, seed):
    leaves, layout = call_of(generator(seed), "padded", "packed")
    out = torch.empty(4, 9, 4, 12)
    result, lse, probs = flashtile.attention_varlen(
        **leaves, **layout, return_attn_probs=True, out=out, backend=backend
    )
    assert result.data_ptr() == out.data_ptr()
    assert lse.shape == (4, 4, 9)
    fresh = flashtile.attention_varlen(**leaves, **layout, backend=backend)
    assert torch.equal(out, fresh)
    packing = {"cu_seqlens_q": None} | layout | {"max_seqlen_q": 9, "max_seqlen_k": 12}
    judge_outputs(
        {"out": out, "probs": probs},
        partial(attention_varlen_reference, **leaves, **packing),
        out.dtype,
        seed,
    )


@pytest.mark.parametrize(
    "given",
    [
        lambda n: None,
        lambda n: torch.tensor(n),
        lambda n: torch.tensor(n, dtype=torch.int32),
        lambda n: np.int64(n),
    ],
    ids=["omitted", "int64 tensor", "int32 tensor", "NumPy"],
)
def test_longest_lengths(given, backend, seed, monkeypatch):
    g = generator(seed)
    leaves, layout = call_of(g, "packed", "packed")
    wanted = flashtile.attention_varlen(
        **leaves, **layout, max_seqlen_q=9, max_seqlen_k=12, backend=backend
    )
    given_lengths = {"max_seqlen_q": given(9), "max_seqlen_k": given(12)}
    got = flashtile.attention_varlen(**leaves, **layout, **given_lengths, backend=backend)
    assert torch.equal(got, wanted)
    got = flashtile.flash_attn_varlen_func(**leaves, **layout, **given_lengths)
    torch.testing.assert_close(got, wanted)
    if given(4) is not None:  # a smaller bound hides tokens, if the layout allows it
        monkeypatch.setenv("FLASHTILE_CHECK", "0")
        short = {"max_seqlen_q": given(4), "max_seqlen_k": given(12)}
        got = flashtile.attention_varlen(**leaves, **layout, **short, backend=backend)
        assert (got[4:9] == 0).all()
    keys, values = normal(g, 4, 12, 2, 16), normal(g, 4, 12, 2, 8)
    cache = {"q": leaves["q"], "k_cache": keys, "v_cache": values}
    cache |= {"cu_seqlens_q": layout["cu_seqlens_q"], "causal": True}
    out = flashtile.attention_with_kvcache(**cache, max_seqlen_q=given(9), backend=backend)
    judge_outputs(
        {"out": out},
        partial(attention_with_kvcache_reference, **cache, max_seqlen_q=9),
        out.dtype,
        seed,
    )


def test_a_batch_of_no_sequences(backend):
    q, kv = torch.empty(0, 4, 16), torch.empty(0, 2, 16)
    cu = torch.zeros(1, dtype=torch.int32)
    assert flashtile.attention_varlen(q, kv, kv, cu, cu, backend=backend).shape == (0, 4, 16)
    padded = torch.empty(0, 7, 4, 16)
    out, lse = flashtile.attention_varlen(
        padded, kv, kv, None, cu, return_lse=True, backend=backend
    )
    assert out.shape == (0, 7, 4, 16)
    assert lse.shape == (0, 4, 7)
