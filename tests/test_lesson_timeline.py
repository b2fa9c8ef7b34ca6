"""The pictures and tables of lesson 8, from numbers that no GPU has measured."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")

DOCS = Path(__file__).resolve().parents[1] / "docs"
EVENTS = {
    "producer": ["begin", "K slot empty", "K copy issued", "V slot empty", "V copy issued"],
    "consumer": ["begin", "K full", "turn", "products issued", "S", "softmax", "O"],
}
STEP = 1000


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the manual."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


def trace(shown: tuple[str, ...]) -> dict[str, Any]:
    """Eight equal steps; the second consumer is half a step behind."""

    def steps(events: int, shift: int) -> list[list[int]]:
        return [[STEP * i + shift + 100 * n for n in range(events)] for i in range(8)]

    consumers = {"consumer 1": steps(7, 0), "consumer 2": steps(7, STEP // 2)}
    stages = dict.fromkeys(EVENTS["consumer"][1:], 100.0) | {"step": float(STEP)}
    with_roles = {"producer": steps(5, -30)} | consumers
    timelines = dict.fromkeys(shown, with_roles)
    timelines["no roles"] = {"consumer 1": consumers["consumer 1"]}
    schedules = {name: {"timeline": found, "stages": stages} for name, found in timelines.items()}
    return {"events": EVENTS, "schedules": schedules}


def test_a_bar_for_each_stage(docs: Any):
    drawing: ModuleType = docs("timeline_figures")
    figure = drawing.draw(trace(drawing.SHOWN))
    assert len(figure.axes) == len(drawing.SHOWN)
    for axes, name in zip(figure.axes, drawing.SHOWN, strict=True):
        assert axes.get_title(loc="left") == f"{name}: 1,000 cycles a step"
        bars = {row: [] for row in range(len(axes.get_yticks()))}
        for bar in axes.patches:
            assert bar.get_x() >= 0 and bar.get_x() + bar.get_width() <= drawing.STEPS * STEP
            bars[round(bar.get_y() + bar.get_height() / 2)].append(bar)
        first = bars[1 if name != "no roles" else 0]  # consumer 1: six stages a step
        assert len(first) == 6 * drawing.STEPS
        softmax = [bar for bar in first if bar.get_facecolor() == first[4].get_facecolor()]
        assert [bar.get_x() for bar in softmax] == [STEP * i + 400 for i in range(drawing.STEPS)]
    drawing.plt.close(figure)


def test_pictures_for_both_themes_only_of_a_trace(docs: Any, tmp_path: Path):
    drawing: ModuleType = docs("timeline_figures")
    source = tmp_path / "timeline.json"
    drawing.write_all(tmp_path / "figures", source)
    assert not (tmp_path / "figures").exists()
    source.write_text(json.dumps(trace(drawing.SHOWN)))
    drawing.write_all(tmp_path / "figures", source)
    found = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert found == ["hopper_timeline_dark.png", "hopper_timeline_light.png"]


def test_tables_say_what_is_not_measured(docs: Any, tmp_path: Path):
    tables: ModuleType = docs("lesson_tables")
    assert tables.timeline(tmp_path).startswith("**Not measured yet**")
    assert tables.ablation(tmp_path).startswith("**Not measured yet**")
    assert "| everything | – | – | 661 | 1.00 |" in tables.ablation(tmp_path)


def test_tables_have_the_measured_numbers(docs: Any, tmp_path: Path):
    tables: ModuleType = docs("lesson_tables")
    origin = {"device": "a GPU", "torch": "2", "triton": "3", "commit": "abc", "date": "today"}
    speeds = {"everything": "600.0", "no roles": "450.0", "cuDNN": "630.0"}
    with (tmp_path / "ablation.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["schedule", "tflops", *origin])
        writer.writeheader()
        for name, tflops in speeds.items():
            writer.writerow({"schedule": name, "tflops": tflops, **origin})
    found = tables.ablation(tmp_path)
    assert found.startswith("Ours: a GPU, torch 2, Triton 3, commit abc, today, medians.")
    assert "| everything | 600 | 1.00 | 661 | 1.00 |" in found
    assert "| no roles, so no ping-pong | 450 | 0.75 | 570 | 0.86 |" in found
    assert "| cuDNN | 630 | 1.05 | – | – |" in found
    (tmp_path / "timeline.json").write_text(json.dumps(trace(("everything",))))
    found = tables.timeline(tmp_path)
    for theme in ("light", "dark"):
        assert f"../figures/hopper_timeline_{theme}.png\n:class: only-{theme}" in found
    assert f"| everything | {' | '.join(['100'] * 6)} | 1,000 |" in found
