"""What a call returns and where: LSE and its gradient, `out`, tuples, determinism, merged parts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashtile
from flashtile.testing import (
    DTYPES,
    assert_close,
    attention_reference,
    combine_reference,
    combine_variance,
    cu_seqlens,
    floor_of,
    generator,
    normal,
    packed_qkv,
    qkv,
)

from .harness import Sizes, check_dense, check_varlen, dropout_keep, judge_outputs

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

WAYS = ("nothing", "causal", "softcap + sink", "dropout", "bias", "window + alibi")


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
def test_lse_has_a_gradient(options, dtype, backend, seed):
    check_dense(Sizes(), options, dtype, backend, seed, through=("lse",))


@pytest.mark.parametrize("options", WAYS)
def test_packed_lse_has_a_gradient(options, backend, seed):
    s = Sizes(B=4, M=9, N=11)
    lengths = [5, 0, 9, 1], [7, 3, 11, 0]
    check_varlen(*lengths, s, options, torch.float32, backend, seed, through=("lse",))


def test_lse_shapes_and_dtypes(backend):
    for dtype in DTYPES:
        q, k, v = qkv(generator(0), dtype=dtype)
        out, lse = flashtile.attention(q, k, v, return_lse=True, backend=backend)
        assert out.shape == (2, 17, 4, 16)
        assert out.dtype == dtype
        assert lse.shape == (2, 4, 17)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        q, k, v = packed_qkv(generator(0), [3, 4], [5, 6], dtype=dtype)
        cu = cu_seqlens([3, 4]), cu_seqlens([5, 6])
        out, lse = flashtile.attention_varlen(q, k, v, *cu, 4, 6, return_lse=True, backend=backend)
        assert out.shape == (7, 4, 16)
        assert lse.shape == (4, 7)


def test_tuples_only_when_asked(backend):
    q, k, v = qkv(generator(0))
    assert isinstance(flashtile.attention(q, k, v, backend=backend), torch.Tensor)
    assert len(flashtile.attention(q, k, v, return_lse=True, backend=backend)) == 2
    assert len(flashtile.attention(q, k, v, return_attn_probs=True, backend=backend)) == 3


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
def test_out_receives_the_result(options, backend, seed):
    q, k, v = qkv(generator(seed), Dv=9)
    wanted, lse = flashtile.attention(q, k, v, **options, return_lse=True, backend=backend)
    whole = torch.full((2, 17, 4, 20), torch.nan)
    out = whole[..., 3:12]  # a view: strides and an offset
    given, lse_again = flashtile.attention(
        q, k, v, **options, out=out, return_lse=True, backend=backend
    )
    assert given is out
    assert torch.equal(out, wanted)
    assert torch.equal(lse, lse_again)
    assert whole[..., :3].isnan().all()
    assert whole[..., 12:].isnan().all()


def test_packed_out_receives_the_result(backend, seed):
    q, k, v = packed_qkv(generator(seed), [3, 4], [5, 6])
    call = (cu_seqlens([3, 4]), cu_seqlens([5, 6]), 4, 6)
    out = torch.full_like(q, torch.nan)
    assert flashtile.attention_varlen(q, k, v, *call, out=out, backend=backend) is out
    assert torch.equal(out, flashtile.attention_varlen(q, k, v, *call, backend=backend))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"softcap": 2.0}, {"dropout_p": 0.3}, {"window_size": (5, 5)}],
    ids=str,
)
@pytest.mark.parametrize("switch", ["argument", "global"])
def test_the_deterministic_backward_repeats_bit_for_bit(options, switch, backend, seed):
    leaves = [x.requires_grad_() for x in qkv(generator(seed), M=300, N=280)]

    def run():
        torch.manual_seed(seed)
        deterministic = switch == "argument"
        out = flashtile.attention(*leaves, **options, deterministic=deterministic, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    torch.use_deterministic_algorithms(switch == "global")
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_manual_seed_rules_the_dropout(backend):
    q, k, v = qkv(generator(0))

    def drop(seed):
        torch.manual_seed(seed)
        return flashtile.attention(q, k, v, dropout_p=0.5, backend=backend)

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))
    torch.manual_seed(1)
    first, second = (flashtile.attention(q, k, v, dropout_p=0.5, backend=backend) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_call_without_dropout_leaves_the_generator_alone(backend):
    q, k, v = qkv(generator(0))
    before = torch.get_rng_state()
    flashtile.attention(q, k, v, causal=True, backend=backend)
    assert torch.equal(torch.get_rng_state(), before)


def test_packed_and_dense_dropout_agree(backend, seed):
    q, k, v = qkv(generator(seed), B=3, M=8, N=8)
    torch.manual_seed(seed)
    dense = flashtile.attention(q, k, v, dropout_p=0.4, backend=backend)
    cu = cu_seqlens([8, 8, 8])
    torch.manual_seed(seed)
    packed = flashtile.attention_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 8, 8, dropout_p=0.4, backend=backend
    )
    keep = dropout_keep(seed, 0.4, Sizes(B=3, M=8, N=8), backend)
    reference = partial(attention_reference, q, k, v, dropout_p=0.4, keep=keep)
    for out in (dense, packed.view_as(dense)):
        judge_outputs({"out": out}, reference, out.dtype, seed)


class TestCombine:
    """`flash_attn_combine` merges results over parts of the keys into the result over all keys."""

    @pytest.mark.parametrize("splits", [1, 2, 5])
    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    def test_against_the_reference(self, splits, packed, seed):
        g = generator(seed)
        lead = (7,) if packed else (2, 7)
        out_partial = normal(g, splits, *lead, 4, 9)
        lse_partial = normal(g, splits, *lead, 4, scale=4)
        lse_partial[:, ..., :2, 1] = -torch.inf  # rows without keys in every part
        lse_partial[0] = -torch.inf
        out_partial[0] = torch.nan  # an empty split may leave NaN
        out, lse = flashtile.flash_attn_combine(out_partial, lse_partial)
        assert out.dtype == torch.float32

        parts = out_partial, lse_partial
        truth, plain = combine_reference(*parts), combine_reference(*parts, torch.float32)
        variance = combine_variance(*parts)
        got = out, lse
        for name, *results, x in zip(("out", "lse"), got, truth, plain, variance, strict=True):
            assert_close(name, *results, floor=floor_of(x), seed=seed)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_out_and_out_dtype(self, dtype, seed):
        g = generator(seed)
        parts = normal(g, 3, 2, 7, 4, 8), normal(g, 3, 2, 7, 4)
        wanted, _ = flashtile.flash_attn_combine(*parts)
        cast, _ = flashtile.flash_attn_combine(*parts, out_dtype=dtype)
        assert torch.equal(cast, wanted.to(dtype))
        out = torch.full((2, 7, 4, 8), torch.nan, dtype=dtype)
        given, _ = flashtile.flash_attn_combine(*parts, out, dtype)
        assert given is out
        assert torch.equal(out, cast)
        exact = torch.empty(2, 7, 4, 8)  # its dtype overrides `out_dtype`
        flashtile.flash_attn_combine(*parts, exact, dtype)
        assert torch.equal(exact, wanted)

    def test_used_tokens_of_a_batch(self, seed):
        g = generator(seed)
        parts = normal(g, 3, 2, 7, 4, 8), normal(g, 3, 2, 7, 4)
        wanted_out, wanted_lse = flashtile.flash_attn_combine(*parts)
        wanted_out[0, 5:], wanted_lse[0, 5:] = 0, -torch.inf
        wanted_out[1], wanted_lse[1] = 0, -torch.inf
        parts[0][:, 1] = torch.nan  # unused values may be anything
        order = torch.tensor([1, 0], dtype=torch.int32)
        lengths = {"seqused": torch.tensor([5, 0], dtype=torch.int32), "virtual_batch_idx": order}
        out, lse = flashtile.flash_attn_combine(*parts, **lengths)
        assert torch.equal(out, wanted_out)
        assert torch.equal(lse, wanted_lse)
        given = torch.full_like(out, torch.nan)
        _, nothing = flashtile.flash_attn_combine(*parts, given, **lengths, return_lse=False)
        assert torch.equal(given, wanted_out)
        assert nothing is None

    def test_used_tokens_of_packed_sequences(self, seed):
        g = generator(seed)
        parts = normal(g, 3, 12, 4, 8), normal(g, 3, 12, 4)
        whole_out, whole_lse = flashtile.flash_attn_combine(*parts)
        cu = cu_seqlens([4, 0, 6])  # two tokens after the last sequence
        for seqused, used in (
            (None, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
            ([1, 0, 6], [0, *range(4, 10)]),
        ):
            lengths = None if seqused is None else torch.tensor(seqused, dtype=torch.int32)
            out, lse = flashtile.flash_attn_combine(*parts, cu_seqlens=cu, seqused=lengths)
            wanted_out = torch.zeros_like(out)
            wanted_lse = torch.full_like(lse, -torch.inf)
            wanted_out[used], wanted_lse[used] = whole_out[used], whole_lse[used]
            assert torch.equal(out, wanted_out)
            assert torch.equal(lse, wanted_lse)

    @pytest.mark.parametrize(
        ("shape", "lengths", "message"),
        [
            ((2, 4, 8), {}, "out_partial: got shape"),
            ((2, 3, 5, 4, 8), {"seqused": [1, 2]}, "seqused: got shape"),
            ((2, 3, 5, 4, 8), {"virtual_batch_idx": [1, 2]}, "virtual_batch_idx: got shape"),
            ((2, 3, 5, 4, 8), {"cu_seqlens": [0, 5]}, "cu_seqlens: is for packed tokens"),
            ((2, 5, 4, 8), {"seqused": [5]}, "seqused: needs cu_seqlens"),
            ((2, 5, 4, 8), {"cu_seqlens": [0, 5], "seqused": [5, 5]}, "seqused: got shape"),
        ],
    )
    def test_shapes_and_lengths_that_do_not_fit_are_refused(self, shape, lengths, message):
        given = {name: torch.tensor(x, dtype=torch.int32) for name, x in lengths.items()}
        with pytest.raises(ValueError, match=message):
            flashtile.flash_attn_combine(torch.zeros(shape), torch.zeros(shape[:-1]), **given)

    def test_parts_of_the_keys_make_the_whole(self, backend, seed):
        q, k, v = qkv(generator(seed), M=9, N=40)
        parts = [
            flashtile.attention(q, k[:, s], v[:, s], return_lse=True, backend=backend)
            for s in (slice(0, 13), slice(13, 13), slice(13, 40))
        ]
        out, lse = flashtile.flash_attn_combine(
            torch.stack([out for out, _ in parts]),
            torch.stack([lse.transpose(1, 2) for _, lse in parts]),
        )
        judge_outputs(
            {"out": out, "lse": lse.transpose(1, 2)},
            partial(attention_reference, q, k, v),
            q.dtype,
            seed,
        )
