"""`training.memory`: its measurements, the end of memory, and its errors."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from tiny_runs import overrides, settings

from training import memory
from training.memory import Point
from training.train import Run

pytestmark = pytest.mark.slow


def test_a_point_is_the_memory_and_the_time_of_a_step(tmp_path):
    point = memory.measure(settings(tmp_path))
    assert (point.attn, point.context) == ("flashtile", 16)
    assert point.peak_memory_mib > 0 and point.seconds > 0


def test_a_point_that_does_not_fit_is_nan(tmp_path, monkeypatch):
    def train_step(run: Run) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(Run, "train_step", train_step)
    point = memory.measure(settings(tmp_path))
    assert math.isnan(point.peak_memory_mib) and math.isnan(point.seconds)


def test_an_attention_ends_where_memory_does(tmp_path, monkeypatch, capsys):
    """As on a GPU on which quadratic memory suffices for 32 tokens."""

    def measure(settings):
        n, quadratic = settings.data.context, settings.attn == "eager"
        fits = not quadratic or n <= 32
        return Point(settings.attn, n, n**2 if quadratic and fits else n if fits else math.nan, 0.1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "measure", measure)
    monkeypatch.setattr(memory, "provenance", lambda device, command: {"device": device})
    contexts, folder = ["16", "32", "64", "128"], tmp_path / "memory"
    keys = [key for key in overrides(tmp_path) if not key.startswith(("run_dir", "data.context"))]
    arguments = ["--attn", "eager", "flashtile", "--contexts", *contexts, "--folder", str(folder)]
    memory.main([*arguments, *keys])
    with (folder / "memory.csv").open() as file:
        lines = [(line["attn"], int(line["context"])) for line in csv.DictReader(file)]
    assert lines == [
        *(("eager", n) for n in (16, 32, 64)),
        *(("flashtile", n) for n in (16, 32, 64, 128)),
    ]
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "flashtile, 128 tokens: 128 MiB" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no CUDA device"):
        memory.main([])


@pytest.mark.parametrize("argument", ["--speed", "steps", "attn=sdpa", "data.context=16"])
def test_what_is_no_override_is_refused(argument, capsys):
    with pytest.raises(SystemExit):
        memory.parse([argument])
    assert repr(argument) in capsys.readouterr().err
