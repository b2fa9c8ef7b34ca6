"""Cases written as options, functions and spans: each way computes the case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import ahead, functions, gpu_targets, peers, plots, presets, run, shapes
from benchmarks.rows import Row
from benchmarks.shapes import Case

pytestmark = pytest.mark.slow

N = 192
WAYS = ("flashtile", "flashtile-function", "flashtile-spans")
QUICK = run.Settings(peers=WAYS, seconds=0, min_rounds=1, memory=False)


def small(case: Case) -> Case:
    """A case of gpu-masks or gpu-cascade that a CPU runs at once."""
    case = replace(case, dtype="float32", head_dim=16, head_dim_v=16, seqlen_k=N)
    case = replace(case, heads_q=4, heads_kv=4 * case.heads_kv // case.heads_q)
    case = replace(case, batch=min(case.batch, 3), seqlen_q=min(case.seqlen_q, N))
    if case.relative > N:
        case = replace(case, relative=N - 1)
    if case.window != (-1, -1):
        case = replace(case, window=(31, 0))
    if case.block_sparse:
        case = replace(case, block_density=0.3)
    return replace(case, prefix=case.prefix // 64, shared_prefix=case.shared_prefix // 128)


MASKS = [small(case) for case in presets.preset_cases("gpu-masks") if case.head_dim == 64]
CASCADE = [small(case) for case in presets.preset_cases("gpu-cascade")]


def by_variant(cases: Sequence[Case]) -> Callable[..., object]:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.variant)


def measured(case: Case, settings: run.Settings) -> list[Row]:
    rows = run.measure_case(case, settings, timer=lambda call: [1.0, call()][0])
    return [row for row in rows if not row.skipped]


@by_variant(MASKS)
def test_every_way_to_write_a_case_computes_it(case: Case) -> None:
    rows = measured(case, replace(QUICK, directions=("forward", "backward")))
    masks_alone = not (case.softcap or case.alibi or case.relative)
    wanted = {"flashtile": not case.prefix, "flashtile-function": not case.block_sparse}
    wanted["flashtile-spans"] = masks_alone and not case.block_sparse
    assert {row.peer for row in rows} == {way for way, runs in wanted.items() if runs}
    assert len(rows) == 2 * sum(wanted.values())
    for row in rows:
        assert row.max_error is not None
        assert 0 < row.max_error < 1e-4, row


@by_variant(MASKS)
def test_flex_computes_the_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, because it has no backward on a CPU; one case as code that PyTorch compiles."""
    if case is not MASKS[0]:
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    (row,) = measured(case, replace(QUICK, peers=("flex",))) or [None]
    if row is None:
        pytest.skip("FlexAttention needs a C++ compiler")
    assert row.max_error is not None
    assert 0 < row.max_error < 1e-4


@by_variant([case for case in MASKS if not case.documents])
def test_functions_and_spans_are_the_mask(case: Case) -> None:
    inputs = shapes.make_inputs(case)
    wanted = shapes.visible(case, inputs, N, N)
    mask = functions.mask_function(case, inputs, 0)
    assert wanted is not None
    assert mask is not None
    nothing, row, key = torch.tensor(0), torch.arange(N)[:, None], torch.arange(N)
    assert torch.equal(mask(nothing, nothing, row, key), wanted)
    assert shapes.visible_scores(case) == case.heads_q * int(wanted.sum())
    if case.causal:
        starts, stops = (x[0, 0] for x in functions.spans(case, torch.device("cpu")))
        assert torch.equal((key >= starts) & (key < stops), wanted)


def test_peers_without_a_relative_bias_say_so() -> None:
    case = next(case for case in MASKS if case.relative)
    rows = run.measure_case(case, replace(QUICK, peers=("sdpa", "standard")))
    assert {row.skipped for row in rows} == {"not set up for a relative bias"}


@by_variant(CASCADE)
def test_a_shared_prefix_changes_no_result(case: Case) -> None:
    inputs = shapes.make_inputs(case)
    assert torch.equal(inputs.k[1:, : case.shared_prefix], inputs.k[:-1, : case.shared_prefix])
    rows = measured(case, replace(QUICK, peers=("flashtile", "flashtile-unshared")))
    assert [row.peer for row in rows] == ["flashtile", "flashtile-unshared"]
    for row in rows:
        assert row.gbps is None  # the two read unlike amounts
        assert row.max_error is not None
        assert 0 < row.max_error < 1e-5


def test_one_peer_passes_the_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    attend = peers.api.attention_with_kvcache

    def noted(*args: object, **options: Any) -> object:
        asked.append(options.get("shared_prefix_len"))
        return attend(*args, **options)

    monkeypatch.setattr(peers.api, "attention_with_kvcache", noted)
    for peer, wanted in (("flashtile", CASCADE[0].shared_prefix), ("flashtile-unshared", None)):
        asked.clear()
        measured(CASCADE[0], replace(QUICK, peers=(peer,)))
        assert set(asked) == {wanted}


def test_a_call_without_a_shared_prefix_has_one_peer() -> None:
    case = replace(CASCADE[0], shared_prefix=0)
    shared, _ = run.measure_case(case, replace(QUICK, peers=("flashtile-unshared", "flashtile")))
    assert shared.skipped == "no prefix is shared"


# Compiling ahead


def test_cases_run_in_other_processes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens there; a peer that is missing is met again by the measurement."""
    settings = replace(QUICK, peers=("flashtile", "fa3"), directions=("forward", "backward"))
    assert ahead.compile_ahead([MASKS[0]], settings, processes=1) > 0
    called = []
    monkeypatch.setattr(command, "compile_ahead", lambda *given: [called.append(given), 2.0][1])
    argv = ["--seq-len", "32", "--num-heads", "2", "--head-dim", "8", "--seconds", "0"]
    argv += ["--device", "cpu", "--peers", "standard"]
    assert command.main(argv) == 0
    assert called == []
    assert command.main([*argv, "--ahead", "3"]) == 0
    ((cases, settings, processes),) = called
    assert [case.seqlen_k for case in cases] == [32]
    assert settings.peers == ("standard",)
    assert processes == 3


# The page


def rows_of(case: Case, direction: str, times: dict[str, float]) -> list[Row]:
    return [Row.of(case, peer, direction).timed(case, [ms]) for peer, ms in times.items()]


def test_every_way_is_compared_with_flex_and_spans_with_the_option() -> None:
    case = next(c for c in presets.preset_cases("gpu-masks") if c.variant == "causal")
    times = {"flashtile": 1.0, "flashtile-function": 2.2, "flashtile-spans": 1.05, "flex": 2.0}
    found = gpu_targets.outcomes(rows_of(case, "backward", times))
    assert {outcome.target.about: outcome.ratio for outcome in found} == {
        "masks as options, backward": pytest.approx(2.0),
        "masks as functions, backward": pytest.approx(2.0 / 2.2),
        "masks as spans, backward": pytest.approx(2.0 / 1.05),
        "causal as spans, backward": pytest.approx(1 / 1.05),
    }
    assert [outcome.met for outcome in found] == [True, False, True, False]
    case, *_ = presets.preset_cases("gpu-cascade")
    times = {"flashtile": 1.0, "flashtile-unshared": 3.0}
    (outcome,) = gpu_targets.outcomes(rows_of(case, "decode", times))
    assert (outcome.ratio, outcome.met) == (pytest.approx(3.0), True)


def test_a_picture_shows_each_way_next_to_flex(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = presets.preset_cases("gpu-masks")
    times = {"flashtile": 1.0, "flashtile-spans": 1.6, "flex": 4.0}
    rows = [row for case in cases for row in rows_of(case, "forward", times)]
    (path,) = plots.draw(tmp_path, rows, {"device": "GPU", "date": "2026-01-02"})
    assert path.name == "flex-gpu-masks-forward-bfloat16.png"
    figure = plots._next_to_flex(rows, {"device": "GPU", "date": "2026-01-02"})
    assert len(figure.axes) == 2
    for axis in figure.axes:
        option, spans, _ = axis.get_lines()
        assert option.get_xdata().tolist() == [4.0] * (len(cases) // 2)
        assert spans.get_xdata().tolist() == [2.5] * (len(cases) // 2)
    without = [row for row in rows if row.peer != "flex"]
    assert plots._next_to_flex(without, {}) is None
