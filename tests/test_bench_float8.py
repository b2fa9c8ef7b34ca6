"""Float8 in the benchmarks: the peers, the bytes that quantising moves, the tables."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from benchmarks import float8, peers, presets, report, run, shapes
from benchmarks.prepared import Skip
from benchmarks.shapes import Case
from flashtile.ops.quantize.formula import E4M3, Recipe

SMALL = Case(
    dtype="bfloat16", heads_q=4, heads_kv=2, head_dim=16, head_dim_v=16, seqlen_q=160, seqlen_k=200
)
QUANTIZING = replace(SMALL, batch=2, recipe=Recipe())
ATTENDING = presets.PRESETS["gpu-float8"].settings.peers
QUICK = run.Settings(peers=ATTENDING, seconds=0, min_rounds=1, memory=False)


@pytest.mark.parametrize("causal", [False, True])
def test_float8_takes_turns_with_bfloat16_on_the_same_case(causal: bool) -> None:
    rows = run.measure_case(replace(SMALL, causal=causal), QUICK, timer=lambda _: 1.0)
    plain, block, head, other = rows
    assert other.skipped == "runs only on CUDA"
    assert len({row.subject for row in rows}) == 1
    assert plain.rms_error is not None
    for row in (block, head):
        assert (row.skipped, row.backend) == ("", "cpu")
        assert row.tflops == plain.tflops
        assert row.rms_error is not None
        assert 3 * plain.rms_error < row.rms_error < 0.05


def test_fa3_attends_to_the_numbers_that_we_attend_to(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, causal=True, batch=2)
    inputs = shapes.make_inputs(case)

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        assert {x.dtype for x in (q, k, v)} == {E4M3}
        assert v.is_contiguous()
        for name in ("q_descale", "k_descale", "v_descale"):
            assert options[name].shape == (case.batch, case.heads_kv)
        return flashtile.attention(q, k, v, **options), None

    fake = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setattr(float8, "cuda_package", lambda name, inputs: fake)
    with torch.no_grad():
        theirs = float8.fa3(case, inputs).forward()
        ours = peers.PEERS["flashtile-float8-head"](case, inputs).forward()
    assert torch.equal(theirs, ours)


def test_what_float8_cannot_is_a_line() -> None:
    (row,) = run.measure_case(
        SMALL, replace(QUICK, peers=("flashtile-float8",), directions=("backward",))
    )
    assert row.skipped == "float8 has no backward"
    (row,) = run.measure_case(replace(SMALL, sink=True), replace(QUICK, peers=ATTENDING[1:2]))
    assert row.skipped == "not set up for a sink"


def test_bytes_are_what_quantising_reads_and_writes() -> None:
    numbers = 2 * (160 * 4 * 16 + 2 * 200 * 2 * 16)
    assert shapes.quantized_bytes(QUANTIZING) == 3 * numbers
    assert shapes.quantized_bytes(replace(QUANTIZING, recipe=Recipe(hadamard=False))) == 3 * numbers
    assert shapes.quantized_bytes(replace(QUANTIZING, recipe=Recipe("head"))) == 5 * numbers


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("head"), Recipe(hadamard=False)], ids=str)
def test_quantising_runs_the_recipe_and_its_copy_moves_as_much(recipe: Recipe) -> None:
    case = replace(QUANTIZING, recipe=recipe)
    inputs = shapes.make_inputs(case)
    with torch.no_grad():
        found = float8.quantize(case, inputs).forward()
        copied = float8.copy(case, inputs).forward()
    wanted = flashtile.quantize_qkv(*inputs[:3], scales=recipe.scales, hadamard=recipe.hadamard)
    assert torch.equal(found.float(), wanted.q.float())
    assert 2 * copied.numel() * copied.itemsize == shapes.quantized_bytes(case)
    assert copied.eq(1).all()


def test_a_row_of_quantising_has_a_bandwidth_and_no_flops(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("flashtile-quantize", "copy", "flashtile", "standard")
    rows = run.measure_case(QUANTIZING, replace(QUICK, peers=names), timer=lambda _: 2.0)
    for row in rows[:2]:
        assert (row.skipped, row.direction, row.tflops) == ("", "quantize", None)
        assert row.gbps == pytest.approx(shapes.quantized_bytes(QUANTIZING) / 2e-3 / 1e9)
    assert {row.skipped for row in rows[2:]} == {"attends, and this case quantises"}
    report.show(rows)
    assert "pass quantize" in capsys.readouterr().out


@pytest.mark.parametrize("name", float8.QUANTIZERS)
def test_quantising_has_a_case_of_its_own_and_no_backward(name: str) -> None:
    inputs = shapes.make_inputs(SMALL)
    with pytest.raises(Skip, match="this case attends"):
        peers.PEERS[name](SMALL, inputs)
    with pytest.raises(Skip, match="no backward"), torch.enable_grad():
        peers.PEERS[name](QUANTIZING, inputs)


def test_the_presets_hold_what_the_targets_are_about() -> None:
    attending = presets.preset_cases("gpu-float8")
    assert {case.head_dim for case in attending} == {64, 128, 256}
    assert {case.seqlen_k for case in attending} == {4096, 16384}
    assert {case.causal for case in attending} == {False, True}
    assert len(attending) == 12
    quantizing = presets.preset_cases("gpu-quantize")
    assert {(case.head_dim, case.recipe) for case in quantizing} == {
        (head_dim, recipe)
        for head_dim in (64, 128, 256)
        for recipe in (Recipe(), Recipe("head"), Recipe(hadamard=False))
    }
