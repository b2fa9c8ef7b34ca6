"""The comparison: what it runs, what it computes, what it refuses."""

from __future__ import annotations

import csv
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from training import compare
from training.metrics import MetricsFile, Row


def curve(shift: float, speed: float, steps: int = 120) -> list[Row]:
    """A run whose loss falls by 0.01 a step; `shift` is added from step 50 on."""
    return [
        Row(
            step=step,
            tokens=step * 64,
            loss=5 - 0.01 * step + (shift if step >= 50 else 0.0),
            validation_bits_per_byte=2.5 if step == steps else float("nan"),
            tokens_per_second=speed + step % 3,
            peak_memory_mib=step,
        )
        for step in range(1, steps + 1)
    ]


def test_the_table_measures_against_the_first_run():
    first, second = compare.compare({"flashtile": curve(0.0, 1000.0), "sdpa": curve(1e-4, 500.0)})
    assert (first.largest_distance, first.speed_ratio) == (0.0, 1.0)
    assert second.largest_distance == pytest.approx(1e-4)
    assert second.speed_ratio == pytest.approx(1001 / 501)
    assert second.final_loss - first.final_loss == pytest.approx(1e-4)
    assert (second.bits_per_byte, second.peak_memory_mib) == (2.5, 120)


def test_distances_are_those_of_the_first_steps():
    late = [replace(row, loss=row.loss + (row.step > 100)) for row in curve(0.0, 1.0)]
    assert compare.compare({"flashtile": curve(0.0, 1.0), "sdpa": late})[1].largest_distance == 0


def test_every_attention_runs_with_the_same_keys(tmp_path, monkeypatch, capsys):
    commands = []

    def train(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        run_dir = Path(command[-1].removeprefix("run_dir="))
        file = MetricsFile(run_dir / "metrics.csv", after_step=0)
        for row in curve(0.0, 100.0):
            file.write(row)
        (run_dir / "provenance.jsonl").write_text('{"date": "1603"}\n{"date": "1616"}\n')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", train)
    folder = tmp_path / "compare"
    compare.main(["--attn", "sdpa", "eager", "--folder", str(folder), "seed=3"])
    assert commands == [
        ["-m", "training.train", "seed=3", f"attn={name}", f"run_dir={folder / name}"]
        for name in ("sdpa", "eager")
    ]
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    with (folder / "compare.csv").open() as file:
        lines = [(line["attn"], line["date"]) for line in csv.DictReader(file)]
    assert lines == [("sdpa", "1616"), ("eager", "1616")]
    assert "from the loss of sdpa" in " ".join(capsys.readouterr().out.split())


def test_a_failed_run_ends_the_comparison(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda command, check: failed)
    with pytest.raises(SystemExit, match="the run with attn=flashtile failed"):
        compare.main(["--folder", str(tmp_path)])


@pytest.mark.parametrize("argument", ["--speed", "steps", "attn=sdpa", "run_dir=x"])
def test_what_is_no_override_is_refused(argument, capsys):
    with pytest.raises(SystemExit):
        compare.parse([argument])
    assert repr(argument) in capsys.readouterr().err
