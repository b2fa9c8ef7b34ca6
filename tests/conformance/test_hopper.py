"""The Hopper backend by the same rule, at lengths and head dims that it takes.

The calls in the other files of this suite are mostly shorter than one tile, and the backend skips
many of them. Here a refusal is a failure, so no call is skipped unnoticed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import flashtile
from flashtile.masks import BlockMask
from flashtile.testing import (
    STRIDE_STYLES,
    cu_seqlens,
    dense_from_tiles,
    generator,
    packed_qkv,
    qkv,
    strided,
    tile_kinds,
)

from .devices import carry_calls
from .harness import Masked, Sizes, check_dense, check_varlen, resolve

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_buffers", "on_the_gpu")]

BACKEND = "hopper"
DTYPES = [torch.bfloat16, torch.float16]

# Names of `harness.OPTIONS`, single and combined.
ALONE = (
    *("nothing", "scale", "negative scale", "causal", "window", "window to the left"),
    *("window to the right", "window of one key", "causal window", "chunk", "softcap", "alibi"),
    *("alibi for each batch", "sink", "deterministic"),
)
TOGETHER = (
    "causal + softcap + sink",
    "causal + alibi + deterministic",
    "chunk + softcap",
    "causal window + sink + deterministic",
    "window + alibi",
)
# More names, because the small windows of `harness.OPTIONS` do not span several tiles.
WIDE = {
    "wide window": {"window_size": (150, 40)},
    "wide causal window": {"window_size": (100, 0)},
    "long chunk": {"attention_chunk": 130},
    "long chunk, causal": {"attention_chunk": 130, "causal": True},
}

SIZES = Sizes(M=200, N=333, D=64)
LENGTHS_Q, LENGTHS_K = [70, 0, 201, 1, 130, 0], [90, 3, 77, 257, 0, 0]
PACKED = Sizes(B=6, M=201, N=257, D=64)


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are copied to the GPU; without a Hopper GPU the backend gives the reason to skip."""
    if torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name()
        pytest.skip(f"the Hopper backend wants compute capability 9.0, this is {found}")
    carry_calls(monkeypatch, torch.device("cuda"), refusals="fail")


def block_mask(g, s, heads):
    """Empty, full and partial tiles of 128 x 128, one mask for all heads or one for each; the
    first keys are seen by no query, and the last queries see no key."""
    lead = (s.B, s.Hq) if heads else (1, 1)
    kinds = tile_kinds(g, *lead, -(-s.M // 128), -(-s.N // 128))
    kinds[:, :, -1], kinds[..., 0] = False, False
    visible = dense_from_tiles(kinds, (128, 128), s.M, s.N)
    visible[:, :, 128:256] &= torch.rand(visible[:, :, 128:256].shape, generator=g) < 0.5
    return Masked(BlockMask.from_dense(visible), visible)


def as_named(options):
    """The options of `WIDE` by name; other names are `harness.OPTIONS`'."""
    return (lambda g, s, dtype: WIDE[options]) if options in WIDE else options


def distant(g, s):
    """Score functions by name: without a tensor, and with numbers of heads and of distances, and
    documents, as tensors."""
    slopes, reach = torch.rand(s.Hq, generator=g), max(s.M, s.N)
    table = torch.randn(s.Hq, 2 * reach + 1, generator=g)
    documents = torch.arange(max(s.M, s.N)) // 70

    def alibi(slopes, score, b, h, i, j):
        return score - slopes[h] * (i - j).abs()

    def relative(table, score, b, h, i, j):
        return score + table[h, j - i + reach]

    def clamped(table, score, b, h, i, j):
        return score + table[h, (j - i).clamp(-20, 20) + 20]

    def same(documents, score, b, h, i, j):
        return torch.where(documents[i] == documents[j], score, -torch.inf)

    return {
        "causal": lambda score, b, h, i, j: torch.where(i >= j, score, -torch.inf),
        "softcap": lambda score, b, h, i, j: 2.0 * torch.tanh(score / 2.0),
        "infinite slope": lambda score, b, h, i, j: score.abs().sqrt() * score.sign(),
        "alibi": partial(alibi, slopes),
        "relative": partial(relative, table),
        "clamped": partial(clamped, table),
        "documents": partial(same, documents),
    }


FUNCTIONS = list(distant(generator(0), SIZES))


def with_function(name, options):
    """The options and a score function."""

    def made(g, s, dtype):
        return {**resolve(as_named(options), g, s, dtype), "score_mod": distant(g, s)[name]}

    return made


@pytest.mark.parametrize("options", ["nothing", "causal", "wide window", "deterministic", "sink"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_score_functions(name, D, options, seed):
    check_dense(replace(SIZES, D=D), with_function(name, options), torch.bfloat16, BACKEND, seed)


@pytest.mark.parametrize("D", [80, 96, 192, 256])
def test_score_functions_of_head_dims(D, seed):
    given = with_function("clamped", "causal")
    check_dense(Sizes(M=140, N=200, D=D), given, torch.float16, BACKEND, seed)


@pytest.mark.parametrize("options", ["nothing", "causal", "softcap + alibi"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_score_functions_of_packed_sequences(name, options, seed):
    given = with_function(name, options)
    check_varlen(LENGTHS_Q, LENGTHS_K, PACKED, given, torch.bfloat16, BACKEND, seed)


@pytest.mark.parametrize("options", [*ALONE, *TOGETHER, *WIDE])
def test_options(options, seed):
    check_dense(SIZES, as_named(options), torch.bfloat16, BACKEND, seed)


@pytest.mark.parametrize("options", [*ALONE, *TOGETHER, *WIDE, "seqused", "causal + seqused"])
def test_options_of_packed_sequences(options, seed):
    check_varlen(LENGTHS_Q, LENGTHS_K, PACKED, as_named(options), torch.bfloat16, BACKEND, seed)


READ_BY_SCORES = (
    *("relative bias", "relative bias of all distances", "relative bias of one number + causal"),
    *("relative bias + softcap + sink", "learned alibi", "learned alibi for each batch + causal"),
)


@pytest.mark.parametrize("options", READ_BY_SCORES)
@pytest.mark.parametrize("D", [64, 128])
def test_gradients_of_what_scores_read(D, options, seed):
    """Triton's kernels add them to the gradients of Hopper's."""
    check_dense(replace(SIZES, D=D), options, torch.bfloat16, BACKEND, seed)
    check_varlen(LENGTHS_Q, LENGTHS_K, replace(PACKED, D=D), options, torch.bfloat16, BACKEND, seed)


@pytest.mark.parametrize(
    ("M", "N"), [(65, 1), (65, 65), (129, 127), (300, 70), (70, 300), (256, 256), (193, 1000)]
)
@pytest.mark.parametrize("options", ["nothing", "causal", "wide window"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_lengths(M, N, options, D, seed):
    """Among them one key, one tile, whole tiles, many tiles, and queries that see no key."""
    check_dense(Sizes(M=M, N=N, D=D), as_named(options), torch.bfloat16, BACKEND, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("options", ["nothing", "causal", "softcap"])
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_head_dims(D, options, dtype, seed):
    check_dense(Sizes(M=140, N=200, D=D), options, dtype, BACKEND, seed)


@pytest.mark.parametrize(
    ("D", "Dv"), [(8, 8), (40, 72), (64, 200), (128, 16), (136, 136), (192, 128), (248, 24)]
)
@pytest.mark.parametrize("options", ["nothing", "causal + deterministic"])
def test_padded_head_dims(D, Dv, options, seed):
    check_dense(Sizes(M=140, N=200, D=D, Dv=Dv), options, torch.bfloat16, BACKEND, seed)


@pytest.mark.parametrize(("Hq", "Hk"), [(1, 1), (3, 3), (4, 1), (6, 2), (9, 3)])
@pytest.mark.parametrize("options", ["causal", "sink + alibi"])
def test_grouped_heads(Hq, Hk, options, seed):
    check_dense(Sizes(M=140, N=200, D=64, Hq=Hq, Hk=Hk), options, torch.bfloat16, BACKEND, seed)


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [False, True], ids=["one mask", "a mask for each head"])
@pytest.mark.parametrize("options", ["nothing", "causal", "wide window", "deterministic"])
def test_block_masks(options, heads, D, seed):
    def masked(g, s, dtype):
        given = resolve(as_named(options), g, s, dtype)
        return {**given, "block_mask": block_mask(g, s, heads)}

    sizes = Sizes(M=600, N=700, D=D, Dv=D)
    check_dense(sizes, masked, torch.bfloat16, BACKEND, seed)


@pytest.mark.parametrize("style", STRIDE_STYLES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_strides(style, packed, seed):
    layout = partial(strided, style=style)
    if packed:
        given = (LENGTHS_Q, LENGTHS_K, PACKED)
        check_varlen(*given, "causal", torch.bfloat16, BACKEND, seed, layout=layout)
    else:
        check_dense(SIZES, "causal", torch.bfloat16, BACKEND, seed, layout=layout)


@pytest.mark.parametrize("options", ["nothing", "causal", "softcap + sink", "alibi"])
@pytest.mark.parametrize("factor", [5, 20])
def test_large_inputs_do_not_overflow(options, factor, seed):
    """Scores of many hundreds, whose exp overflows; the softmax must not overflow."""

    def layout(x):
        return x * factor

    check_dense(SIZES, options, torch.bfloat16, BACKEND, seed, layout=layout)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (0, 0)}], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_rows_that_see_no_key_have_no_gradient(options, D, seed):
    """Of 300 queries the first 230 see none of the 70 keys; their results are 0, never NaN."""
    leaves = qkv(generator(seed), M=300, N=70, D=D, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = flashtile.attention(*leaves, **options, return_lse=True, backend=BACKEND)
    assert (out[:, :230] == 0).all()
    assert (lse[..., :230] == -torch.inf).all()
    dq, dk, dv = torch.autograd.grad(out.float().square().sum(), leaves)
    assert (dq[:, :230] == 0).all()
    for gradient in (dq, dk, dv):
        assert gradient.isfinite().all()
        assert gradient.any()


def test_keys_that_no_query_sees_have_no_gradient(seed):
    """With a window of 40 keys and 70 queries, no query sees the first of 600 keys."""
    leaves = qkv(generator(seed), M=70, N=600, D=64, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in leaves]
    out = flashtile.attention(*leaves, window_size=(39, 0), backend=BACKEND)
    _, dk, dv = torch.autograd.grad(out.float().square().sum(), leaves)
    for gradient in (dk, dv):
        assert (gradient[:, :491] == 0).all()
        assert gradient[:, 491:].any()


def test_tokens_past_the_last_sequence_get_zero(seed):
    """A packed buffer may be longer than its sequences; the values there do not matter."""
    q, k, v = packed_qkv(generator(seed), [90, 120], [90, 120], D=64, dtype=torch.bfloat16)
    q[195:], k[195:], v[195:] = torch.nan, torch.nan, torch.nan
    cu = cu_seqlens([85, 110])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given = (cu, cu, 110, 110)
    out, lse = flashtile.attention_varlen(*leaves, *given, return_lse=True, backend=BACKEND)
    assert (out[195:] == 0).all()
    assert (lse[:, 195:] == -torch.inf).all()
    for gradient in torch.autograd.grad(out[:195].float().sum(), leaves):
        assert gradient.isfinite().all()
        assert (gradient[195:] == 0).all()
