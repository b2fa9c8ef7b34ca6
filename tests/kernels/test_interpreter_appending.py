"""Decoding steps in Triton's interpreter: the attention kernel appends and rotates the new tokens.

Whole calls, judged with the contents of the caches: what must not change keeps its bits, and slots
that hold no token hold NaN.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_appending.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from configurations import one_kind_each
from conformance import caches
from conformance.caches import B, Cache
from torch import Tensor

import flashtile
from flashtile.call import memo
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import generator, normal, rotary_tables

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend
from flashtile.backends.triton import launch
from flashtile.gpu.launch import Launch

from .interpreted_repeats import repeat_interpreted

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

# Keys of four tiles in float32. The third sequence's new tokens are on both sides of an edge.
CAPACITY = 100
FILLED = (5, 0, 62)
INT = {"dtype": torch.int32}


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Run calls on CPU tensors by the interpreted kernels, and note which of them append."""
    calls: list[bool] = []
    forward = launch.forward

    def noted(problem: Any, operands: Any, new: Any = ()) -> Any:
        calls.append(bool(new))
        return forward(problem, operands, new)

    monkeypatch.setattr(backend, "unsupported_reasons", lambda problem: [])
    monkeypatch.setattr(launch, "forward", noted)
    monkeypatch.setattr(caches, "CAPACITY", CAPACITY)
    flashtile.clear_caches()
    yield calls
    flashtile.clear_caches()  # decisions that are true only here


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every new launch; calls are repeated as on a GPU."""
    describe = AttentionProblem.of

    def of(operands: Operands, options: Options) -> AttentionProblem:
        return describe(operands, options)._replace(device_type="cuda")

    monkeypatch.setattr(AttentionProblem, "of", of)
    monkeypatch.setattr(memo, "_has_launches", lambda x: True)
    return repeat_interpreted(monkeypatch)


def rotary(dtype: torch.dtype, dim: int = 16, **more: Any) -> dict[str, Any]:
    cos, sin = rotary_tables(CAPACITY + 16, dim, dtype)
    return {"rotary_cos": cos, "rotary_sin": sin, **more}


CASES: dict[str, dict[str, Any]] = {
    "one token": {"M": 1},
    "not rotated": {"M": 2, "rotary": 0},
    "halves": {"M": 3, "interleaved": False},
    "half of the features": {"M": 3, "D": 24, "rotary": 12},
    "half of the features, halves": {"M": 3, "D": 24, "rotary": 12, "interleaved": False},
    "eight tokens": {"M": 8},
    "one key head": {"M": 2, "Hq": 8, "Hk": 1},
    "heads alone": {"M": 3, "Hq": 2},
    "one position": {"M": 3, "options": "nothing"},
    "softcap": {"M": 2, "options": "softcap + sink"},
    "window": {"M": 4, "options": "causal window"},
    "window that ends before the new tokens": {"M": 2, "window": (30, -20)},
    "window of the future": {"M": 2, "window": (-3, -1)},
    "chunk": {"M": 2, "options": "chunk"},
    "more tokens than queries": {"M": 1, "tokens": 5},
    "fewer tokens than queries": {"M": 5, "tokens": 1},
    "own rotary positions": {"M": 2, "base": (0, 40, 90)},
    "another value head dim": {"M": 2, "Dv": 20},
    "rows": {"M": 2, "rows": (4, 0, 2)},
    "left pads": {"M": 2, "leftpad": (5, 0, 40)},
    "pages of 1": {"M": 2, "page_size": 1},
    "pages of 8": {"M": 2, "page_size": 8},
    "pages of 25": {"M": 8, "page_size": 25},
    "pages of 20, left pads": {"M": 2, "page_size": 20, "leftpad": (7, 0, 63)},
    "pages of 50 under a window": {"M": 2, "page_size": 50, "options": "causal window"},
}


def make_call(case: dict[str, Any], dtype: torch.dtype, seed: int) -> tuple[Cache, dict[str, Any]]:
    """The cache of a case, and the arguments of its call."""
    case = {"options": "causal", "rotary": 16, "interleaved": True, **case}
    sizes = {key: case[key] for key in ("M", "Hq", "Hk", "D", "Dv") if key in case}
    rows = case.get("rows")
    c = Cache(seed, dtype, filled=FILLED, rows=5 if rows else B, **sizes)
    if rows:
        c.call["cache_batch_idx"] = torch.tensor(rows, **INT)
    if "page_size" in case:
        c.to_pages(case["page_size"])
    queries, c.M = c.M, case.get("tokens", c.M)
    call = c.new_tokens()
    c.M = queries
    if case["rotary"]:
        call |= rotary(dtype, case["rotary"], rotary_interleaved=case["interleaved"])
    if "base" in case:
        call["rotary_seqlens"] = torch.tensor(case["base"], **INT)
    if "leftpad" in case:
        call["cache_leftpad"] = torch.tensor(case["leftpad"], **INT)
    if "window" in case:
        call["window_size"] = case["window"]
    else:
        call["options"] = case["options"]
    return c, call


@pytest.mark.parametrize(("name", "splits"), one_kind_each(CASES, [3, 1]))
def test_a_step(name: str, splits: int, appended: list[bool], seed: int):
    """In one part, or in parts of one tile or two."""
    c, call = make_call(CASES[name], torch.float32, seed)
    c.check("triton", **call, num_splits=splits)
    assert appended == [True]


def test_more_parts_than_tiles(appended: list[bool], seed: int):
    c, call = make_call(CASES["eight tokens"], torch.float32, seed)
    c.check("triton", **call, num_splits=9)
    assert appended == [True]


@pytest.mark.parametrize("name", ["halves", "half of the features"])
def test_a_step_in_float16(name: str, appended: list[bool], seed: int):
    c, call = make_call(CASES[name], torch.float16, seed)
    c.check("triton", **call)
    assert appended == [True]


@pytest.mark.parametrize("sizes", [{}, {"D": 32, "Hk": 4}], ids=["one by one", "pairs"])
@pytest.mark.parametrize("page_size", [0, 8])
def test_a_float8_cache(sizes: dict[str, int], page_size: int, appended: list[bool], seed: int):
    """Its numbers times a factor of each sequence and key head. New tokens may be larger than the
    largest float8 number.

    The new tokens are numbers that float8 holds, not rotated, also after a factor of up to 4 has
    divided them, when none is subnormal: the interpreter rounds some others to half of what they
    are.
    """
    c = Cache(seed, torch.float16, filled=FILLED, M=2, **sizes)
    if page_size:
        c.to_pages(page_size)
    c.to_float8()
    new = {k: x.to(torch.float8_e4m3fn).to(x.dtype) for k, x in c.new_tokens().items()}
    new = {k: x.masked_fill(x.abs() < 4 * 2**-6, 0.0) for k, x in new.items()}
    new["v"][0, 0] *= 4096
    tables = torch.ones(CAPACITY + 3, 4).half(), torch.zeros(CAPACITY + 3, 4).half()
    identity = dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
    for splits in (1, 3):
        c.check("triton", **new, **identity, causal=True, num_splits=splits)
    assert appended == [True] * 2


@pytest.mark.parametrize("name", ["halves", "pages of 8", "rows", "reading only"])
def test_a_repeated_step_uses_the_new_tensors(
    name: str, appended: list[bool], repeats: list[Launch], seed: int
):
    """Other numbers, other lengths, other positions: the fifth call and later ones go straight
    from the arguments to the launches, without the backend's own preparations."""
    for step in range(6):
        c, call = make_call(CASES.get(name, {"M": 2}), torch.float32, seed + step)
        c.seqlens = c.seqlens - step % 2 * torch.tensor([1, 0, 2], **INT)
        if name == "reading only":
            call = {"causal": True}
        c.check("triton", **call, num_splits=3)
    assert appended == [name != "reading only"] * 4
    assert len(repeats) == 2


LENGTHS = (-2, -1, 0, 5, 29, 31, 62, 97, 98, 100, 101)  # two or three of three tokens fit in most
TOKENS = 3


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("storage", ["contiguous", "rows", "pages"])
def test_tokens_without_a_slot_are_dropped(
    storage: str, splits: int, appended: list[bool], monkeypatch: pytest.MonkeyPatch, seed: int
):
    """As by the op, if nothing checks the values, as on a GPU: past the capacity, before the start,
    in rows and pages that do not exist."""
    monkeypatch.setenv("FLASHTILE_CHECK", "0")
    g, count = generator(seed), len(LENGTHS)
    q = normal(g, count, TOKENS, 2, 16)
    new = [normal(g, count, TOKENS, 1, 16) for _ in "kv"]
    cache = [normal(g, count, CAPACITY, 1, 16) for _ in "kv"]
    lengths, exists = torch.tensor(LENGTHS, **INT), torch.ones(count, dtype=torch.bool)
    rows = table = None
    if storage == "rows":
        rows = torch.arange(count, **INT).flip(0)
        rows[2], rows[5] = -1, count
        exists[[2, 5]] = False
        exists[rows.clamp(0, count - 1)[[2, 5]].long()] = True
    elif storage == "pages":
        cache = [x.reshape(-1, 25, 1, 16) for x in cache]
        table = torch.randperm(4 * count, generator=g).view(count, 4).int()
        table[2, 0], table[5, 1] = -1, 4 * count
        exists[[2, 5]] = False
    wanted = [x.clone() for x in cache]
    where = (None, table, rows, None, None)
    used = torch.ops.flashtile.kvcache_append(*wanted, *new, lengths, *where)
    given = {"cache_batch_idx": rows, "page_table": table, "causal": True, "num_splits": splits}

    def call(caches: list[Tensor], lengths: Tensor, *tokens: Tensor) -> Any:
        return flashtile.attention_with_kvcache(
            q, *caches, *tokens, cache_seqlens=lengths, **given, return_lse=True, backend="triton"
        )

    got = call(cache, lengths, *new)
    assert all(map(torch.equal, cache, wanted))
    for x, y in zip(got, call(wanted, used), strict=True):
        assert torch.equal(x[exists], y[exists])
    assert appended == [True, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"Hq": 70, "Hk": 1},
        {"M": 17},
        {"M": 9, "Hq": 8, "Hk": 1, "tokens": 1},
        {"M": 2, "page_size": 8, "options": "causal + spans for each batch"},
    ],
    ids=["heads of two tiles", "many tokens", "queries of two tiles", "spans"],
)
def test_other_calls_append_first(changes: dict[str, Any], appended: list[bool], seed: int):
    """Programs that share a key head would read what another one stores; new tokens may be in the
    hole between two spans.
    """
    c, call = make_call(changes, torch.float32, seed)
    c.check("triton", **call, num_splits=3)
    assert appended == [False]


def test_caches_of_spread_features_are_appended_to_first(appended: list[bool], seed: int):
    """The attention reads copies of them."""
    c, call = make_call({"M": 2}, torch.float32, seed)
    c.k_cache, c.v_cache = (x.mT.contiguous().mT for x in (c.k_cache, c.v_cache))
    assert c.k_cache.clone().stride(-1) > 1
    c.check("triton", **call)
    assert appended == [False]
