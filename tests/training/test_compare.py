"""`training.compare`: its runs, its numbers and its errors."""

from __future__ import annotations

import csv
import json
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
    curves = {"flashtile": curve(0.0, 1000.0), "sdpa": curve(1e-4, 500.0)}
    first, second = compare.compare(curves, {"flashtile": 1, "sdpa": 1})
    assert (first.largest_distance, first.speed_ratio) == (0.0, 1.0)
    assert second.largest_distance == pytest.approx(1e-4)
    assert second.speed_ratio == pytest.approx(1001 / 501)
    assert second.final_loss - first.final_loss == pytest.approx(1e-4)
    assert (second.bits_per_byte, second.peak_memory_mib) == (2.5, 120)


def test_distances_are_those_of_the_first_steps():
    late = [replace(row, loss=row.loss + (row.step > 100)) for row in curve(0.0, 1.0)]
    curves = {"flashtile": curve(0.0, 1.0), "sdpa": late}
    assert compare.compare(curves, {"flashtile": 1, "sdpa": 1})[1].largest_distance == 0


def test_speed_is_compared_a_device():
    curves = {"one": curve(0.0, 100.0), "four": curve(0.0, 400.0)}
    four = compare.compare(curves, {"one": 1, "four": 4})[1]
    assert four.tokens_per_second == 401
    assert four.speed_ratio == pytest.approx(4 * 101 / 401)


def write_run(run: Path, devices: int) -> None:
    """The folder of a finished run of training.train."""
    file = MetricsFile(run / "metrics.csv", after_step=0)
    for row in curve(0.0, 100.0 * devices):
        file.write(row)
    lines = ({"date": "1603"}, {"date": "1616", "devices": devices})
    (run / "provenance.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_finished_runs_are_read_and_nothing_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(subprocess, "run")
    for name, devices in (("single", 1), ("ddp", 2)):
        write_run(tmp_path / name, devices)
    folder = tmp_path / "report"
    runs = [str(tmp_path / "single"), str(tmp_path / "ddp")]
    compare.main(["--runs", *runs, "--folder", str(folder)])
    with (folder / "compare.csv").open() as file:
        lines = [(line["run"], line["devices"], line["date"]) for line in csv.DictReader(file)]
    assert lines == [("single", "1", "1616"), ("ddp", "2", "1616")]
    assert (folder / "compare.png").stat().st_size > 0
    assert "from the loss of single" in " ".join(capsys.readouterr().out.split())


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare.parse(["--runs", str(tmp_path)])
    assert f"{str(tmp_path)!r} holds no metrics.csv" in capsys.readouterr().err


def test_every_attention_runs_with_the_same_keys(tmp_path, monkeypatch, capsys):
    commands = []

    def train(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        write_run(Path(command[-1].removeprefix("run_dir=")), devices=1)
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
        lines = [(line["run"], line["date"]) for line in csv.DictReader(file)]
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
