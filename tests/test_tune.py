"""`flashtile tune` without a GPU: the choice of a tile, its file and the use of that file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from flashtile import clear_caches
from flashtile.backends.triton import plan
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.cli import tune
from flashtile.problem import AttentionProblem
from flashtile_command import main

SLOW, FAST, NOW = (
    tune.Candidate("16-bit", 128, "forward", plan.Tile(BLOCK_M, 64, 4, 2))
    for BLOCK_M in (32, 64, 128)
)


def test_the_fastest_wins():
    assert tune.chosen({SLOW: 3.0, FAST: 1.0, NOW: 1.1}, NOW) == FAST


def test_what_is_in_use_stays_where_another_is_faster_by_noise_alone():
    assert tune.chosen({SLOW: 3.0, FAST: 1.0, NOW: 1.005}, NOW) == NOW


def test_what_is_in_use_may_not_fit():
    assert tune.chosen({SLOW: 3.0, FAST: 1.0}, NOW) == FAST


@pytest.mark.parametrize("name", sorted(set(plan.ARCHITECTURES.values())))
@pytest.mark.parametrize("call", tune.CALLS)
@pytest.mark.parametrize("head_dim", tune.HEAD_DIMS)
def test_every_pass_has_candidates(name: str, call: str, head_dim: int):
    every = tune.in_use(name, head_dim, call)
    assert [now.kernel for now in every] == list(plan.PASSES[: len(every)])
    assert len(every) == 1 if "decoding" in call else len(every) >= 3
    for now in every:
        found = list(tune.grid(*now[:3]))
        assert len(set(found)) == len(found) > 3
        assert {candidate[:3] for candidate in found} == {now[:3]}


GPUS = [("NVIDIA H200", (9, 0)), ("NVIDIA L4", (8, 9))]


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, object]]]:
    """The GPUs of this machine, the first of which is the current one; tiles go to `tmp_path`."""
    here = list[tuple[str, object]](GPUS)
    monkeypatch.setenv("FLASHTILE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: here[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: here[index][1])
    monkeypatch.setattr(tune, "multiprocessors", lambda device: 132)
    clear_caches()
    yield here
    clear_caches()


TILE = [32, 32, 4, 2]


def first_tile() -> list[int]:
    clear_caches()
    return list(plan.tiles_for("sm_90", 64)[0])


def test_results_are_added_to_those_of_other_head_dims(gpus: object, tmp_path: Path):
    before = plan.tiles_for("sm_90", 128)
    tune.write({"16-bit 64 forward": TILE}, tmp_path)
    path = tune.write({"16-bit 128 keys": [32, 64, 4, 3]}, tmp_path)
    written = json.loads(path.read_text())
    assert (written["device"], written["capability"]) == ("NVIDIA H200", [9, 0])
    assert [x.name for x in tmp_path.iterdir()] == ["NVIDIA-H200.json"]
    assert first_tile() == TILE
    after = plan.tiles_for("sm_90", 128)
    assert (after[0], after[1], after[2]) == (before[0], (32, 64, 4, 3), before[2])


def test_a_file_of_another_gpu_is_ignored_and_kept(gpus: list[object], tmp_path: Path):
    """Also one of the same architecture, and where GPUs of two names would share a plan."""
    tune.write({"16-bit 64 forward": TILE}, tmp_path)
    gpus[0] = ("NVIDIA H100", (9, 0))
    before = first_tile()
    assert before != TILE
    other = [64, 32, 4, 2]
    tune.write({"16-bit 64 forward": other}, tmp_path)
    assert first_tile() == other
    gpus.append(GPUS[0])
    assert first_tile() == before
    gpus[:] = GPUS
    assert first_tile() == TILE
    gpus.clear()
    assert first_tile() == before


def problem(capability: tuple[int, int], queries: int, **given: object) -> AttentionProblem:
    dtype = given.pop("dtype", torch.bfloat16)
    make = partial(torch.empty, dtype=dtype, device="meta")
    if "bias" in given:
        given["bias"] = make(1, 1, queries, 4096)
    k = make(4, 4096, 8, 64)
    operands, options = describe((make(4, queries, 8, 64), k, k), Dense(), given)
    found = AttentionProblem.of(operands, options)
    return found._replace(device_type="cuda", capability=capability)


def test_explain_says_which_files_are_used(gpus: list[object], tmp_path: Path):
    path = tune.write({"16-bit 64 forward": TILE}, tmp_path)
    asked = problem((9, 0), 4096)
    clear_caches()
    assert f"tiles measured on NVIDIA H200, used: {path}" in plan.describe_plan(asked, 1)
    assert "tiles measured" not in plan.describe_plan(problem((8, 0), 4096), 1)
    gpus[0] = ("NVIDIA H100", (9, 0))
    clear_caches()
    report = plan.describe_plan(asked, 1)
    assert f"`flashtile tune` can measure others: {path}" in report
    assert "NVIDIA H200, ignored" in report


@pytest.mark.parametrize(
    ("kind", "passes", "asked"),
    [
        ("16-bit", 3, problem((9, 0), 4096)),
        ("bias", 3, problem((9, 0), 4096, bias=True)),
        ("bf16x6", 3, problem((9, 0), 4096, dtype=torch.float32)),
        ("ieee", 3, problem((8, 9), 4096, dtype=torch.float32)),
        ("decoding", 1, problem((9, 0), 1)),
        ("split-decoding", 1, problem((9, 0), 1)),
    ],
)
def test_each_kind_of_call_uses_its_own_tiles(
    gpus: object, tmp_path: Path, kind: str, passes: int, asked: AttentionProblem
):
    tile = plan.Tile(16, 32, 2, 5)  # in no table
    found = {f"{kind} 64 {kernel}": list(tile) for kernel in plan.PASSES[:passes]}
    if asked.capability == (8, 9):
        gpus.reverse()
    tune.write(found, tmp_path)
    clear_caches()
    planned = plan.plan(asked, True)
    first = planned.split if kind == "split-decoding" else planned.forward
    for kernel in (first, planned.keys, planned.queries)[:passes]:
        size = kernel.config.BLOCK_M, kernel.config.BLOCK_N
        assert (*size, kernel.warps, kernel.stages) == tile
    others = {"16-bit", "bias", "ieee", "bf16x6", "decoding", "split-decoding"} - {kind}
    tune.write({f"{other} 64 forward": [64, 16, 1, 7] for other in others}, tmp_path)
    clear_caches()
    assert plan.plan(asked, True).forward.stages == (7 if kind == "split-decoding" else tile.stages)


DAMAGED = [
    "{",
    "[]",
    '{"device": "NVIDIA H200", "tiles": {}}',
    '{"device": "a", "capability": [9], "tiles": {}}',
    '{"device": "a", "capability": [9, 0], "tiles": []}',
    '{"device": "a", "capability": [9, 0], "tiles": {"16-bit 64 forward": [64, 64, 4]}}',
    '{"device": "a", "capability": [9, 0], "tiles": {"16-bit 64 forward": [64, 64, 4, 0]}}',
    '{"device": "a", "capability": [9, 0], "tiles": {"64": {"forward": [64, 64, 4, 2]}}}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_and_one_of_earlier_versions_are_errors_with_their_names(
    gpus: object, tmp_path: Path, text: str
):
    (tmp_path / "sm_90.json").write_text(text)
    with pytest.raises(ValueError, match=r"sm_90.json is no file of this version.*: delete it"):
        first_tile()


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("is_cut_short", [False, True])
def test_a_pass_is_measured_and_written_once_its_candidates_are_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_cut_short: bool,
):
    compiled: set[tune.Candidate] = set()
    measured: list[str] = []

    def in_processes(
        function: object, candidates: list[tune.Candidate], processes: int, seconds: float | None
    ) -> Iterator[tuple[tune.Candidate, None]]:
        assert (processes, seconds) == (3, 120 if is_cut_short else None)
        # All but the last candidate of the last pass, if time has ended.
        for candidate in candidates[: len(candidates) - is_cut_short]:
            compiled.add(candidate)
            yield candidate, None

    def measure(candidates: list[tune.Candidate], *_: object) -> dict[tune.Candidate, float]:
        assert compiled.issuperset(candidates)
        assert written() == measured
        kind, head_dim, kernel, _ = candidates[0]
        measured.append(f"{kind} {head_dim} {kernel}")
        return {candidate: 1.0 + number for number, candidate in enumerate(candidates)}

    def written() -> list[str]:
        file = tmp_path / "NVIDIA-H200.json"
        return list(json.loads(file.read_text())["tiles"]) if file.is_file() else []

    monkeypatch.setattr(tune, "in_processes", in_processes)
    monkeypatch.setattr(tune, "measure", measure)
    flags = ["--head-dim", "64", "128", "--processes", "3", "--output", str(tmp_path)]
    assert main(["tune", *flags, *(["--minutes", "2"] if is_cut_short else [])]) == 0
    every = [x for dim in (64, 128) for call in tune.CALLS for x in tune.in_use("sm_90", dim, call)]
    passes = [f"{kind} {head_dim} {kernel}" for kind, head_dim, kernel, _ in every]
    assert written() == measured == passes[: len(passes) - is_cut_short]
    assert ("out of time: 1 pass" in capsys.readouterr().out) == is_cut_short


@pytest.mark.usefixtures("gpus")
def test_without_time_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tune, "in_processes", lambda *_: iter(()))
    flags = ["--head-dim", "64", "--minutes", "0", "--output", str(tmp_path / "tiles")]
    assert main(["tune", *flags]) == 1
    assert not (tmp_path / "tiles").exists()
