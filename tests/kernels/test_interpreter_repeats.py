"""Repeated calls in Triton's interpreter: memo entries and launches are used again with other
tensors, and the results are those of a first call.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_repeats.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.lru import clear_caches
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import generator, normal, rotary_tables

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

import flashtile.ops.append  # noqa: F401  (defines the ops)
from flashtile.backends import triton as backend
from flashtile.backends.triton import plan
from flashtile.gpu import launch_cache
from flashtile.gpu.launch import Launch
from flashtile.ops.append.kernel import rotate_and_append

from .cases import make_call
from .compare import everything
from .decoding import make_decoding
from .interpreted_repeats import repeat_interpreted
from .parts import make_parts

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every new launch; later calls like it repeat the launch."""
    return repeat_interpreted(monkeypatch)


def assert_repeated() -> None:
    """The last call found launches to repeat."""
    assert all(isinstance(x, launch_cache.PreparedCall) for x in launch_cache._prepared.values())


@pytest.mark.parametrize(
    ("name", "splits"),
    [("one query", 1), ("pages of 16", 3), ("sink", 1), ("packed queries", 3), ("alibi", 3)],
)
def test_a_repeated_call_uses_the_new_tensors(
    name: str, splits: int, repeats: list[Launch], seed: int
):
    """Other numbers, other lengths, other pages: the same kernels, found without Triton."""
    for step in range(3):
        operands, options = make_decoding(name, torch.float32, seed + step)
        assert operands.seqused_k is not None
        operands = operands._replace(seqused_k=operands.seqused_k - step % 2)
        options = options._replace(num_splits=splits)
        problem = AttentionProblem.of(operands, options)
        got = backend.forward(problem, operands)
        assert len(repeats) == (1 if splits == 1 else 2)
    assert_repeated()
    launch_cache._prepared.clear()
    launch_cache._compiled.clear()
    wanted = backend.forward(problem, operands)
    assert len(repeats) == (2 if splits == 1 else 4)
    assert all(map(torch.equal, got, wanted))


def test_a_call_of_another_layout_is_launched_anew(repeats: list[Launch], seed: int):
    operands, options = make_decoding("pages of 16", torch.float32, seed)
    options = options._replace(num_splits=1)
    assert operands.page_table is not None
    spread = torch.stack([operands.k, operands.k], -2)[..., 0, :]
    more = torch.cat([operands.page_table, operands.page_table], 1)
    calls = (operands, operands._replace(k=spread), operands._replace(page_table=more))
    outs = [backend.forward(AttentionProblem.of(x, options), x)[0] for x in calls]
    assert len(repeats) == 3
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("name", ["one query", "another value head dim", "pages, packed queries"])
def test_parts_lie_in_the_workspace(
    name: str, repeats: list[Launch], monkeypatch: pytest.MonkeyPatch, seed: int
):
    """The first call and those like it: the same bits, no memory of their own, and not a byte past
    what they need."""
    made: list[Tensor] = []
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(empty(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "empty", counted)
    for step in range(3):
        operands, options = make_decoding(name, torch.float16, seed + step)
        options = options._replace(num_splits=3)
        problem = AttentionProblem.of(operands, options)
        rows = operands.q.shape[:-1].numel()
        used = 4 * 3 * rows * (problem.Dv + 1)
        workspace = torch.full((used + 64,), 255, dtype=torch.uint8)
        made.clear()
        got = backend.forward(problem, operands._replace(workspace=workspace))
        assert all(x.is_meta for x in made)  # `out` and `lse` are made by another function
        assert len(repeats) == 2
        assert (workspace[used:] == 255).all()
        assert not workspace[used - 12 * rows : used].view(torch.float32).isnan().any()
        assert not workspace[: 12 * rows * problem.Dv].view(torch.float32).isnan().all()
    assert_repeated()
    launch_cache._prepared.clear()
    launch_cache._compiled.clear()
    wanted = backend.forward(problem, operands)
    assert all(map(torch.equal, got, wanted))


def test_repeated_appends_write_the_new_tokens(repeats: list[Launch], seed: int):
    g = generator(seed)
    tables = rotary_tables(17, 16)
    for step in range(3):
        cache = [normal(g, 3, 16, 2, d) for d in (20, 7)]
        new = [normal(g, 3, 2, 2, d) for d in (20, 7)]
        q, lengths = normal(g, 3, 2, 4, 20), torch.tensor([0, 14 - step % 2, 7], dtype=torch.int32)
        wanted = [x.clone() for x in cache]
        rest = (*tables, lengths, lengths, *[None] * 6, True, True)
        rotated = rotate_and_append(q, *cache, *new, *rest)
        truth = torch.ops.flashtile.kvcache_rotate_append(q, *wanted, *new, *rest)
        for x, y in zip((*rotated, *cache), (*truth, *wanted), strict=True):
            torch.testing.assert_close(x, y)
        assert len(repeats) == 1


@pytest.mark.parametrize(("short", "launches"), [(0, 3), (plan.SHORT, 1)])
def test_gradients_of_a_cache_are_kernels_of_their_own(
    short: int, launches: int, repeats: list[Launch], monkeypatch: pytest.MonkeyPatch
):
    """They are float32 until rows that are shared are added up, in a call that is else the same as
    one over keys without pages."""
    monkeypatch.setattr(plan, "SHORT", short)
    clear_caches()
    q, dout = torch.randn(2, 2, 3, 2, 16, dtype=torch.float16)
    k, v = torch.randn(2, 4, 16, 2, 16, dtype=torch.float16)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    paged = Operands(q, k, v, seqused_k=torch.tensor([20, 32], dtype=torch.int32))
    dense = paged._replace(k=k.view(2, 32, 2, 16), v=v.view(2, 32, 2, 16))
    for operands in (paged._replace(page_table=table), dense):
        before = len(repeats)
        problem = AttentionProblem.of(operands, Options(3, 32, 0.25))
        backend.backward(problem, operands, q, torch.zeros(2, 2, 3), dout, None)
        assert len(repeats) - before == launches


@pytest.mark.parametrize(
    ("name", "launches"),
    [("packed dropout", 4), ("bias", 6), ("sink", 4), ("block mask", 7)],
)
def test_repeated_training(name: str, launches: int, repeats: list[Launch], seed: int):
    """Forward and backward; the lists of a block mask's tiles are made anew each time."""

    def results(step: int) -> dict[str, Tensor]:
        operands, options = make_call(name, torch.float32, seed)
        g = generator(seed + step)
        q, k, v = (normal(g, *x.shape) for x in operands[:3])
        operands = operands._replace(q=q, k=k, v=v)
        packed = q.dim() == 3
        dlse = normal(g, *(q.shape[1::-1] if packed else (q.shape[0], q.shape[2], q.shape[1])))
        dout = normal(g, *q.shape[:-1], v.shape[-1])
        return everything(backend, operands, options, dout, dlse)

    again = [results(step) for step in range(3)]
    assert len(repeats) == launches
    launch_cache._prepared.clear()
    launch_cache._compiled.clear()
    wanted = results(2)
    for field, x in again[2].items():
        assert torch.equal(x, wanted[field]), field


def test_parts_of_sequences_are_kernels_of_their_own(repeats: list[Launch], seed: int):
    """Other runs are not: a call that is prepared reads those of each step."""

    def results(operands: Operands, is_partial: bool = False) -> dict[str, Tensor]:
        dout, dlse = torch.ones_like(operands.q), torch.ones(operands.q.shape[1::-1])
        return everything(backend, operands, parts.options, dout, dlse, is_partial=is_partial)

    parts = make_parts("one run", torch.float16, seed)
    operands = parts.operands
    whole = operands._replace(q_runs=None, k_runs=None)
    for _ in range(3):
        results(operands)
        results(whole)
        results(operands, is_partial=True)
    assert len(repeats) == 3 * 4
    moved = operands.q_runs.clone()
    moved[:, 0, 1] = 0  # the first run of queries stands further to the left
    again = results(operands._replace(q_runs=moved))
    assert len(repeats) == 3 * 4
    launch_cache._prepared.clear()
    launch_cache._compiled.clear()
    for field, x in results(operands._replace(q_runs=moved)).items():
        assert torch.equal(again[field], x), field


def test_given_tensors_of_other_strides(repeats: list[Launch], seed: int):
    """Each layout of the tensors to write to has launches of its own."""
    operands, options, *_ = make_parts("one run", torch.float32, seed)
    problem = AttentionProblem.of(operands, options)._replace(is_partial=True)
    out, lse = backend.forward(problem, operands)
    dq = backend.backward(problem, operands, out, lse, torch.ones_like(out), None).dq
    tokens, heads, head_dim = operands.q.shape
    for step in range(3):
        views = torch.zeros(2, tokens, heads + step % 2, head_dim)[:, :, :heads].unbind(0)
        found = torch.full_like(lse, -torch.inf)
        backend.forward(problem, operands, (views[0], found))
        assert torch.equal(views[0], out) and torch.equal(found, lse)
        backend.backward(problem, operands, out, lse, torch.ones_like(out), None, views[1])
        assert torch.equal(views[1], dq)
