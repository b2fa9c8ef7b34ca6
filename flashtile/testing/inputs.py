"""Makers of test inputs: seeded, odd sizes, awkward strides, packed, paged, block-sparse."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from ..dropout import draw_rng_state, keep_mask

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

ODD_LENGTHS = (1, 2, 3, 7, 17, 31, 33, 63, 65, 127, 129)
ODD_HEAD_DIMS = (1, 3, 8, 20, 33, 40, 64, 65)


def generator(seed: int) -> Generator:
    """A new CPU generator, so that making inputs does not advance PyTorch's global generator."""
    return Generator().manual_seed(seed)


def normal(
    g: Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """N(0, scale^2) numbers, drawn in float64 and rounded once to `dtype`."""
    return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)


def qkv(
    g: Generator,
    B: int = 2,
    M: int = 17,
    N: int = 23,
    Hq: int = 4,
    Hk: int = 2,
    D: int = 16,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, M, Hq, D), k (B, N, Hk, D), v (B, N, Hk, Dv or D)."""
    return (
        normal(g, B, M, Hq, D, dtype=dtype),
        normal(g, B, N, Hk, D, dtype=dtype),
        normal(g, B, N, Hk, D if Dv is None else Dv, dtype=dtype),
    )


def strided(x: Tensor, style: str) -> Tensor:
    """The same values in an awkward layout.

    `style`: `contiguous`; `transposed` (heads before length); `sliced` (every second element of a
    larger buffer, with a storage offset); `offset` (contiguous, away from its storage's start).
    """
    if style == "contiguous":
        return x.contiguous()
    if style == "transposed":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if style == "sliced":
        buffer = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 3)
        view = buffer[..., 3::2]
        view.copy_(x)
        return view
    if style == "offset":
        buffer = x.new_zeros(x.numel() + 5)
        view = buffer[5:].view(x.shape)
        view.copy_(x)
        return view
    raise ValueError(f"style: got {style!r}, want one of {STRIDE_STYLES}")


STRIDE_STYLES = ("contiguous", "transposed", "sliced", "offset")


def cu_seqlens(lengths: list[int]) -> Tensor:
    """Lengths as cumulative int32 (B + 1,), starting at 0."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_qkv(
    g: Generator,
    lengths_q: list[int],
    lengths_k: list[int],
    Hq: int = 4,
    Hk: int = 2,
    D: int = 16,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv or D)."""
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    return (
        normal(g, total_q, Hq, D, dtype=dtype),
        normal(g, total_k, Hk, D, dtype=dtype),
        normal(g, total_k, Hk, D if Dv is None else Dv, dtype=dtype),
    )


def paged(
    g: Generator, dense: Tensor, page_size: int, *, shared: int = 0, spare: int = 2
) -> tuple[Tensor, Tensor]:
    """Cut a cache (B, S, H, D) into shuffled pages.

    Returns pages (num_pages, page_size, H, D) and page_table (B, ceil(S / page_size)) int32. The
    unused end of a last page holds NaN. All sequences share the first `shared` pages of sequence 0.
    `spare` pages belong to no sequence and hold NaN.
    """
    B, S, H, D = dense.shape
    columns = -(-S // page_size)
    cut = dense.new_full((B, columns * page_size, H, D), math.nan)
    cut[:, :S] = dense
    cut = cut.view(B, columns, page_size, H, D)
    owners = [(b, c) for b in range(B) for c in range(columns) if b == 0 or c >= shared]
    order = torch.randperm(len(owners) + spare, generator=g)
    pages = dense.new_full((len(owners) + spare, page_size, H, D), math.nan)
    table = torch.zeros(B, columns, dtype=torch.int32)
    for slot, (b, c) in zip(order.tolist(), owners, strict=False):
        pages[slot] = cut[b, c]
        table[b, c] = slot
    table[:, :shared] = table[:1, :shared].clone()
    return pages, table


def tile_kinds(g: Generator, *shape: int, density: float = 0.6) -> Tensor:
    """A random layout of tiles, bool `shape` = (..., nM, nN), True where visible."""
    return torch.rand(*shape, generator=g) < density


def dense_from_tiles(kinds: Tensor, tile_size: tuple[int, int], M: int, N: int) -> Tensor:
    """Expand a layout of full and empty tiles (..., nM, nN) to bool (..., M, N)."""
    rows = torch.arange(M) // tile_size[0]
    cols = torch.arange(N) // tile_size[1]
    return kinds.bool()[..., rows[:, None], cols[None, :]]


def drawn_keep(
    seed: int, dropout_p: float, sizes: tuple[int, int, int, int], device: torch.device | str
) -> Tensor:
    """The dropout mask of a call on `device` right after ``torch.manual_seed(seed)``: bool `sizes`.

    `sizes` are B, Hq, M and N, of packed sequences the longest lengths. Each device has a generator
    of its own, but one seed gives one mask on all of them.
    """
    torch.manual_seed(seed)
    state = draw_rng_state(torch.device(device)).cpu()
    return keep_mask(state, dropout_p, *(torch.arange(size) for size in sizes))


def alibi_slopes(g: Generator, heads: int, batch: int | None = None) -> Tensor:
    """Slopes float32 (Hq,) or (B, Hq), between 0 and 1."""
    return torch.rand(*((heads,) if batch is None else (batch, heads)), generator=g)


def rotary_tables(
    length: int, rotary_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos, sin (length, rotary_dim / 2), base 10000 (Su et al., RoFormer, section 3.4.2)."""
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)
