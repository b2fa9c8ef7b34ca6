"""The functions of FlashAttention-2's compiled extension, which it imports as `flash_attn_gpu`.

They have the same positional order and results, write gradients into given tensors, and run on
every device. `flash_attn_2_interface` has the same functions with keywords. None of them records
gradients. Two things differ from FlashAttention-2: the log-sum-exp of a row without keys is -inf,
and dropout and softcap can be combined.

Source: FlashAttention 2.8.4, ``csrc/flash_attn/flash_api.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import autograd
from .api import attention_with_kvcache
from .call import dispatch
from .call.layouts import Dense, Packed
from .call.prepare import QKV, Keywords, prepare
from .dropout import draw_rng_state
from .operators import ops
from .problem import Operands, lse_shape

BLOCK = 128  # the extension pads lengths to a multiple of this


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Attention of q (batch, seq_q, heads, head_dim) over k and v (batch, seq_k, kv_heads,
    head_dim).

    Args:
        out: the tensor to write the result to.
        return_softmax: compute S_dmask, see `s_dmask`; otherwise it is empty.
        generator: draws the rng_state of dropout; by default PyTorch's generator of the device.

    Returns:
        [out, lse, S_dmask, rng_state]; rng_state is int64 (2,), for `bwd`, and zeros without
        dropout.

    Raises:
        RuntimeError: `generator` is a tensor, as in old versions.
        ValueError, TypeError, NotImplementedError: as `flashtile.attention`.
    """
    window = window_size_left, window_size_right
    options = _options(alibi_slopes, dropout_p, softmax_scale, causal, window, softcap)
    return _forward((q, k, v), Dense(), options, out, return_softmax, generator)


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: torch.Generator | None = None,
    num_splits: int = 0,
) -> list[Tensor]:
    """`fwd` for packed sequences: q (total_q, heads, head_dim), k and v (total_k, kv_heads,
    head_dim), or (num_pages, page_size, kv_heads, head_dim) with `block_table`.

    Args:
        seqused_k: (batch,) int32, number of valid keys of each sequence, counted from its start.
        leftpad_k: (batch,) int32, number of those keys to skip at the start; not with pages.
        zero_tensors: ignored; rows that belong to no sequence are always zeros.
    """
    if block_table is not None and num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported for varlen paged KV")
    if block_table is not None and leftpad_k is not None:
        raise ValueError("leftpad_k: got both leftpad_k and block_table, want at most one of them")
    window = window_size_left, window_size_right
    options = _options(
        alibi_slopes,
        dropout_p,
        softmax_scale,
        causal,
        window,
        softcap,
        seqused_k=seqused_k,
        num_splits=num_splits,
    )
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, leftpad_k)
    return _forward((q, k, v), layout, options, out, return_softmax, generator)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: torch.Generator | None = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """The gradients, from the inputs and the results of `fwd`.

    Args:
        out, softmax_lse: the result over these keys or, in ring attention, over these and others.
        dq, dk, dv: the tensors to write the gradients to; may have any strides.
        generator: ignored; `rng_state` determines the dropout.
        rng_state: from the forward; needed with dropout.

    Returns:
        [dq, dk, dv, softmax_d]; softmax_d (batch, heads, seq_q rounded up to a multiple of 128)
        float32 holds the row sums of dout * out.

    Raises:
        ValueError: a tensor has another shape than in the forward, or `rng_state` is missing.
    """
    window = window_size_left, window_size_right
    options = _options(
        alibi_slopes, dropout_p, softmax_scale, causal, window, softcap, deterministic=deterministic
    )
    _check_generator(generator)
    results = (dout, out, softmax_lse)
    return backward((q, k, v), Dense(), options, results, (dq, dk, dv), rng_state)


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: torch.Generator | None = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """`bwd` for packed sequences; softmax_d is (heads, total_q + 128 * batch), where the rows of
    sequence ``b`` begin at ``cu_seqlens_q[b] + 128 * b``.
    """
    window = window_size_left, window_size_right
    options = _options(
        alibi_slopes, dropout_p, softmax_scale, causal, window, softcap, deterministic=deterministic
    )
    _check_generator(generator)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    results = (dout, out, softmax_lse)
    return backward((q, k, v), layout, options, results, (dq, dk, dv), rng_state)


def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """[out, lse] of `flashtile.attention_with_kvcache`."""
    return list(
        attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            page_table=block_table,
            alibi_slopes=alibi_slopes,
            out=out,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=(window_size_left, window_size_right),
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            num_splits=num_splits,
            return_lse=True,
        )
    )


def s_dmask(probabilities: Tensor) -> Tensor:
    """Convert the probabilities of a call with `return_attn_probs` to FlashAttention-2's S_dmask.

    (batch, heads, seq_q, seq_k) is padded to multiples of 128 in its last two dimensions. Each row
    is divided by its largest probability: ``exp(score - largest score)``, negative where dropped.
    """
    M, N = probabilities.shape[-2:]
    if M > 0 and N > 0:
        largest = probabilities.abs().amax(-1, keepdim=True)
        probabilities = probabilities / largest.masked_fill(largest == 0, 1)
    return F.pad(probabilities, (0, -N % BLOCK, 0, -M % BLOCK))


def _options(
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    **more: Any,
) -> Keywords:
    """The options that all functions for training share, and `more`."""
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        **more,
    }


def _forward(
    qkv: QKV,
    layout: Dense | Packed,
    options: Keywords,
    out: Tensor | None,
    return_softmax: bool,
    generator: torch.Generator | None,
) -> list[Tensor]:
    _check_generator(generator)
    with torch.no_grad():
        problem, operands, *_ = prepare(qkv, layout, options, None, out, return_softmax)
        device = operands.q.device
        rng_state = torch.zeros(2, dtype=torch.int64, device=device)
        if problem.options.dropout_p > 0:
            rng_state = draw_rng_state(device, generator)
            operands = operands._replace(rng_state=rng_state)
        result, lse = autograd.attend(problem, operands)
        if out is not None:
            result = out.copy_(result)
        S_dmask = result.new_empty(0)
        if return_softmax:
            S_dmask = s_dmask(autograd.attention_probabilities(problem, operands, lse))
        return [result, lse.contiguous(), S_dmask, rng_state]


def backward(
    qkv: QKV,
    layout: Dense | Packed,
    options: Keywords,
    results: tuple[Tensor, Tensor, Tensor],
    targets: tuple[Tensor | None, Tensor | None, Tensor | None],
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """[dq, dk, dv, softmax_d] of `bwd` or, with packed sequences, `varlen_bwd`.

    Args:
        results: (dout, out, softmax_lse).
        targets: the tensors to write dq, dk and dv to.
    """
    operands, found = gradients(qkv, layout, options, results, targets, rng_state)
    dout, out, _ = results
    return [*found[:3], _softmax_d(dout, out, operands)]


def gradients(
    qkv: QKV,
    layout: Dense | Packed,
    options: Keywords,
    results: tuple[Tensor, Tensor, Tensor],
    targets: tuple[Tensor | None, Tensor | None, Tensor | None],
    rng_state: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Operands, list[Tensor]]:
    """The operands of `backward`, and dq, dk, dv, dbias and dsink."""
    dout, out, lse = results
    with torch.no_grad():
        problem, operands, *_ = prepare(qkv, layout, options)
        backend = dispatch.select(problem._replace(needs_grad=True))
        if problem.options.dropout_p > 0:
            if rng_state is None:
                raise ValueError("rng_state: got None, want the rng_state of the forward's dropout")
            operands = operands._replace(rng_state=rng_state)
        q, k, v = operands[:3]
        _check_shape("dout", dout, (*q.shape[:-1], v.shape[-1]))
        _check_shape("out", out, (*q.shape[:-1], v.shape[-1]))
        _check_shape("softmax_lse", lse, lse_shape(operands))
        for name, target, x in zip(("dq", "dk", "dv"), targets, (q, k, v), strict=True):
            if target is not None:
                _check_shape(name, target, tuple(x.shape))
        found = ops.attention_backward(
            dout, dlse, out, lse, False, *operands, *problem.options._replace(backend=backend)
        )
        written = [
            gradient if target is None else target.copy_(gradient)
            for target, gradient in zip(targets, found, strict=False)
        ]
        return operands, [*written, *found[3:5]]


def layout_of(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Dense | Packed:
    """The layout of packed sequences or of a padded batch; `backward` supports no mixtures.

    A missing longest length becomes the number of all tokens, an upper bound that the host knows.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return Dense()
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise NotImplementedError("cu_seqlens_q, cu_seqlens_k: got one of them, want both or none")
    M = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    N = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    return Packed(cu_seqlens_q, cu_seqlens_k, M, N)


def _softmax_d(dout: Tensor, out: Tensor, operands: Operands) -> Tensor:
    """Row sums of dout * out, in the extension's padded layout."""
    sums = (dout.float() * out.float()).sum(-1)
    cu_seqlens = operands.cu_seqlens_q
    if cu_seqlens is None:
        return F.pad(sums.transpose(1, 2), (0, -sums.shape[1] % BLOCK))
    B, (total, heads) = cu_seqlens.shape[0] - 1, sums.shape
    padded = sums.new_zeros(heads, total + BLOCK * B)
    if B == 0:
        return padded
    rows = torch.arange(total, device=sums.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), rows, right=True).clamp(max=B - 1)
    return padded.index_copy(1, rows + BLOCK * sequence, sums.t())


def _check_generator(generator: Any) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise RuntimeError(
            f"the `generator` argument is no longer supported as a {type(generator).__name__}; "
            "want a torch.Generator or None"
        )


def _check_shape(name: str, x: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want {wanted}")
