"""Limits of split-KV partial results, which a caller's workspace must hold.

They depend only on sizes, not on lengths on the GPU, so one workspace serves a captured graph whose
caches grow.
"""

from __future__ import annotations

import torch

from .hardware import multiprocessors

MAX_SPLITS = 256
# Largest number of rows of partial results per multiprocessor; a row belongs to one query, head and
# part. More rows would take much memory and save little time.
MOST_PART_ROWS = 512


def workspace_size(
    tokens: int, heads: int, value_head_dim: int, num_splits: int, device: torch.device
) -> int:
    """Largest size in bytes of the partial results of calls with up to `tokens` query tokens."""
    rows = tokens * heads
    if device.type == "cpu" or num_splits == 1:
        return 0
    parts = num_splits * rows
    if num_splits == 0:
        parts = min(MAX_SPLITS * rows, MOST_PART_ROWS * multiprocessors(device))
    # A row maximum and a row sum beside the output, which with most options are one number.
    return parts * (value_head_dim + 2) * torch.float32.itemsize
