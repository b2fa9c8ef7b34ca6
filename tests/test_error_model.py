"""The floor under the allowed error: correct sums stay within it, wrong ones exceed it.

`test_random_combinations.py` shows that correct sums pass for random inputs; with
`FLASHTILE_DRAWS=10000` it does so for as many calls.
"""

from __future__ import annotations

import pytest
import torch

from flashtile.testing import (
    alibi_slopes,
    assert_close,
    attention_reference,
    combine_reference,
    combine_variance,
    floor_of,
    generator,
    normal,
    plain_dtype,
    qkv,
    rounding_variance,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {
    "nothing": lambda g: {},
    "causal": lambda g: {"causal": True},
    "everything": lambda g: {
        "window_size": (9, 3),
        "softcap": 2.0,
        "alibi_slopes": alibi_slopes(g, 4),
        "bias": normal(g, 1, 4, 1, 1),
        "sink": normal(g, 4),
    },
}


def results(leaves, cotangents, dtype, **how):
    """out, lse and the gradient of every leaf, by name."""
    given = {n: x.detach().to(dtype) for n, x in leaves.items()}
    differentiable = [n for n, x in given.items() if n != "alibi_slopes"]
    given |= {n: given[n].requires_grad_() for n in differentiable}
    found = attention_reference(**given, compute_dtype=dtype, **how)
    gradients = torch.autograd.grad(
        (found.out, found.lse),
        [given[n] for n in differentiable],
        [x.to(dtype) for x in cotangents],
    )
    named = {f"d{n}": x for n, x in zip(differentiable, gradients, strict=True)}
    return {
        n: x.detach().contiguous()
        for n, x in ({"out": found.out, "lse": found.lse} | named).items()
    }


def case(seed, dtype, options="nothing", through_lse=True, **sizes):
    """truth, plain and floor of a random call by name, and the function that computes them."""
    g = generator(seed)
    leaves = dict(zip("qkv", qkv(g, **sizes, dtype=dtype), strict=True))
    made = OPTIONS[options](g)
    leaves |= {n: x.to(dtype) for n, x in made.items() if isinstance(x, torch.Tensor)}
    rest = {n: x for n, x in made.items() if not isinstance(x, torch.Tensor)}
    B, M, Hq = leaves["q"].shape[:3]
    cotangents = [normal(g, B, M, Hq, leaves["v"].shape[-1]), through_lse * normal(g, B, Hq, M)]
    cotangents = [x.to(dtype) for x in cotangents]

    def run(compute_dtype, change=lambda x: x, **how):
        return results({n: change(x) for n, x in leaves.items()}, cotangents, compute_dtype, **how)

    variance = run(torch.float64, attend=rounding_variance(dtype), **rest)
    floor = {name: floor_of(x) for name, x in variance.items()}
    return run(torch.float64, **rest), run(plain_dtype(dtype), **rest), floor, run


def judge(name, got, truth, plain, floor, dtype):
    assert_close(name, got, truth[name], plain[name], floor=floor[name], dtype=dtype)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_an_error_of_four_floors_is_caught(dtype, options, seed):
    """In every output and gradient, where its terms are largest; one of 0.9 floors is none."""
    truth, plain, floor, _ = case(seed, dtype, options)
    for name, wanted in truth.items():
        worst = int(floor[name].flatten().argmax())
        for size, fails in ((0.9, False), (4.0, True), (-4.0, True)):
            got = wanted.clone()
            got.view(-1)[worst] += size * floor[name].max()
            if not fails:
                judge(name, got, truth, plain, floor, dtype)
                continue
            with pytest.raises(AssertionError, match=f"{name}: 1 of"):
                judge(name, got, truth, plain, floor, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_terms_cancel_the_floor_is_a_few_roundings_of_them(dtype, seed):
    """A row that sees one key: dQ = scale P (dP - delta) K = 0. Plain PyTorch may get exactly 0; a
    kernel need not. But an error of four floors is too large, and a floor is small."""
    truth, plain, floor, _ = case(seed, dtype, through_lse=False, N=1)
    assert truth["dq"].abs().max() < 1e-12
    size = 16**0.5 * 16**-0.5  # |dP| |K| scale: 16 columns of about 1 each
    eps = torch.finfo(dtype).eps  # as 16-bit outputs are stored before delta is computed
    # On average: the largest floor depends on the largest numbers that were drawn.
    assert 0.3 * eps * size < floor["dq"].mean() < 100 * eps * size
    got = truth["dq"] + 0.9 * floor["dq"]
    judge("dq", got, truth, plain | {"dq": truth["dq"]}, floor, dtype)
    with pytest.raises(AssertionError, match="dq"):
        judge("dq", truth["dq"] + 4 * floor["dq"], truth, plain, floor, dtype)


def test_nothing_is_allowed_where_nothing_is_seen(seed):
    """Rows before the first key: 0 and -inf to the last bit, in gradients too."""
    truth, plain, floor, _ = case(seed, torch.float32, "causal", M=9, N=4)
    for name in ("out", "dq"):
        assert (floor[name][:, :5] == 0).all()
    assert (floor["lse"][..., :5] == 0).all()
    assert (floor["out"][:, 5:] > 0).all()
    got = truth["lse"].clone()
    got[0, 0, 0] = -1e30
    with pytest.raises(AssertionError, match="lse"):
        judge("lse", got, truth, plain, floor, torch.float32)


def keep_bits(x, bits):
    """`x` rounded to `bits` bits after the first."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)


@pytest.mark.parametrize("options", OPTIONS)
def test_tf32_is_caught(options, seed):
    """float32 inputs rounded to TF32's ten bits, all else right: every result is wrong."""
    truth, plain, floor, run = case(seed, torch.float32, options, M=40, N=50)
    rest = {n: x for n, x in OPTIONS[options](generator(0)).items() if type(x) is not torch.Tensor}
    got = run(torch.float64, lambda x: keep_bits(x, 10), **rest)
    for name in truth:
        with pytest.raises(AssertionError, match=name):
            judge(name, got[name], truth, plain, floor, torch.float32)


def test_parts_that_are_joined_in_float32(seed):
    g = generator(seed)
    parts = normal(g, 5, 2, 7, 4, 9), normal(g, 5, 2, 7, 4, scale=4)
    truth, plain = combine_reference(*parts), combine_reference(*parts, torch.float32)
    for name, wanted, low, variance in zip(
        ("out", "lse"), truth, plain, combine_variance(*parts), strict=True
    ):
        floor = floor_of(variance)
        assert (low - wanted).abs().max() < floor.max()
        assert floor.max() < 1e-4
        got = wanted.clone()
        got.view(-1)[int(floor.flatten().argmax())] += 4 * floor.max()
        with pytest.raises(AssertionError, match=name):
            assert_close(name, got, wanted, low, floor=floor, dtype=torch.float32)


def test_a_sink_without_keys_has_a_floor(seed):
    """Its gradient is a sum over all rows."""
    _, _, floor, _ = case(seed, torch.float64, "everything", M=65, N=0)
    assert (floor["dsink"] > 0).all()
