"""The player of docs/learn/visualiser.md: its traces, and the page in a headless browser."""

from __future__ import annotations

import html
import importlib
import json
import os
import random
import re
import shutil
import subprocess
from math import inf, isfinite
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
MASKS = ("full", "causal", "window", "documents", "blocks")


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


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_traces_end_with_the_result(traces: ModuleType, name: str, mask: str):
    problem = traces.make_problem(name, mask, 4, 6, 14, 4, 8)
    algorithm = traces.ALGORITHMS[name]
    shown: dict[int, list[float]] = {}
    for step in traces.steps(algorithm, problem):
        shown |= {row: value for row, field, value in step.shown if field == algorithm.result}
    found = torch.tensor([shown[row] for row in range(6)], dtype=torch.float64)
    torch.testing.assert_close(found, problem[algorithm.result])
    assert step.memory == {} or name in ("fa1", "ring")


@pytest.mark.parametrize("mask", MASKS)
def test_the_definition_is_pytorchs(traces: ModuleType, mask: str):
    problem = traces.make_problem("fa2", mask, 3, 9, 7, 4, 4)  # the first queries see no key
    Q, K, V = (problem[x].clone().requires_grad_() for x in "QKV")
    sees = problem["visible"].any(1)
    S = (Q @ K.T / traces.D**0.5).masked_fill(~problem["visible"], -torch.inf)
    P = torch.softmax(S[sees], 1)
    O = torch.zeros_like(Q).index_put((sees,), P @ V)
    gradients = torch.autograd.grad(O, (Q, K, V), problem["dO"])
    expected = {"P": P, "L": torch.logsumexp(S, 1)[sees], "O": O}
    expected |= dict(zip(("dQ", "dK", "dV"), gradients, strict=True))
    for x, truth in expected.items():
        found = problem[x][sees] if x in "PL" else problem[x]
        torch.testing.assert_close(found, truth.detach())


def test_masks_are_what_the_page_calls_them(traces: ModuleType):
    M, N, size = 5, 12, 3
    length = N // size
    position = [[m + N - M for _ in range(N)] for m in range(M)]
    expected = {
        "full": lambda i, j: True,
        "causal": lambda i, j: j <= i,
        "window": lambda i, j: i - size < j <= i,
        "documents": lambda i, j: j <= i and i // length == j // length,
        "blocks": lambda i, j: j < size or i // size % 2 == j // size % 2,
    }
    for mask, sees in expected.items():
        found = traces.visible_keys(mask, M, N, size).tolist()
        assert found == [[sees(i, j) for j, i in enumerate(row)] for row in position], mask


def test_traces_count_what_the_lessons_count(traces: ModuleType):
    N, B_r, B_c = 16, 4, 4
    moved = {}
    for name in NAMES:
        problem = traces.make_problem(name, "full", 1, N, N, B_r, B_c)
        *_, last = traces.steps(traces.ALGORITHMS[name], problem)
        moved[name] = last.moved
    fast_memory = 4 * traces.D * B_c
    assert flash_attention_1.block_sizes(fast_memory, traces.D) == (B_r, B_c)
    assert moved["standard"] == traffic.standard_traffic(N, traces.D)
    assert moved["standard"] == traces.standard_traffic("fa2", N, N)
    assert moved["fa1"] == traffic.flash_attention_1_traffic(N, traces.D, fast_memory)
    assert moved["fa2"] == traffic.flash_attention_2_traffic(N, traces.D, B_r)


def test_hidden_tiles_are_not_computed(traces: ModuleType):
    for name in ("fa1", "fa2", "backward", "ring"):
        problem = traces.make_problem(name, "window", 4, 16, 16, 4, 4)
        rows, cols = traces.edges(name, 16, 16, 4, 4)
        visible = {
            (rows[i], cols[j])
            for i, line in enumerate(traces.kinds(problem["visible"], rows, cols))
            for j, kind in enumerate(line)
            if kind != "empty"
        }
        steps = list(traces.steps(traces.ALGORITHMS[name], problem))
        assert {step.tile for step in steps if step.is_score} == visible


def test_the_player_offers_what_the_lessons_have(traces: ModuleType):
    player = (DOCS / "learn" / "visualiser.html").read_text(encoding="utf-8")
    offered = {
        name: re.findall(r'<option value="([^"]*)"', options)
        for name, options in re.findall(r'<select name="(\w+)">(.*?)</select>', player, re.S)
    }
    assert offered["algorithm"] == list(traces.ALGORITHMS) == list(NAMES)
    assert offered["mask"] == list(MASKS)
    assert set(re.findall(r'type="number" .*max="(\d+)"', player)) == {str(traces.LONGEST)}


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


# Like `digest` below, of JavaScript's steps.
STEPS = """
  const number = (x) => (Number.isFinite(x) ? x : String(x));
  const finite = (x) => (Number.isFinite(x) ? x : 0);
  const sum = (numbers) => numbers.reduce((total, x, n) => total + finite(x) * (n + 1), 0);
  const digest = (step) => [
    step.line, step.corner, step.moved, step.loops, step.isScore,
    step.memory.map(([name, x]) => [name, x.shape, sum(x.data)]),
    step.shown.map(([row, name, x]) => [row, name, [x].flat().map(number)]),
  ];
  return CASES.map((choice) => {
    const { rows, cols, kinds, visible, weights, reference, standard, steps } =
      window.traces.traceOf(choice);
    const known = [rows, cols, kinds, visible, weights, reference, standard];
    return { known, steps: steps.map(digest) };
  });
"""


def digest(step: Any) -> list[Any]:
    """A step, with sums instead of the matrices in fast memory."""

    def weighted(x: torch.Tensor) -> float:
        flat = x.flatten()
        numbers = torch.arange(1, len(flat) + 1, dtype=flat.dtype)
        return float((flat.nan_to_num(posinf=0.0, neginf=0.0) * numbers).sum())

    def numbers(x: Any) -> list[Any]:
        listed = x if isinstance(x, list) else [x]
        return [y if isfinite(y) else {inf: "Infinity", -inf: "-Infinity"}[y] for y in listed]

    return [
        step.line, list(step.tile) if step.tile else None, step.moved, step.loops, step.is_score,
        [[name, list(x.shape), weighted(x)] for name, x in step.memory.items()],
        [[row, name, numbers(x)] for row, name, x in step.shown],
    ]  # fmt: skip


def assert_same(found: Any, expected: Any, where: Any) -> None:
    """Equal, numbers up to rounding: both sides compute in float64, in another order."""
    if isinstance(expected, list):
        assert len(found) == len(expected), where
        for n, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, (*where, n))
    elif isinstance(expected, float) and not isinstance(found, str):
        assert abs(found - expected) <= 1e-10 * max(1.0, abs(expected)), where
    else:
        assert found == expected, where


PLAY = """
  const player = window.attentionVisualiser;
  const report = {};
  for (const preset of player.presets) {
    await player.choose(Object.fromEntries(new URLSearchParams(preset)));
    const before = player.difference();
    for (let step = 0; step < player.steps(); step++) player.show(step);
    report[preset] = [before, player.difference()];
  }
  return report;
"""

KEYS = """
  const player = window.attentionVisualiser;
  const root = document.getElementById("visualiser");
  const form = root.querySelector("form");
  const first = form.elements.row.value;
  player.choose({ algorithm: "fa2", mask: "causal", M: 8, N: 8, B_r: 4, B_c: 4, row: 0 });
  const where = () => `${form.elements.step.value}/${form.elements.row.value}`;
  const press = (key, target = root) => (
    target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }))
  );
  const steps = [where()];
  for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "End", "Home"]) {
    press(key);
    steps.push(where());
  }
  const kept = location.hash;
  root.querySelectorAll(".v-cell")[8 * 6 + 2].dispatchEvent(new MouseEvent("click"));
  steps.push(where());
  const isLeft = press("ArrowUp", form.elements.M); // which the field for a number keeps
  root.querySelector("[data-do=tile]").click();
  const tile = root.querySelector(".v-active").style.display;
  const enter = (name, value) => {
    form.elements[name].value = value;
    form.elements[name].dispatchEvent(new Event("change"));
  };
  enter("mask", "documents");
  enter("N", "99");
  enter("B_c", "");
  enter("size", "3");
  const label = root.querySelector(".v-size").textContent;
  const [hash, cells] = [location.hash, root.querySelectorAll(".v-cell").length];
  form.elements.preset.value = player.presets[1];
  form.elements.preset.dispatchEvent(new Event("change"));
  const hidden = [...form.elements].filter((x) => x.parentElement.hidden).map((x) => x.name);
  const ofPreset = form.elements.row.value;
  return { first, ofPreset, steps, kept, isLeft, tile, label, hash, cells, hidden };
"""


def choices(name: str) -> list[dict[str, Any]]:
    """Problems for an algorithm, most of them drawn."""
    draw = random.Random(f"{os.environ['FLASHTILE_SEED']} {name}")
    most = {"size": 8, "M": 24, "N": 24, "B_r": 9, "B_c": 9}
    drawn = [
        {"mask": mask, **{x: draw.randint(1, limit) for x, limit in most.items()}}
        for mask in MASKS
        for _ in range(4)
    ]
    return [*drawn, {**drawn[0], "M": 1, "N": 32}, {**drawn[-1], "M": 32, "N": 1}]


@pytest.fixture(scope="module")
def reports(page: Path) -> dict[str, Any]:
    """What each script returns, one after the other in one page, since a browser takes seconds to
    start; nothing may be written to the console."""
    scripts = {"keys": KEYS, "examples": PLAY}
    for name in NAMES:
        given = json.dumps([{"algorithm": name, **choice} for choice in choices(name)])
        scripts[name] = STEPS.replace("CASES", given)
    functions = ",".join(f"{name}: async () => {{ {text} }}" for name, text in scripts.items())
    text = f"""<script>(async () => {{
      const report = {{}};
      for (const [name, script] of Object.entries({{ {functions} }}))
        report[name] = await script().catch((error) => ({{ error: error.stack }}));
      const shown = Object.assign(document.createElement("pre"), {{ id: "report" }});
      shown.textContent = JSON.stringify(report);
      document.body.append(shown);
    }})();</script>"""
    driven = page.with_name("driven.html")
    driven.write_text(page.read_text(encoding="utf-8") + text, encoding="utf-8")
    document, console = opened(driven)
    found = re.search(r'<pre id="report">(.*?)</pre>', document, re.S)
    assert found and console == [], console
    returned = json.loads(html.unescape(found[1]))
    assert not [report["error"] for report in returned.values() if "error" in report]
    return returned


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_player_does_what_python_does_step_by_step(
    traces: ModuleType, reports: dict[str, Any], name: str
):
    for choice, run in zip(choices(name), reports[name], strict=True):
        problem = traces.make_problem(name, **choice)
        M, N, B_r, B_c = choice["M"], choice["N"], problem["B_r"], problem["B_c"]
        rows, cols = traces.edges(name, M, N, B_r, B_c)
        known = [
            rows, cols, traces.kinds(problem["visible"], rows, cols), problem["visible"].tolist(),
            problem["P"].tolist(), problem[traces.ALGORITHMS[name].result].tolist(),
            traces.standard_traffic(name, M, N),
        ]  # fmt: skip
        assert_same(run["known"], known, (choice,))
        steps = list(traces.steps(traces.ALGORITHMS[name], problem))
        assert_same(run["steps"], [digest(step) for step in steps], (choice,))
        for row, col in filter(None, (step.tile for step in steps)):
            assert row in rows and col in cols, choice


@pytest.mark.slow
def test_every_example_plays_to_its_end(reports: dict[str, Any]):
    report = reports["examples"]
    player = (DOCS / "learn" / "visualiser.html").read_text(encoding="utf-8")
    assert len(report) == player.count('<option value="algorithm=')
    assert {re.search(r"algorithm=(\w+)", preset)[1] for preset in report} == set(NAMES)
    assert {re.search(r"mask=(\w+)", preset)[1] for preset in report} == set(MASKS)
    for preset, (before, after) in report.items():
        assert after is not None and after < 1e-12, preset  # infinite is null
        assert before is None or before > 0.01, preset  # in the first step


@pytest.mark.slow
def test_an_address_plays_by_itself(page: Path):
    address = "#algorithm=fa2&mask=causal&M=8&N=8&B_r=4&B_c=4&speed=40&row=5&play=1"
    document, console = opened(page, address)
    assert console == []
    finished = re.search(r'data-finished="([^"]*)"', document)
    assert finished and float(finished[1]) < 1e-12
    assert "The result is that of the definition" in document
    assert len(re.findall(r'class="v-tile [^"]*v-scored', document)) == 3  # of four, one is hidden


@pytest.mark.slow
def test_keys_touch_buttons_and_numbers(reports: dict[str, Any]):
    found = reports["keys"]
    *steps, end, home, row = found["steps"]
    assert steps == ["0/0", "1/0", "2/0", "1/0", "1/1"]
    assert int(end.split("/")[0]) > 30 and [home, row] == ["0/1", "0/6"]
    assert found["first"] == found["ofPreset"] == "15"  # the last query sees all keys
    assert found["kept"].endswith("&B_r=4&B_c=4&step=0&row=1")
    assert found["isLeft"] and found["tile"] == ""
    assert found["label"] == "Documents" and found["cells"] == 8 * 32
    address = "#algorithm=fa2&mask=documents&size=3&M=8&N=32&B_r=4&B_c=1&step=0&row=6"
    assert found["hash"] == address
    assert found["hidden"] == ["size", "B_r"]  # in "down the columns"


@pytest.mark.slow
def test_an_address_may_hold_anything(page: Path):
    document, console = opened(page, "#algorithm=none&mask=full&M=x&N=-3&step=-7&row=99&speed=x")
    assert console == [] and 'class="v-current"' in document


@pytest.mark.slow
def test_console_errors_are_seen(page: Path):
    broken = page.with_name("broken.html")
    text = page.read_text(encoding="utf-8").replace("_static/visualiser.js", "_static/missing.js")
    broken.write_text(text + "<script>undefinedFunction()</script>", encoding="utf-8")
    assert any("undefinedFunction" in line for line in opened(broken)[1])
