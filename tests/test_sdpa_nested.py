"""Jagged nested tensors through `sdpa.scaled_dot_product_attention`, sequence by sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashtile.integrations import sdpa

ATTEND = sdpa.scaled_dot_product_attention


def jagged(lengths, heads, head_dim):
    """(batch, heads, seq, head_dim), and the leaf below it."""
    values = torch.randn(sum(lengths), heads, head_dim, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2), values


def with_lengths_of(x, heads, head_dim):
    """Another tensor with the same ragged structure, like two projections of one input."""
    values = torch.randn(x.values().shape[1], heads, head_dim, dtype=torch.float64)
    values.requires_grad_()
    return torch.nested.nested_tensor_from_jagged(values, x.offsets()).transpose(1, 2), values


def reference(q, k, v, **options):
    """One call of PyTorch for each sequence, packed again."""
    outs = [
        F.scaled_dot_product_attention(*(x[None] for x in one), **options)[0].transpose(0, 1)
        for one in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    ]
    return torch.cat(outs)


LENGTHS = {"some": [5, 1, 33, 12], "empty": [4, 0, 7], "one": [20], "all empty": [0, 0]}
OPTIONS = {"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_self_attention_with_gradients(lengths, options, seed):
    q, q_leaf = jagged(lengths, 4, 8)
    (k, k_leaf), (v, v_leaf) = with_lengths_of(q, 4, 8), with_lengths_of(q, 4, 12)
    got = ATTEND(q, k, v, **options)
    assert got.layout == torch.jagged
    assert got.shape == (*q.shape[:3], 12)
    leaves = [q_leaf, k_leaf, v_leaf]
    want = reference(q, k, v, **options)
    packed = got.transpose(1, 2).values()
    torch.testing.assert_close(packed, want, atol=1e-12, rtol=1e-10)
    cotangent = torch.randn_like(want)
    gotten = torch.autograd.grad(packed, leaves, cotangent)
    wanted = torch.autograd.grad(want, leaves, cotangent, allow_unused=True)
    for mine, theirs in zip(gotten, wanted, strict=True):
        theirs = torch.zeros_like(mine) if theirs is None else theirs
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


def test_the_result_goes_on_as_a_nested_tensor(seed):
    """The residual of a block adds tensors of one ragged structure."""
    x, _ = jagged([3, 6], 4, 8)
    assert (x + ATTEND(x, x, x)).shape == x.shape


@pytest.mark.parametrize("is_causal", [False, True])
def test_cross_attention_with_grouped_heads(is_causal, seed):
    q, _ = jagged([3, 1, 6], 4, 8)
    k, _ = jagged([5, 1, 9], 2, 8)
    v, _ = with_lengths_of(k, 2, 8)
    got = ATTEND(q, k, v, is_causal=is_causal, enable_gqa=True)
    want = reference(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(got.transpose(1, 2).values(), want, atol=1e-12, rtol=1e-10)


def test_sequences_that_do_not_fill_their_part(seed):
    values = torch.randn(12, 2, 8, dtype=torch.float64)
    offsets, lengths = torch.tensor([0, 4, 9, 12]), torch.tensor([3, 0, 3])
    x = torch.nested.nested_tensor_from_jagged(values, offsets, lengths).transpose(1, 2)
    got = ATTEND(x, x, x, is_causal=True).transpose(1, 2)
    for b, (start, length) in enumerate(zip([0, 4, 9], lengths.tolist(), strict=True)):
        part = values[start : start + length].transpose(0, 1)[None]
        want = F.scaled_dot_product_attention(part, part, part, is_causal=True)[0].transpose(0, 1)
        mine = got.values()[start : start + length]
        torch.testing.assert_close(mine, want, atol=1e-12, rtol=1e-10, msg=f"sequence {b}")


def test_dropout(seed):
    q, _ = jagged([40, 30], 2, 8)
    out = ATTEND(q, q, q, dropout_p=0.5)
    assert not torch.equal(out.values(), ATTEND(q, q, q).values())
    assert ATTEND(q, q, q, dropout_p=1.0).values().eq(0).all()


def test_installed(seed):
    q, _ = jagged([4, 7], 2, 8)
    want = F.scaled_dot_product_attention(q, q, q).values()
    with sdpa.install() as installation:
        got = F.scaled_dot_product_attention(q, q, q).values()
    assert installation.calls == 1
    torch.testing.assert_close(got, want)


def test_what_is_refused(seed):
    q, _ = jagged([4, 7], 4, 8)
    few, _ = with_lengths_of(q, 2, 8)
    shorter, _ = jagged([4, 6], 4, 8)
    batch, _ = jagged([4, 6, 1], 4, 8)
    dense = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    mask = torch.ones(7, 7, dtype=torch.bool)
    strided = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])
    with pytest.raises(NotImplementedError, match=r"attn_mask.*attention_varlen"):
        ATTEND(q, q, q, attn_mask=mask)
    with pytest.raises(TypeError, match="key: got a dense tensor"):
        ATTEND(q, dense, q)
    with pytest.raises(TypeError, match=r"query: .*torch\.strided.*torch\.jagged"):
        ATTEND(strided, strided, strided)
    with pytest.raises(ValueError, match="enable_gqa"):
        ATTEND(q, few, few)
    with pytest.raises(ValueError, match=r"value: .*lengths"):
        ATTEND(q, q, shorter)
    offsets, values = torch.tensor([0, 4, 9]), torch.randn(9, 4, 8, dtype=torch.float64)
    full, with_hole = (
        torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor(lengths))
        for lengths in ([4, 5], [4, 3])
    )
    with pytest.raises(ValueError, match=r"value: .*lengths"):  # from equal offsets
        ATTEND(*(x.transpose(1, 2) for x in (full, full, with_hole)))
    with pytest.raises(ValueError, match="batches"):
        ATTEND(q, batch, batch)
    with pytest.raises(ValueError, match=r"query: .*ragged seq"):
        ATTEND(*[q.transpose(1, 2)] * 3)
    with pytest.raises(NotImplementedError, match="is_causal"):
        ATTEND(q, shorter, shorter, is_causal=True)
