"""The measuring library: its numbers, not this machine's. Nothing here asserts a time."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from flashtile.bench import machine, measure, peers, prepared, report, run, shapes, targets
from flashtile.bench.shapes import Case, vary

PROVENANCE = {"command": "c", "date": "d", "commit": None, "device": "cpu", "torch": "2"}
SMALL = Case(heads_q=4, heads_kv=2, head_dim=16, head_dim_v=16, seqlen_q=160, seqlen_k=160)
QUICK = run.Settings(peers=("flashtile", "standard"), seconds=0, min_rounds=1)


# Work


@pytest.mark.parametrize(("B", "H", "N", "D"), [(1, 1, 1, 8), (2, 4, 33, 64)])
def test_flops_of_full_attention_are_the_papers(B: int, H: int, N: int, D: int) -> None:
    sizes = {"batch": B, "heads_q": H, "heads_kv": 1, "seqlen_q": N, "seqlen_k": N}
    case = Case(head_dim=D, head_dim_v=D, **sizes)
    assert shapes.flops(case, "forward") == 4 * B * H * N * N * D
    assert shapes.flops(case, "backward") == 2.5 * 4 * B * H * N * N * D
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


def test_pages_hold_the_contiguous_cache() -> None:
    case = vary(replace(SMALL, batch=3), "paged-decode")
    inputs = shapes.make_inputs(case)
    assert inputs.k_pages is not None
    assert inputs.v_pages is not None
    assert inputs.page_table is not None
    for pages, whole in ((inputs.k_pages, inputs.k), (inputs.v_pages, inputs.v)):
        assert torch.equal(pages[inputs.page_table.long()].flatten(1, 2), whole)


def test_inputs_repeat_with_their_seed() -> None:
    first, again = shapes.make_inputs(SMALL), shapes.make_inputs(SMALL)
    other = shapes.make_inputs(replace(SMALL, seed=1))
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize("variant", shapes.VARIANTS)
def test_a_crop_is_a_small_case_of_the_same_kind(variant: str) -> None:
    case = vary(replace(SMALL, batch=4, seqlen_q=4000, seqlen_k=4000), variant)
    small = shapes.crop(case, 100)
    assert (small.batch, small.seqlen_k) == (1, 100)
    assert small.seqlen_q == (1 if case.cached else 100)
    assert replace(small, batch=4, seqlen_q=0, seqlen_k=0, documents=0, page_size=0) == replace(
        case, seqlen_q=0, seqlen_k=0, documents=0, page_size=0
    )
    shapes.make_inputs(small)


# Time


def test_timing_is_median_and_spread() -> None:
    timing = measure.Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    assert timing.median_ms == 3.5
    assert timing.p20_ms == 2.0
    assert timing.p80_ms == 5.0
    assert measure.Timing.of([7.0]) == (7.0, 7.0, 7.0)


class FakeClock:
    """Every call takes the time that it returns; remembers the order of the calls."""

    def __init__(self) -> None:
        self.order: list[float] = []

    def __call__(self, call: measure.Call) -> float:
        took = call()
        assert isinstance(took, float)
        self.order.append(took)
        return took


def test_interleave_takes_turns_in_random_order() -> None:
    clock = FakeClock()
    calls = {"a": lambda: 10.0, "b": lambda: 20.0, "c": lambda: 30.0}
    samples = measure.interleave(calls, clock, budget_ms=0, min_rounds=20)
    assert samples == {"a": [10.0] * 20, "b": [20.0] * 20, "c": [30.0] * 20}
    rounds = [tuple(clock.order[i : i + 3]) for i in range(3, 63, 3)]  # after the warm-up
    assert all(sorted(turn) == [10.0, 20.0, 30.0] for turn in rounds)
    assert len(set(rounds)) > 3


def test_interleave_stops_when_the_budget_is_spent() -> None:
    samples = measure.interleave({"a": lambda: 10.0}, FakeClock(), budget_ms=95, min_rounds=2)
    assert len(samples["a"]) == 10
    samples = measure.interleave({"a": lambda: 10.0}, FakeClock(), budget_ms=5, min_rounds=7)
    assert len(samples["a"]) == 7


def test_interleave_repeats_short_calls_in_their_turn() -> None:
    calls = {"short": lambda: 2.0, "tiny": lambda: 0.0, "long": lambda: 50.0}
    samples = measure.interleave(calls, FakeClock(), budget_ms=0, min_rounds=3)
    counts = {name: len(times) for name, times in samples.items()}
    assert counts == {"short": 15, "tiny": 3 * measure.MAX_REPEATS, "long": 3}


def test_interleave_always_ends() -> None:
    samples = measure.interleave({"free": lambda: 0.0}, FakeClock(), budget_ms=1e9)
    assert len(samples["free"]) == measure.MAX_ROUNDS * measure.MAX_REPEATS


def test_the_cpu_clock_runs_the_call_once() -> None:
    ran = Counter[str]()
    assert measure.cpu_timer(lambda: ran.update(["call"])) >= 0
    assert ran["call"] == 1


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


def test_dropout_has_no_error_to_compare() -> None:
    row, *_ = run.measure_case(vary(SMALL, "dropout"), QUICK, timer=lambda _: 1.0)
    assert row.median_ms == 1.0
    assert row.max_error is None


# Rows


def test_a_row_follows_from_its_samples() -> None:
    case = vary(replace(SMALL, seqlen_q=1000, seqlen_k=1000), "decode")
    row = report.Row.of(case, "sdpa-flash", "forward").timed(case, [2.0, 2.0, 4.0])
    assert (row.provider, row.backend, row.peer) == ("sdpa", "flash", "sdpa-flash")
    assert (row.median_ms, row.seqlen_q, row.seqlen_k) == (2.0, 1, 1000)
    assert row.tflops == pytest.approx(shapes.flops(case, "forward") / 2e-3 / 1e12)
    assert row.gbps == pytest.approx(shapes.cache_bytes(case) / 2e-3 / 1e9)


def test_our_rows_name_the_backend_that_ran() -> None:
    row, *_ = run.measure_case(SMALL, QUICK, timer=lambda _: 1.0)
    assert (row.provider, row.backend) == ("flashtile", "cpu")


def test_a_missing_peer_is_a_skipped_line(capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(QUICK, peers=("fa2", "sdpa-cudnn", "standard"))
    rows = run.measure_case(vary(SMALL, "sink"), settings, timer=lambda _: 1.0)
    assert [bool(row.skipped) for row in rows] == [True, True, False]
    assert rows[0].median_ms is None
    report.show(rows)
    printed = capsys.readouterr().out
    assert "skipped fa2 (sink): runs on CUDA alone" in printed
    assert "skipped sdpa-cudnn (sink): PyTorch has it for CUDA alone" in printed


def test_a_peer_that_cannot_says_why() -> None:
    inputs = shapes.make_inputs(vary(SMALL, "softcap"))
    with pytest.raises(prepared.Skip, match="softcap"):
        peers.prepare("sdpa", vary(SMALL, "softcap"), inputs, backward=False)
    value_dim = vary(SMALL, "value-dim")
    with pytest.raises(prepared.Skip, match="same last dimension"):
        peers.prepare("sdpa-flash", value_dim, shapes.make_inputs(value_dim), backward=False)
    endless = replace(SMALL, seqlen_q=2**24, seqlen_k=2**24)
    with pytest.raises(prepared.Skip, match="GiB"):
        peers.standard(endless, inputs)


def test_an_uninstalled_package_is_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    on_gpu = shapes.make_inputs(SMALL)._replace(q=torch.empty(1, device="meta"))
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda")))
    with pytest.raises(prepared.Skip, match="not installed"):
        peers.fa2(SMALL, on_gpu)


def test_our_own_failure_is_no_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case, inputs: shapes.Inputs) -> prepared.Prepared:
        raise ValueError("a bug of ours")

    monkeypatch.setitem(peers.PEERS, "flashtile", broken)
    monkeypatch.setitem(peers.PEERS, "standard", broken)
    inputs = shapes.make_inputs(SMALL)
    with pytest.raises(ValueError, match="a bug of ours"):
        peers.prepare("flashtile", SMALL, inputs, backward=False)
    with pytest.raises(prepared.Skip, match="a bug of ours"):
        peers.prepare("standard", SMALL, inputs, backward=False)


def test_a_cache_has_no_backward() -> None:
    settings = replace(QUICK, directions=("backward",))
    rows = run.measure_case(vary(SMALL, "decode"), settings, timer=lambda _: 1.0)
    assert all("no backward" in row.skipped for row in rows)


# Report


@pytest.fixture(scope="module")
def rows() -> list[report.Row]:
    settings = replace(QUICK, peers=("flashtile", "standard", "fa2"))
    settings = replace(settings, directions=("forward", "backward"))
    cases = [replace(SMALL, seqlen_q=n, seqlen_k=n) for n in (64, 128)]
    return [row for case in cases for row in run.measure_case(case, settings)]


COLUMNS = {
    *("provider", "backend", "pass", "dtype", "head_dim", "heads_q", "heads_kv", "batch"),
    *("seqlen_q", "seqlen_k", "causal", "variant", "median_ms", "p20_ms", "p80_ms", "tflops"),
    *("gbps", "peak_mib", "max_error", "rms_error", "skipped", "date", "commit", "device"),
    *("torch", "triton", "command"),
}


def test_csv_has_a_line_for_each_row(rows: list[report.Row], tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.csv"
    report.write_csv(path, rows, machine.provenance("cpu", "flashtile bench"))
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert set(lines[0]) >= COLUMNS
    assert len(lines) == len(rows) == 12
    for line, row in zip(lines, rows, strict=True):
        assert line["pass"] == row.direction
        assert line["skipped"] == row.skipped
        assert line["command"] == "flashtile bench"
        if row.skipped:
            assert line["median_ms"] == ""
        else:
            assert row.median_ms is not None
            assert float(line["median_ms"]) == pytest.approx(row.median_ms, rel=1e-4)


def test_json_keeps_the_rows_and_the_machine(rows: list[report.Row], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    report.write_json(path, rows, PROVENANCE)
    content = json.loads(path.read_text())
    assert content["machine"] == PROVENANCE
    assert [row["skipped"] for row in content["rows"]] == [row.skipped for row in rows]
    assert content["rows"][0]["median_ms"] == rows[0].median_ms


def test_the_table_says_once_what_never_changes(rows: list[report.Row]) -> None:
    title, headings, lines = report.table(rows)
    assert "dtype float32" in title
    assert "heads 4:2" in title
    assert "dtype" not in headings
    assert {"pass", "length", "who", "peak MiB", "max error"} <= set(headings)
    assert "GB/s" not in headings  # nothing decodes here
    assert len(lines) == 8


def test_the_table_needs_no_rich(
    rows: list[report.Row],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    report.show(rows)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[:3] == ["pass", "length", "who"]
    assert "flashtile-cpu" in printed[2]


def test_plain_columns_line_up() -> None:
    assert report.plain_table(["a", "bb"], [["long", "x"], ["s", "y"]]) == (
        "a     bb\nlong  x\ns     y"
    )


def test_pictures_are_drawn(rows: list[report.Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flashtile.bench.plots import draw

    causal = [replace(row, causal=True) for row in rows]
    paths = draw(tmp_path / "new", [*rows, *causal], PROVENANCE)
    assert [path.name for path in paths] == [
        "dense-full-float32-b1-h4-2-d16.png",
        "dense-causal-float32-b1-h4-2-d16.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_provenance_says_where_from() -> None:
    origin = machine.provenance("cpu", "flashtile bench --dtype fp32")
    assert origin["torch"] == torch.__version__
    assert origin["device"]
    assert set(origin) >= {"date", "commit", "flashtile", "triton", "python", "command"}


def test_the_commit_is_that_of_our_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.commit() is None


# Targets


def test_targets_are_judged_at_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SETTINGS", replace(targets.SETTINGS, seconds=0, min_rounds=1))
    monkeypatch.setattr(targets, "cpu_timer", lambda call: (call(), 10.0)[1])
    base = Case(variant="targets", heads_q=2, heads_kv=2, seqlen_q=128, seqlen_k=128)
    outcomes = targets.measure(base)
    found = {(o.name, o.row.direction): o for o in outcomes}
    names = set(targets.jobs(base))
    assert set(found) == {(name, "forward") for name in names} | {
        (name, "backward") for name in names - {"paged decode"}
    }
    assert found["full", "forward"].limit == found["causal", "backward"].limit == 1.05
    assert (found["sink", "forward"].limit, found["sink", "backward"].limit) == (1.4, 1.5)
    assert found["sink", "forward"].ratio == 1.0  # as many scores as the causal yardstick
    half = found["causal, M = N/2", "forward"]
    share = (64 * 64 + 64 * 65 / 2) / (128 * 129 / 2)
    assert half.native_ms == pytest.approx(10.0 * share)
    assert half.ratio == pytest.approx(1 / share)
    assert len(targets.native_rows(outcomes)) == 3 + 2


def _outcome(name: str, length: int, ms: float, peak: float) -> targets.Outcome:
    row = report.Row.of(
        Case(seqlen_q=length, seqlen_k=length, causal=True), "flashtile", "backward"
    )
    row = replace(row, median_ms=ms, peak_mib=peak)
    return targets.Outcome(name, row, row, native_ms=10.0, limit=1.5)


def test_growth_is_the_power_of_the_length() -> None:
    assert targets.growth([_outcome("sink", 1024, 1, 3), _outcome("sink", 4096, 1, 12)]) == 1
    assert targets.growth([_outcome("sink", 1024, 1, 3), _outcome("sink", 2048, 1, 12)]) == 2
    scores = 8 * 1024 * 1024 * 4 / MIB
    ends = [_outcome("bias", 1024, 1, 3 + scores), _outcome("bias", 2048, 1, 6 + 4 * scores)]
    assert targets.growth(ends) == pytest.approx(1)


def test_the_summary_says_what_was_missed() -> None:
    outcomes = [
        *(_outcome("sink", n, 15.0, n) for n in targets.LENGTHS),
        *(_outcome("softcap", n, 14.0 + n / 1024, n * n) for n in targets.LENGTHS),
    ]
    headings, lines = targets.summary(outcomes)
    assert len(headings) == len(lines[0])
    assert [line[2] for line in lines] == ["sink", "softcap"]
    assert lines[0][3] == "15 / 10 = 1.50"
    assert [line[-1] for line in lines] == ["met", "missed: 2048, 4096, memory"]


# On a GPU


@pytest.mark.gpu
def test_the_gpu_is_measured_with_events_and_its_own_memory() -> None:
    timer = measure.timer_for("cuda")
    x = torch.zeros(MIB, device="cuda")
    calls = {"add": lambda: x + 1, "graph": measure.captured(lambda: x + 1)}
    samples = measure.interleave(calls, timer, budget_ms=0, min_rounds=2)
    assert all(min(times) > 0 for times in samples.values())
    assert measure.peak_bytes(lambda: x + 1, "cuda") == 4 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_peers_on_a_gpu_compute_the_case(direction: str) -> None:
    settings = replace(QUICK, device="cuda", peers=("sdpa", "standard"), directions=(direction,))
    for row in run.measure_case(replace(SMALL, dtype="bfloat16"), settings):
        assert row.max_error is not None
        assert row.max_error < 0.1
