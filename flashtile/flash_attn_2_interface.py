"""``flash_attn.flash_attn_interface`` of FlashAttention-2, with all names that other projects
import from it.

The private functions have FlashAttention-2's positional order, keywords and results. The public
functions are those of `flash_attn_interface`, except that `return_attn_probs` returns S_dmask
(`flash_attn_2_cuda.s_dmask`; empty without dropout) instead of probabilities. `flash_attn_2_cuda`
lists the differences from FlashAttention-2.

Source: FlashAttention 2.8.4, ``flash_attn/flash_attn_interface.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import flash_attn_2_cuda as flash_attn_gpu
from . import flash_attn_interface as ours

USE_TRITON_ROCM = False


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """`x` with a contiguous last dimension."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """The smallest multiple of `m` that is at least `x`."""
    return (x + m - 1) // m * m


def _get_block_size_n(
    device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """Number of keys among which S_dmask takes the largest score: in flashtile always all keys."""
    return 2**31 - 1


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """(out, softmax_lse, S_dmask, rng_state) of `flash_attn_2_cuda.fwd`."""
    mask = (causal, window_size_left, window_size_right)
    call = (q, k, v, None, alibi_slopes, dropout_p, softmax_scale, *mask, softcap)
    return tuple(flash_attn_gpu.fwd(*call, return_softmax, generator))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """(out, softmax_lse, S_dmask, rng_state) of `flash_attn_2_cuda.varlen_fwd`."""
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table)
    numbers = (max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors)
    mask = (causal, window_size_left, window_size_right)
    call = (q, k, v, None, *lengths, alibi_slopes, *numbers, *mask, softcap)
    return tuple(flash_attn_gpu.varlen_fwd(*call, return_softmax, generator, num_splits))


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients into dq, dk and dv; returns softmax_d of `flash_attn_2_cuda.bwd`."""
    tensors = (dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes)
    mask = (causal, window_size_left, window_size_right)
    call = (*tensors, dropout_p, softmax_scale, *mask, softcap)
    return flash_attn_gpu.bwd(*call, deterministic, None, rng_state)[3]


def _flash_attn_varlen_backward(
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write the gradients into dq, dk and dv; returns softmax_d of
    `flash_attn_2_cuda.varlen_bwd`.
    """
    tensors = (dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k)
    numbers = (max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors)
    mask = (causal, window_size_left, window_size_right)
    call = (*tensors, alibi_slopes, *numbers, *mask, softcap)
    return flash_attn_gpu.varlen_bwd(*call, deterministic, None, rng_state)[3]


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _returning_s_dmask(function: Callable[..., Any]) -> Any:
    """Wrap a function of `flash_attn_interface` to return S_dmask instead of probabilities."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not given.get("return_attn_probs", False):
            return function(*args, **kwargs)
        if given.get("dropout_p", 0.0) > 0.0:
            out, lse, probabilities = function(*args, **kwargs)
            return out, lse, flash_attn_gpu.s_dmask(probabilities)
        out, lse = function(**{**given, "return_attn_probs": False, "return_lse": True})
        return out, lse, out.new_empty(0)

    return call


flash_attn_func = _returning_s_dmask(ours.flash_attn_func)
flash_attn_kvpacked_func = _returning_s_dmask(ours.flash_attn_kvpacked_func)
flash_attn_qkvpacked_func = _returning_s_dmask(ours.flash_attn_qkvpacked_func)
flash_attn_varlen_func = _returning_s_dmask(ours.flash_attn_varlen_func)
flash_attn_varlen_kvpacked_func = _returning_s_dmask(ours.flash_attn_varlen_kvpacked_func)
flash_attn_varlen_qkvpacked_func = _returning_s_dmask(ours.flash_attn_varlen_qkvpacked_func)
flash_attn_with_kvcache = ours.flash_attn_with_kvcache


def _class_of(name: str, function: Callable[..., Any], parameters: int) -> Any:
    """A class whose ``apply`` takes the function's parameters, then `is_grad_enabled`."""

    def apply(*args: Any) -> Any:
        is_grad_enabled = args[parameters] if len(args) > parameters else True
        with torch.set_grad_enabled(is_grad_enabled and torch.is_grad_enabled()):
            return function(*args[:parameters])

    text = f"`{function.__name__}` as the ``apply`` of a class, with positional arguments."
    return type(name, (), {"__doc__": text, "__module__": __name__, "apply": staticmethod(apply)})


FlashAttnFunc = _class_of("FlashAttnFunc", flash_attn_func, 11)
FlashAttnKVPackedFunc = _class_of("FlashAttnKVPackedFunc", flash_attn_kvpacked_func, 10)
FlashAttnQKVPackedFunc = _class_of("FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func, 9)
FlashAttnVarlenFunc = _class_of("FlashAttnVarlenFunc", flash_attn_varlen_func, 16)
FlashAttnVarlenKVPackedFunc = _class_of(
    "FlashAttnVarlenKVPackedFunc", flash_attn_varlen_kvpacked_func, 14
)
FlashAttnVarlenQKVPackedFunc = _class_of(
    "FlashAttnVarlenQKVPackedFunc", flash_attn_varlen_qkvpacked_func, 11
)
