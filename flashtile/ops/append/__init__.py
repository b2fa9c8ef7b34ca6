"""The ops ``flashtile::kvcache_append`` and ``flashtile::kvcache_rotate_append``, which append new
tokens to a cache in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...autocast import without_autocast
from ...operators import library, register_fake
from . import formula

library.define(
    "kvcache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor lengths, "
    "Tensor? cu_seqlens_k_new, Tensor? page_table, Tensor? cache_batch_idx, Tensor? k_descale, "
    "Tensor? v_descale) -> Tensor"
)
library.define(
    "kvcache_rotate_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor cos, Tensor sin, Tensor lengths, Tensor base, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k_new, Tensor? page_table, Tensor? cache_batch_idx, Tensor? k_descale, "
    "Tensor? v_descale, bool interleaved, bool own_positions) -> (Tensor, Tensor)"
)


@without_autocast
def append_on_gpu(k_cache: Tensor, v_cache: Tensor, *args: Any) -> Tensor:
    """`formula.append` by one kernel launch, without a device synchronisation."""
    from . import kernel

    used = kernel.append(k_cache, v_cache, *args)
    record_write(k_cache, v_cache)
    return used


@without_autocast
def rotate_and_append_on_gpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    """`formula.rotate_and_append` by one kernel launch, without a device synchronisation."""
    from . import kernel

    q_rotated, used = kernel.rotate_and_append(q, k_cache, v_cache, *args)
    record_write(k_cache, v_cache)
    return q_rotated, used


def record_write(*caches: Tensor) -> None:
    """Tell autograd that the caches changed, so that a backward that saved one of them raises.

    PyTorch sees neither what a kernel writes nor what an op's schema says that it writes.
    """
    torch.autograd.graph.increment_version([x for x in caches if not x.is_inference()])


def _fake_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *args: Any
) -> Tensor:
    return lengths.new_empty(lengths.shape, dtype=torch.int32)


def _fake_rotate_and_append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), lengths.new_empty(lengths.shape, dtype=torch.int32)


library.impl("kvcache_append", formula.append, "CPU")
library.impl("kvcache_append", append_on_gpu, "CUDA")
library.impl("kvcache_rotate_append", formula.rotate_and_append, "CPU")
library.impl("kvcache_rotate_append", rotate_and_append_on_gpu, "CUDA")
register_fake("kvcache_append", _fake_append)
register_fake("kvcache_rotate_append", _fake_rotate_and_append)
