"""Keys and values that no query sees have no influence, whatever they hold.

NaN that a query sees is its result.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.masks import BlockMask, Spans
from flashtile.testing import attention_reference, generator, normal

from .harness import Make, Masked, Options, Sizes, resolve, split_options

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

SIZES = Sizes(B=2, M=19, N=60, Hq=4, Hk=2, D=16)
JUNK = (math.nan, math.inf)


def a_quarter(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=g) < 0.25


def hiding_spans(lead: tuple[int, int], rest: str) -> Make:
    """Spans that leave out the first and the last keys."""

    def make(g: torch.Generator, s: Sizes, dtype: torch.dtype) -> dict[str, Any]:
        starts = torch.randint(5, 30, (*lead, s.M, 2), generator=g, dtype=torch.int32)
        stops = starts + torch.randint(0, 20, starts.shape, generator=g, dtype=torch.int32)
        return {"mask": Spans(starts, stops), **resolve(rest, g, s, dtype)}

    return make


def hiding_block_mask(heads: int, tile: int, rest: str) -> Make:
    """A block mask in which no row sees most of the keys; of tiles of `tile` x `tile`."""

    def make(g: torch.Generator, s: Sizes, dtype: torch.dtype) -> dict[str, Any]:
        seen = a_quarter(g, s.B, heads, s.M, s.N // tile) & a_quarter(g, s.B, heads, 1, s.N // tile)
        seen = seen.repeat_interleave(tile, 3)
        seen[..., -tile:], seen[..., 0] = True, False
        block_mask = Masked(BlockMask.from_dense(seen, (16, 15)), seen)
        return {"block_mask": block_mask, **resolve(rest, g, s, dtype)}

    return make


def some_used(g: torch.Generator, s: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """Lengths of at least one query and one key, under a window to the left."""
    lengths = {
        f"seqused_{x}": torch.randint(1, most + 1, (s.B,), generator=g, dtype=torch.int32)
        for x, most in (("q", s.M), ("k", s.N))
    }
    return lengths | resolve("window to the left", g, s, dtype)


# Options that hide keys from every query, and some that change how scores are computed.
HIDING: dict[str, Options] = {
    name: name
    for name in (
        "window to the left",
        "window before the query + softcap",
        "keys far before the query + bias",
        "chunk",
    )
} | {
    "seqused + window to the left": some_used,
    "spans": hiding_spans((1, 1), "dropout"),
    "spans for each batch": hiding_spans((2, 1), "sink"),
    "spans for each batch and head": hiding_spans((2, 4), "alibi"),
    "block mask of whole tiles": hiding_block_mask(1, 15, "nothing"),
    "block mask": hiding_block_mask(1, 1, "scale"),
    "block mask for each head": hiding_block_mask(4, 1, "curved score function"),
}


def run(
    inputs: dict[str, Tensor], hidden: Tensor, junk: float, **options: Any
) -> dict[str, Tensor]:
    """The results and gradients of a call with `junk` in the hidden keys and values."""
    torch.manual_seed(0)  # of dropout
    leaves = {name: x.clone() for name, x in inputs.items()}
    for name in ("k", "v"):
        leaves[name][hidden] = junk
    for x in leaves.values():
        x.requires_grad_()
    out, lse = flashtile.attention(**leaves, return_lse=True, **options)
    (out.float().square().sum() + lse[lse.isfinite()].sum()).backward()
    gradients = {f"d{name}": x.grad for name, x in leaves.items()}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def check(
    inputs: dict[str, Tensor], probabilities: Tensor, s: Sizes = SIZES, **options: Any
) -> None:
    """Compare calls with junk where all of the `probabilities` (B, Hq, M, N) are 0 with one whose
    hidden keys and values are ordinary numbers.
    """
    seen = (probabilities != 0).unflatten(1, (s.Hk, -1)).any(2).any(2)
    hidden = ~seen.transpose(1, 2)
    assert hidden.any() and not hidden.all()
    wanted = run(inputs, hidden, 1.0, **options)
    for junk in JUNK:
        for name, got in run(inputs, hidden, junk, **options).items():
            assert torch.equal(got, wanted[name]), f"{name} with {junk} in hidden keys"


def random_inputs(g: torch.Generator, s: Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "q": normal(g, s.B, s.M, s.Hq, s.D, dtype=dtype).detach(),
        "k": normal(g, s.B, s.N, s.Hk, s.D, dtype=dtype).detach(),
        "v": normal(g, s.B, s.N, s.Hk, s.value_dim, dtype=dtype).detach(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", HIDING)
def test_options_that_hide(name, dtype, backend, seed):
    g = generator(seed)
    inputs = random_inputs(g, SIZES, dtype)
    options, for_reference, extra = split_options(resolve(HIDING[name], g, SIZES, dtype))
    inputs |= {name: x.detach() for name, x in extra.items()}
    keep = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    reference = attention_reference(**(inputs | for_reference), keep=keep)
    check(inputs, reference.probs, backend=backend, **options)


@pytest.mark.parametrize(
    "options",
    ["nothing", "causal", "softcap", "scale", hiding_block_mask(1, 15, "nothing")],
    ids=lambda x: x if isinstance(x, str) else "block mask",
)
@pytest.mark.parametrize("rows", [1, 19, 300])
def test_bool_masks(rows, options, backend, seed):
    """Masks of one row and of one tile become a bias of -inf, others a block mask."""
    g, s = generator(seed), replace(SIZES, M=rows, N=300 if rows == 300 else 60)
    inputs = random_inputs(g, s, torch.float32)
    options, for_reference, _ = split_options(resolve(options, g, s, torch.float32))
    mask = a_quarter(g, s.M, s.N) & a_quarter(g, s.N)
    padding = a_quarter(g, s.B, s.N) | (torch.arange(s.N) == s.N - 1)
    mask[-1, -1] = True  # some key is seen in every sequence
    options |= {"attn_mask": mask, "key_padding_mask": padding}
    visible = (mask & padding[:, None, None]) & for_reference.pop("block_mask", True)
    reference = attention_reference(**inputs, block_mask=visible, **for_reference)
    check(inputs, reference.probs, s, backend=backend, **options)


def test_tangents_of_a_bias_beside_a_mask(seed):
    """In forward mode a bool mask is a part of the bias, whose tangents hide nothing."""
    inputs = random_inputs(generator(seed), SIZES, torch.float64)
    inputs["bias"] = normal(generator(seed), 1, 1, SIZES.M, SIZES.N, dtype=torch.float64).detach()
    padding = torch.arange(SIZES.N) < SIZES.N - 7

    def moved(junk: float) -> tuple[torch.Tensor, torch.Tensor]:
        tangents = {name: torch.ones_like(x) for name, x in inputs.items()}
        for x in (tangents["k"], tangents["v"]):
            x[:, ~padding] = junk

        def call(*tensors: torch.Tensor) -> Any:
            named = dict(zip(inputs, tensors, strict=True))
            mask = padding.expand(SIZES.B, -1)
            return flashtile.attention(**named, key_padding_mask=mask, return_lse=True)

        return torch.func.jvp(call, tuple(inputs.values()), tuple(tangents.values()))[1]

    for junk in JUNK:
        for got, wanted in zip(moved(junk), moved(1.0), strict=True):
            assert torch.equal(got, wanted)


def test_probabilities(seed):
    g = generator(seed)
    inputs = random_inputs(g, SIZES, torch.float32)
    mask = a_quarter(g, SIZES.N).expand(SIZES.M, SIZES.N)
    wanted = flashtile.attention(**inputs, attn_mask=mask, return_attn_probs=True)[2]
    for name in ("k", "v"):
        inputs[name][:, ~mask[0]] = math.nan
    got = flashtile.attention(**inputs, attn_mask=mask, return_attn_probs=True)[2]
    assert torch.equal(got, wanted)


def test_rows_that_use_the_log_sums_again(seed):
    """Rows whose scores are huge add up their weights once more in the backward."""
    g = generator(seed)
    inputs = random_inputs(g, SIZES, torch.float32)
    bias = torch.full((1, 1, SIZES.M, SIZES.N), -1e9)
    mask = a_quarter(g, SIZES.N).expand(SIZES.M, SIZES.N)
    probabilities = mask.expand(SIZES.B, SIZES.Hq, -1, -1)
    check(inputs | {"bias": bias}, probabilities, attn_mask=mask)


# Both ends of the range of calls: one tile and many, one query and many, parts of the keys.
SEEN: dict[str, tuple[Sizes, str]] = {
    "short": (SIZES, "nothing"),
    "short, sink": (SIZES, "sink"),
    "short, softcap": (SIZES, "softcap"),
    "tiles": (replace(SIZES, M=200, N=300), "nothing"),
    "tiles, causal": (replace(SIZES, M=200, N=300, D=64), "causal"),
    "tiles, bias and sink": (replace(SIZES, M=200, N=300), "bias + sink"),
    "decoding": (replace(SIZES, M=1, N=700), "nothing"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", SEEN)
def test_nan_in_a_query_is_its_result(name, dtype, backend, seed):
    """It stays in the row, its LSE and its gradient, and in every gradient that adds it up."""
    g, (s, options) = generator(seed), SEEN[name]
    inputs = random_inputs(g, s, dtype)
    options, _, extra = split_options(resolve(options, g, s, dtype))
    inputs |= {name: x.detach() for name, x in extra.items()}
    nowhere = torch.zeros(s.B, s.N, s.Hk, dtype=torch.bool)
    wanted = run(inputs, nowhere, 0.0, backend=backend, **options)
    row, head = s.M // 2, 1
    inputs["q"][0, row, head] = math.nan
    got = run(inputs, nowhere, 0.0, backend=backend, **options)
    assert got["out"][0, row, head].isnan().all()
    assert got["dq"][0, row, head].isnan().all()
    assert got["dv"][0, 0, 0].isnan().all()
    assert got["lse"][0, head, row].isnan()
    wanted["out"][0, row, head], wanted["lse"][0, head, row] = math.nan, math.nan
    for result in ("out", "lse"):
        assert torch.equal(got[result].nan_to_num(7e4), wanted[result].nan_to_num(7e4))


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("name", SEEN)
def test_nan_in_a_key_is_the_result_of_the_queries_that_see_it(name, where, backend, seed):
    g, (s, options) = generator(seed), SEEN[name]
    inputs = random_inputs(g, s, torch.float16)
    options, _, extra = split_options(resolve(options, g, s, torch.float16))
    inputs |= {name: x.detach() for name, x in extra.items()}
    inputs[where][0, 0, 1] = math.nan
    nowhere = torch.zeros(s.B, s.N, s.Hk, dtype=torch.bool)
    got = run(inputs, nowhere, 0.0, backend=backend, **options)
    heads = slice(s.Hq // s.Hk, None)
    assert got["out"][0, :, heads].isnan().all()
    assert not got["out"][1].isnan().any()
    nan = got["lse"][0, heads].isnan()
    assert nan.all() if where == "k" else not nan.any()


def test_nan_in_a_float8_query_is_its_result(backend, seed):
    g, s = generator(seed), replace(SIZES, M=200, N=300, D=64)
    inputs = random_inputs(g, s, torch.float32)
    inputs["q"][0, 100, 1] = math.nan
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs.values())
    out, lse = flashtile.attention(q, k, v, return_lse=True, backend=backend)
    assert out[0, 100, 1].isnan().all() and lse[0, 1, 100].isnan()
    assert out.isnan().sum() == 64 and lse.isnan().sum() == 1
