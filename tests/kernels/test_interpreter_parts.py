"""Parts of sequences in Triton's interpreter, against the whole sequences in float64.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_parts.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from configurations import one_kind_each

from flashtile.backends import cpu
from flashtile.problem import AttentionProblem
from flashtile.testing import assert_close, floor_of, rounding_variance

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend
from flashtile.backends.triton import launch, plan
from flashtile.gpu import launch_cache

from .compare import Run, everything, expected
from .parts import PARTS, Parts, make_parts

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

DTYPES = (torch.float32, torch.float16)


def assert_parts(
    parts: Parts,
    dtype: torch.dtype,
    seed: int,
    capability: tuple[int, int] | None = None,
    **facts: Any,
) -> None:
    """The rows of the parts are those of the whole."""
    q, v = parts.operands.q, parts.operands.v
    dout = torch.randn(*q.shape[:-1], v.shape[-1]).to(dtype)
    dlse = torch.randn(q.shape[1], q.shape[0])
    given = parts.whole, parts.whole_options, *_scattered(parts, dout, dlse)
    truth = _gathered(parts, expected(*given, compute_dtype=torch.float64))
    plain = _gathered(parts, expected(*given, compute_dtype=dtype))
    varied = expected(*given, compute_dtype=torch.float64, attend=rounding_variance(dtype))
    variance = _gathered(parts, varied)
    got = everything(backend, parts.operands, parts.options, dout, dlse, capability, **facts)
    assert got.keys() == truth.keys()
    for field, x in got.items():
        floor = floor_of(variance[field])
        assert_close(field, x, truth[field], plain[field], floor=floor, dtype=dtype, seed=seed)


def _scattered(parts: Parts, dout: torch.Tensor, dlse: torch.Tensor):
    """Cotangents of the whole: zero where no part has the row."""
    B, M, Hq = parts.whole.q.shape[:3]
    whole_dout = dout.new_zeros(B, M, *dout.shape[1:])
    whole_dout[parts.q_index] = dout
    whole_dlse = dlse.new_zeros(B, M, Hq)
    whole_dlse[parts.q_index] = dlse.mT
    return whole_dout, whole_dlse.transpose(1, 2)


def _gathered(parts: Parts, whole: Run) -> Run:
    """Results of the whole at the rows of the parts."""
    index = {"out": parts.q_index, "dq": parts.q_index, "dk": parts.k_index, "dv": parts.k_index}
    found = {name: whole[name][rows] for name, rows in index.items()}
    found["lse"] = whole["lse"].transpose(1, 2)[parts.q_index].mT
    return found | ({"dsink": whole["dsink"]} if "dsink" in whole else {})


@pytest.mark.parametrize(
    ("name", "dtype"), one_kind_each(PARTS, DTYPES), ids=lambda x: str(x).removeprefix("torch.")
)
def test_parts_of_sequences(name: str, dtype: torch.dtype, seed: int):
    has_key_blocks = name.endswith("of blocks")
    assert_parts(make_parts(name, dtype, seed), dtype, seed, has_key_blocks=has_key_blocks)


@pytest.mark.parametrize("name", ["causal", "softcap and sink", "dropout of few queries"])
def test_a_part_of_the_heads_in_float32(name: str, seed: int):
    """Results keep the dtype of their sums, and dropout counts the heads of the whole call."""
    dtype = torch.float16
    parts = make_parts(name, dtype, seed, Hk=2)
    operands, options = parts.operands, parts.options
    q, k, v = (x[:, 1:] for x in operands[:3])
    sink = None if operands.sink is None else operands.sink[1:]
    mine = operands._replace(q=q, k=k, v=v, sink=sink)
    dout, dlse = torch.randn(*q.shape).to(dtype), torch.randn(q.shape[1], q.shape[0])
    whole = everything(backend, operands, options, _padded(dout, 1), _padded(dlse, 0))
    part_options = options._replace(first_head=1)
    got = everything(backend, mine, part_options, dout, dlse, is_partial=True)
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].dtype == torch.float32
        assert torch.equal(got[name].to(dtype), whole[name][:, 1:])
    assert torch.equal(got["lse"], whole["lse"][1:])
    facts = {"is_partial": True, "has_whole_queries": True}
    final = everything(backend, mine, part_options, dout, dlse, **facts)
    assert final["dq"].dtype == dtype
    assert torch.equal(final["dq"], whole["dq"][:, 1:])
    assert torch.equal(final["dk"], got["dk"])
    assert torch.equal(final["dv"], got["dv"])


def _padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`x` with zeros for the first head."""
    return torch.cat([torch.zeros_like(x), x], dim)


@pytest.mark.parametrize(("moved", "splits"), [(0, 1), (1, 1), (0, 3)])
def test_results_in_given_tensors(
    moved: int, splits: int, seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Also where the kernels cannot write to them: rows that are not aligned, parts to merge."""
    passes = []

    def run_all(name: str, *call: Any) -> None:
        passes.append(name)
        launch_cache.run_all(name, *call)

    monkeypatch.setattr(launch, "run_all", run_all)
    parts = make_parts("one run", torch.float16, seed)
    operands, options = parts.operands, parts.options._replace(num_splits=splits)
    problem = AttentionProblem.of(operands, options)._replace(is_partial=True)
    q = operands.q
    tokens, heads, head_dim = q.shape

    def view(within: torch.Tensor) -> torch.Tensor:
        return within[:, 2 : 2 + heads, moved : moved + head_dim]

    all_out, all_dq = torch.zeros(2, tokens, heads + 3, head_dim + moved)
    all_lse = torch.full((heads + 3, tokens), -torch.inf)
    out, dq, lse = view(all_out), view(all_dq), all_lse[2 : 2 + heads]
    want_out, want_lse = backend.forward(problem, operands)
    assert backend.forward(problem, operands, (out, lse))[0] is out
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
    call = problem, operands, want_out.half(), want_lse, torch.ones_like(q), None
    want, got = backend.backward(*call), backend.backward(*call, dq)
    assert got.dq is dq
    assert all(torch.equal(*pair) for pair in zip(got[:3], want[:3], strict=True))
    backend.backward(*call, dq)  # adds to it
    assert torch.equal(dq, want.dq + want.dq)
    for whole, mine in ((all_out, out), (all_dq, dq)):  # nothing is written beside it
        assert whole.count_nonzero() == mine.count_nonzero()
    assert all_lse.isfinite().sum() == lse.isfinite().sum()
    assert ("triton forward into given tensors" in passes) == (moved == 0 and splits == 1)


def test_dense_parts(seed: int):
    """Sequences of equally many rows need not be packed."""
    parts = make_parts("equal lengths", torch.float32, seed)
    q, k, v = (x.unflatten(0, (2, -1)) for x in parts.operands[:3])
    dense = parts.operands._replace(q=q, k=k, v=v, cu_seqlens_q=None, cu_seqlens_k=None)
    dout, dlse = torch.randn_like(parts.operands.q), torch.randn(*parts.operands.q.shape[1::-1])
    packed = everything(backend, parts.operands, parts.options, dout, dlse)
    dense_dlse = dlse.unflatten(1, (2, -1)).transpose(0, 1)
    got = everything(backend, dense, parts.options, dout.unflatten(0, (2, -1)), dense_dlse)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(got[name].flatten(0, 1), packed[name])
    assert torch.equal(got["lse"].transpose(0, 1).flatten(1, 2), packed["lse"])


@pytest.mark.parametrize("width", [2, 8])
def test_other_numbers_of_runs(width: int, seed: int):
    parts = make_parts("one run", torch.float32, seed)
    q_runs, k_runs = (
        torch.cat([x[:, :2], x[:, 2:].repeat(1, (width - 2) // 2, 1)], 1)
        for x in (parts.operands.q_runs, parts.operands.k_runs)
    )
    parts = parts._replace(operands=parts.operands._replace(q_runs=q_runs, k_runs=k_runs))
    assert_parts(parts, torch.float32, seed)


def test_split_loops_over_keys(seed: int):
    parts = make_parts("few queries", torch.float32, seed)
    parts = parts._replace(options=parts.options._replace(num_splits=3))
    assert_parts(parts, torch.float32, seed)


@pytest.mark.parametrize("name", ["alibi", "dropout"])
def test_probabilities(name: str, seed: int):
    parts = make_parts(name, torch.float32, seed)
    problem = AttentionProblem.of(parts.operands, parts.options)
    _, lse = backend.forward(problem, parts.operands)
    got = backend.probabilities(problem, parts.operands, lse)
    want = cpu.probabilities(problem, parts.operands, lse)
    torch.testing.assert_close(got, want)


def test_through_tensor_descriptors(monkeypatch: pytest.MonkeyPatch, seed: int):
    monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
    plan.plan.cache_clear()
    assert_parts(make_parts("window", torch.float16, seed), torch.float16, seed, (9, 0))
