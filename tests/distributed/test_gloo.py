"""Context parallelism over processes that gloo connects."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes(world: int, tmp_path: Path) -> None:
    processes.run("distributed/context_worker.py", world, tmp_path / "rendezvous")
