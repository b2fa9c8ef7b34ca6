"""Checkpoints that are complete or absent, whenever the process is killed.

A checkpoint is a folder `step-00000100` with the parameters and the optimizer's numbers in `state`,
and with the settings that a continued run must share in `run.json`. It is written under another
name, flushed to the disk and then renamed, which is atomic; it is removed in the opposite order.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric

PARTIAL = ".partial"


def save(
    fabric: Fabric, folder: Path, state: dict[str, Any], run: dict[str, Any], keep: int
) -> None:
    """Write the checkpoint of `run["step"]` below `folder`; only the newest `keep` remain."""
    whole = folder / f"step-{run['step']:08d}"
    partial = whole.with_name(whole.name + PARTIAL)
    if whole.is_dir():  # a finished run was started again
        return
    if fabric.is_global_zero:
        for left_behind in folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(left_behind)
        partial.mkdir(parents=True)
        (partial / "run.json").write_text(json.dumps(run, indent=1), encoding="utf-8")
    fabric.barrier()
    fabric.save(partial / "state", state)
    fabric.barrier()  # every process has written its part
    if fabric.is_global_zero:
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        partial.rename(whole)
        _flush(folder)
        for old in _whole_ones(folder)[:-keep]:
            old = old.rename(old.with_name(old.name + PARTIAL))
            shutil.rmtree(old)
    fabric.barrier()


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint below `folder`, or None."""
    return max(_whole_ones(folder), default=None)


def described(checkpoint: Path) -> dict[str, Any]:
    """The `run` that `save` was given."""
    return json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))


def load(fabric: Fabric, checkpoint: Path, state: dict[str, Any]) -> None:
    """Fill the model and the optimizer of `state`."""
    fabric.load(checkpoint / "state", state)


def _whole_ones(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.suffix != PARTIAL)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
