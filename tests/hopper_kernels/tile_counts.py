"""Runs the Hopper kernels of a head dim with no, one and many tiles for each program.

    python tests/hopper_kernels/tile_counts.py HEAD_DIM MASK

A process of its own, so that whoever starts it can end it when a kernel does not. Each line is
printed before its kernels are launched.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch

import flashtile
from flashtile.testing import cu_seqlens

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (80, 0)},
    "chunk": {"attention_chunk": 100},
}


def tensors(*leading: int, heads: int, head_dim: int) -> torch.Tensor:
    """Random numbers that want a gradient."""
    shape = (*leading, heads, head_dim)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def dense(head_dim: int, count: int, N: int, **options: Any) -> None:
    """`count` heads of 65 queries, which are a tile of the forward each, and N keys."""
    q, k, v = (tensors(1, n, heads=count, head_dim=head_dim) for n in (65, N, N))
    out = flashtile.attention(q, k, v, backend="hopper", **options)
    finish(out, [q, k, v])


def packed(head_dim: int, lengths: list[int], **options: Any) -> None:
    """Sequences of these lengths; room for as many tiles as 2,000 tokens in each would have."""
    cu = cu_seqlens(lengths).cuda()
    q, k, v = (tensors(sum(lengths) + 1, heads=2, head_dim=head_dim) for _ in range(3))
    out = flashtile.attention_varlen(q, k, v, cu, cu, 2000, 2000, backend="hopper", **options)
    finish(out, [q, k, v])


def finish(out: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """The backward, and wait for everything."""
    gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in (out, *gradients))


def main(head_dim: int, mask: str) -> None:
    """A mask, ordered and not, over fewer, as many and more tiles than there are programs."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    counts = (1, programs - 1, programs, programs + 1, 5 * programs + 3)
    batches = ([0], [1], [0, 0, 0], [2000], [0, 1, 700, 0], [65] * 40, [3] * 200)
    for deterministic in (False, True):
        chosen = {**MASKS[mask], "deterministic": deterministic}
        for count, N in itertools.product(counts, (1, 65, 400)):
            print(f"dense {head_dim}: {count} heads, {N} keys, {chosen}", flush=True)
            dense(head_dim, count, N, **chosen)
        for lengths in batches:
            print(f"packed {head_dim}: {lengths[:5]} of {len(lengths)}, {chosen}", flush=True)
            packed(head_dim, lengths, **chosen)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    # PyTorch's autograd threads can abort an interpreter that ends (pytorch/pytorch#190489), and
    # the exit status is only about the kernels.
    os._exit(0)
