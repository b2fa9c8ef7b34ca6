"""FlashAttention-3's functions: parameters, results, and agreement with the native API."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashtile
from flashtile import flash_attn_3_interface as fa3
from flashtile.backends.triton import plan as triton_plan
from flashtile.testing import cu_seqlens, generator, normal, qkv

DESCALES = "q_descale k_descale v_descale"
HINTS = "num_splits pack_gqa"
# FlashAttention-3's own parameters, in order (hopper/flash_attn_interface.py).
PARAMETERS = {
    "flash_attn_func": f"q k v softmax_scale causal qv {DESCALES} window_size attention_chunk "
    f"softcap {HINTS} deterministic sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q "
    f"seqused_k softmax_scale causal qv {DESCALES} window_size attention_chunk softcap {HINTS} "
    "deterministic sm_margin return_attn_probs",
    "flash_attn_qkvpacked_func": f"qkv softmax_scale causal {DESCALES} window_size attention_chunk "
    "softcap deterministic num_heads_q sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q "
    f"rotary_seqlens {DESCALES} softmax_scale causal window_size attention_chunk softcap "
    f"rotary_interleaved scheduler_metadata {HINTS} sm_margin return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv "
    "headdim cache_seqlens qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad "
    "page_size max_seqlen_k_new causal window_size attention_chunk has_softcap num_splits "
    "pack_gqa sm_margin",
    "_flash_attn_forward": "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new "
    "seqused_q seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos "
    f"rotary_sin seqlens_rotary {DESCALES} softmax_scale causal window_size_left "
    "window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata "
    f"{HINTS} sm_margin",
    "_flash_attn_backward": "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q "
    "sequed_k max_seqlen_q max_seqlen_k dq dk dv softmax_scale is_causal window_size_left "
    "window_size_right softcap deterministic sm_margin",
}
DEFAULTS = {"flash_attn_func": 1, "flash_attn_varlen_func": 1, "flash_attn_with_kvcache": 0}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    parameters = inspect.signature(getattr(fa3, name)).parameters
    of_others = [x for x, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert [x for x in parameters if x not in of_others] == PARAMETERS[name].split()
    if name in DEFAULTS:
        assert parameters["num_splits"].default == DEFAULTS[name]


@pytest.fixture
def tensors(seed):
    return qkv(generator(seed), B=2, M=6, N=9, Hq=4, Hk=2, D=8, Dv=16)


def test_dense(tensors, seed):
    qv = normal(generator(seed), 2, 6, 4, 16)
    out, lse = fa3.flash_attn_func(
        *tensors, 0.3, True, qv, None, None, None, (3, 0), 0, 5.0, 2, True, True, 4, True
    )
    wanted = flashtile.attention(
        *tensors, softmax_scale=0.3, causal=True, qv=qv, window_size=(3, 0), softcap=5.0,
        return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    assert torch.equal(fa3.flash_attn_func(*tensors), flashtile.attention(*tensors))


def test_packed(seed):
    q, k, v = (normal(generator(seed), 9, heads, 8) for heads in (4, 2, 2))
    cu, used = cu_seqlens([4, 5]), torch.tensor([3, 5], dtype=torch.int32)
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu, cu, 5, 5, used, used, causal=True, return_attn_probs=True
    )
    wanted = flashtile.attention_varlen(
        q, k, v, cu, cu, 5, 5, seqused_q=used, seqused_k=used, causal=True, return_lse=True
    )
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


def test_one_tensor_with_fewer_key_heads(seed):
    packed = normal(generator(seed), 2, 6, 8, 8).requires_grad_()
    q, k, v = packed.split([4, 2, 2], dim=2)
    out = fa3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=4)
    assert torch.equal(out, flashtile.attention(q, k, v, causal=True))
    out.sum().backward()
    assert packed.grad is not None
    five = normal(generator(seed), 2, 6, 3, 4, 8)
    wanted = flashtile.attention(*five.unbind(2))
    assert torch.equal(fa3.flash_attn_qkvpacked_func(five), wanted)


@pytest.mark.parametrize(("heads", "message"), [(None, "got None"), (3, "of 8 heads"), (8, "of 8")])
def test_wrong_numbers_of_query_heads_are_refused(heads, message):
    with pytest.raises(ValueError, match=f"num_heads_q: .*{message}"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(2, 6, 8, 8), num_heads_q=heads)


def test_cache(tensors, seed):
    q, k_cache, v_cache = tensors
    k, v = normal(generator(seed), 2, 1, 2, 8), normal(generator(seed + 1), 2, 1, 2, 16)
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(2, 6, 9, 4, 2, 8, lengths, headdim_v=16, num_splits=2)
    results = []
    for function, how in (
        (fa3.flash_attn_with_kvcache, {"return_softmax_lse": True, "scheduler_metadata": metadata}),
        (flashtile.attention_with_kvcache, {"return_lse": True}),
    ):
        caches = k_cache.clone(), v_cache.clone()
        found = function(q, *caches, k, v, cache_seqlens=lengths, causal=True, **how)
        results.append((*found[:2], *caches))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    _, _, *parts = fa3.flash_attn_with_kvcache(*tensors, return_softmax_lse=True)
    assert [x.numel() for x in parts] == [0, 0]
    assert isinstance(fa3.flash_attn_with_kvcache(*tensors), torch.Tensor)


@pytest.fixture
def paged(seed):
    """SGLang's tensors: q and qv of 5 tokens, pages of 4 keys, their table, and three lengths."""
    g = generator(seed)
    q, qv = normal(g, 5, 4, 8), normal(g, 5, 4, 16)
    k_pages, v_pages = normal(g, 6, 4, 2, 8), normal(g, 6, 4, 2, 16)
    table = torch.tensor([[0, 2, 1], [3, 5, 4]], dtype=torch.int32)
    used = torch.tensor([9, 6], dtype=torch.int32)
    return q, qv, k_pages, v_pages, table, used, cu_seqlens([2, 3]), cu_seqlens([9, 6])


def packed_keys(pages, table, used):
    rows = [pages[row.long()].flatten(0, 1)[:n] for row, n in zip(table, used, strict=True)]
    return torch.cat(rows)


@pytest.mark.parametrize("only_qv", [False, True])
@pytest.mark.parametrize("function", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_the_keywords_of_sglang(function, only_qv, paged, seed):
    q, qv, k_pages, v_pages, table, used, cu_q, cu_k = paged
    sinks, out = normal(generator(seed), 4), torch.empty(5, 4, 16)
    options = {"softmax_scale": 0.3, "causal": True, "sinks": sinks, "out": out}
    if only_qv:
        given: tuple = (None, None, v_pages)
    else:
        given = (q, k_pages, v_pages)
    options |= {"qv": qv, "only_qv": only_qv, "return_softmax_lse": True, "page_table": table}
    if function == "flash_attn_with_kvcache":
        options |= {"cache_seqlens": used, "cu_seqlens_q": cu_q, "cu_seqlens_k_new": cu_k}
        lengths = {"max_seqlen_q": 3, "attention_chunk": None}
        got, lse, *_ = fa3.flash_attn_with_kvcache(*given, **options, **lengths)
    else:
        options["seqused_k"] = used
        got, lse = fa3.flash_attn_varlen_func(*given, cu_q, None, 3, 9, **options)
    k, v = (packed_keys(pages, table, used) for pages in (k_pages, v_pages))
    inputs, more = ((qv, v, v), {}) if only_qv else ((q, k, v), {"qv": qv})
    wanted, wanted_lse = flashtile.attention_varlen(
        *inputs, cu_q, cu_k, 3, 9, softmax_scale=0.3, causal=True, sink=sinks, return_lse=True,
        **more,
    )  # fmt: skip
    assert got is out
    assert torch.equal(got, wanted)
    assert torch.equal(lse, wanted_lse)


def test_only_qv_refuses_what_it_has_no_queries_for(paged):
    _, qv, _, v_pages, table, used, *_ = paged
    how = {"page_table": table, "cache_seqlens": used, "only_qv": True}
    with pytest.raises(ValueError, match="qv: got None"):
        fa3.flash_attn_with_kvcache(None, None, v_pages, **how)
    with pytest.raises(ValueError, match="rotary_cos: want None with only_qv"):
        fa3.flash_attn_with_kvcache(None, None, v_pages, qv=qv, rotary_cos=qv, **how)


def test_metadata_checks_what_it_is_given():
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="cache_seqlens: got shape"):
        fa3.get_scheduler_metadata(3, 6, 9, 4, 2, 8, lengths)
    with pytest.raises(TypeError, match="pack_gqa"):
        fa3.get_scheduler_metadata(2, 6, 9, 4, 2, 8, lengths, pack_gqa="yes")


def test_private_forward(tensors, seed):
    q, k, v = tensors
    out, lse, *parts = fa3._flash_attn_forward(q, k, v, causal=True)
    wanted = flashtile.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    assert [x.numel() for x in parts] == [0, 0]
    given = torch.empty_like(out)
    assert fa3._flash_attn_forward(q, k, v, out_=given, causal=True)[0] is given
    rows = torch.tensor([1, 0], dtype=torch.int32)
    by_row = fa3._flash_attn_forward(q, k, v, kv_batch_idx=rows, causal=True)[0]
    torch.testing.assert_close(by_row, flashtile.attention(q, k[[1, 0]], v[[1, 0]], causal=True))
    cu = cu_seqlens([6, 6])
    flat, cu_k = [x.flatten(0, 1) for x in tensors], cu_seqlens([9, 9])
    packing = {"cu_seqlens_q": cu, "max_seqlen_q": 6}
    keys = {"cu_seqlens_k": cu_k, "max_seqlen_k": 9}
    packed = fa3._flash_attn_forward(*flat, **packing, **keys, causal=True)[0]
    torch.testing.assert_close(packed.view_as(out), out)
    padded_keys = fa3._flash_attn_forward(flat[0], k, v, **packing, causal=True)[0]
    torch.testing.assert_close(padded_keys.view_as(out), out)
    with pytest.raises(ValueError, match="leftpad_k: is for a cache"):
        fa3._flash_attn_forward(*flat, **packing, **keys, leftpad_k=rows)


@pytest.mark.parametrize("used", [False, True])
def test_private_forward_of_packed_queries_and_padded_keys_has_gradients(tensors, used):
    q, k, v = (x.requires_grad_() for x in tensors)
    given = {"cu_seqlens_q": cu_seqlens([6, 6]), "max_seqlen_q": 6}
    if used:
        given["seqused_k"] = torch.tensor([9, 4], dtype=torch.int32)
    flat = q.flatten(0, 1)
    out, lse, *_ = fa3._flash_attn_forward(flat, k, v, **given, causal=True)
    wanted = flashtile.attention_varlen(flat, k, v, **given, causal=True, return_lse=True)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    got = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    want = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), (q, k, v))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("side", ["q", "k"])
def test_private_backward_of_mixed_layouts_is_refused(side):
    tensors = dict(zip("qkv", qkv(generator(0), B=2, M=6, N=9, Hq=4, Hk=2, D=8), strict=True))
    for name in "q" if side == "q" else "kv":
        tensors[name] = tensors[name].flatten(0, 1)
    given = {f"cu_seqlens_{side}": cu_seqlens([6, 6] if side == "q" else [9, 9])}
    lse = torch.zeros(2, 4, 6)
    out = torch.zeros(2, 6, 4, 8)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q, cu_seqlens_k: got one of them"):
        fa3._flash_attn_backward(out, *tensors.values(), out, lse, **given)


@pytest.mark.parametrize("packed", [False, True])
def test_private_backward(packed, seed):
    q, k, v = qkv(generator(seed), B=2, M=6, N=9, Hq=4, Hk=2, D=8)
    used = torch.tensor([6, 4], dtype=torch.int32)
    packing = {}
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        packing = {"cu_seqlens_q": cu_seqlens([6, 6]), "cu_seqlens_k": cu_seqlens([9, 9])}
        packing |= {"max_seqlen_q": 6, "max_seqlen_k": 9}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, *_ = fa3._flash_attn_forward(*leaves, seqused_q=used, **packing, causal=True)
    dout = normal(generator(seed), *out.shape)
    wanted = torch.autograd.grad(out, leaves, dout)
    targets = [torch.empty_like(x) for x in leaves]
    fa3._flash_attn_backward(
        dout, q, k, v, out, lse, sequed_q=used, dq=targets[0], dk=targets[1], dv=targets[2],
        is_causal=True, **packing,
    )  # fmt: skip
    for got, want in zip(targets, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("given", ["float8", "qv"])
def test_a_call_without_backward_fails_in_its_backward_only(given, monkeypatch):
    """Like on a GPU: the test patches `_has_no_backward` on every device."""
    monkeypatch.setattr(fa3, "_has_no_backward", lambda q, qv: True)
    dtype = torch.float8_e4m3fn if given == "float8" else torch.bfloat16
    q, k, v, qv = (torch.randn(1, 9, 2, 32).to(dtype).requires_grad_() for _ in range(4))
    more = {"qv": qv} if given == "qv" else {}
    out = fa3.flash_attn_func(q, k, v, **more)
    plain, lse = fa3.flash_attn_func(
        *(x.detach() for x in (q, k, v)), return_attn_probs=True, **more
    )
    assert torch.equal(out, plain)
    with pytest.raises(NotImplementedError, match=f"{given}.* no backward on a GPU"):
        out.sum().backward()
    lengths = cu_seqlens([9])
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    more = {name: x.flatten(0, 1) for name, x in more.items()}
    out, packed_lse = fa3.flash_attn_varlen_func(
        *packed, lengths, lengths, 9, 9, return_attn_probs=True, **more
    )
    assert torch.equal(packed_lse, lse[0])
    with pytest.raises(NotImplementedError, match=f"{given}.* no backward on a GPU"):
        out.sum().backward()


def test_the_widest_head_dim_with_a_gradient_is_the_backends():
    assert fa3.WIDEST_WITH_GRADIENT == triton_plan.MAX_HEAD_DIM


@pytest.mark.parametrize("name", ["q", "k", "v", "qv"])
def test_an_input_that_is_no_tensor_is_named(name):
    given = [[1.0]]
    x = torch.randn(1, 9, 2, 32, requires_grad=True)
    with pytest.raises(TypeError, match=f"^{name}: got "):
        fa3.flash_attn_func(**{"q": x, "k": x, "v": x, name: given})
    packed, lengths = x.flatten(0, 1), cu_seqlens([9])
    call = {"q": packed, "k": packed, "v": packed, name: given}
    with pytest.raises(TypeError, match=f"^{name}: got "):
        fa3.flash_attn_varlen_func(
            **call, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=9, max_seqlen_k=9
        )
