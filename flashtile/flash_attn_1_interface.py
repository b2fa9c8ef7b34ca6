"""The functions of packed sequences of ``flash_attn.flash_attn_interface`` 1.

They are those of `flash_attn_interface` under older names, in another positional order. In
FlashAttention 1 the causal mask starts at the top-left corner, and the log-sum-exp is padded; a
call that would get another result here is refused.

Source: FlashAttention 1.0.9, ``flash_attn/flash_attn_interface.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch

from . import flash_attn_interface as ours


def _older(function: Callable[..., Any]) -> Any:
    """A function with the parameters that it had in FlashAttention 1."""
    given = inspect.signature(function).parameters
    names = takewhile(lambda name: name != "window_size", given)
    order = (*names, "return_attn_probs", "deterministic")
    signature = inspect.Signature([given[name] for name in order])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("return_attn_probs", False):
            raise NotImplementedError(
                "return_attn_probs: got True, want False; FlashAttention 1 pads the log-sum-exp; "
                f"use {function.__name__}"
            )
        lengths = [x for name, x in arguments.items() if name.startswith("cu_seqlens")]
        # The host waits for the GPU only if queries and keys have lengths of their own.
        is_square = lengths[0] is lengths[-1] or not arguments.get("causal", False)
        if not is_square and not torch.equal(*lengths):
            raise NotImplementedError(
                "causal: got True, want False when queries and keys have other lengths; the mask "
                f"of FlashAttention 1 starts at the top left; use {function.__name__}"
            )
        return function(**arguments)

    vars(call)["__signature__"] = signature
    return call


flash_attn_unpadded_func = _older(ours.flash_attn_varlen_func)
flash_attn_unpadded_kvpacked_func = _older(ours.flash_attn_varlen_kvpacked_func)
flash_attn_unpadded_qkvpacked_func = _older(ours.flash_attn_varlen_qkvpacked_func)
