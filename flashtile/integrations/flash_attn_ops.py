"""The operators ``torch.ops.flash_attn`` and ``torch.ops.flash_attn_3``, which other projects call
or find in profiles. They record no gradient, as in flash_attn.

``torch.compile`` refuses FlashAttention-3's ``fwd`` and ``bwd``, whose results may be their
arguments; it takes the other operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..operators import SCHEMA_TYPES

_WRITTEN = ("dq", "dk", "dv", "out", "out_")
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"

# Namespace -> (module, its functions and what they return).
_OPERATORS = {
    "flash_attn": (
        "flash_attn_2_interface",
        {
            "_flash_attn_forward": _FOUR,
            "_flash_attn_varlen_forward": _FOUR,
            "_flash_attn_backward": "Tensor",
            "_flash_attn_varlen_backward": "Tensor",
        },
    ),
    "flash_attn_3": (
        "flash_attn_3_interface",
        {"_flash_attn_forward": _FOUR, "_flash_attn_backward": "Tensor"},
    ),
}

# The compiled operators of FlashAttention-3: their schemas, of flash_api_stable.cpp.
_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, "
    "Tensor(a!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(a!), Tensor, Tensor, Tensor)"
)
_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0, "
    "bool deterministic=False, int sm_margin=0) -> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor, "
    "Tensor, Tensor, Tensor, Tensor)"
)


def register(namespace: str) -> torch.library.Library | None:
    """Register the operators of a namespace until the library is destroyed; None if another
    package has registered them.
    """
    name, functions = _OPERATORS[namespace]
    module: Any = import_module(f"..{name}", __package__)
    if hasattr(getattr(torch.ops, namespace), next(iter(functions))):
        return None
    library = torch.library.Library(namespace, "FRAGMENT")
    for operator, returned in functions.items():
        function = getattr(module, operator)
        _add(library, _schema(operator, function, returned), function)
    if namespace == "flash_attn_3":
        _add(library, _FWD, module._flash_attn_forward)
        _add(library, _BWD, partial(_bwd, module._flash_attn_backward))
        combine = _schema("fwd_combine", module.flash_attn_combine, "(Tensor, Tensor)")
        _add(library, combine, module.flash_attn_combine)
    return library


def _schema(operator: str, function: Callable[..., Any], returned: str) -> str:
    arguments = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            kind, default = SCHEMA_TYPES[parameter.annotation], parameter.default
            if name in _WRITTEN and kind == "Tensor?":
                kind = f"Tensor({name}!)?"
            shown = "" if default is parameter.empty else f"={default}"
            arguments.append(f"{kind} {name}{shown}")
    return f"{operator}({', '.join(arguments)}) -> {returned}"


def _add(library: torch.library.Library, schema: str, function: Callable[..., Any]) -> None:
    operator = library.define(schema)
    defaults = [x.default_value for x in torch._C.parse_schema(schema).arguments]

    def run(*given: Any) -> Any:  # without the last arguments that have their default
        return function(*given, *defaults[len(given) :])

    # The function is made of operators that have fakes, so it is its own.
    library.impl(operator, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{operator}", run, lib=library)


def _bwd(backward: Callable[..., Tensor], *given: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv, softmax_d) of FlashAttention-3, and four empty tensors for its work space; the
    arguments are those of `_BWD`.
    """
    results, targets, lengths, rest = given[:6], given[6:9], given[9:15], given[15:]
    q, k, v = results[1:4]
    dq, dk, dv = (
        torch.empty_like(x) if y is None else y for x, y in zip((q, k, v), targets, strict=True)
    )
    softmax_d = backward(*results, *lengths, dq, dk, dv, *rest)
    return (dq, dk, dv, softmax_d, *(q.new_empty(0, dtype=torch.float32) for _ in range(4)))
