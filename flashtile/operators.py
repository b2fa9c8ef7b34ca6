"""The namespace of flashtile's operators, ``torch.ops.flashtile``; the FLOP formulas of attention;
and PyTorch's own operators of attention on a CPU, which the CPU backend calls for each tile.

One process may load several copies of the package under other names, for example two versions by
Hugging Face's ``kernels``. The first copy has this namespace, the next ones have ``flashtile_2``,
``flashtile_3`` and so on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.library import Library


def _new_library() -> Library:
    for copy in count(1):
        try:
            return Library("flashtile" if copy == 1 else f"flashtile_{copy}", "DEF")
        except RuntimeError as error:
            if "Only a single TORCH_LIBRARY" not in str(error):
                raise
    raise AssertionError


library = _new_library()
ops = getattr(torch.ops, library.ns)


# The types that an operator's arguments have in its schema.
SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    bool | None: "bool?",
    str: "str",
    torch.dtype | None: "ScalarType?",
}


def schema_of(fields: type) -> str:
    """The arguments of an operator that takes the fields of a NamedTuple one after the other."""
    return ", ".join(
        f"{SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(fields).items()
    )


def register_fake(name: str, function: Callable[..., Any]) -> None:
    """Register what operator `name` returns for tensors without data."""
    torch.library.register_fake(f"{library.ns}::{name}", function, lib=library)


# Code that replaces PyTorch's operators with flashtile's puts the original kernels here. Otherwise
# the backend would call itself through the replaced operators.
native_forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
native_backward: Callable[..., Any]
native_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# FLOP formulas for ``torch.utils.flop_counter``: those of SDPA, which ignore masks.
#
# ``torch.utils.flop_counter`` imports Triton if it is installed, so nothing here imports it. The
# formulas are registered once other code has imported the counter, as every process that counts
# FLOPs does.


_flops_lock = threading.Lock()
_flops_are_registered = False


def register_flops_when_counting() -> None:
    """Register the formulas, once, if this process has imported PyTorch's counter."""
    global _flops_are_registered
    if _flops_are_registered or "torch.utils.flop_counter" not in sys.modules:
        return
    with _flops_lock:
        if not _flops_are_registered:
            _register_flops()
            _flops_are_registered = True


def _register_flops() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import (
        flop_registry,
        register_flop_formula,
        sdpa_backward_flop_count,
        sdpa_flop_count,
    )

    def forward(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return sdpa_flop_count(*_dense_shapes(args))

    def backward(dout: Any, dlse: Any, out: Any, lse: Any, *args: Any, **kwargs: Any) -> int:
        _bias_needs_grad, *operands = args
        q, k, v = _dense_shapes(operands)
        return sdpa_backward_flop_count((*q[:-1], v[-1]), q, k, v)

    register_flop_formula([ops.attention_forward, ops.attention_forward_in_workspace])(forward)
    register_flop_formula(ops.attention_backward)(backward)
    # A counter copies the registry when it is created, so counters that already run are updated.
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "counter"):
            mode.counter.flop_registry.update(flop_registry)


def _dense_shapes(args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Shapes of q, k, v as (batch, heads, length, head_dim); the arguments arrive as shapes."""
    q, k, v = args[:3]
    if len(q) == 3:  # packed: counted as one long sequence, an upper bound
        q, k, v = ((1, *x) if len(x) == 3 else (1, x[0] * x[1], *x[2:]) for x in (q, k, v))
    heads = q[2]  # every query head multiplies, also where query heads share a key head
    return (
        (q[0], heads, q[1], q[3]),
        (q[0], heads, k[1], k[3]),
        (q[0], heads, v[1], v[3]),
    )
