"""FlexAttention's documented examples: the same functions, in flex_attention and here.

flex_attention has no backward on a CPU, so gradients are compared with the reference's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashtile
from flashtile.testing import attention_reference, generator, normal

pytestmark = pytest.mark.slow

B, Hq, Hk, M, N, D = 2, 4, 2, 64, 64, 8
WIDTH = 8  # of the image whose rows, one after the other, are the tokens
Mod = Callable[..., Tensor]

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
DOCUMENTS = torch.tensor([0] * 20 + [1] * 31 + [2] * 13)
PREFIX = torch.tensor([5, 17])
TABLE = torch.linspace(-1, 1, Hq * (M + N), dtype=torch.float64).sin().view(Hq, M + N)


def relative(score, b, h, i, j):
    return score + (i - j)


def alibi(score, b, h, i, j):
    return score + SLOPES[h] * (j - i)


def learned_bias(score, b, h, i, j):
    return score + TABLE[h, j - i + M]


def softcap(score, b, h, i, j):
    return 2 * torch.tanh(score / 2)


def checkerboard(score, b, h, i, j):
    return torch.where(torch.abs(i - j) % 2 == 1, score * 0.5, score)


def causal(b, h, i, j):
    return i >= j


def sliding_window(b, h, i, j):
    return (i >= j) & (i - j <= 10)


def prefix_lm(b, h, i, j):
    return (j < PREFIX[b]) | (i >= j)


def document(b, h, i, j):
    return DOCUMENTS[i] == DOCUMENTS[j]


def causal_document(b, h, i, j):
    return causal(b, h, i, j) & document(b, h, i, j)


def neighbourhood(b, h, i, j):
    """NATTEN's: a window of 3 x 3 that stays inside of the image."""
    row, column = (x.clamp(1, WIDTH - 2) for x in (i // WIDTH, i % WIDTH))
    return ((row - j // WIDTH).abs() <= 1) & ((column - j % WIDTH).abs() <= 1)


def dilated(b, h, i, j):
    return (i >= j) & ((i - j) % 3 == 0)


SCORES: tuple[Mod, ...] = (relative, alibi, learned_bias, softcap, checkerboard)
MASKS: tuple[Mod, ...] = (
    causal, sliding_window, prefix_lm, document, causal_document, neighbourhood, dilated,
)  # fmt: skip


def hiding(mask_mod: Mod) -> Mod:
    """A mask as a score function."""
    return lambda score, b, h, i, j: torch.where(mask_mod(b, h, i, j), score, -float("inf"))


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v in FlexAttention's layout, (batch, heads, length, head_dim)."""
    g = generator(0)
    return [normal(g, B, heads, n, D, dtype=dtype) for heads, n in ((Hq, M), (Hk, N), (Hk, N))]


def flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of flex_attention in the layouts of flashtile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        out, lse = flex_attention(q, k, v, **options, enable_gqa=True, return_lse=True)
    return out.transpose(1, 2), lse


def ours(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """(out, lse) of flashtile for tensors in FlexAttention's layout."""
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    return flashtile.attention(*swapped, **options, return_lse=True)


def name_of(function: Mod) -> str:
    return function.__name__


@pytest.mark.parametrize("score_mod", SCORES, ids=name_of)
def test_score_functions(score_mod) -> None:
    wanted = flex(*inputs(), score_mod=score_mod)
    torch.testing.assert_close(ours(*inputs(), score_mod=score_mod), wanted)


@pytest.mark.parametrize("mask_mod", MASKS, ids=name_of)
def test_masks(mask_mod) -> None:
    """As FlexAttention's block mask, and as score functions, with ALiBi and without."""
    block_mask = create_block_mask(mask_mod, B, None, M, N, device="cpu", BLOCK_SIZE=16)
    wanted = flex(*inputs(), block_mask=block_mask)
    torch.testing.assert_close(ours(*inputs(), block_mask=block_mask), wanted)
    torch.testing.assert_close(ours(*inputs(), score_mod=hiding(mask_mod)), wanted)
    wanted = flex(*inputs(), block_mask=block_mask, score_mod=alibi)
    torch.testing.assert_close(ours(*inputs(), block_mask=block_mask, score_mod=alibi), wanted)


@pytest.mark.parametrize("function", [*SCORES, *MASKS], ids=name_of)
def test_gradients(function) -> None:
    score_mod = function if function in SCORES else hiding(function)
    leaves = [x.transpose(1, 2).requires_grad_() for x in inputs()]
    out = flashtile.attention(*leaves, score_mod=score_mod)
    wanted = attention_reference(*leaves, score_mod=score_mod).out
    dout = normal(generator(1), *wanted.shape, dtype=torch.float64)
    got, same = (torch.autograd.grad(x, leaves, dout) for x in (out, wanted))
    torch.testing.assert_close(got, same)


def test_float32() -> None:
    table = TABLE.float()
    score_mod = partial(lambda t, score, b, h, i, j: score + t[h, j - i + M], table)
    given = inputs(torch.float32)
    torch.testing.assert_close(ours(*given, score_mod=score_mod), flex(*given, score_mod=score_mod))


def test_pages() -> None:
    """PagedAttention's functions, which undo the order of pages; and the same pages as a cache."""
    page, lengths = 16, torch.tensor([64, 48])
    paged = PagedAttention(n_pages=12, page_size=page, max_batch_size=B, device="cpu")
    q, k, v = inputs()
    k_pages, v_pages = (torch.zeros(1, Hk, 12 * page, D, dtype=q.dtype) for _ in range(2))
    for b in (1, 0):
        paged.reserve(torch.tensor(b), lengths[b])
    positions = torch.arange(N).expand(B, N)
    for b in range(B):
        n = int(lengths[b])
        paged.assign(
            torch.tensor([b]), positions[b : b + 1, :n],
            k[b : b + 1, :, :n], v[b : b + 1, :, :n], k_pages, v_pages,
        )  # fmt: skip
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (j < lengths[b]), B, None, M, N, device="cpu", BLOCK_SIZE=page
    )
    block_mask = paged.convert_logical_block_mask(mask)
    score_mod = paged.get_score_mod(alibi)
    wanted = flex(q, k_pages, v_pages, score_mod=score_mod, block_mask=block_mask)
    logical = flex(q, k, v, score_mod=alibi, block_mask=mask)
    torch.testing.assert_close(wanted, logical)

    everywhere = [x.expand(B, *x.shape[1:]) for x in (k_pages, v_pages)]
    got = ours(q, *everywhere, score_mod=score_mod, block_mask=block_mask)
    torch.testing.assert_close(got, wanted)

    caches = [x.view(Hk, 12, page, D).permute(1, 2, 0, 3).contiguous() for x in (k_pages, v_pages)]
    table = paged.page_table[:, : N // page].clamp(min=0).int()
    shown = flashtile.Spans.prefix_lm(torch.tensor([0, 0]), seq_len=M)
    got = flashtile.attention_with_kvcache(
        q.transpose(1, 2), *caches, page_table=table, cache_seqlens=lengths.int(), mask=shown,
        score_mod=alibi, return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(got, wanted)
