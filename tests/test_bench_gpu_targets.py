"""The GPU targets: their rows, the compared peers, and when a target is missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import gpu_targets, presets, shapes
from benchmarks.gpu_targets import Outcome
from benchmarks.rows import Row
from benchmarks.shapes import Case


def _measured(case: Case, direction: str, speeds: dict[str, float]) -> list[Row]:
    """A row for each peer, with its speed in TFLOP/s."""
    work = shapes.flops(case, direction) / 1e9
    return [
        Row.of(case, peer, direction).timed(case, [work / speed]) for peer, speed in speeds.items()
    ]


def _of(name: str, **facts: object) -> Case:
    """The one case of a preset with these facts."""
    (case,) = (
        case
        for case in presets.preset_cases(name)
        if all(getattr(case, key) == value for key, value in facts.items())
    )
    return case


def _found(rows: list[Row]) -> dict[str, Outcome]:
    return {outcome.target.about: outcome for outcome in gpu_targets.outcomes(rows)}


LONG = {"head_dim": 128, "seqlen_k": 4096, "causal": True}


def test_triton_is_compared_with_fa2_and_the_free_choice_with_the_fastest() -> None:
    speeds = {"flashtile": 600.0, "flashtile-triton": 400.0, "fa2": 320.0, "fa3": 500.0}
    speeds |= {"cudnn": 610.0, "standard": 1000.0}
    found = _found(_measured(_of("gpu-dense", **LONG), "forward", speeds))
    assert set(found) == {"Triton forward, D 64, 128", "Hopper forward, D 64, 128, 256"}
    triton, hopper = found.values()
    assert (triton.other, triton.ratio) == ("fa2", pytest.approx(1.25))
    assert (hopper.other, hopper.ratio) == ("cudnn", pytest.approx(600 / 610))
    assert (triton.met, hopper.met) == (False, False)


def test_a_ratio_is_met_as_it_is_shown() -> None:
    case = _of("gpu-dense", **LONG)
    for speed, met in ((99.6, True), (99.4, False)):
        rows = _measured(case, "forward", {"flashtile": speed, "fa4": 100.0})
        (outcome,) = gpu_targets.outcomes(rows)
        assert outcome.met is met


@pytest.mark.parametrize(
    ("preset", "facts", "direction", "about"),
    [
        ("gpu-dense", LONG | {"seqlen_k": 1024}, "backward", "backward, D 64, 128, 256, N = 1k"),
        ("gpu-layer", {"variant": "layer"}, "both", "layer"),
        ("gpu-hopper", LONG | {"head_dim": 192}, "forward", "D 96, 192"),
        ("gpu-hopper", LONG | {"variant": "grouped"}, "backward", "heads 32:8"),
        ("gpu-hopper", {"variant": "packed", "causal": False}, "forward", "packed"),
        ("gpu-hopper", {"variant": "window 1024"}, "forward", "window"),
    ],
)
def test_every_case_that_has_a_target_is_measured(preset, facts, direction, about) -> None:
    rows = _measured(_of(preset, **facts), direction, {"flashtile": 2.0, "fa4": 1.0})
    (outcome,) = gpu_targets.outcomes(rows)
    assert about in outcome.target.about
    assert direction in outcome.target.about or direction == "both"
    assert outcome.ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("facts", "direction", "least", "mean"),
    [
        ({"head_dim": 128, "seqlen_k": 4096}, "forward", 1.0, 1.05),
        ({"head_dim": 64, "seqlen_k": 16384}, "backward", 1.0, 1.05),
        ({"head_dim": 256, "seqlen_k": 1024}, "forward", 0.97, 1.02),
        ({"head_dim": 64, "seqlen_k": 1024}, "backward", 0.97, 1.02),
        ({"head_dim": 96, "seqlen_k": 4096}, "forward", 1.0, 0.0),
        ({"head_dim": 192, "seqlen_k": 16384}, "backward", 0.95, 1.0),
    ],
)
def test_the_papers_shapes_have_a_target_for_the_least_and_for_the_mean(
    facts, direction, least, mean
) -> None:
    preset = "gpu-hopper" if facts["head_dim"] in (96, 192) else "gpu-dense"
    rows = _measured(_of(preset, causal=False, **facts), direction, {"flashtile": 2.0, "fa4": 1.0})
    (summary,) = gpu_targets.summaries(rows)
    assert (summary.target.least, summary.target.mean) == (least, mean)


def test_two_thousand_tokens_have_no_target() -> None:
    case = _of("gpu-dense", **(LONG | {"seqlen_k": 2048}))
    assert gpu_targets.outcomes(_measured(case, "forward", {"flashtile": 1.0, "fa3": 9.0})) == []


def test_masks_are_compared_with_full_attention_by_the_same_peer() -> None:
    full = _of("gpu-sparse", variant="dense", causal=False)
    window = _of("gpu-sparse", variant="window 1024")
    speeds = {"flashtile": 600.0, "flashtile-triton": 300.0}
    rows = _measured(full, "forward", speeds)
    rows += _measured(window, "forward", dict.fromkeys(speeds, 150.0))
    (outcome,) = gpu_targets.outcomes(rows)
    share = shapes.visible_scores(full) / shapes.visible_scores(window)
    assert outcome.target.about == "Triton forward, window 1024"
    assert outcome.ratio == pytest.approx(share / 2)


def test_the_deterministic_backward_and_the_hosts_time() -> None:
    speeds = {"flashtile": 400.0, "flashtile-deterministic": 300.0}
    rows = _measured(_of("gpu-deterministic", **LONG), "backward", speeds)
    case = _of("gpu-host", head_dim=64, seqlen_k=128)
    rows += [replace(row, host_us=50.0) for row in _measured(case, "forward", {"flashtile": 1.0})]
    elsewhere = _measured(_of("gpu-dense", **LONG), "forward", {"flashtile": 1.0})
    found = gpu_targets.outcomes([*rows, *(replace(row, host_us=9.0) for row in elsewhere)])
    assert [outcome.ratio for outcome in found] == [pytest.approx(0.75), pytest.approx(0.8)]
    assert not any(outcome.met for outcome in found)


def test_decoding_is_compared_with_two_libraries_and_with_the_memory() -> None:
    one = _of("gpu-decode", batch=1, seqlen_k=32768, variant="decode")  # 134 MB
    many = _of("gpu-decode", batch=64, variant="decode, pages of 256")  # 1.07 GB
    rows = _measured(one, "decode", {"flashtile": 1.1, "fa2": 1.0, "fa3": 0.9})
    rows += _measured(many, "decode", {"flashtile": 1.0, "fa3": 0.9})
    rows = [replace(row, percent_of_read=81.0) for row in rows]
    found = _found(rows)
    assert len(gpu_targets.outcomes(rows)) == len(found)
    assert {name: round(outcome.ratio, 2) for name, outcome in found.items()} == {
        "decoding, batch 1": 1.1,
        "decoding, larger batches": 1.11,
        "decoding over more than 1 GB": 0.9,
    }
    assert [outcome.met for outcome in found.values()] == [False, True, False]


def test_caches_are_compared_with_the_plain_one_of_the_same_sizes() -> None:
    sizes = {"batch": 64, "seqlen_k": 4096}
    times = {
        "decode": 1.0,
        "decode, float8": 0.5,
        "decode, pages of 16": 1.25,
        "decode, append and rotary": 1.0,
    }
    rows = [
        replace(row, median_ms=ms)
        for name, ms in times.items()
        for row in _measured(_of("gpu-decode", variant=name, **sizes), "decode", {"flashtile": 1.0})
    ]
    long = {"prefill": "forward", "prefill, cache": "decode", "prefill, pages of 256": "decode"}
    for name, direction in long.items():
        rows += _measured(_of("gpu-prefill", variant=name, batch=1), direction, {"flashtile": 1.0})
    other = _of("gpu-decode", variant="decode, float8", batch=16, heads_kv=8)  # has no target
    rows += _measured(other, "decode", {"flashtile": 1.0})
    found = _found(rows)
    assert {name: round(outcome.ratio, 2) for name, outcome in found.items()} == {
        "decoding, float8 cache, batch 64": 2.0,
        "decoding, pages of 16": 0.8,
        "append, rotary and attention": 1.0,
        "prefill from a cache": 1.0,
        "prefill from pages": 1.0,
    }


@pytest.mark.parametrize("causal", [False, True])
def test_float8_is_compared_with_fa3_and_its_block_scales_with_our_own(causal: bool) -> None:
    case = _of("gpu-float8", **(LONG | {"causal": causal}))
    speeds = {"flashtile": 600.0, "flashtile-float8": 900.0, "flashtile-float8-head": 1000.0}
    found = _found(_measured(case, "forward", speeds | {"fa3-float8": 990.0}))
    assert {name: (o.other, round(o.ratio, 2), o.met) for name, o in found.items()} == {
        "float8 forward, per-head scales": ("fa3-float8", 1.01, True),
        "float8 forward, per-block scales": ("flashtile-float8-head", 0.9, False),
    }


def test_quantising_is_compared_with_a_copy_of_as_many_bytes() -> None:
    case = _of("gpu-quantize", head_dim=128, variant="per-head scales")
    rows = [
        replace(Row.of(case, peer, "quantize").timed(case, [ms]), percent_of_read=50.0)
        for peer, ms in (("flashtile-quantize", 2.0), ("copy", 1.5))
    ]
    (outcome,) = gpu_targets.outcomes(rows)  # and none of a cache's
    assert (outcome.other, outcome.ratio, outcome.met) == ("copy", 0.75, False)


def test_the_page_counts_what_is_met_and_names_what_is_not() -> None:
    rows = []
    for length, speed in ((4096, 550.0), (16384, 450.0)):
        speeds = {"flashtile": speed, "fa3": 500.0}
        rows += _measured(_of("gpu-dense", **(LONG | {"seqlen_k": length})), "forward", speeds)
    lines = list(gpu_targets.section(rows))
    about = "Hopper forward, D 64, 128, 256: / fa3 or fa4 or cudnn"
    assert f"| {about} | 1.0, 1.05 | 0.90, 0.99, 1.10 | 1 of 2 | 1 of 2 |" in lines
    assert "| Hopper forward, D 64, 128, 256 | mean of 2 cases | 0.99 | 1.05 | |" in lines
    case = "dense causal, 16:16 heads of 128, 16,384 tokens"
    assert f"| Hopper forward, D 64, 128, 256 | {case} | 0.90 | 1.0 | fa3 |" in lines
    assert list(gpu_targets.section(rows[1:2])) == []
