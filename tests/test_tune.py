"""`flashtile tune` without a GPU: the choice of a tile, its file and the use of that file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashtile import cli
from flashtile.backends.triton import plan
from flashtile.cli import tune

SLOW, FAST, NOW = (
    tune.Candidate(128, "forward", plan.Tile(BLOCK_M, 64, 4, 2)) for BLOCK_M in (32, 64, 128)
)


def test_the_fastest_wins():
    assert tune.chosen({SLOW: 3.0, FAST: 1.0, NOW: 1.1}, NOW) == FAST


def test_what_is_in_use_stays_where_another_is_faster_by_noise_alone():
    assert tune.chosen({SLOW: 3.0, FAST: 1.0, NOW: 1.005}, NOW) == NOW


def test_what_is_in_use_may_not_fit():
    assert tune.chosen({SLOW: 3.0, FAST: 1.0}, NOW) == FAST


@pytest.mark.parametrize("head_dim", tune.HEAD_DIMS)
def test_every_pass_has_candidates(head_dim: int):
    for kernel in plan.passes_of(head_dim):
        found = list(tune.grid(head_dim, kernel))
        assert len(set(found)) == len(found) > 3
        assert tune.in_use("sm_90", head_dim, kernel).kernel == kernel


@pytest.fixture
def forgets_tiles() -> Iterator[None]:
    plan.tuned.cache_clear()
    yield
    plan.tuned.cache_clear()


@pytest.mark.usefixtures("forgets_tiles")
def test_results_are_added_to_those_of_other_head_dims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("FLASHTILE_CACHE", str(tmp_path))
    before = plan.tiles_for("sm_90", 128)
    tune.write({"64": {"forward": [32, 32, 4, 2]}}, "sm_90", tmp_path)
    path = tune.write({"128": {"keys": [32, 64, 4, 3]}}, "sm_90", tmp_path)
    assert json.loads(path.read_text())["device"] == "a GPU"
    plan.tuned.cache_clear()
    assert plan.tiles_for("sm_90", 64)[0] == (32, 32, 4, 2)
    after = plan.tiles_for("sm_90", 128)
    assert (after[0], after[1], after[2]) == (before[0], (32, 64, 4, 3), before[2])


@pytest.mark.usefixtures("forgets_tiles")
def test_all_candidates_are_compiled_before_the_first_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done: list[tuple[str, tune.Candidate]] = []

    def in_processes(function: object, candidates: list[tune.Candidate], processes: int):
        assert processes == 3
        for candidate in candidates:
            done.append(("compiled", candidate))
            yield candidate, None

    def measure(candidates: list[tune.Candidate], *_: object) -> dict[tune.Candidate, float]:
        done.extend(("measured", candidate) for candidate in candidates)
        return {candidate: float(len(done)) for candidate in candidates}

    monkeypatch.setattr(tune, "in_processes", in_processes)
    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    flags = ["--head-dims", "64", "128", "--processes", "3", "--output", str(tmp_path)]
    assert cli.main(["tune", *flags]) == 0
    half = len(done) // 2
    assert [what for what, _ in done] == ["compiled"] * half + ["measured"] * half
    assert [x for _, x in done[:half]] == [x for _, x in done[half:]]
    passes = {(x.head_dim, x.kernel) for _, x in done}
    assert passes == {(dim, kernel) for dim in (64, 128) for kernel in plan.passes_of(dim)}
