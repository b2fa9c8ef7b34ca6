"""The functions that measure. No test asserts a time."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F

from benchmarks import measure, peers, prepared, report, run, shapes
from benchmarks.rows import Row
from benchmarks.shapes import Case, vary
from flashtile.cli import machine, timing

pytestmark = pytest.mark.slow

SMALL = Case(heads_q=4, heads_kv=2, head_dim=16, head_dim_v=16, seqlen_q=160, seqlen_k=160)
QUICK = run.Settings(peers=("flashtile", "standard"), seconds=0, min_rounds=1)


# Work


@pytest.mark.parametrize(("B", "H", "N", "D"), [(1, 1, 1, 8), (2, 4, 33, 64)])
def test_flops_of_full_attention_are_the_papers(B: int, H: int, N: int, D: int) -> None:
    sizes = {"batch": B, "heads_q": H, "heads_kv": 1, "seqlen_q": N, "seqlen_k": N}
    case = Case(head_dim=D, head_dim_v=D, **sizes)
    assert shapes.flops(case, "forward") == 4 * B * H * N * N * D
    assert shapes.flops(case, "backward") == 2.5 * 4 * B * H * N * N * D
    assert shapes.flops(case, "both") == 3.5 * 4 * B * H * N * N * D
    causal = replace(case, causal=True)
    assert shapes.flops(causal, "forward") == 4 * B * H * (N * (N + 1) // 2) * D


def test_flops_count_the_value_head_dim_on_its_own() -> None:
    case = Case(heads_q=1, heads_kv=1, seqlen_q=10, seqlen_k=10, head_dim=64, head_dim_v=16)
    assert shapes.flops(case, "forward") == 100 * (2 * 64 + 2 * 16)
    assert shapes.flops(case, "backward") == 100 * (6 * 64 + 4 * 16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", shapes.VARIANTS)
@pytest.mark.parametrize(("M", "N"), [(160, 160), (700, 700), (129, 700), (200, 130)])
def test_visible_scores_are_the_ones_in_the_mask(
    variant: str, causal: bool, M: int, N: int
) -> None:
    case = vary(replace(SMALL, causal=causal, seqlen_q=M, seqlen_k=N), variant)
    inputs = shapes.make_inputs(case)
    lengths = [(case.seqlen_q, case.seqlen_k)] * case.batch
    if case.documents:
        lengths = [(n, n) for n in shapes.document_lengths(case)]
    masks = [shapes.visible(case, inputs, m, n) for m, n in lengths]
    pairs = sum(
        m * n if mask is None else int(mask.sum())
        for (m, n), mask in zip(lengths, masks, strict=True)
    )
    assert shapes.visible_scores(case) == case.heads_q * pairs
    everything = sum(m * n for m, n in lengths)
    assert shapes.density(case) == pytest.approx(pairs / everything)


def test_cache_bytes_are_keys_and_values_once() -> None:
    case = Case(dtype="bfloat16", batch=3, heads_q=8, heads_kv=2, seqlen_q=1, seqlen_k=100)
    assert shapes.cache_bytes(case) == 3 * 100 * 2 * (64 + 64) * 2


# Inputs


def test_documents_fill_the_batch() -> None:
    case = vary(replace(SMALL, batch=2), "varlen")
    lengths = shapes.document_lengths(case)
    assert len(lengths) == case.documents
    assert min(lengths) >= 1
    assert sum(lengths) == 2 * 160
    inputs = shapes.make_inputs(case)
    assert inputs.q.shape == (320, 4, 16)
    assert inputs.cu_seqlens is not None
    assert inputs.cu_seqlens.diff().tolist() == lengths


def test_inputs_repeat_with_their_seed() -> None:
    first, again = shapes.make_inputs(SMALL), shapes.make_inputs(SMALL)
    other = shapes.make_inputs(replace(SMALL, seed=1))
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)


# Time


def test_timing_is_median_and_spread() -> None:
    found = timing.Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    assert found.median_ms == 3.5
    assert found.p20_ms == 2.0
    assert found.p80_ms == 5.0
    assert timing.Timing.of([7.0]) == (7.0, 7.0, 7.0)


class FakeClock:
    """Every call takes the time that it returns; records the order of the calls."""

    def __init__(self) -> None:
        self.order: list[float] = []

    def __call__(self, call: timing.Call) -> float:
        took = call()
        assert isinstance(took, float)
        self.order.append(took)
        return took


def test_interleave_takes_turns_in_random_order() -> None:
    clock = FakeClock()
    calls = {"a": lambda: 10.0, "b": lambda: 20.0, "c": lambda: 30.0}
    samples = timing.interleave(calls, clock, budget_ms=0, min_rounds=20)
    assert samples == {"a": [10.0] * 20, "b": [20.0] * 20, "c": [30.0] * 20}
    rounds = [tuple(clock.order[i : i + 3]) for i in range(3, 63, 3)]  # after the warm-up
    assert all(sorted(times) == [10.0, 20.0, 30.0] for times in rounds)
    assert len(set(rounds)) > 3


def test_interleave_stops_when_the_budget_is_spent() -> None:
    samples = timing.interleave({"a": lambda: 10.0}, FakeClock(), budget_ms=95, min_rounds=2)
    assert len(samples["a"]) == 10
    samples = timing.interleave({"a": lambda: 10.0}, FakeClock(), budget_ms=5, min_rounds=7)
    assert len(samples["a"]) == 7
    samples = timing.interleave({"a": lambda: 10.0}, FakeClock(), budget_ms=5, min_rounds=201)
    assert len(samples["a"]) == 201  # more than `MAX_ROUNDS`, which asks for no fewer


def test_interleave_repeats_short_calls_in_their_turn() -> None:
    calls = {"short": lambda: 2.0, "tiny": lambda: 0.0, "long": lambda: 50.0}
    samples = timing.interleave(calls, FakeClock(), budget_ms=0, min_rounds=3)
    counts = {name: len(times) for name, times in samples.items()}
    assert counts == {"short": 15, "tiny": 3 * timing.MAX_REPEATS, "long": 3}


def test_interleave_always_ends() -> None:
    samples = timing.interleave({"free": lambda: 0.0}, FakeClock(), budget_ms=1e9)
    assert len(samples["free"]) == timing.MAX_ROUNDS * timing.MAX_REPEATS


def test_the_cpu_clock_runs_the_call_once() -> None:
    ran = Counter[str]()
    assert timing.cpu_timer(lambda: ran.update(["call"])) >= 0
    assert ran["call"] == 1


def test_the_host_is_timed_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    timer = measure.HostTimer("cuda")
    assert timer(lambda: events.append("call")) >= 0
    assert events == ["wait", *["call"] * timer.BURST, "wait"]


def test_the_host_time_is_of_one_call() -> None:
    took = measure.HostTimer("cpu")(lambda: time.sleep(1e-3))
    assert 1.0 <= took < 1.0 * measure.HostTimer.BURST
    settings = replace(QUICK, host=True)
    row, *_ = run.measure_case(SMALL, settings, timer=lambda _: 1.0)
    assert row.host_us is not None
    assert row.host_us > 1


def test_the_best_product_is_in_flops() -> None:
    reached = measure.matmul_tflops("cpu", torch.float32, size=64)
    assert 1e-6 < reached < 100


# Memory

MIB = 2**20


def _mib(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.int8)


def test_peak_counts_what_is_held_at_once() -> None:
    def call() -> torch.Tensor:
        first, second = _mib(2), _mib(3)
        del first, second  # 5 held, then 0
        kept = _mib(1)
        third = _mib(3)
        del third  # 4 held, then 1
        return kept

    assert measure.peak_bytes(call) == 5 * MIB


def test_peak_ignores_what_was_there_before() -> None:
    before = [_mib(8)]

    def call() -> torch.Tensor:
        before.clear()
        return _mib(2)

    assert measure.peak_bytes(call) == 2 * MIB


def test_peak_of_nothing_is_nothing() -> None:
    assert measure.peak_bytes(lambda: None) == 0


def test_peak_sees_the_backward_and_the_scratch_of_native_kernels() -> None:
    x = torch.randn(MIB // 4, requires_grad=True)

    def square() -> object:
        return torch.autograd.grad((x * x).sum(), x)

    assert measure.peak_bytes(square) >= 2 * MIB  # the product and the gradient
    q = torch.randn(1, 4, 256, 64)
    out = q.nbytes
    with torch.no_grad():
        scratch = measure.peak_bytes(lambda: F.scaled_dot_product_attention(q, q, q)) - out
    assert 0 < scratch < 16 * MIB  # the log-sum-exp and the tiles of each thread


def test_standard_attention_holds_the_scores() -> None:
    case = replace(SMALL, heads_kv=4, seqlen_q=512, seqlen_k=512)
    call = peers.standard(case, shapes.make_inputs(case))
    scores = 4 * 4 * 512 * 512
    assert run.peak_memory(call, "forward", "cpu") >= 2 * scores


# Errors


def test_errors_are_over_all_tensors_together() -> None:
    got = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    truth = [torch.tensor([1.0, 2.5]), torch.tensor([[2.0]])]
    found = measure.errors(got, truth)
    assert found.max_error == 1.0
    assert found.rms_error == pytest.approx(((0.25 + 1.0) / 3) ** 0.5)
    assert measure.errors([torch.tensor([float("nan")])], [torch.zeros(1)]).max_error != 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", [name for name in shapes.VARIANTS if name != "dropout"])
def test_every_peer_that_runs_a_case_computes_it(variant: str, causal: bool) -> None:
    case = vary(replace(SMALL, causal=causal), variant)
    directions = ("forward",) if case.cached else ("forward", "backward")
    everyone = replace(QUICK, peers=("flashtile", "sdpa", "sdpa-math", "standard"), memory=False)
    rows = run.measure_case(case, replace(everyone, directions=directions), timer=lambda _: 1.0)
    measured = [row for row in rows if not row.skipped]
    assert {row.provider for row in measured} >= {"flashtile"}
    for row in measured:
        assert row.max_error is not None
        assert 0 < row.max_error < 1e-4, row
        assert row.rms_error is not None
        assert row.rms_error <= row.max_error


@pytest.mark.parametrize("variant", ["dense", "alibi", "bias", "sink", "varlen", "block-sparse"])
def test_float64_judges_one_group_of_heads(variant: str) -> None:
    case = vary(replace(SMALL, batch=2, causal=True), variant)
    inputs = shapes.make_inputs(case)
    whole = peers.standard(case, inputs)
    results = zip(("out", *whole.leaves), whole.forward_and_backward(), strict=True)
    got = {name: whole.public(name, x) for name, x in results}
    wanted = run.truth(case, inputs, backward=True)
    assert set(got) == set(wanted)
    for name, truth in wanted.items():
        assert truth.dtype == torch.float64
        heads = 1 if name in ("k", "v") else 2
        axis = {"sink": 0, "bias": 1}.get(name, -2)  # of the heads
        found = got[name].movedim(axis, 0)[:heads].double()
        torch.testing.assert_close(found, truth.movedim(axis, 0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wrong", ["out", "gradients"])
def test_a_pass_is_judged_by_its_own_results(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(case: Case, inputs: shapes.Inputs) -> prepared.Prepared:
        right = peers.standard(case, inputs)
        if wrong == "gradients":
            return replace(right, dout=2 * right.dout)
        return replace(right, forward=lambda: right.forward() + 1)

    monkeypatch.setitem(peers.PEERS, "standard", peer)
    settings = replace(QUICK, peers=("standard",), directions=("forward", "backward", "both"))
    rows = run.measure_case(SMALL, settings, timer=lambda _: 1.0)
    errors = {row.direction: row.max_error or 0.0 for row in rows}
    right = errors.pop("forward" if wrong == "gradients" else "backward")
    assert 0 < right < 1e-4
    assert min(errors.values()) > 1e-1


def test_a_pass_is_one_call() -> None:
    call = peers.standard(SMALL, shapes.make_inputs(SMALL)).call
    names = {"forward": ["out"], "backward": ["dq", "dk", "dv"], "both": ["out", "dq", "dk", "dv"]}
    for direction, results in names.items():
        found = call(direction)()
        assert len(results) == (1 if isinstance(found, torch.Tensor) else len(found))


def test_no_error_where_float64_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "memory_bytes", lambda device: 2**20)
    row, *_ = run.measure_case(SMALL, QUICK, timer=lambda _: 1.0)
    assert (row.median_ms, row.max_error) == (1.0, None)


def test_dropout_has_no_error_to_compare() -> None:
    row, *_ = run.measure_case(vary(SMALL, "dropout"), QUICK, timer=lambda _: 1.0)
    assert row.median_ms == 1.0
    assert row.max_error is None


# Rows


def test_a_row_follows_from_its_samples() -> None:
    case = vary(replace(SMALL, seqlen_q=1000, seqlen_k=1000), "decode")
    row = Row.of(case, "sdpa-flash", "forward").timed(case, [2.0, 2.0, 4.0])
    assert (row.provider, row.backend, row.peer) == ("sdpa", "flash", "sdpa-flash")
    assert (row.median_ms, row.seqlen_q, row.seqlen_k) == (2.0, 1, 1000)
    assert row.tflops == pytest.approx(shapes.flops(case, "forward") / 2e-3 / 1e12)
    assert row.gbps == pytest.approx(shapes.cache_bytes(case) / 2e-3 / 1e9)


def test_our_rows_name_the_backend_that_ran() -> None:
    row, *_ = run.measure_case(SMALL, QUICK, timer=lambda _: 1.0)
    assert (row.provider, row.backend, row.peer) == ("flashtile", "cpu", "flashtile")
    row, *_ = run.measure_case(SMALL, replace(QUICK, peers=("flashtile-cpu",)), timer=lambda _: 1.0)
    assert (row.provider, row.backend, row.peer) == ("flashtile-cpu", "cpu", "flashtile-cpu")


def test_a_deterministic_backward_is_a_peer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    attention = peers.api.attention

    def noted(*args: object, **options: Any) -> object:
        asked.append(options.get("deterministic", False))
        return attention(*args, **options)

    monkeypatch.setattr(peers.api, "attention", noted)
    names = ("flashtile", "flashtile-deterministic")
    settings = replace(QUICK, peers=names, directions=("backward",))
    rows = run.measure_case(SMALL, settings, timer=lambda _: 1.0)
    assert [row.peer for row in rows] == list(names)
    assert {row.skipped for row in rows} == {""}
    assert set(asked) == {False, True}
    row, _ = run.measure_case(vary(SMALL, "decode"), replace(settings, peers=names[::-1]))
    assert row.skipped == "a cache has no backward"


def test_a_missing_peer_is_a_skipped_line(capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(QUICK, peers=("fa2", "cudnn", "standard"))
    rows = run.measure_case(vary(SMALL, "sink"), settings, timer=lambda _: 1.0)
    assert [bool(row.skipped) for row in rows] == [True, True, False]
    assert rows[0].median_ms is None
    report.show(rows)
    printed = capsys.readouterr().out
    assert "skipped fa2 (sink): runs only on CUDA" in printed
    assert "skipped cudnn (sink): PyTorch has it only for CUDA" in printed


def _task(case: Case, direction: str = "forward") -> run.Task:
    inputs = shapes.make_inputs(case)
    return run.Task(case, direction, inputs, QUICK, timer=lambda _: 1.0, truth={})


def test_a_peer_that_cannot_says_why() -> None:
    with pytest.raises(prepared.Skip, match="softcap"):
        run.prepare("sdpa", _task(vary(SMALL, "softcap")))
    with pytest.raises(prepared.Skip, match="same last dimension"):
        run.prepare("sdpa-flash", _task(vary(SMALL, "value-dim")))
    endless = replace(SMALL, seqlen_q=2**24, seqlen_k=2**24)
    with pytest.raises(prepared.Skip, match="GiB"):
        peers.standard(endless, shapes.make_inputs(SMALL))


def test_an_uninstalled_package_is_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    on_gpu = shapes.make_inputs(SMALL)._replace(q=torch.empty(1, device="meta"))
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda")))
    with pytest.raises(prepared.Skip, match="not installed"):
        peers.fa2_package(SMALL, on_gpu)


class Broken:
    """A peer that holds a tensor and fails in the given call."""

    def __init__(self, error: type[Exception], message: str, fails_at: int = 1) -> None:
        self.error, self.message, self.left = error, message, fails_at
        self.held: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, case: Case, inputs: shapes.Inputs) -> prepared.Prepared:
        def forward() -> torch.Tensor:
            held = torch.zeros(4)
            self.held.append(weakref.ref(held))
            self.left -= 1
            if self.left <= 0:
                raise self.error(self.message)
            return held

        return prepared.Prepared(forward, {}, inputs.dout)


@pytest.mark.parametrize("fails_at", [1, 2], ids=["when it is tried", "when it is examined"])
def test_whatever_a_peer_raises_is_a_line(
    fails_at: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Broken(AttributeError, "no such kernel", fails_at)
    monkeypatch.setitem(peers.PEERS, "fa3", missing)
    settings = replace(QUICK, peers=("fa3", "standard"))
    row, other = run.measure_case(SMALL, settings, timer=lambda _: 1.0)
    assert (row.skipped, row.median_ms) == ("no such kernel", None)
    assert other.median_ms == 1.0
    assert capsys.readouterr().err == ""
    assert [held() for held in missing.held] == [None] * fails_at  # its memory has been freed


def test_our_own_failure_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.PEERS, "flashtile", Broken(ValueError, "a bug of ours"))
    row, other = run.measure_case(SMALL, QUICK, timer=lambda _: 1.0)
    assert row.skipped == f"{peers.FAILED}: a bug of ours"
    assert other.median_ms == 1.0
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setitem(peers.PEERS, "flashtile", Broken(NotImplementedError, "none can"))
    row, _ = run.measure_case(SMALL, QUICK, timer=lambda _: 1.0)
    assert row.skipped == "none can"
    assert capsys.readouterr().err == ""


def test_a_case_that_fails_as_a_whole_leaves_the_next_one_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(case: Case, device: str) -> shapes.Inputs:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(run, "make_inputs", full)
    rows = run.measure_case(SMALL, replace(QUICK, directions=("forward", "both")))
    assert [(row.direction, row.provider) for row in rows] == [
        ("forward", "flashtile"),
        ("forward", "standard"),
        ("both", "flashtile"),
        ("both", "standard"),
    ]
    assert {row.skipped for row in rows} == {f"{peers.FAILED}: out of memory"}
    assert "no room" in capsys.readouterr().err


def test_out_of_memory_is_said_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 140 GiB"
    monkeypatch.setitem(peers.PEERS, "standard", Broken(torch.OutOfMemoryError, said))
    _, row = run.measure_case(SMALL, QUICK, timer=lambda _: 1.0)
    assert row.skipped == "out of memory: 64.00 GiB wanted at once"


def test_a_cache_has_no_backward() -> None:
    settings = replace(QUICK, directions=("backward",))
    rows = run.measure_case(vary(SMALL, "decode"), settings, timer=lambda _: 1.0)
    assert all("no backward" in row.skipped for row in rows)
    row, *_ = run.measure_case(vary(SMALL, "decode"), QUICK, timer=lambda _: 1.0)
    assert (row.direction, row.skipped) == ("decode", "")
    assert row.gbps is not None


# Where


def test_provenance_says_where_from() -> None:
    origin = machine.provenance("cpu", "python -m benchmarks --dtype fp32")
    assert origin["torch"] == torch.__version__
    assert origin["device"]
    assert set(origin) >= {"date", "commit", "flashtile", "triton", "python", "command"}


def test_the_commit_is_that_of_our_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    monkeypatch.delenv("FLASHTILE_COMMIT", raising=False)
    assert machine.commit() is None
    monkeypatch.setenv("FLASHTILE_COMMIT", "0123456789ab")
    assert machine.provenance("cpu", "c")["commit"] == "0123456789ab"


def test_a_captured_call_keeps_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph reads them whenever it is replayed."""
    monkeypatch.setattr(torch, "cuda", MagicMock())
    x = torch.zeros(1)
    alive = weakref.ref(x)
    replay = measure.captured(partial(torch.neg, x))
    del x
    replay()
    assert alive() is not None
