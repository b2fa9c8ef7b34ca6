"""Lesson 7: the lesson's kernels next to flashtile's own Triton kernels, on a CUDA device.

python -m examples.learn.triton_times
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import flashtile

from .traffic import seconds


def times(attend: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """The times of a forward pass, and of one with its backward pass."""
    forward = seconds(lambda: attend(x), "cuda")
    step = seconds(lambda: attend(x).sum().backward(), "cuda")
    return f"{1e3 * forward:8.3f} ms {1e3 * step:8.3f} ms"


def main() -> None:
    """Causal attention of 16 heads of 128, in bfloat16."""
    if not torch.cuda.is_available():
        print("This machine has no CUDA device: nothing is timed.")
        return
    from .triton_attention import TritonAttention

    print("forward, then forward and backward")
    for N in (1024, 4096, 16384):
        x = torch.randn(16, N, 128, device="cuda", dtype=torch.bfloat16)
        dense = x.transpose(0, 1)[None].contiguous().requires_grad_()  # (1, seq, heads, head_dim)
        lesson = times(lambda x: TritonAttention.apply(x, x, x, True), x.requires_grad_())
        own = times(lambda x: flashtile.attention(x, x, x, causal=True, backend="triton"), dense)
        print(f"{N:6} tokens: the lesson {lesson}; flashtile {own}")


if __name__ == "__main__":
    main()
