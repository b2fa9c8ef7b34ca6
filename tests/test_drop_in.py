"""A user's file runs with only the package name replaced, and agrees with the reference.

The signatures are FlashAttention-2.8's: names, positional order and defaults.
"""

from __future__ import annotations

import inspect
import re
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from conformance.harness import compare, judge_outputs

import flashtile
import flashtile.bert_padding
import flashtile.layers.rotary
from flashtile.testing import (
    Reference,
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
    qkv,
    rotary_tables,
    rotate,
)

USER_FILE = Path(__file__).with_name("flash_attn_user.py")


@pytest.fixture(scope="module")
def user():
    """The user's module, after the one-word migration."""
    source = re.sub(r"\b(from|import) flash_attn\b", r"\1 flashtile", USER_FILE.read_text())
    module = types.ModuleType("flash_attn_user")
    exec(compile(source, USER_FILE, "exec"), module.__dict__)
    return module


dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)


def test_one_word_is_all_that_changes(user):
    text = USER_FILE.read_text()
    changed = [a for a in text.splitlines() if re.search(r"\b(from|import) flash_attn\b", a)]
    assert len(changed) == 4
    assert user.flash_attn_func is flashtile.flash_attn_func


@dtypes
def test_flash_attn_func(user, dtype, seed):
    leaves = dict(zip("qkv", qkv(generator(seed), dtype=dtype), strict=True))
    compare(
        lambda x: user.attend(**x),
        lambda x, **how: attention_reference(**x, causal=True, **how),
        leaves,
        seed=seed,
    )


@dtypes
def test_kvpacked(user, dtype, seed):
    g = generator(seed)
    leaves = {
        "q": normal(g, 2, 9, 4, 16, dtype=dtype),
        "kv": normal(g, 2, 13, 2, 2, 16, dtype=dtype),
    }
    options = {"causal": True, "window_size": (5, 0), "softcap": 2.0}
    compare(
        lambda x: user.attend_kvpacked(**x),
        lambda x, **how: attention_reference(x["q"], *x["kv"].unbind(2), **options, **how),
        leaves,
        seed=seed,
    )


@dtypes
def test_qkvpacked(user, dtype, seed):
    g = generator(seed)
    slopes = torch.rand(4, generator=g)
    options = {"causal": True, "alibi_slopes": slopes}
    compare(
        lambda x: user.attend_qkvpacked(x["qkv"], slopes),
        lambda x, **how: attention_reference(*x["qkv"].unbind(2), **options, **how),
        {"qkv": normal(g, 2, 11, 3, 4, 16, dtype=dtype)},
        seed=seed,
    )


def padding(lengths, longest):
    return torch.arange(longest)[None] < torch.tensor(lengths)[:, None]


@dtypes
def test_varlen_func_with_padding(user, dtype, seed):
    leaves = dict(zip("qkv", qkv(generator(seed), 3, 9, 9, 4, 2, dtype=dtype), strict=True))
    lengths = torch.tensor([9, 0, 4])
    options = {"causal": True, "seqused_q": lengths, "seqused_k": lengths}
    compare(
        lambda x: user.attend_padded(**x, key_padding_mask=padding([9, 0, 4], 9)),
        lambda x, **how: attention_reference(**x, **options, **how),
        leaves,
        seed=seed,
    )


@dtypes
def test_varlen_qkvpacked_with_padding(user, dtype, seed):
    lengths = torch.tensor([2, 9, 5])
    options = {"softmax_scale": 0.3, "seqused_q": lengths, "seqused_k": lengths}
    compare(
        lambda x: user.attend_padded_qkvpacked(x["qkv"], padding([2, 9, 5], 9)),
        lambda x, **how: attention_reference(*x["qkv"].unbind(2), **options, **how),
        {"qkv": normal(generator(seed), 3, 9, 3, 4, 16, dtype=dtype)},
        seed=seed,
    )


@dtypes
def test_varlen_kvpacked_with_padding(user, dtype, seed):
    g = generator(seed)
    used = {"seqused_q": torch.tensor([7, 3]), "seqused_k": torch.tensor([1, 11])}
    masks = padding([7, 3], 7), padding([1, 11], 11)
    compare(
        lambda x: user.cross_attend_padded(x["q"], x["kv"], *masks),
        lambda x, **how: attention_reference(x["q"], *x["kv"].unbind(2), **used, **how),
        {
            "q": normal(g, 2, 7, 4, 16, dtype=dtype),
            "kv": normal(g, 2, 11, 2, 2, 16, dtype=dtype),
        },
        seed=seed,
    )


def test_documents_concatenated_in_rows(user, seed):
    lengths = torch.tensor([[3, 4, 0, 0, 0, 0, 0, 0, 0], [2, 1, 6, 0, 0, 0, 0, 0, 0]])
    cu = cu_seqlens([3, 4, 2, 1, 6])

    def reference(x, **how):
        packed = torch.cat([x["qkv"][0, :7], x["qkv"][1, :9]])
        flat = attention_varlen_reference(*packed.unbind(1), cu, cu, 6, 6, causal=True, **how)
        out = x["qkv"].new_zeros(2, 9, *flat.out.shape[1:])
        out[0, :7], out[1, :9] = flat.out[:7], flat.out[7:]
        return Reference(out, flat.lse, flat.probs)

    compare(
        lambda x: user.attend_concatenated(x["qkv"], lengths),
        reference,
        {"qkv": normal(generator(seed), 2, 9, 3, 4, 16)},
        seed=seed,
    )


@dtypes
def test_with_kvcache_step_by_step(user, dtype, seed):
    """A prompt of 5, then single tokens, is the whole sequence at once."""
    packed = normal(generator(seed), 2, 9, 3, 4, 16, dtype=dtype)
    decoder = user.Decoder(8, 2, 12, 4, 16, dtype)
    steps = [decoder.step(packed[:, a:b]) for a, b in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 9))]
    cos, sin = rotary_tables(12, 8, torch.float64)
    at = torch.arange(9)

    def reference(x, compute_dtype=torch.float64, **how):
        tables = cos.to(dtype).to(compute_dtype), sin.to(dtype).to(compute_dtype)
        q, k, v = x["qkv"].unbind(2)
        q, k = (torch.stack([rotate(row, *tables, at, False) for row in t]) for t in (q, k))
        return attention_reference(q, k, v, causal=True, compute_dtype=compute_dtype, **how)

    for out in (torch.cat(steps, dim=1), decoder.whole(packed)):
        compare(lambda x, out=out: out, reference, {"qkv": packed}, seed=seed, through=())


def test_padding_functions(user, seed):
    x = normal(generator(seed), 7, 3).requires_grad_()
    indices = torch.tensor([5, 0, 3])
    scattered, residual = user.scatter_and_gather(x, indices, 7)
    wanted = torch.zeros(7, 3)
    wanted[indices] = x.detach()[indices]
    assert torch.equal(scattered, wanted)
    assert torch.equal(residual, x)
    (grad,) = torch.autograd.grad(scattered.sum(), x)
    assert torch.equal(grad, (wanted != 0).float())


def test_unpad_input_returns_what_flash_attn_does(user, seed):
    x = normal(generator(seed), 3, 5, 2)
    flat, indices, cu, longest, used = user.unpad_input(x, padding([2, 5, 0], 5))
    assert torch.equal(flat, torch.cat([x[0, :2], x[1]]))
    assert indices.tolist() == [0, 1, 5, 6, 7, 8, 9]
    assert cu.tolist() == [0, 2, 7, 7]
    assert cu.dtype == torch.int32
    assert longest == 5
    assert isinstance(longest, int)
    assert used.tolist() == [2, 5, 0]


def test_rotary_functions(user, seed):
    x = normal(generator(seed), 2, 5, 3, 16)
    cos, sin = rotary_tables(5, 8)
    truth = torch.stack([rotate(row, cos, sin, torch.arange(5), False) for row in x])
    for result in user.rotations(x, cos, sin):
        torch.testing.assert_close(result, truth)


TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
# FlashAttention-2 has no defaults for these; ours are those of FlashAttention-4.
BOUNDS = "max_seqlen_q=None, max_seqlen_k=None"
LENGTHS = f"cu_seqlens_q=None, cu_seqlens_k=None, {BOUNDS}"

SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, cu_seqlens_q, cu_seqlens_k, {BOUNDS}, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen=None, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
    "flash_attn_combine": (
        "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
        "virtual_batch_idx=None, return_lse=True"
    ),
    "bert_padding.unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "bert_padding.unpad_input_for_concatenated_sequences": (
        "hidden_states, attention_mask_in_length"
    ),
    "bert_padding.pad_input": "hidden_states, indices, batch, seqlen",
    "layers.rotary.apply_rotary_emb": (
        "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None"
    ),
    "layers.rotary.apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "layers.rotary.apply_rotary_emb_qkv_": (
        "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
        "num_heads_q=None"
    ),
    "layers.rotary.apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "layers.rotary.RotaryEmbedding": (
        "dim, base=10000.0, interleaved=False, scale_base=None, device=None"
    ),
    "layers.rotary.rotate_half": "x, interleaved=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    function = flashtile
    for part in name.split("."):
        function = getattr(function, part)
    extra = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    positional = [p.replace(annotation=p.empty) for p in parameters if p.kind not in extra]
    assert ", ".join(str(p).replace(" = ", "=") for p in positional) == SIGNATURES[name]


@pytest.mark.parametrize(
    "name",
    [n for n in SIGNATURES if "varlen" in n or (n.startswith("flash_attn_") and "comb" not in n)],
)
def test_extras_are_keyword_only(name, seed):
    """`bias`, `sink` and the other keywords are visible to Python's introspection."""
    function = getattr(flashtile, name)
    q, k, v = qkv(generator(seed), Hq=2, Hk=2)
    cu = cu_seqlens([17, 17])
    flat = [x[:, :17].flatten(0, 1) for x in (q, k, v)]
    args = {
        "flash_attn_func": (q, k, v),
        "flash_attn_kvpacked_func": (q, torch.stack([k, v], 2)),
        "flash_attn_qkvpacked_func": (torch.stack([q, q, q], 2),),
        "flash_attn_varlen_func": (*flat, cu, cu, 17, 17),
        "flash_attn_varlen_kvpacked_func": (flat[0], torch.stack(flat[1:], 1), cu, cu, 17, 17),
        "flash_attn_varlen_qkvpacked_func": (torch.stack(flat, 1), cu, 17),
        "flash_attn_with_kvcache": (q, k, v),
    }[name]
    plain = function(*args)
    out = torch.full_like(plain, torch.nan)
    sunk = function(*args, sink=torch.full((2,), 30.0), out=out, backend="cpu")
    assert sunk is out
    assert sunk.abs().max() < 1e-6 < plain.abs().max()
    biased = function(*args, bias=torch.zeros(1, 2, 1, 1), attention_chunk=0, block_mask=None)
    dense = (q, k, v)
    if "qkvpacked" in name or "varlen" in name:
        dense = (q, q, q) if name == "flash_attn_qkvpacked_func" else (q, k[:, :17], v[:, :17])
    reference = partial(attention_reference, *dense)
    judge_outputs({"out": biased.view(q.shape)}, reference, biased.dtype, seed)


def test_return_values():
    q, k, v = qkv(generator(0), dtype=torch.float16)
    out, lse, probs = flashtile.flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out.shape, lse.shape, probs.shape) == ((2, 17, 4, 16), (2, 4, 17), (2, 4, 17, 23))
    out, lse = flashtile.flash_attn_func(q, k, v, return_lse=True)
    assert lse.dtype == torch.float32
    out, lse = flashtile.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    for flags in ({"return_lse": True}, {"return_lse": True, "return_softmax_lse": True}):
        again = flashtile.flash_attn_with_kvcache(q, k, v, **flags)
        assert all(map(torch.equal, again, (out, lse)))
    assert (out.shape, lse.shape) == ((2, 17, 4, 16), (2, 4, 17))
    assert isinstance(flashtile.flash_attn_with_kvcache(q, k, v), torch.Tensor)


def test_window_of_none_and_minus_one_are_the_same():
    q, k, v = qkv(generator(0))
    for side in (None, -1):
        assert torch.equal(
            flashtile.flash_attn_func(q, k, v, window_size=(side, side)),
            flashtile.flash_attn_func(q, k, v),
        )
