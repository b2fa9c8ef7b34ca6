"""Add flashtile to PyTorch's registry of flash attention implementations.

::

    from torch.nn.attention import activate_flash_attention_impl
    from flashtile.integrations import torch_registry

    activate_flash_attention_impl(torch_registry.register())

From then on ``scaled_dot_product_attention`` uses flashtile wherever PyTorch chooses its flash
kernel. ``torch.nn.attention.varlen.varlen_attn`` always uses flashtile, on CUDA and also on the
CPU, for which PyTorch has no such kernel. ``restore_flash_attention_impl`` undoes both.

`sdpa.install` covers more: every mask, dtype and head dim, and dropout on the CPU. The registry
also affects code that calls PyTorch's operators instead of ``torch.nn.functional``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import flash_attn_2_cuda as flash
from .. import operators
from ..api import attention
from ..autocast import without_autocast
from ..call.layouts import Dense
from ..call.prepare import prepare
from ..operators import ops

NAME = "flashtile"


def register() -> str:
    """Register flashtile for ``torch.nn.attention.activate_flash_attention_impl``.

    Returns:
        "flashtile", the name to activate. Nothing changes before its activation.

    Raises:
        ImportError: this PyTorch has no registry of flash attention.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise ImportError(
            "torch.nn.attention.register_flash_attention_impl: got torch "
            f"{torch.__version__}, want 2.13 or newer; flashtile.integrations.sdpa.install() works "
            "with every version"
        ) from None
    register_flash_attention_impl(NAME, register_fn=_Activation)
    return NAME


class _Activation:
    """Puts our kernels into PyTorch's dispatcher until `remove`. PyTorch keeps this object."""

    def __init__(self) -> None:
        self._native = operators.native_forward, operators.native_backward
        operators.native_forward = _kernel(_SDPA_CPU)
        operators.native_backward = _kernel(f"{_SDPA_CPU}_backward")
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # of overrides
            for key, implementations in (("CPU", _ON_CPU | _EVERYWHERE), ("CUDA", _EVERYWHERE)):
                for name, function in implementations.items():
                    self._library.impl(name, function, key)

    def remove(self) -> None:
        """Give the operators back to PyTorch."""
        self._library._destroy()
        operators.native_forward, operators.native_backward = self._native


def _kernel(name: str) -> Callable[..., Any]:
    """PyTorch's own CPU kernel of an operator. Our CPU backend calls it directly, because the
    operator would call flashtile again.
    """
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel.call_boxed(keys, *args, **kwargs)

    return call


@without_autocast
def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_forward``, FlashAttention-2's forward; causal is bottom-right."""
    window = (_side(window_size_left), _side(window_size_right))
    tail = (0.0, return_debug_mask)  # softcap
    if cum_seq_q is None:
        if seqused_k is not None or block_table is not None:
            raise NotImplementedError("seqused_k, block_table: need cum_seq_q, got None")
        results = flash.fwd(
            query, key, value, out, alibi_slopes, dropout_p, scale, is_causal, *window, *tail
        )
    else:
        offsets = cum_seq_q.int(), _key_offsets(cum_seq_k, seqused_k)
        keys = seqused_k, None, block_table, alibi_slopes  # no leftpad_k
        numbers = max_q, max_k, dropout_p, scale, False, is_causal  # no zero_tensors
        call = query, key, value, out, *offsets, *keys, *numbers, *window, *tail
        results = flash.varlen_fwd(*call, num_splits=num_splits or 0)
    result, lse, debug_mask, rng_state = results
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return result, lse, rng_state.view(torch.uint64), unused, debug_mask


def _flash_forward_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: writes `out`, returns the lse."""
    dropout_p = args[7]  # after q, k, v, offsets and lengths
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p: got {dropout_p}, want 0.0 when `out` is given")
    return _flash_forward(*args, **kwargs, out=out)[1]


@without_autocast
def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_backward``."""
    options: dict[str, Any] = {
        "alibi_slopes": None,
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size_left": _side(window_size_left),
        "window_size_right": _side(window_size_right),
        "softcap": 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "rng_state": rng_state.view(torch.int64) if dropout_p > 0 else None,
        "dq": None,
        "dk": None,
        "dv": None,
    }
    if cum_seq_q is None or cum_seq_k is None:
        gradients = flash.bwd(grad_out, query, key, value, out, logsumexp, **options)
    else:
        options |= {"cu_seqlens_q": cum_seq_q.int(), "cu_seqlens_k": cum_seq_k.int()}
        options |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k, "zero_tensors": False}
        gradients = flash.varlen_bwd(grad_out, query, key, value, out, logsumexp, **options)
    return tuple(gradients[:3])


def _sdpa_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``, (batch, heads, seq, head_dim).

    Causal is bottom-right, as in PyTorch's kernel: SDPA calls it only with equal lengths, and
    ``causal_lower_right`` also with others.
    """
    M, N = query.shape[2], key.shape[2]
    out = query.new_empty(*query.shape[:3], value.shape[3])
    out = torch.empty_like(query) if out.shape == query.shape else out  # the strides of the query
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    call = (q, k, v, None, None, M, N, dropout_p, is_causal, return_debug_mask)
    results = _flash_forward(*call, scale=scale, out=out.transpose(1, 2))
    _, lse, rng_state, unused, debug_mask = results
    return out, lse, None, None, M, N, rng_state, unused, debug_mask


def _sdpa_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    dout, q, k, v, result = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    tensors = (dout, q, k, v, result, logsumexp, None, None)
    call = (*tensors, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    gradients = _flash_backward(*call, scale=scale)
    return tuple(gradient.transpose(1, 2) for gradient in gradients)


@without_autocast
def _sdpa_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; causal is top-left.

    As in PyTorch, the log-sum-exp is stored as (batch, seq, heads) in memory.
    """
    q, k, v, options = _cpu_call(query, key, value, dropout_p, is_causal, attn_mask)
    with torch.no_grad():
        out, lse, *_ = attention(q, k, v, softmax_scale=scale, return_lse=True, **options)
    result = torch.empty_like(query) if query.shape[-1] == value.shape[-1] else out.transpose(1, 2)
    result = result.copy_(out.transpose(1, 2))
    return result, lse.transpose(1, 2).contiguous().transpose(1, 2)


@without_autocast
def _sdpa_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_scaled_dot_product_flash_attention_for_cpu_backward``."""
    q, k, v, options = _cpu_call(query, key, value, dropout_p, is_causal, attn_mask)
    with torch.no_grad():
        problem, operands, *_ = prepare((q, k, v), Dense(), {"softmax_scale": scale, **options})
        dout, result = grad_out.transpose(1, 2), out.transpose(1, 2)
        dq, dk, dv, *_ = ops.attention_backward(
            dout, None, result, logsumexp, False, *operands, *problem.options
        )
    unseen = (0, 0, 0, 0, 0, key.shape[2] - dk.shape[1])
    dk, dv = (torch.nn.functional.pad(x, unseen) for x in (dk, dv))
    return tuple(gradient.transpose(1, 2) for gradient in (dq, dk, dv))


def _cpu_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v as (batch, seq, heads, head_dim), and the options of `attention`."""
    if dropout_p != 0.0:  # the operator cannot pass the random state to its backward
        raise NotImplementedError(
            f"dropout_p: got {dropout_p}, want 0.0; the CPU operator has no dropout, use "
            "flashtile.integrations.sdpa"
        )
    options: dict[str, Any] = {}
    M = query.shape[2]
    if is_causal:  # top-left: no query sees keys from M on; dropping them makes M >= N
        key, value = key[:, :, :M], value[:, :, :M]
        attn_mask = None if attn_mask is None else attn_mask[..., :M]
        options["window_size"] = (-1, M - key.shape[2])
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden, attn_mask = ~attn_mask, torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.masked_fill(hidden, float("-inf"))
        options["bias"] = attn_mask.detach()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return q, k, v, options


def _side(window_size: int | None) -> int:
    return -1 if window_size is None else window_size


def _key_offsets(cum_seq_k: Tensor | None, seqused_k: Tensor | None) -> Tensor:
    """Offsets of the keys; with pages they may come from the lengths only."""
    if cum_seq_k is not None:
        return cum_seq_k.int()
    if seqused_k is None:
        raise ValueError("cum_seq_k: got None, want cumulative lengths or, with pages, seqused_k")
    return torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int()


_SDPA_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_ON_CPU = {_SDPA_CPU: _sdpa_cpu, f"{_SDPA_CPU}_backward": _sdpa_cpu_backward}
_EVERYWHERE: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_inplace,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa_flash,
    "_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
}
