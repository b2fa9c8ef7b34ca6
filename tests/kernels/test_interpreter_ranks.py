"""Context parallelism on the Triton backend: ranks as threads in Triton's interpreter, against one
process in float64.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_ranks.py
"""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from configurations import FULL

from flashtile.backends import triton as backend
from flashtile.distributed import ContextParallel, decode, executor
from flashtile.testing import assert_close, attention_reference, generator, normal
from flashtile.testing.wires import ThreadCommunicator, run_ranks

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from distributed.caches import CacheCase, compare
from distributed.cases import Case, compare_rounded

from flashtile.ops.append import kernel as append_kernel
from flashtile.ops.merge import kernel as merge_kernel

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

one_at_a_time = threading.Lock()  # the interpreter is not made for threads


def select(problem, name):
    """The backend of a call, which is what an A100 would run."""
    on_gpu = problem._replace(device_type="cuda", capability=(8, 0))
    reasons = backend.unsupported_reasons(on_gpu)
    assert not reasons, reasons
    return "triton"


def alone(function):
    """`function`, for one thread at a time."""

    def run(*call, **more):
        with one_at_a_time:
            return function(*call, **more)

    return run


forward, backward = alone(backend.forward), alone(backend.backward)
column_sums = alone(backend.column_sums)


# Dense and packed, gathered, in stages and exchanged for heads; every option occurs.
SEEDS = range(40) if FULL else (0, 8, 12, 23, 27)


def dispatch_to(here: SimpleNamespace) -> SimpleNamespace:
    """What `call.dispatch` says where only the backend `here` is."""
    return SimpleNamespace(
        select=select,
        forced=lambda: None,
        is_batch_invariant=lambda: False,
        BACKENDS={"triton": here},
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_compute_what_one_process_does(seed: int, monkeypatch: pytest.MonkeyPatch):
    here = SimpleNamespace(forward=forward, backward=backward)
    dispatch = dispatch_to(here)
    monkeypatch.setattr(executor, "dispatch", dispatch)
    monkeypatch.setattr(executor, "add_column_sums", column_sums)
    dtype = torch.float16
    case = Case(seed).rounded(dtype)
    ways = {"ulysses": case.ulysses, "stages": case.stages}
    results = run_ranks(
        case.ranks, lambda comm: case.on_rank(ContextParallel.over(comm, **ways), dtype)
    )
    compare_rounded(case, results, dtype)


@pytest.mark.parametrize("stages", [1, 3])
def test_one_sequence_in_one_piece_is_a_dense_batch(
    stages: int, seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Of keys that end where the queries end."""
    layouts: list[str] = []

    def counted(problem, *given):
        layouts.append(problem.layout)
        return forward(problem, *given)

    here = SimpleNamespace(forward=counted, backward=backward)
    dispatch = dispatch_to(here)
    monkeypatch.setattr(executor, "dispatch", dispatch)
    dtype, g = torch.float16, generator(seed)
    q, k, v, dout = (normal(g, 1, 96, heads, 16, dtype=dtype) for heads in (4, 2, 2, 4))
    given = {"causal": True, "window_size": (20, 0)}

    def one_rank(comm: ThreadCommunicator) -> list[torch.Tensor]:
        parallel = ContextParallel.over(comm, ulysses=1, stages=stages)
        layout = parallel.layout(seq_len=96, way="contiguous", grain=8)
        leaves = [layout.shard(x).requires_grad_() for x in (q, k, v)]
        out = parallel.attention(*leaves, layout, **given)
        found = torch.autograd.grad(out, leaves, layout.shard(dout))
        return [layout.unshard(x) for x in (out, *found)]

    def whole(compute: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(compute).requires_grad_() for x in (q, k, v)]
        out = attention_reference(*leaves, compute_dtype=compute, **given).out
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(compute))]

    found, truth, plain = run_ranks(3, one_rank)[0], whole(torch.float64), whole(dtype)
    for name, *compared in zip(("out", "dq", "dk", "dv"), found, truth, plain, strict=True):
        assert_close(name, *compared, dtype=dtype, seed=seed)
    assert layouts.count("dense") == 3


@pytest.mark.parametrize("seed", range(12) if FULL else range(3))
def test_ranks_decode_what_one_process_does(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Masks are spans of each rank's rows; kernels append and merge, too."""
    here = SimpleNamespace(forward=forward)
    dispatch = dispatch_to(here)
    monkeypatch.setattr(decode, "dispatch", dispatch)
    monkeypatch.setattr(decode.append_formula, "append", alone(append_kernel.append))
    monkeypatch.setattr(decode.merge_op, "merge_parts", alone(merge_kernel.merge_parts))
    case = CacheCase(seed, ranks=2, dtype=torch.float32)
    case.options.pop("alibi_slopes", None)  # only on CPUs
    compare(case, run_ranks(2, lambda comm: case.on_rank(ContextParallel.over(comm))))
