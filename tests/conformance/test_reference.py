"""Tests of the reference itself: against PyTorch, by hand, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from flashtile.masks import Window
from flashtile.testing import (
    allowed_error,
    assert_close,
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
    combine_reference,
    cu_seqlens,
    dense_block_mask,
    dense_from_tiles,
    generator,
    normal,
    packed_qkv,
    paged,
    qkv,
    rotary_tables,
    rotate,
    strided,
    tile_kinds,
    visible_keys,
)

F64 = torch.float64


def sdpa(q, k, v, mask=None, scale=None):
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=scale, enable_gqa=True
        )
    return out.transpose(1, 2)


def test_equals_the_math_of_sdpa(seed):
    q, k, v = qkv(generator(seed), dtype=F64)
    torch.testing.assert_close(attention_reference(q, k, v).out, sdpa(q, k, v))
    torch.testing.assert_close(
        attention_reference(q, k, v, softmax_scale=0.3).out, sdpa(q, k, v, scale=0.3)
    )


def test_equals_sdpa_with_a_bias_and_its_gradient(seed):
    g = generator(seed)
    q, k, v = (x.requires_grad_() for x in qkv(g, dtype=F64))
    bias = normal(g, 1, 4, 17, 23, dtype=F64).requires_grad_()
    dout = normal(g, 2, 17, 4, 16, dtype=F64)
    leaves = (q, k, v, bias)
    mine = torch.autograd.grad(attention_reference(q, k, v, bias=bias).out, leaves, dout)
    theirs = torch.autograd.grad(sdpa(q, k, v, mask=bias), leaves, dout)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_causal_is_aligned_to_the_bottom_right():
    lengths = torch.tensor([2]), torch.tensor([5])
    wanted = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    assert torch.equal(visible_keys(*lengths, 2, 5, causal=True)[0], wanted)
    lengths = torch.tensor([5]), torch.tensor([2])
    wanted = torch.tensor([[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]).bool()
    assert torch.equal(visible_keys(*lengths, 5, 2, causal=True)[0], wanted)


def test_window_and_chunk_by_hand():
    m, n = torch.tensor([3]), torch.tensor([5])  # queries at positions 2, 3, 4
    wanted = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]).bool()
    assert torch.equal(visible_keys(m, n, 3, 5, window_size=(1, 0))[0], wanted)
    assert torch.equal(visible_keys(m, n, 3, 5, window_size=(1, 7), causal=True)[0], wanted)
    # Negative sides: only keys after the query, or only keys before it.
    wanted = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert torch.equal(visible_keys(m, n, 3, 5, window_size=(-2, 9))[0], wanted)
    wanted = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    assert torch.equal(visible_keys(m, n, 3, 5, window_size=(None, -2))[0], wanted)
    wanted = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    assert torch.equal(visible_keys(m, n, 3, 5, window_size=Window(None, -1))[0], wanted)
    # A window without a key is ignored.
    assert visible_keys(m, n, 3, 5, window_size=(1, -2)).all()
    wanted = visible_keys(m, n, 3, 5, causal=True)
    assert torch.equal(visible_keys(m, n, 3, 5, window_size=(-2, 5), causal=True), wanted)
    wanted = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]).bool()
    assert torch.equal(visible_keys(m, n, 3, 5, attention_chunk=2)[0], wanted)
    # Negative positions floor downwards: the first query, at -1, is alone in chunk -1.
    wanted = torch.tensor([[0, 0], [1, 1], [1, 1]]).bool()
    assert torch.equal(visible_keys(m, torch.tensor([2]), 3, 2, attention_chunk=2)[0], wanted)


def test_softcap_alibi_and_sink_by_hand(seed):
    g = generator(seed)
    q, k, v = qkv(g, B=1, M=3, N=4, Hq=2, Hk=1, D=2, dtype=F64)
    slopes, sink = torch.tensor([0.5, 0.25]), normal(g, 2, dtype=F64)
    result = attention_reference(q, k, v, softcap=0.7, alibi_slopes=slopes, sink=sink)
    for h in range(2):
        for i in range(3):
            logits = [
                0.7 * math.tanh(float(q[0, i, h] @ k[0, j, 0]) * 2**-0.5 / 0.7)
                - float(slopes[h]) * abs(i + 4 - 3 - j)
                for j in range(4)
            ]
            total = sum(math.exp(x) for x in logits) + math.exp(sink[h])
            torch.testing.assert_close(result.lse[0, h, i].item(), math.log(total))
            row = sum(math.exp(x) / total * v[0, j, 0] for j, x in enumerate(logits))
            torch.testing.assert_close(result.out[0, i, h], row)


def test_dead_rows_are_zero_with_zero_gradient(seed):
    q, k, v = (x.requires_grad_() for x in qkv(generator(seed), M=5, N=2, dtype=F64))
    result = attention_reference(q, k, v, causal=True)
    assert (result.out[:, :3] == 0).all()
    assert (result.lse[:, :, :3] == -math.inf).all()
    assert result.lse[:, :, 3:].isfinite().all()
    loss = (
        result.out.sum()
        + result.lse[:, :, 3:].sum()
        + result.lse.masked_fill(result.lse == -math.inf, 0).sum()
    )
    for grad in torch.autograd.grad(loss, (q, k, v)):
        assert grad.isfinite().all()
    grad_q = torch.autograd.grad(attention_reference(q, k, v, causal=True).lse.sum(), q)[0]
    assert (grad_q[:, :3] == 0).all()


def test_a_dead_row_with_a_sink_keeps_the_sink_as_its_lse():
    q, k, v = qkv(generator(0), M=4, N=2, dtype=F64)
    sink = torch.arange(4, dtype=F64)
    result = attention_reference(q, k, v, causal=True, sink=sink, seqused_q=torch.tensor([4, 0]))
    assert torch.equal(result.lse[0, :, :2], sink[:, None].expand(4, 2))
    assert (result.lse[1] == -math.inf).all()  # padding, not a dead row
    assert (result.out[0, :2] == 0).all()


@pytest.mark.parametrize("option", ["plain", "softcap", "sink", "window", "dropout"])
def test_gradients_by_finite_differences(seed, option):
    g = generator(seed)
    inputs = [x.requires_grad_() for x in qkv(g, B=1, M=5, N=4, Hq=2, Hk=1, D=3, Dv=2, dtype=F64)]
    options = {
        "plain": {},
        "softcap": {"softcap": 1.5},
        "sink": {"sink": normal(g, 2, dtype=F64).requires_grad_()},
        "window": {"window_size": (1, 0)},
        "dropout": {"dropout_p": 0.4, "keep": torch.rand(1, 2, 5, 4, generator=g) > 0.4},
    }[option]
    extra = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]

    def call(*leaves):
        named = dict(options, sink=leaves[3]) if extra else options
        result = attention_reference(*leaves[:3], **named)
        return result.out, result.lse.masked_fill(result.lse == -math.inf, 0)

    assert torch.autograd.gradcheck(call, (*inputs, *extra))


def test_varlen_is_dense_per_sequence(seed):
    g = generator(seed)
    lengths_q, lengths_k = [3, 0, 5, 1], [4, 2, 0, 7]
    q, k, v = packed_qkv(g, lengths_q, lengths_k, dtype=F64)
    cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    packed = attention_varlen_reference(q, k, v, cu_q, cu_k, 5, 7, causal=True)
    for b in range(4):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        alone = attention_reference(q[None, rows], k[None, keys], v[None, keys], causal=True)
        torch.testing.assert_close(packed.out[rows], alone.out[0])
        torch.testing.assert_close(packed.lse[:, rows], alone.lse[0])


def test_a_paged_cache_is_the_dense_cache(seed):
    g = generator(seed)
    q = normal(g, 2, 3, 4, 8, dtype=F64)
    k_cache, v_cache = normal(g, 2, 16, 2, 8, dtype=F64), normal(g, 2, 16, 2, 8, dtype=F64)
    new = {"k": normal(g, 2, 3, 2, 8, dtype=F64), "v": normal(g, 2, 3, 2, 8, dtype=F64)}
    seqlens = torch.tensor([5, 11], dtype=torch.int32)
    call = {"cache_seqlens": seqlens, "causal": True, **new}
    dense = attention_with_kvcache_reference(q, k_cache, v_cache, **call)
    k_pages, table = paged(generator(1), k_cache, 4)
    v_pages, _ = paged(generator(1), v_cache, 4)
    pages = attention_with_kvcache_reference(q, k_pages, v_pages, page_table=table, **call)
    torch.testing.assert_close(pages.out, dense.out)
    torch.testing.assert_close(pages.k_cache[table.long()].flatten(1, 2), dense.k_cache)
    grown = (
        torch.cat([k_cache[1, :11], new["k"][1]])[None],
        torch.cat([v_cache[1, :11], new["v"][1]])[None],
    )
    torch.testing.assert_close(dense.out[1:], attention_reference(q[1:], *grown, causal=True).out)


def test_rotation_keeps_relative_positions(seed):
    cos, sin = rotary_tables(64, 8, F64)
    x, y = normal(generator(seed), 2, 1, 1, 12, dtype=F64)
    for interleaved in (True, False):
        near, far = (
            (
                rotate(x, cos, sin, torch.tensor([a]), interleaved)
                * rotate(y, cos, sin, torch.tensor([b]), interleaved)
            ).sum()
            for a, b in ((3, 7), (43, 47))
        )
        torch.testing.assert_close(near, far)
    first = rotate(x, cos, sin, torch.tensor([1]), True)[0, 0]
    torch.testing.assert_close(first[0], x[0, 0, 0] * math.cos(1) - x[0, 0, 1] * math.sin(1))
    torch.testing.assert_close(first[8:], x[0, 0, 8:])


def test_combining_halves_gives_the_whole(seed):
    q, k, v = qkv(generator(seed), dtype=F64)
    whole = attention_reference(q, k, v)
    halves = [attention_reference(q, k[:, s], v[:, s]) for s in (slice(0, 9), slice(9, 23))]
    out, lse = combine_reference(
        torch.stack([x.out for x in halves]),
        torch.stack([x.lse.transpose(1, 2) for x in halves]),
    )
    torch.testing.assert_close(out, whole.out)
    torch.testing.assert_close(lse.transpose(1, 2), whole.lse)


def test_a_flex_mask_densifies_to_its_mask_mod():
    def mod(b, h, i, j):
        return (i >= j) & (i - j < 40 + 10 * h) & (j != b)

    flex = create_block_mask(mod, 2, 3, 150, 200, device="cpu", BLOCK_SIZE=(32, 64))
    assert torch.equal(
        dense_block_mask(flex, 150, 200), create_mask(mod, 2, 3, 150, 200, device="cpu")
    )


def test_tiles_densify(seed):
    kinds = tile_kinds(generator(seed), 2, 3)
    dense = dense_from_tiles(kinds, (4, 5), 7, 13)
    assert dense.shape == (7, 13)
    assert all(dense[i, j] == kinds[i // 4, j // 5] for i in range(7) for j in range(13))


@pytest.mark.parametrize("style", ["contiguous", "transposed", "sliced", "offset"])
def test_awkward_strides_keep_the_values(style):
    x = normal(generator(0), 2, 3, 4, 5)
    assert torch.equal(strided(x, style), x)
    assert (style == "contiguous") == (
        strided(x, style).is_contiguous() and strided(x, style).storage_offset() == 0
    )


class TestTheRule:
    truth = torch.tensor([1.0, -2.0, 4.0], dtype=F64)

    def test_it_is_twice_plain_plus_one_rounding(self):
        plain = (self.truth + torch.tensor([0.0, 0.25, 0.0])).to(torch.float32)
        wanted = 2 * 0.25 + 4 * torch.finfo(torch.float32).eps
        assert allowed_error(torch.float32, self.truth, plain) == pytest.approx(wanted, rel=1e-12)

    def test_float64_scales_the_float32_error(self):
        plain = (self.truth + 0.5).to(torch.float32)
        wanted = torch.finfo(F64).eps * (2 * 0.5 / torch.finfo(torch.float32).eps + 4)
        assert allowed_error(F64, self.truth, plain) == pytest.approx(wanted, rel=1e-12)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 4.01])
    def test_it_fails_a_wrong_value(self, bad):
        got = self.truth.float().clone()
        got[2] = bad
        with pytest.raises(AssertionError, match=r"out \(seed 7\).*worst at \(2,\)"):
            assert_close("out", got, self.truth, self.truth.float(), seed=7)

    def test_minus_infinity_matches_exactly(self):
        truth = torch.tensor([-math.inf, 1.0], dtype=F64)
        assert_close("lse", truth.float(), truth, truth.float())
        for wrong in ([0.0, 1.0], [math.inf, 1.0], [-1e30, 1.0], [-math.inf, -math.inf]):
            with pytest.raises(AssertionError):
                assert_close("lse", torch.tensor(wrong), truth, truth.float())
