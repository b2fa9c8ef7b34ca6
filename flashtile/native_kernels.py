"""PyTorch's own flash attention kernels for CPUs, which the CPU backend calls for each tile.

Code that replaces PyTorch's operators with flashtile's passes the original kernels to
`use_kernels`. Otherwise the backend would call itself through the replaced operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Kernel = Callable[..., Any]

_kernels: tuple[Kernel, Kernel] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def kernels() -> tuple[Kernel, Kernel]:
    """The forward and the backward kernel in use."""
    return _kernels


def use_kernels(forward: Kernel, backward: Kernel) -> None:
    """Use these kernels from now on."""
    global _kernels
    _kernels = forward, backward
