"""The preset of context parallelism: its cases, its yardstick, its files."""

from __future__ import annotations

import argparse
from pathlib import Path

import processes
import pytest
import torch

import flashtile
from benchmarks.context import compare_trees, plot, run
from benchmarks.context.cases import cases
from benchmarks.context.rows import ContextRow, read, write
from benchmarks.context.truth import exact
from flashtile.testing import attention_varlen_reference, generator, normal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 3])
def test_the_zigzag_ring_is_exact(world: int, tmp_path: Path) -> None:
    processes.run("distributed/ring_worker.py", world, tmp_path / "rendezvous")


def test_a_peer_that_fails_is_a_row(tmp_path: Path) -> None:
    """Also where it fails on one rank only, or finds something else than the others."""
    processes.run("distributed/failing_peer.py", 2, tmp_path / "rendezvous")


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("lengths", [[300], [1, 280, 19]])
def test_the_truth_is_the_definition(lengths: list[int], window: int) -> None:
    g = generator(window)
    q, dout = (normal(g, 300, 3, 8, dtype=torch.float64) for _ in range(2))
    k, v = (normal(g, 300, 1, 8, dtype=torch.float64) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    out = attention_varlen_reference(
        *leaves, ends, ends, 300, 300, causal=True, window_size=(window or -1, -1)
    ).out
    want = (out, *torch.autograd.grad(out, leaves, dout))
    with torch.no_grad():
        found = exact(q, k, v, dout, lengths, window)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_documents_fill_the_ranks(device: str) -> None:
    for case in cases(device):
        for ranks in (1, 2, 4, 8):
            lengths = case.lengths(ranks)
            assert sum(lengths) == ranks * case.tokens
            assert all(length > 0 for length in lengths)
            assert (len(lengths) > 1) == (case.variant == "packed")


def test_it_wants_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert run.run(argparse.Namespace()) == 2
    assert "torchrun --nproc-per-node 2 -m benchmarks --preset context" in capsys.readouterr().err


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = ContextRow("flashtile", "both", "dense", "float32", 8, 2, 64, 0, 1024, 1, 2, "gloo")
    measured = ContextRow(**{**vars(row), "steady_ms": 6.25, "efficiency": 0.8})
    skipped = ContextRow(**{**vars(row), "peer": "zigzag-ring", "skipped": "no"})
    path = tmp_path / "context.csv"
    origin = {"device": "a machine", "torch": "2", "date": "today"}
    write(path, [measured, skipped], origin)
    lines = read(path)
    assert [line["efficiency"] for line in lines] == ["0.8", ""]
    assert lines[1]["skipped"] == "no"
    assert lines[0]["device"] == "a machine"
    assert plot.draw(path, tmp_path / "context.png").stat().st_size > 1000


def test_a_tree_is_measured_over_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, out = Path(flashtile.__file__).parents[1], tmp_path / "compared.csv"
    flags = ["--cases", "1", "--rounds", "1", "--csv", str(out)]
    assert compare_trees.main([f"base={here}", *flags]) == 0
    rows = read(out)
    assert [(row["peer"], row["direction"]) for row in rows] == [
        ("base", "forward"),
        ("base", "both"),
    ]
    assert all(float(row["steady_ms"]) > 0 for row in rows)
    assert str(here) not in out.read_text()
    assert "1     forward" in capsys.readouterr().out
