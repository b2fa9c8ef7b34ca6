"""Sizes and layouts: lengths 0 and 1, dead rows, grouped heads, head dims, strides."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashtile
from flashtile.testing import (
    STRIDE_STYLES,
    assert_close,
    attention_in_float8,
    attention_reference,
    generator,
    normal,
    qkv,
    strided,
)

from .harness import Sizes, check_dense, resolve, split_options

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

# The native op, tiles of the native op, plain tiles: one option for each.
WAYS = ("nothing", "causal", "softcap + sink")


@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 9), (9, 1), (0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("options", [*WAYS, "bias", "alibi", "dropout", "sink", "window"])
def test_lengths_zero_and_one(M, N, options, backend, seed):
    check_dense(Sizes(M=M, N=N), options, torch.float32, backend, seed)


@pytest.mark.parametrize("options", WAYS)
def test_no_batch(options, backend, seed):
    check_dense(Sizes(B=0), options, torch.float32, backend, seed)


@pytest.mark.parametrize(("M", "N"), [(7, 33), (33, 7), (64, 64), (65, 63), (1, 129)])
@pytest.mark.parametrize(
    "options", ["causal", "causal window", "chunk", "causal + sink", "causal + softcap"]
)
def test_masks_of_unequal_lengths(M, N, options, backend, seed):
    check_dense(Sizes(M=M, N=N), options, torch.float32, backend, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("M", "N"), [(600, 650), (650, 600)])
@pytest.mark.parametrize("options", ["causal", "causal + sink"])
def test_many_causal_rows(M, N, options, backend, seed):
    """From 512 rows on, a CPU attends to the square under the diagonal and to the keys before it
    in two calls, and merges them."""
    check_dense(Sizes(B=1, M=M, N=N, Hq=2, Hk=1, D=8), options, torch.float32, backend, seed)


@pytest.mark.parametrize(("Hq", "Hk"), [(1, 1), (3, 3), (4, 1), (6, 2), (9, 3)])
@pytest.mark.parametrize("options", [*WAYS, "dropout + alibi"])
def test_grouped_heads(Hq, Hk, options, backend, seed):
    check_dense(Sizes(Hq=Hq, Hk=Hk), options, torch.float32, backend, seed)


@pytest.mark.parametrize("D", [1, 2, 3, 8, 33, 64, 80, 128, 200, 256, 257, 512])
@pytest.mark.parametrize("options", WAYS)
def test_head_dims(D, options, backend, seed):
    check_dense(Sizes(M=9, N=11, D=D), options, torch.float32, backend, seed)


@pytest.mark.parametrize(
    ("D", "Dv"), [(16, 8), (8, 16), (5, 33), (64, 1), (1, 64), (192, 128), (64, 512)]
)
@pytest.mark.parametrize("options", [*WAYS, "dropout", "causal + bias"])
def test_value_head_dims(D, Dv, options, backend, seed):
    check_dense(Sizes(M=9, N=11, D=D, Dv=Dv), options, torch.float32, backend, seed)


def test_latent_keys_have_gradients_on_a_cpu(seed):
    check_dense(Sizes(M=9, N=11, D=576, Dv=512), "causal", torch.float32, "cpu", seed)


@pytest.mark.parametrize("style", STRIDE_STYLES)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_strides(style, options, dtype, backend, seed):
    check_dense(Sizes(), options, dtype, backend, seed, layout=partial(strided, style=style))


@pytest.mark.parametrize("options", [*WAYS, "bias", "dropout"])
def test_stride_zero(options, backend, seed):
    def expanded(x):  # one batch and one head, expanded
        return x[:1, :, :1].expand(x.shape)

    check_dense(Sizes(), options, torch.float32, backend, seed, layout=expanded)


def test_a_bias_that_is_expanded_has_a_full_gradient(backend, seed):
    g = generator(seed)
    q, k, v = qkv(g, dtype=torch.float64)
    bias = normal(g, 1, 4, 17, 1, dtype=torch.float64)
    whole = bias.expand(2, 4, 17, 23).detach().requires_grad_()
    small = bias.clone().requires_grad_()
    for leaf in (whole, small):
        flashtile.attention(q, k, v, bias=leaf, backend=backend).square().sum().backward()
    torch.testing.assert_close(whole.grad.sum((0, 3), keepdim=True), small.grad)


@pytest.mark.parametrize(
    "options", ["causal", "causal + bias", "causal + sink", "causal + dropout"]
)
def test_dead_rows(options, backend, seed):
    """The first 20 of 25 queries see no key."""
    check_dense(Sizes(M=25, N=5), options, torch.float32, backend, seed)


@pytest.mark.parametrize("options", [*WAYS, "alibi", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scores_far_beyond_the_range_of_exp(options, dtype, backend, seed):
    """Scores of several hundreds, whose exp overflows; the softmax must not overflow."""
    check_dense(Sizes(), options, dtype, backend, seed, layout=lambda x: x * 20)


@pytest.mark.parametrize("descale", [False, True], ids=["plain", "descaled"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
def test_float8_forward(options, descale, backend, seed):
    g = generator(seed)
    inputs = [x.to(torch.float8_e4m3fn) for x in qkv(g)]
    if descale:
        names = ("q_descale", "k_descale", "v_descale")
        options = options | {n: 0.5 + torch.rand(2, 2, generator=g) for n in names}
    out, lse = flashtile.attention(*inputs, **options, return_lse=True, backend=backend)
    assert out.dtype == torch.bfloat16
    reference = partial(attention_reference, *inputs, **options)
    truth = reference()
    plain = reference(compute_dtype=torch.float32, attend=attention_in_float8)
    for name, x in (("out", out), ("lse", lse)):
        wanted, low = getattr(truth, name), getattr(plain, name)
        assert_close(name, x, wanted, low, dtype=torch.bfloat16, seed=seed)


@pytest.mark.parametrize("options", ["nothing", "causal", "sink", "softcap", "dropout"])
def test_padding_is_never_read(options, backend, seed):
    """NaN past the used lengths changes nothing, and gets a zero gradient."""
    g = generator(seed)
    q, k, v = qkv(g, M=9, N=12)
    used_q, used_k = torch.tensor([4, 9]).int(), torch.tensor([12, 3]).int()
    poisoned = [x.clone() for x in (q, k, v)]
    poisoned[0][0, 4:] = torch.nan
    for x in poisoned[1:]:
        x[1, 3:] = torch.nan
    call = {"seqused_q": used_q, "seqused_k": used_k, "return_lse": True, "backend": backend}
    call |= {
        "nothing": {},
        "causal": {"causal": True},
        "sink": {"sink": torch.zeros(4)},
        "softcap": {"softcap": 2.0},
        "dropout": {"dropout_p": 0.5},
    }[options]
    results = []
    for inputs in ([q, k, v], poisoned):
        leaves = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(seed)
        out, lse = flashtile.attention(*leaves, **call)
        out.square().sum().backward()
        results.append([out, lse, *(x.grad for x in leaves)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert (results[0][0][0, 4:] == 0).all()
    assert (results[0][1][0, :, 4:] == -torch.inf).all()


@pytest.mark.parametrize(
    "s",
    [
        Sizes(B=1, M=63, N=63, Hq=1, Hk=1, D=33, Dv=14),
        Sizes(B=2, M=83, N=117, D=40, Dv=20),
        Sizes(B=2, M=65, N=129, D=1, Dv=13),
        Sizes(B=2, M=129, N=129, D=16, Dv=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", ["causal", "causal + softcap + dropout", "chunk + seqused"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_heads_over_several_steps_of_the_matrix_unit(s, options, dtype, backend, seed):
    check_dense(s, options, dtype, backend, seed)


DEAD_ROWS = [
    "causal",
    "causal + softcap + dropout",
    "causal + alibi + bias",
    "block mask with partial tiles",
    "spans for each batch",
    "seqused",
]


@pytest.mark.parametrize(
    ("result", "options"),
    [(name, o) for name in ("out", "lse") for o in (*DEAD_ROWS, "causal + sink")],
)
def test_what_the_gradients_of_rows_without_a_key_hold_is_ignored(result, options, backend, seed):
    """What is computed from -inf often has a gradient of NaN."""
    g, s = generator(seed), Sizes(M=40)
    inputs = [
        normal(g, s.B, n, h, s.D).requires_grad_()
        for n, h in ((s.M, s.Hq), (s.N, s.Hk), (s.N, s.Hk))
    ]
    given = resolve(options, g, s, torch.float32)
    if "mask" in given:  # random spans and lengths may leave no row without a key
        given["mask"].stops[..., 7, :] = given["mask"].starts[..., 7, :]
    if "seqused_q" in given:
        given["seqused_q"][0] = s.M - 3
    options, _, leaves = split_options(given)
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out, lse = flashtile.attention(*inputs, **options, **leaves, return_lse=True, backend=backend)
    dead = lse == -torch.inf
    if "sink" in leaves:  # which is the log-sum-exp of such a row, but for rounding
        dead = torch.isclose(lse, leaves["sink"][:, None], atol=0.0, rtol=1e-6)
        dead &= (out == 0).all(-1).transpose(1, 2)
    assert dead.any()

    def gradients(number):
        cotangents = {"out": out.detach().cos(), "lse": lse.detach().sin().nan_to_num()}
        rows = dead if result == "lse" else dead.transpose(1, 2)[..., None]
        cotangents[result] = cotangents[result].masked_fill(rows, number)
        return torch.autograd.grad(
            (out, lse), [*inputs, *leaves.values()], tuple(cotangents.values()), retain_graph=True
        )

    names = ["dq", "dk", "dv", *leaves]
    for name, wanted, got in zip(names, gradients(0.0), gradients(torch.nan), strict=True):
        # With a sink the log-sum-exp of such a row is the sink, which has its gradient.
        assert (result, name) == ("lse", "sink") or torch.equal(got, wanted)
