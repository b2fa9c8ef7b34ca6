"""A file as a user of flash_attn writes it; `test_drop_in.py` replaces the package's name."""

import torch
from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flash_attn.flash_attn_interface import flash_attn_func as same_function
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

assert same_function is flash_attn_func


def attend(q, k, v, causal=True):
    return flash_attn_func(q, k, v, 0.0, None, causal)


def attend_kvpacked(q, kv):
    return flash_attn_kvpacked_func(q, kv, causal=True, window_size=(5, 0), softcap=2.0)


def attend_qkvpacked(qkv, slopes):
    return flash_attn_qkvpacked_func(qkv, 0.0, None, True, (-1, -1), 0.0, slopes)


def attend_padded(q, k, v, key_padding_mask):
    """Batches of unequal length, padded on the right."""
    batch, seqlen = key_padding_mask.shape
    q, indices, cu_seqlens, max_seqlen, _ = unpad_input(q, key_padding_mask)
    k, *_ = unpad_input(k, key_padding_mask)
    v, *_ = unpad_input(v, key_padding_mask)
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, causal=True
    )
    return pad_input(out, indices, batch, seqlen)


def attend_padded_qkvpacked(qkv, key_padding_mask):
    batch, seqlen = key_padding_mask.shape
    packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(qkv, key_padding_mask)
    out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, max_seqlen, 0.0, softmax_scale=0.3)
    return pad_input(out, indices, batch, seqlen)


def cross_attend_padded(q, kv, query_mask, key_mask):
    batch, seqlen = query_mask.shape
    q, indices, cu_q, max_q, _ = unpad_input(q, query_mask)
    kv, _, cu_k, max_k, _ = unpad_input(kv, key_mask)
    out = flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, max_q, max_k)
    return pad_input(out, indices, batch, seqlen)


def attend_concatenated(qkv, lengths):
    """Several short documents in each row."""
    packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(qkv, lengths)
    out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, max_seqlen, causal=True)
    return pad_input(out, indices, *qkv.shape[:2])


class Decoder:
    """Self-attention with rotary embeddings: a whole prompt at once, or token by token."""

    def __init__(self, rotary_dim, batch, capacity, heads, head_dim, dtype):
        self.rotary = RotaryEmbedding(rotary_dim)
        self.rotary._update_cos_sin_cache(capacity, device=torch.device("cpu"), dtype=dtype)
        self.k_cache = torch.zeros(batch, capacity, heads, head_dim, dtype=dtype)
        self.v_cache = torch.zeros(batch, capacity, heads, head_dim, dtype=dtype)
        self.seqlens = torch.zeros(batch, dtype=torch.int32)

    def whole(self, qkv):
        return flash_attn_qkvpacked_func(self.rotary(qkv.clone()), causal=True)

    def step(self, qkv):
        q, k, v = qkv.unbind(2)
        out = flash_attn_with_kvcache(
            q,
            self.k_cache,
            self.v_cache,
            k,
            v,
            self.rotary._cos_cached,
            self.rotary._sin_cached,
            self.seqlens,
            causal=True,
            rotary_interleaved=False,
        )
        self.seqlens += qkv.shape[1]
        return out


def scatter_and_gather(x, indices, rows):
    gathered, residual = index_first_axis_residual(x, indices)
    assert torch.equal(gathered, index_first_axis(x, indices))
    return index_put_first_axis(gathered, indices, rows), residual


def rotations(x, cos, sin):
    """x (batch, seq, heads, head_dim) by every function that rotates: all results are the same."""
    qkv = apply_rotary_emb_qkv_(torch.stack([x, x, x], dim=2), cos, sin)
    kv = apply_rotary_emb_kv_(torch.stack([x, x], dim=2), cos, sin)
    by_hand = torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
    rotated = x[..., : 2 * cos.shape[-1]]
    rotated = rotated * by_hand[0] + rotate_half(rotated) * by_hand[1]
    return [
        apply_rotary_emb(x, cos, sin),
        apply_rotary_emb(x.clone(), cos, sin, inplace=True),
        apply_rotary_emb_func(x, cos, sin, False),
        apply_rotary_emb_torch(x, cos, sin),
        qkv[:, :, 0],
        qkv[:, :, 1],
        kv[:, :, 0],
        torch.cat([rotated, x[..., 2 * cos.shape[-1] :]], -1),
    ]
