"""Indices of a score function outside of a captured tensor, on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashtile


def test_an_index_outside_of_a_captured_tensor() -> None:
    """As in PyTorch: negative indices count from the end, others raise."""
    q, table = torch.zeros(1, 6, 1, 4), torch.arange(6.0)
    out = flashtile.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[j - i])
    assert out.isfinite().all()
    with pytest.raises(IndexError, match=r"score_mod: in a captured tensor of shape \(6,\)"):
        flashtile.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[i + j])


def test_an_index_outside_of_a_captured_tensor_is_refused_before_a_number_is_drawn() -> None:
    q, table = torch.zeros(1, 6, 1, 4), torch.arange(6.0)
    state = torch.get_rng_state()
    with pytest.raises(IndexError, match="score_mod"):
        flashtile.attention(
            q, q, q, dropout_p=0.5, score_mod=lambda s, b, h, i, j: s + table[i + j]
        )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("paged", [False, True])
def test_an_index_outside_of_a_captured_tensor_is_refused_before_an_append(paged: bool) -> None:
    """Only the new key is outside."""
    q, cache = torch.zeros(1, 1, 1, 4), torch.zeros(2, 8, 1, 4)
    where = {"page_table": torch.tensor([[1, 0]], dtype=torch.int32)} if paged else {}
    row = cache if paged else cache[:1]
    lengths, function = torch.tensor([6], dtype=torch.int32), lambda s, b, h, i, j: s + table[j]
    for tokens in (6, 7):
        table = torch.arange(float(tokens))
        given = (q, row, row.clone(), q + 1, q + 1)
        run = partial(flashtile.attention_with_kvcache, *given, cache_seqlens=lengths, **where)
        if tokens == 7:
            assert run(score_mod=function).isfinite().all()
            assert cache.any()
            continue
        with pytest.raises(IndexError, match="score_mod"):
            run(score_mod=function)
        assert not cache.any()
