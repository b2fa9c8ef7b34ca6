"""Several host threads call flashtile at once; each gets the same results as without the others."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from typing import Any

import pytest
import torch
from interruptions import interrupted
from torch import Tensor

import flashtile
from flashtile import operators
from flashtile.layers import rotary
from flashtile.layers.rotary import RotaryEmbedding
from flashtile.testing import cu_seqlens, generator, normal

THREADS, ROUNDS, SIZES, D = 8, 40, 3, 64
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}

Outcome = list[Tensor] | str  # the results, or why the call was refused


@pytest.fixture(autouse=True)
def threads_alternate() -> Iterator[None]:
    """Make Python switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def dense(device: str, size: int) -> list[Tensor]:
    g, dtype = generator(size), DTYPES[device]
    q, k, v = (normal(g, 2, 5 + size, 2, D, dtype=dtype).to(device) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flashtile.attention(*leaves, causal=True, softcap=3.0 * size, deterministic=True)
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def varlen(device: str, size: int) -> list[Tensor]:
    g, dtype = generator(size), DTYPES[device]
    offsets = cu_seqlens([2, 1 + size, 4]).to(device)
    q, k, v = (normal(g, 7 + size, 2, D, dtype=dtype).to(device) for _ in range(3))
    return [flashtile.attention_varlen(q, k, v, offsets, offsets, 4, 4, window_size=(size, 0))]


def cached(device: str, size: int) -> list[Tensor]:
    g, dtype = generator(size), DTYPES[device]
    q, k, v = (normal(g, 2, 1, 2, D, dtype=dtype).to(device) for _ in range(3))
    caches = [normal(g, 2, 16, 2, D, dtype=dtype).to(device) for _ in range(2)]
    lengths = torch.tensor([size, 9], dtype=torch.int32, device=device)
    return [
        flashtile.attention_with_kvcache(q, *caches, k, v, cache_seqlens=lengths),
        *caches,
    ]


def float8(device: str, size: int) -> list[Tensor]:
    g = generator(size)
    q, k, v = (normal(g, 1, 5 + size, 2, D, dtype=torch.bfloat16).to(device) for _ in range(3))
    return [flashtile.attention_fp8(q, k, v, causal=True)]


CALLS = (dense, varlen, cached, float8)
FORCED = (None, "cpu", "triton", "hopper")


def outcome(call: Callable[..., list[Tensor]], *args: Any) -> Outcome:
    try:
        return call(*args)
    except NotImplementedError as error:
        return str(error)


def is_same(a: Outcome, b: Outcome) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a is b or a == b
    return all(map(torch.equal, a, b))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_eight_threads_of_mixed_calls(device: str, seed: int) -> None:
    """With other backends forced, on other streams, while caches are emptied."""
    expected: dict[Any, Outcome] = {}
    for name in FORCED:
        for call in CALLS:
            for size in range(SIZES):
                with flashtile.backend(name):
                    expected[name, call, size] = outcome(call, device, size)
    refused = {name for (name, *_), found in expected.items() if isinstance(found, str)}
    assert refused and None not in refused
    together = Barrier(THREADS)

    def run(thread: int) -> list[str]:
        draw, wrong = random.Random(seed + thread), []
        together.wait()
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
        with stream:
            for _ in range(ROUNDS):
                name, call, size = draw.choice(FORCED), draw.choice(CALLS), draw.randrange(SIZES)
                with nullcontext() if name is None else flashtile.backend(name):
                    found = outcome(call, device, size)
                if not is_same(found, expected[name, call, size]):
                    wrong.append(f"{call.__name__} {size} on {name}: {found}")
                if draw.random() < 0.05:
                    flashtile.clear_caches()
        return wrong

    if device == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(THREADS) as pool:
        assert not [line for lines in pool.map(run, range(THREADS)) for line in lines]


@pytest.mark.parametrize("kept", [torch.float32, torch.float64], ids=["kept", "made"])
def test_tables_of_a_rotary_embedding_are_whole_whenever_another_thread_replaces_them(kept):
    """One thread uses float32, another float64: each gets four tables of its dtype."""
    cpu = torch.device("cpu")

    def make() -> RotaryEmbedding:
        rope = RotaryEmbedding(4, scale_base=512)
        rope.tables(5, cpu, kept)
        return rope

    for tables in interrupted(
        make,
        lambda rope: rope.tables(4, cpu, torch.float32),
        lambda rope: rope.tables(3, cpu, torch.float64),
        rotary,
    ):
        assert {table.dtype for table in tables} == {torch.float32}
        assert len({table.shape for table in tables}) == 1
        assert len(tables.cos) >= 4


def test_flop_formulas_are_registered_after_a_first_call_that_failed(monkeypatch) -> None:
    registered = []

    def register() -> None:
        if not registered:
            registered.append("failed")
            raise ImportError
        registered.append("done")

    monkeypatch.setitem(sys.modules, "torch.utils.flop_counter", object())
    monkeypatch.setattr(operators, "_flops_are_registered", False)
    monkeypatch.setattr(operators, "_register_flops", register)
    with pytest.raises(ImportError):
        operators.register_flops_when_counting()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: operators.register_flops_when_counting(), range(8)))
    assert registered == ["failed", "done"]
