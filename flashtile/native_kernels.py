"""PyTorch's own flash attention kernels for CPUs, which the CPU backend calls for each tile.

Code that replaces PyTorch's operators with flashtile's puts the original kernels here. Otherwise
the backend would call itself through the replaced operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Kernel = Callable[..., Any]

forward: Kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward: Kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
