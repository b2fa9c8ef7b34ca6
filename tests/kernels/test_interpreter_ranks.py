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
from flashtile.distributed import ContextParallel, decoding, executor
from flashtile.testing.wires import run_ranks

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from distributed.caches import CacheCase, compare
from distributed.cases import Case, compare_rounded

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

one_at_a_time = threading.Lock()  # the interpreter is not made for threads


def select(problem, name):
    """The backend of a call, which is what an A100 would run."""
    on_gpu = problem._replace(device_type="cuda", capability=(8, 0))
    reasons = backend.unsupported_reasons(on_gpu)
    assert not reasons, reasons
    return "triton"


def forward(*call):
    with one_at_a_time:
        return backend.forward(*call)


def backward(*call, **more):
    with one_at_a_time:
        return backend.backward(*call, **more)


# Dense and packed, gathered, in stages and exchanged for heads; every option occurs.
SEEDS = range(40) if FULL else (0, 8, 12, 23, 27)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_compute_what_one_process_does(seed: int, monkeypatch: pytest.MonkeyPatch):
    here = SimpleNamespace(forward=forward, backward=backward)
    dispatch = SimpleNamespace(select=select, forced=lambda: None, load=lambda name: here)
    monkeypatch.setattr(executor, "dispatch", dispatch)
    dtype = torch.float16
    case = Case(seed).rounded(dtype)
    ways = {"ulysses": case.ulysses, "stages": case.stages}
    results = run_ranks(
        case.ranks, lambda wire: case.on_rank(ContextParallel.over(wire, **ways), dtype)
    )
    compare_rounded(case, results, dtype)


@pytest.mark.parametrize("seed", range(12) if FULL else range(3))
def test_ranks_decode_what_one_process_does(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Masks are spans of each rank's rows."""
    here = SimpleNamespace(forward=forward)
    dispatch = SimpleNamespace(select=select, load=lambda name: here)
    monkeypatch.setattr(decoding, "dispatch", dispatch)
    case = CacheCase(seed, ranks=2, dtype=torch.float32)
    case.options.pop("alibi_slopes", None)  # only on CPUs
    compare(case, run_ranks(2, lambda wire: case.on_rank(ContextParallel.over(wire))))
