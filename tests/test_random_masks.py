"""Random problems with spans, score functions, relative biases and slopes, by the rule.

`FLASHTILE_DRAWS` says how many in all. Which options stand together, in which layout and with which
sizes of heads, is a fixed list of random combinations, because each is a set of kernels, which
takes many seconds to compile on a GPU. Drawn at large are lengths and numbers. What a score
function captures has gradients, which are compared as well.
"""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from conformance.caches import B as CACHES
from conformance.caches import Cache
from conformance.harness import OPTIONS, Make, Sizes, Twin, check_dense, check_varlen
from torch import Tensor

from flashtile.backends.triton import plan
from flashtile.testing import STRIDE_STYLES, alibi_slopes, generator, normal, strided

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_cpu_tiles", "poisoned_buffers")]

COMBINATIONS = 30  # two for each of 15 processes
DRAWS = int(os.environ.get("FLASHTILE_DRAWS", str(COMBINATIONS)))

MASKS = (
    ["span"],
    ["spans for each batch", "causal"],
    ["spans for each batch and head"],
    ["causal"],
    ["causal window"],
    ["block mask with partial tiles", "causal"],
    ["chunk", "span"],
)
SCORES = (
    ["table by distance"],
    ["relative bias"],
    ["curve", "learned alibi"],
    ["learned slopes", "relative bias"],
    ["documents", "alibi"],
    ["softcap", "alibi for each batch"],
)
OTHERS = (["sink"], ["dropout"], ["sink", "dropout"], ["bias shared by heads"], [])
HEADS = ((4, 2), (3, 3), (4, 1), (2, 2))
HEAD_DIMS = ((64, 64), (128, 128), (64, 64), (128, 128), (40, 40), (64, 128))
# The lengths of a call choose a GPU's kernels only by these ranges: one with few queries may be
# split. The tiles of the CPU are small here, so that shorter sequences cross their borders.
MANY, FEW = (130, 200), (1, 6)
ON_A_CPU = (40, 70)
LONGEST, SEQUENCES = 240, 4  # sizes of captured tensors are part of the kernels, too


class Combination(NamedTuple):
    """The configuration of the compiled kernels."""

    layout: str
    queries: tuple[int, int]
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: torch.dtype
    options: tuple[str, ...]
    style: str  # of strides
    has_descriptors: bool

    @property
    def label(self) -> str:
        """For the name of a test."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layout} {self.heads} {self.head_dims} {dtype} {' + '.join(self.options)}"


def combination(number: int) -> Combination:
    """A combination of options; a number always gives the same one."""
    chance = random.Random(number)
    layout = ("dense", "packed", "dense", "cache", "packed")[number % 5]
    options = [*MASKS[number % len(MASKS)], *SCORES[number % len(SCORES)]]
    # A cache has no dropout, and its rows are not those of a bias.
    others = [[], ["sink"]] if layout == "cache" else OTHERS
    options += chance.choice(others)
    heads = HEADS[number % len(HEADS)]
    return Combination(
        layout,
        FEW if layout == "cache" or number % 9 == 4 else MANY,
        heads,
        chance.choice(HEAD_DIMS),
        torch.float16 if number % 6 == 3 else torch.bfloat16,
        tuple(options),
        chance.choice(STRIDE_STYLES) if number % 3 == 0 else "contiguous",
        number % 2 == 0,
    )


def table_by_distance(
    table: Tensor, shift: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    return score + table[h, (j - i - shift[b]).clamp(-40, 40) + 40]


def slopes_of_distance(
    slopes: Tensor, shift: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    return score - slopes[h] * (j - i - shift[b]).abs()


def curve(scale: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    bent = 2 * torch.tanh(score / 2) - h
    return torch.where((i + j) % 2 == 0, score * scale[b, i], bent)


def documents(ids: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(ids[b, i] == ids[b, j], score, -float("inf"))


def functions(g: torch.Generator, heads: int, shifts: list[int]) -> dict[str, Twin | partial]:
    """Score functions by name, with what they capture, whose sizes do not depend on the call.

    `shifts`: how many keys more than queries each sequence has.
    """
    shift = torch.zeros(SEQUENCES, dtype=torch.int64)
    shift[: len(shifts)] = torch.tensor(shifts)
    table, slopes = normal(g, heads, 81), alibi_slopes(g, heads)
    ids = torch.randint(0, 3, (SEQUENCES, LONGEST), generator=g)
    return {
        "table by distance": Twin(table_by_distance, "relative_bias", table, (shift,)),
        "learned slopes": Twin(slopes_of_distance, "alibi_slopes", slopes, (shift,)),
        "curve": partial(curve, normal(g, SEQUENCES, LONGEST).requires_grad_()),
        "documents": partial(documents, ids),
    }


def options_of(names: tuple[str, ...], shifts: list[int]) -> Make:
    """The maker of these options."""

    def make(g: torch.Generator, s: Sizes, dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name in names:
            if name in OPTIONS:
                made |= OPTIONS[name](g, s, dtype)
            else:
                made["score_mod"] = functions(g, s.Hq, shifts)[name]
        return made

    return make


def without_gradients(make: Make) -> Make:
    """The same options, for a call without gradients: no tensor is a leaf."""

    def made(g: torch.Generator, s: Sizes, dtype: torch.dtype) -> dict[str, Any]:
        options = make(g, s, dtype)
        function = options.get("score_mod")
        if isinstance(function, Twin):
            options["score_mod"] = partial(function.function, function.leaf, *function.constants)
        elif function is not None:
            captured = (x.detach() for x in function.args)
            options["score_mod"] = partial(function.func, *captured)
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in options.items()}

    return made


@pytest.fixture
def prefers_descriptors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes the Triton backend load tiles as in large calls."""

    def prefer() -> None:
        from flashtile.gpu import launch_cache

        monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
        plan.plan.cache_clear()
        for memory in ("_prepared", "_compiled"):
            monkeypatch.setattr(launch_cache, memory, {})

    yield prefer
    plan.plan.cache_clear()


@pytest.mark.parametrize("number", range(COMBINATIONS), ids=lambda n: combination(n).label)
def test_random_problems(number: int, backend: str, seed: int, prefers_descriptors: Any) -> None:
    c = combination(number)
    if c.has_descriptors and backend == "triton":
        prefers_descriptors()
    chance = random.Random(seed)
    for _ in range(max(1, DRAWS // COMBINATIONS)):
        check(c, backend, chance)


def check(c: Combination, backend: str, chance: random.Random) -> None:
    """A call of the combination whose lengths and numbers are drawn."""
    heads, seed = (*c.heads, *c.head_dims), chance.randrange(2**31)
    layout = partial(strided, style=c.style)
    queries, longest = c.queries, LONGEST
    if backend == "cpu":
        queries, longest = min(c.queries, ON_A_CPU), 80
    if c.layout == "dense":
        s = Sizes(chance.randint(1, 2), chance.randint(*queries), keys(chance, longest), *heads)
        options = options_of(c.options, [s.N - s.M] * s.B)
        check_dense(s, options, c.dtype, backend, seed, layout)
    elif c.layout == "packed":
        count = chance.randint(1, SEQUENCES)
        lengths_q = [chance.randint(0, queries[1]) for _ in range(count)]
        lengths_k = [keys(chance, longest) for _ in range(count)]
        s = Sizes(count, queries[1], max(1, *lengths_k), *heads)
        options = options_of(c.options, [n - m for m, n in zip(lengths_q, lengths_k, strict=True)])
        check_varlen(lengths_q, lengths_k, s, options, c.dtype, backend, seed, layout)
    else:
        filled = tuple(chance.randint(0, 26) for _ in range(CACHES))
        cache = Cache(seed, c.dtype, filled, chance.randint(*queries), *heads)
        if chance.random() < 0.5:
            cache.to_pages(16)
        else:
            pads = [chance.randint(0, n) for n in filled]
            cache.call["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
        cache.call |= cache.new_tokens()
        cache.check(backend, options=without_gradients(options_of(c.options, [0])))


def keys(chance: random.Random, longest: int) -> int:
    """How many keys; now and then a few or none."""
    return chance.choice((chance.randint(0, 12), *(chance.randint(1, longest),) * 3))


def test_the_combinations_hold_every_option() -> None:
    found = {name for number in range(COMBINATIONS) for name in combination(number).options}
    wanted = {name for group in (*MASKS, *SCORES, *OTHERS) for name in group}
    assert found == wanted
    captures = functions(generator(0), 2, [0])
    assert set(captures) == found - set(OPTIONS)
    layouts = {(c.layout, c.has_descriptors) for c in map(combination, range(COMBINATIONS))}
    assert layouts == {(x, y) for x in ("dense", "packed", "cache") for y in (False, True)}
