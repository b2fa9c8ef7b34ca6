"""The player of docs/learn/visualiser.md: its traces, and the page in a headless browser."""

from __future__ import annotations

import html
import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from examples.learn import flash_attention_1, traffic

DOCS = Path(__file__).resolve().parents[1] / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
NAMES = ("standard", "fa1", "fa2", "split", "backward", "ring")


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        return importlib.import_module("traces")


@pytest.mark.parametrize("name", NAMES)
def test_every_line_that_is_explained_exists_once(traces: ModuleType, name: str):
    algorithm = traces.ALGORITHMS[name]
    lines = traces.source_of(algorithm.function)
    for text in algorithm.lines:
        assert sum(text in line for line in lines) == 1, text


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "blocks"])
@pytest.mark.parametrize("name", NAMES)
def test_traces_end_with_the_result(traces: ModuleType, name: str, mask: str):
    problem = traces.make_problem(mask, 6, 14, 4, 8)
    algorithm = traces.ALGORITHMS[name]
    expected = traces.reference(problem)[algorithm.result]
    shown: dict[int, list[float]] = {}
    for step in traces.steps(algorithm, problem):
        shown |= {row: value for row, field, value in step.shown if field == algorithm.result}
    found = torch.tensor([shown[row] for row in range(6)], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert step.memory == {} or name in ("fa1", "ring")


def test_traces_count_what_the_lessons_count(traces: ModuleType):
    N, B_r, B_c = 16, 4, 4
    problem = traces.make_problem("full", N, N, B_r, B_c)
    moved = {}
    for name in NAMES:
        *_, last = traces.steps(traces.ALGORITHMS[name], problem)
        moved[name] = last.moved
    fast_memory = 4 * traces.D * B_c
    assert flash_attention_1.block_sizes(fast_memory, traces.D) == (B_r, B_c)
    assert moved["standard"] == traffic.standard_traffic(N, traces.D)
    assert moved["standard"] == traces.standard_traffic("fa2", N, N)
    assert moved["fa1"] == traffic.flash_attention_1_traffic(N, traces.D, fast_memory)
    assert moved["fa2"] == traffic.flash_attention_2_traffic(N, traces.D, B_r)


def test_hidden_tiles_are_not_computed(traces: ModuleType):
    problem = traces.make_problem("window", 16, 16, 4, 4)
    for name in ("fa1", "fa2", "backward", "ring"):
        rows, cols = traces.edges(name, problem)
        kinds = traces.kinds(problem.visible, rows, cols)
        visible = {
            (rows[i], cols[j])
            for i, line in enumerate(kinds)
            for j, kind in enumerate(line)
            if kind
        }
        steps = list(traces.steps(traces.ALGORITHMS[name], problem))
        assert {step.tile for step in steps if step.is_score} == visible


def test_the_player_offers_what_was_traced(traces: ModuleType):
    player = (DOCS / "learn" / "visualiser.html").read_text(encoding="utf-8")
    offered = {
        name: set(re.findall(r'<option value="([^"]*)"', options))
        for name, options in re.findall(r'<select name="(\w+)">(.*?)</select>', player, re.S)
    }
    assert offered["algorithm"] == set(traces.ALGORITHMS) == set(NAMES)
    assert offered["mask"] == set(traces.MASKS)
    assert offered["lengths"] == {f"{M}x{N}" for M, N in traces.LENGTHS}
    assert offered["tiles"] == {f"{B_r}x{B_c}" for B_r, B_c in traces.TILES}


# In a browser


@pytest.fixture(scope="module")
def page(traces: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The player without the rest of the manual."""
    folder = tmp_path_factory.mktemp("visualiser")
    shutil.copytree(DOCS / "_static", folder / "_static")
    traces.write_all(folder / "_static")
    path = folder / "learn" / "visualiser.html"
    path.parent.mkdir()
    player = (DOCS / "learn" / "visualiser.html").read_text(encoding="utf-8")
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{player}</body>", encoding="utf-8")
    return path


def opened(page: Path, fragment: str = "") -> tuple[str, list[str]]:
    """The page after its scripts have come to rest, and what they wrote to the console."""
    if BROWSER is None:
        pytest.skip("no Chromium on the path")
    run = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            f"--user-data-dir={page.parent}/profile", "--virtual-time-budget=60000", "--dump-dom",
            f"{page.as_uri()}{fragment}",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]


DRIVER = """
<script>
(async () => {
  const report = {};
  const player = window.attentionVisualiser;
  try {
    await player.ready;
    const { mask, lengths, tiles } = player.options();
    for (const m of mask) for (const l of lengths) for (const t of tiles) {
      await player.choose({ algorithm: ALGORITHM, mask: m, lengths: l, tiles: t });
      const last = player.steps() - 1;
      const before = player.difference();
      for (let step = 0; step < last; step += 1 + Math.floor(last / 20)) player.show(step);
      player.show(last);
      report[[m, l, t]] = [before, player.difference()];
    }
  } catch (error) {
    report.error = String(error.stack);
  }
  const shown = Object.assign(document.createElement("pre"), { id: "report" });
  shown.textContent = JSON.stringify(report);
  document.body.append(shown);
})();
</script>
"""


@pytest.mark.parametrize("name", NAMES)
def test_every_choice_plays_to_its_end(page: Path, name: str):
    player = page.read_text(encoding="utf-8")
    driven = page.with_name(f"{name}.html")
    driven.write_text(player + DRIVER.replace("ALGORITHM", json.dumps(name)), encoding="utf-8")
    document, console = opened(driven)
    report: dict[str, Any] = json.loads(
        html.unescape(re.search(r'<pre id="report">(.*?)</pre>', document)[1])
    )
    assert console == [] and "error" not in report, report
    assert len(report) == 5 * 3 * 3
    for choice, (before, after) in report.items():
        assert after is not None and after < 1e-5, choice  # six digits; infinite is null
        assert before is None or before > 0.01, choice  # in the first step


def test_an_address_plays_by_itself(page: Path):
    address = "#algorithm=fa2&mask=causal&lengths=8x8&tiles=4x4&speed=40&row=5&play=1"
    document, console = opened(page, address)
    assert console == []
    finished = re.search(r'data-finished="([^"]*)"', document)
    assert finished and float(finished[1]) < 1e-5
    assert "The result is that of the definition" in document
    assert len(re.findall(r'class="v-tile [^"]*v-scored', document)) == 3  # of four, one is hidden


KEYS = """
<script>
(async () => {
  const player = window.attentionVisualiser;
  await player.ready;
  await player.choose({ algorithm: "fa2", mask: "causal", lengths: "8x8", tiles: "4x4" });
  const root = document.getElementById("visualiser");
  const form = root.querySelector("form");
  const where = () => `${form.elements.step.value}/${form.elements.row.value}`;
  const seen = [where()];
  for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "End", "Home"]) {
    root.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    seen.push(where());
  }
  root.querySelectorAll(".v-cell")[8 * 6 + 2].dispatchEvent(new MouseEvent("click"));
  seen.push(where());
  root.querySelector("[data-do=tile]").click();
  seen.push(root.querySelector(".v-active").style.display === "" ? "tile" : "no tile");
  form.elements.mask.value = "full";
  form.elements.mask.dispatchEvent(new Event("change"));
  await new Promise((resolve) => setTimeout(resolve, 100));
  seen.push(location.hash);
  const shown = Object.assign(document.createElement("pre"), { id: "report" });
  shown.textContent = JSON.stringify(seen);
  document.body.append(shown);
})();
</script>
"""


def test_keys_touch_and_buttons(page: Path):
    pressed = page.with_name("keys.html")
    pressed.write_text(page.read_text(encoding="utf-8") + KEYS, encoding="utf-8")
    document, console = opened(pressed)
    assert console == []
    seen = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', document)[1]))
    *steps, tile, address = seen
    assert steps[:5] == ["0/0", "1/0", "2/0", "1/0", "1/1"]
    assert int(steps[5].split("/")[0]) > 30 and steps[6:] == ["0/1", "0/6"]
    assert tile == "tile"
    assert address.startswith("#algorithm=fa2&mask=full&lengths=8x8&tiles=4x4&step=0")


def test_an_address_may_hold_anything(page: Path):
    document, console = opened(page, "#algorithm=none&mask=full&lengths=1&step=-7&row=99&speed=x")
    assert console == [] and 'class="v-current"' in document


def test_console_errors_are_seen(page: Path):
    broken = page.with_name("broken.html")
    text = page.read_text(encoding="utf-8").replace("_static/visualiser.js", "_static/missing.js")
    broken.write_text(text + "<script>undefinedFunction()</script>", encoding="utf-8")
    assert any("undefinedFunction" in line for line in opened(broken)[1])
