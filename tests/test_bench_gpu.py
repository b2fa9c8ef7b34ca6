"""The functions that measure on a GPU: time, memory, and peers that compute the case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import measure, run
from benchmarks.presets import PRESETS, preset_cases
from benchmarks.shapes import Case, vary
from flashtile.cli import timing

pytestmark = pytest.mark.gpu

MIB = 2**20
SMALL = Case(dtype="bfloat16", heads_q=4, heads_kv=4, seqlen_q=160, seqlen_k=160, causal=True)
QUICK = run.Settings(device="cuda", seconds=0, min_rounds=1)


def test_the_gpu_is_measured_with_events_and_its_own_memory() -> None:
    timer = timing.timer_for("cuda")
    x = torch.zeros(MIB, device="cuda")
    calls = {"add": lambda: x + 1, "graph": measure.captured(lambda: x + 1)}
    samples = timing.interleave(calls, timer, budget_ms=0, min_rounds=2)
    assert all(min(times) > 0 for times in samples.values())
    assert measure.peak_bytes(lambda: x + 1, "cuda") == 4 * MIB


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_peers_on_a_gpu_compute_the_case(direction: str) -> None:
    names = ("flashtile", "sdpa", "fa2", "standard")
    settings = replace(QUICK, peers=names, directions=(direction,), host=True)
    for row in run.measure_case(SMALL, settings):
        assert row.skipped == ""
        assert row.max_error is not None
        assert row.max_error < 0.1
        assert row.host_us is not None
        assert row.percent_of_matmul is not None
        assert 0 < row.percent_of_matmul < 100


def test_a_cache_is_read_no_faster_than_memory_can_be() -> None:
    case = vary(replace(SMALL, batch=16, seqlen_k=32768), "decode")
    settings = replace(QUICK, peers=("flashtile", "flashtile-triton"), cuda_graph=True)
    for row in run.measure_case(case, settings):
        assert row.skipped == ""
        assert row.percent_of_read is not None
        assert 0 < row.percent_of_read < 110


OURS = ["gpu-hopper", "gpu-options", "gpu-layer", "gpu-deterministic", "gpu-float8", "gpu-quantize"]


@pytest.mark.parametrize("preset", OURS)
def test_every_case_of_ours_runs(preset: str) -> None:
    """Once each, at a quarter of the length."""
    if preset == "gpu-float8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"the float8 kernel wants 9.0, not {torch.cuda.get_device_capability()}")
    for case in preset_cases(preset):
        small = replace(case, seqlen_q=case.seqlen_q // 4, seqlen_k=case.seqlen_k // 4)
        if case.documents:
            lengths = tuple(length // 4 for length in case.lengths)
            small = replace(small, lengths=lengths, seqlen_q=sum(lengths), seqlen_k=sum(lengths))
        chosen = PRESETS[preset].settings
        ours = tuple(peer for peer in chosen.peers if peer.startswith("flashtile"))
        how = replace(QUICK, peers=ours, directions=chosen.directions, accuracy=False)
        for row in run.measure_case(small, how):
            assert row.skipped == "", (row.peer, case)


@pytest.mark.parametrize("variant", ["dense", "window", "block-sparse"])
def test_flex_on_a_gpu_computes_the_case(variant: str) -> None:
    settings = replace(QUICK, peers=("flex",), directions=("backward",))
    (row,) = run.measure_case(vary(SMALL, variant), settings)
    assert row.skipped == ""
    assert row.max_error is not None
    assert row.max_error < 0.1


def test_out_of_memory_on_a_gpu_is_a_line() -> None:
    case = replace(SMALL, seqlen_q=2**20, seqlen_k=2**20)
    settings = replace(QUICK, peers=("standard",), accuracy=False)
    (row,) = run.measure_case(case, settings)
    assert row.skipped.startswith("out of memory")
