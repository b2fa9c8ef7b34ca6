"""Lesson 1: what attention computes and what it moves.

    python -m examples.learn.traffic

measures this machine: its speed of products and of copies, and both kinds of attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashtile

from .flash_attention_1 import block_sizes

LENGTHS = (512, 1024, 2048, 4096)  # that are measured

# Numbers read from and written to slow memory, for one head with N queries and N keys.


def standard_traffic(N: int, d: int) -> int:
    """S = Q K^T, P = softmax(S) and O = P V, each from memory to memory."""
    scores = 2 * N * d + N * N
    softmax = 2 * N * N
    output = N * N + 2 * N * d
    return scores + softmax + output


def flash_attention_1_traffic(N: int, d: int, fast_memory: int) -> int:
    """K and V once; Q, O, l and m for every tile of keys."""
    _, B_c = block_sizes(fast_memory, d)
    per_tile_of_keys = N * d + 2 * (N * d + 2 * N)
    return 2 * N * d + math.ceil(N / B_c) * per_tile_of_keys


def flash_attention_2_traffic(N: int, d: int, B_r: int) -> int:
    """Q, O and L once; K and V for every tile of queries."""
    return 2 * N * d + N + math.ceil(N / B_r) * 2 * N * d


def operations(N: int, d: int) -> int:
    """Of the two products: a multiplication and an addition each."""
    return 4 * N * N * d


# Measurements


def seconds(call: Callable[[], Any], device: str, least: float = 0.2) -> float:
    """The least time of a call, from calls that take `least` seconds together."""
    call()  # a first call also allocates, and on a GPU it compiles
    best, stop = math.inf, time.perf_counter() + least
    while best == math.inf or time.perf_counter() < stop:
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: str) -> None:
    if device == "cuda":  # calls return before the GPU has finished
        torch.cuda.synchronize()


def product_speed(device: str, n: int = 1024) -> float:
    """Operations a second of a product of two n x n matrices."""
    a = torch.randn(n, n, device=device)
    return 2 * n**3 / seconds(lambda: a @ a, device)


def copy_speed(device: str, n: int = 2**25) -> float:
    """Bytes a second that a copy reads and writes."""
    a = torch.randn(n, device=device)
    b = torch.empty_like(a)
    return 2 * 4 * n / seconds(lambda: b.copy_(a), device)


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (batch, seq, heads, d) as it is written."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    S = q @ k.mT / math.sqrt(q.shape[-1])
    return (torch.softmax(S, dim=-1) @ v).transpose(1, 2)


def attention_times(N: int, device: str) -> list[float]:
    """Seconds of the two products, of the softmax, and of attention in both ways; 8 heads of 64."""
    q = torch.randn(1, N, 8, 64, device=device)
    S = torch.randn(1, 8, N, N, device=device)
    head = q.transpose(1, 2)
    calls: list[Callable[[], Any]] = [
        lambda: (head @ head.mT, S @ head),
        lambda: torch.softmax(S, -1),
        lambda: standard_attention(q, q, q),
        lambda: flashtile.attention(q, q, q),
    ]
    return [seconds(call, device) for call in calls]


def main() -> None:
    """Print the measurements."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    products, copies = product_speed(device), copy_speed(device)
    print(
        f"{device}: {products / 1e9:,.0f} GFLOP/s in products, {copies / 1e9:,.0f} GB/s in copies"
    )
    print(f"balance: {products / copies:.0f} operations in the time of one byte\n")
    print("     N | products alone |  softmax alone |       standard |          tiled")
    for N in LENGTHS:
        times = attention_times(N, device)
        print(f"{N:6} | " + " | ".join(f"{1e3 * t:11.2f} ms" for t in times))


if __name__ == "__main__":
    main()
