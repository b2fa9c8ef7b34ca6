"""Context parallelism on GPUs: ranks as threads that share one GPU, and processes that NCCL
connects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from distributed.caches import STEPS_OPTIONS, CacheCase, compare_repeated_steps
from distributed.caches import compare_rounded as compare_caches
from distributed.captured_worker import captured_steps
from distributed.cases import Case, compare_rounded, on_one_generator

from flashtile.distributed import ContextParallel
from flashtile.testing.wires import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(40))
def test_ranks_compute_what_one_process_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_one_generator(monkeypatch)
    dtype = torch.bfloat16
    case = Case(seed).rounded(dtype)
    ways = {"ulysses": case.ulysses, "stages": case.stages}
    results = run_ranks(
        case.ranks, lambda comm: case.on_rank(ContextParallel.over(comm, **ways), dtype, "cuda")
    )
    compare_rounded(case, results, dtype)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("has_int", [False, True])
def test_ranks_decode_what_one_process_does(seed: int, has_int: bool) -> None:
    case = CacheCase(seed, ranks=1 + seed % 4, dtype=torch.bfloat16, has_int=has_int)
    case.options.pop("alibi_slopes", None)  # only on CPUs
    results = run_ranks(
        case.ranks, lambda comm: case.on_rank(ContextParallel.over(comm), device="cuda")
    )
    compare_caches(case, results)


@pytest.mark.parametrize("has_int", [False, True])
@pytest.mark.parametrize("options", STEPS_OPTIONS)
def test_a_repeated_step_of_decoding_has_the_bits_of_a_first_one(
    options: dict[str, Any], has_int: bool
) -> None:
    run_ranks(3, lambda comm: compare_repeated_steps(comm, options, has_int, "cuda"))


def test_a_call_like_an_earlier_one_does_not_wait_for_the_gpu() -> None:
    """Neither forward nor backward, with options that need tensors of the layout."""

    def one_rank(comm):
        parallel = ContextParallel.over(comm)
        layout = parallel.layout([0, 1000, 1500], masks=())
        q, k, v = (
            torch.randn(layout.local_tokens, 4, 64, device="cuda", dtype=torch.bfloat16)
            for _ in range(3)
        )
        slopes = torch.rand(2, 4, device="cuda")
        given = {"causal": True, "dropout_p": 0.1, "alibi_slopes": slopes}
        for mode in ("default", "default", "error"):
            leaves = [x.requires_grad_() for x in (q, k, v)]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            out = parallel.attention(*leaves, layout, **given)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    try:
        run_ranks(1, one_rank)  # the mode is one for all threads
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_of_decoding_in_a_graph() -> None:
    run_ranks(1, lambda comm: captured_steps(ContextParallel.over(comm), 1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("worker", ["nccl_worker", "captured_worker"])
def test_processes(worker: str, world: int, tmp_path: Path) -> None:
    """`captured_worker`: a step of decoding in a CUDA graph of each process."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    processes.run(f"distributed/{worker}.py", world, tmp_path / "rendezvous")
