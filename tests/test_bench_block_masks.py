"""The benchmark of block masks, small: all makers make the same mask, and the file has them all."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import block_masks
from flashtile.masks import BlockMask

pytestmark = pytest.mark.slow

LENGTH = 512


@pytest.mark.parametrize("name", block_masks.functions(LENGTH, "cpu"))
def test_the_makers_make_the_same_mask(name: str) -> None:
    function = block_masks.functions(LENGTH, "cpu")[name]
    timed = block_masks.makers(function, LENGTH, "cpu")
    mine, flex = timed["flashtile"](), timed["flex"]()
    assert isinstance(mine, BlockMask)
    theirs = BlockMask.from_flex(flex)
    assert torch.equal(mine.to_dense(LENGTH, LENGTH), theirs.to_dense(LENGTH, LENGTH))
    assert not mine.to_dense(LENGTH, LENGTH).all()


def test_a_line_for_each_mask_and_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = block_masks.makers

    def uncompiled(*given: object) -> dict[str, object]:
        return {name: make for name, make in made(*given).items() if name != "flex, compiled"}

    monkeypatch.setattr(block_masks, "makers", uncompiled)
    path = tmp_path / "masks.csv"
    argv = ["--seq-len", "256", "--rounds", "1", "--device", "cpu", "--csv", str(path)]
    assert block_masks.main(argv) == 0
    with path.open() as file:
        lines = list(csv.DictReader(file))
    found = [(line["mask"], line["maker"]) for line in lines]
    names = block_masks.functions(256, "cpu")
    assert found == [(name, maker) for name in names for maker in ("flashtile", "flex")]
    assert all(float(line["median_ms"]) > 0 for line in lines)
    assert lines[0]["command"].startswith("python -m benchmarks.block_masks --seq-len 256")


def test_an_error_of_flex_costs_only_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel\nmore")

    made = {"flashtile": lambda: None, "flex": fails}
    monkeypatch.setattr(block_masks, "makers", lambda *given: dict(made))
    (line,) = block_masks.measure("causal", lambda b, h, i, j: i >= j, 16, 1, "cpu")
    assert line[:2] == ("causal", "flashtile")
    assert capsys.readouterr().out == "causal, flex: no such kernel\n"
    made["flashtile"] = fails
    with pytest.raises(RuntimeError, match="no such kernel"):
        list(block_masks.measure("causal", lambda b, h, i, j: i >= j, 16, 1, "cpu"))
