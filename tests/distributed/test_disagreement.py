"""Ranks that differ in a later call, in processes that gloo connects: all raise the same error
within seconds, and what is up to each rank is no difference."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
from disagreeing_worker import REFUSED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", ["accepted", *REFUSED])
def test_processes(scenario: str, world: int, tmp_path: Path) -> None:
    script = "distributed/disagreeing_worker.py"
    processes.run(script, world, tmp_path / "rendezvous", scenario)
