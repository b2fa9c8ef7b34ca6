"""The namespace of flashtile's operators, ``torch.ops.flashtile``, and PyTorch's own operators of
attention on a CPU, which the CPU backend calls for each tile.

One process may load several copies of the package under other names, for example two versions by
Hugging Face's ``kernels``. The first copy has this namespace, the next ones have ``flashtile_2``,
``flashtile_3`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
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


def register_fake(name: str, function: Callable[..., Any]) -> None:
    """Register what operator `name` returns for tensors without data."""
    torch.library.register_fake(f"{library.ns}::{name}", function, lib=library)


# Code that replaces PyTorch's operators with flashtile's puts the original kernels here. Otherwise
# the backend would call itself through the replaced operators.
native_forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
native_backward: Callable[..., Any]
native_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
