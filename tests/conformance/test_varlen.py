"""Packed sequences: empty ones, bounds above the longest, every option, pages."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashtile
from flashtile.testing import (
    DTYPES,
    STRIDE_STYLES,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
    packed_qkv,
    paged,
    strided,
)

from .harness import (
    OPTIONS,
    Sizes,
    check_dense,
    check_varlen,
    compare,
    judge_outputs,
    resolve,
    split_options,
)

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

LENGTHS_Q, LENGTHS_K = [5, 0, 17, 1, 9, 0], [7, 3, 11, 13, 0, 0]
SIZES = Sizes(B=6, M=17, N=13)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_option_alone(option, dtype, backend, seed):
    check_varlen(LENGTHS_Q, LENGTHS_K, SIZES, option, dtype, backend, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("options", ["causal", "causal window + softcap + sink"])
def test_dtypes(options, dtype, backend, seed):
    check_varlen(LENGTHS_Q, LENGTHS_K, SIZES, options, dtype, backend, seed)


@pytest.mark.parametrize(
    "options",
    [
        "causal + negative scale",
        "causal + sink",
        "causal + dropout + alibi",
        "window + bias",
        "causal + relative bias + learned alibi",
        "relative bias of all distances + learned alibi for each batch + seqused",
        "seqused + causal + bias shared by heads",
        "block mask with partial tiles + seqused",
        "causal window + softcap + alibi + bias + sink + dropout + seqused + block mask",
    ],
)
def test_options_together(options, backend, seed):
    check_varlen(LENGTHS_Q, LENGTHS_K, SIZES, options, torch.float32, backend, seed)


# Neighbours of equal lengths, which the CPU backend computes together, between others.
ALIKE_Q, ALIKE_K = [3, 3, 3, 5, 5, 0, 0, 2, 4, 4], [3, 3, 3, 5, 2, 4, 4, 7, 0, 0]


@pytest.mark.parametrize("option", [*OPTIONS, "dropout + learned alibi for each batch + bias"])
def test_neighbours_of_equal_lengths(option, backend, seed, monkeypatch):
    monkeypatch.setattr("flashtile.backends.cpu.segments.MAX_BATCH_HEADS", 8)  # two sequences
    sizes = Sizes(B=10, M=5, N=7)
    check_varlen(ALIKE_Q, ALIKE_K, sizes, option, torch.float32, backend, seed)


@pytest.mark.parametrize("options", ["nothing", "causal", "softcap + bias", "dropout"])
def test_max_seqlen_is_an_upper_bound(options, backend, seed):
    s = Sizes(B=6, M=40, N=50)
    check_varlen(LENGTHS_Q, LENGTHS_K, s, options, torch.float32, backend, seed)


@pytest.mark.parametrize("options", ["nothing", "causal", "softcap + sink"])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        ([0], [0]),
        ([0, 0], [4, 5]),
        ([4, 5], [0, 0]),
        ([1], [1]),
        ([1, 1, 1], [9, 1, 4]),
        ([300], [270]),
    ],
    ids=str,
)
def test_lengths(options, lengths_q, lengths_k, backend, seed):
    s = Sizes(B=len(lengths_q), M=max(lengths_q), N=max(lengths_k))
    check_varlen(lengths_q, lengths_k, s, options, torch.float32, backend, seed)


@pytest.mark.parametrize("style", STRIDE_STYLES)
def test_strides(style, backend, seed):
    layout = partial(strided, style=style)
    check_varlen(LENGTHS_Q, LENGTHS_K, SIZES, "causal", torch.float32, backend, seed, layout)


@pytest.mark.parametrize(("Hq", "Hk", "D", "Dv"), [(3, 1, 5, 9), (9, 3, 64, 64), (2, 2, 33, 7)])
def test_heads_and_head_dims(Hq, Hk, D, Dv, backend, seed):
    s = Sizes(B=6, M=17, N=13, Hq=Hq, Hk=Hk, D=D, Dv=Dv)
    check_varlen(LENGTHS_Q, LENGTHS_K, s, "causal + alibi", torch.float32, backend, seed)


def test_tokens_past_the_last_sequence_get_zero(backend, seed):
    """A packed buffer may be longer than its sequences; the values there do not matter."""
    g = generator(seed)
    q, k, v = packed_qkv(g, [9, 6], [9, 6])
    q[12:], k[12:], v[12:] = torch.nan, torch.nan, torch.nan
    cu = cu_seqlens([7, 5])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flashtile.attention_varlen(*leaves, cu, cu, 7, 7, return_lse=True, backend=backend)
    assert (out[12:] == 0).all()
    assert (lse[:, 12:] == -torch.inf).all()
    for grad in torch.autograd.grad(out[:12].sum(), leaves):
        assert grad.isfinite().all()
        assert (grad[12:] == 0).all()


@pytest.mark.parametrize("options", ["nothing", "causal", "sink + softcap"])
def test_packed_equals_dense_when_lengths_are_equal(options, backend, seed):
    check_dense(Sizes(B=3, M=8, N=8), options, torch.float64, backend, seed)
    check_varlen([8] * 3, [8] * 3, Sizes(B=3, M=8, N=8), options, torch.float64, backend, seed)


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
@pytest.mark.parametrize(
    "options", ["nothing", "causal", "causal window + softcap", "alibi", "sink"]
)
def test_pages(page_size, options, backend, seed):
    g = generator(seed)
    lengths_q, lengths_k = [5, 0, 7, 1], [7, 3, 32, 0]
    s = Sizes(B=4, M=7, N=32)
    capacity = -(-32 // page_size) * page_size
    k_dense = normal(g, 4, capacity, 2, 16)
    v_dense = normal(g, 4, capacity, 2, 16)
    for b, n in enumerate(lengths_k):
        k_dense[b, n:], v_dense[b, n:] = torch.nan, torch.nan
    k, table = paged(generator(seed), k_dense, page_size)
    v, _ = paged(generator(seed), v_dense, page_size)
    q = normal(g, sum(lengths_q), 4, 16)
    extra = resolve(options, g, s, q.dtype)
    call = (cu_seqlens(lengths_q), cu_seqlens(lengths_k), 7, 32)
    out, lse = flashtile.attention_varlen(
        q, k, v, *call, page_table=table, return_lse=True, backend=backend, **extra
    )
    judge_outputs(
        {"out": out, "lse": lse},
        partial(attention_varlen_reference, q, k, v, *call, page_table=table, **extra),
        q.dtype,
        seed,
    )


@pytest.mark.parametrize("options", ["causal", "softcap + sink"])
def test_pages_have_gradients(options, backend, seed):
    """The gradients of two sequences that share a page are added there."""
    g = generator(seed)
    s = Sizes(B=2, M=7, N=16)
    k_dense, v_dense = normal(g, 2, 16, 2, 16), normal(g, 2, 16, 2, 16)
    k, table = paged(generator(seed), k_dense, 8, shared=1)
    v, _ = paged(generator(seed), v_dense, 8, shared=1)
    packing = {
        "cu_seqlens_q": cu_seqlens([5, 7]),
        "cu_seqlens_k": cu_seqlens([13, 16]),
        "max_seqlen_q": 7,
        "max_seqlen_k": 16,
        "page_table": table,
    }
    options, for_reference, extra = split_options(resolve(options, g, s, k.dtype))
    compare(
        lambda x: flashtile.attention_varlen(
            **x, **packing, **options, return_lse=True, backend=backend
        ),
        lambda x, **how: attention_varlen_reference(**x, **packing, **for_reference, **how),
        {"q": normal(g, 12, 4, 16), "k": k.nan_to_num(), "v": v.nan_to_num(), **extra},
        seed=seed,
    )
