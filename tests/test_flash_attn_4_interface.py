"""FlashAttention-4's functions: parameters, results, layouts, and agreement with the native API."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import flash_attn_4_interface as fa4
from flashtile.masks import Window
from flashtile.testing import cu_seqlens, generator, normal, paged, qkv

LENGTHS = "cu_seqlens_q cu_seqlens_k"
MODS = "score_mod score_mod_bwd mask_mod"
# FlashAttention-4's own parameters, in order (flash_attn/cute/interface.py).
PARAMETERS = {
    "flash_attn_func": "q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink "
    f"softcap num_splits pack_gqa deterministic {MODS} aux_tensors aux_scalars "
    "block_sparse_tensors block_sparse_tensors_bwd return_lse",
    "flash_attn_varlen_func": f"q k v qv {LENGTHS} max_seqlen_q max_seqlen_k min_seqlen_k "
    "seqused_q seqused_k gather_kv_indices page_table softmax_scale causal window_size "
    f"learnable_sink softcap num_splits pack_gqa deterministic {MODS} block_sparse_tensors "
    "aux_tensors aux_scalars return_lse scheduler_metadata seqlen_k_per_split "
    "disable_scheduler_metadata",
    "flash_attn_combine": "out_partial lse_partial out out_dtype cu_seqlens seqused "
    "virtual_batch_idx return_lse",
    "get_scheduler_metadata": "max_seqlen_q max_seqlen_k nheads nheads_kv headdim num_splits "
    f"headdim_v pack_gqa causal window_size_left window_size_right seqlen_k_new {LENGTHS} "
    "cu_seqlens_k_new seqused_q seqused_k leftpad_k seqlen_k_per_split _arch",
    "_flash_attn_fwd": f"q k v qv {LENGTHS} seqused_q seqused_k max_seqlen_q max_seqlen_k "
    "min_seqlen_k page_table softmax_scale causal softcap window_size_left window_size_right "
    "learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap num_threads num_splits pack_gqa _arch "
    "score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors aux_scalars q_descale "
    "k_descale v_descale gather_kv_indices scheduler_metadata seqlen_k_per_split "
    "disable_scheduler_metadata",
    "_flash_attn_bwd": "q k v out dout lse softmax_scale causal softcap window_size_left "
    "window_size_right m_block_size n_block_size num_threads pack_gqa num_stages_Q num_stages_dO "
    "SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ V_in_regs "
    f"{LENGTHS} seqused_q seqused_k max_seqlen_q max_seqlen_k deterministic dq dk dv {MODS} "
    "aux_tensors aux_scalars block_sparse_tensors dlse learnable_sink",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    assert list(inspect.signature(getattr(fa4, name)).parameters) == PARAMETERS[name].split()


@pytest.fixture
def tensors(seed):
    return qkv(generator(seed), B=2, M=6, N=9, Hq=4, Hk=2, D=8)


def test_dense(tensors, seed):
    sink = normal(generator(seed), 4)
    out, lse = fa4.flash_attn_func(
        *tensors, None, None, 0.3, True, (4, None), sink, 5.0, 2, True, return_lse=True
    )
    wanted = flashtile.attention(
        *tensors, softmax_scale=0.3, causal=True, window_size=(4, 0), sink=sink, softcap=5.0,
        return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


@pytest.mark.parametrize("window", [(None, -1), (-1, None), (-2, 5), (3, -1), (None, None)])
def test_minus_one_is_an_offset(window, tensors):
    out, _ = fa4.flash_attn_func(*tensors, window_size=window)
    assert torch.equal(out, flashtile.attention(*tensors, window_size=Window(*window)))


def test_when_there_is_a_log_sum_exp(tensors):
    q, k, v = tensors
    assert fa4.flash_attn_func(q, k, v)[1] is None
    q.requires_grad_()
    assert not fa4.flash_attn_func(q, k, v)[1].requires_grad
    _, lse = fa4.flash_attn_func(q, k, v, return_lse=True)
    (got,) = torch.autograd.grad(lse.sum(), q)
    _, wanted = flashtile.attention(q, k, v, return_lse=True)
    assert torch.equal(got, torch.autograd.grad(wanted.sum(), q)[0])


def test_heads_of_the_log_sum_exp_are_last_with_qv(tensors, seed):
    q, k, v = tensors
    qv = normal(generator(seed), 2, 6, 4, 8)
    out, lse = fa4.flash_attn_func(q, k, v, qv, return_lse=True)
    wanted = flashtile.attention(q, k, v, qv=qv, return_lse=True)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1].transpose(1, 2))
    flat = [x.flatten(0, 1) for x in (q, k, v, qv)]
    _, lse = fa4.flash_attn_varlen_func(
        *flat, cu_seqlens([6, 6]), cu_seqlens([9, 9]), return_lse=True
    )
    torch.testing.assert_close(lse, wanted[1].transpose(1, 2).flatten(0, 1))


def test_keys_that_are_the_values(seed):
    g = generator(seed)
    q, v = normal(g, 1, 3, 2, 512), normal(g, 1, 5, 1, 512)
    out, lse = fa4.flash_attn_func(q, v, v, return_lse=True)
    wanted = flashtile.attention(q, v, v, return_lse=True)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1].transpose(1, 2))
    found = fa4._flash_attn_fwd(None, None, v, qv=q, return_lse=True)
    assert torch.equal(found[0], out)
    assert torch.equal(found[1], lse)


@pytest.mark.parametrize("packed_q", [False, True])
@pytest.mark.parametrize("packed_k", [False, True])
def test_each_side_is_padded_or_packed(packed_q, packed_k, tensors):
    used_q, used_k = [6, 2], [4, 9]
    lengths = [torch.tensor(x, dtype=torch.int32) for x in (used_q, used_k)]
    wanted, wanted_lse = flashtile.attention(
        *tensors, causal=True, seqused_q=lengths[0], seqused_k=lengths[1], return_lse=True
    )
    how, (q, k, v) = {}, tensors
    if packed_q:
        q = torch.cat([q[b, :n] for b, n in enumerate(used_q)])
        how |= {"cu_seqlens_q": cu_seqlens(used_q), "max_seqlen_q": 6}
        wanted = torch.cat([wanted[b, :n] for b, n in enumerate(used_q)])
        wanted_lse = torch.cat([wanted_lse[b, :, :n] for b, n in enumerate(used_q)], dim=1)
    else:
        how["seqused_q"] = lengths[0]
    if packed_k:
        k, v = (torch.cat([x[b, :n] for b, n in enumerate(used_k)]) for x in (k, v))
        how["cu_seqlens_k"] = cu_seqlens(used_k)
    else:
        how["seqused_k"] = lengths[1]
    out, lse = fa4.flash_attn_varlen_func(q, k, v, **how, causal=True, return_lse=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


@pytest.mark.parametrize("has_lengths", [False, True])
def test_pages(has_lengths, seed):
    g = generator(seed)
    q, k, v = qkv(g, B=2, M=3, N=16, Hq=4, Hk=2, D=8)
    used = torch.tensor([5, 16], dtype=torch.int32) if has_lengths else None
    (k_pages, table), (v_pages, _) = (paged(generator(seed), x, 4) for x in (k, v))
    out, _ = fa4.flash_attn_varlen_func(
        q, k_pages, v_pages, seqused_k=used, page_table=table, causal=True
    )
    torch.testing.assert_close(out, flashtile.attention(q, k, v, seqused_k=used, causal=True))
    with pytest.raises(ValueError, match="cu_seqlens_k: cannot be combined with page_table"):
        fa4.flash_attn_varlen_func(
            q, k_pages, v_pages, page_table=table, cu_seqlens_k=cu_seqlens([5, 16])
        )


@pytest.mark.parametrize(
    "name",
    [
        "gather_kv_indices",
        "score_mod",
        "score_mod_bwd",
        "mask_mod",
        "aux_tensors",
        "aux_scalars",
        "block_sparse_tensors",
    ],
)
def test_what_is_missing_is_refused_by_name(name, tensors):
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            function(*tensors, **{name: [1]})


def refusal_of(function):
    """The lines of its source that refuse arguments."""
    return inspect.getsource(function).partition("_refuse(")[2].partition(")")[0]


def test_the_manual_names_what_is_missing():
    """Every argument of functions that users call that raises when it is given."""
    page = Path(__file__).parents[1] / "docs" / "newer-flash-attention.md"
    text = page.read_text(encoding="utf-8")
    refused = {
        name
        for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func)
        for name in re.findall(r"(\w+)=\1\b", refusal_of(function))
    }
    assert {"score_mod", "block_sparse_tensors_bwd"} <= refused
    assert not {name for name in refused if f"`{name}`" not in text}


def test_scheduler_metadata(tensors):
    used = torch.tensor([9, 9], dtype=torch.int32)
    metadata = fa4.get_scheduler_metadata(6, 9, 4, 2, 8, 3, seqused_k=used)
    out, _ = fa4.flash_attn_varlen_func(*tensors, seqused_k=used, scheduler_metadata=metadata)
    torch.testing.assert_close(out, flashtile.attention(*tensors))
    with pytest.raises(TypeError, match="scheduler_metadata: got Tensor"):
        fa4.flash_attn_varlen_func(*tensors, seqused_k=used, scheduler_metadata=used)
    with pytest.raises(NotImplementedError, match="seqlen_k_per_split"):
        fa4.flash_attn_varlen_func(*tensors, seqused_k=used, seqlen_k_per_split=128)


def test_private_forward_writes_where_it_is_told(tensors):
    q, k, v = tensors
    out, lse = torch.empty_like(q), torch.empty(2, 4, 6)
    found = fa4._flash_attn_fwd(q, k, v, causal=True, out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    wanted = flashtile.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    with pytest.raises(ValueError, match="lse: got shape"):
        fa4._flash_attn_fwd(q, k, v, lse=torch.empty(2, 6, 4))


@pytest.mark.parametrize("packed", [False, True])
def test_private_backward(packed, tensors, seed):
    q, k, v = tensors
    packing = {}
    if packed:
        q, k, v = (x.flatten(0, 1) for x in tensors)
        packing = {"cu_seqlens_q": cu_seqlens([6, 6]), "cu_seqlens_k": cu_seqlens([9, 9])}
    sink = normal(generator(seed), 4)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    out, lse = fa4.flash_attn_varlen_func(
        q, k, v, causal=True, learnable_sink=sink, return_lse=True, **packing
    )
    dout, dlse = normal(generator(seed), *out.shape), normal(generator(seed), *lse.shape)
    wanted = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    dq = torch.empty_like(q)
    found = fa4._flash_attn_bwd(
        q, k, v, out, dout, lse, causal=True, dlse=dlse, learnable_sink=sink, dq=dq, **packing
    )
    assert found[0] is dq
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)
    assert len(fa4._flash_attn_bwd(q, k, v, out, dout, lse, **packing)) == 3
