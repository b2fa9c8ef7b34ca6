"""Context parallelism over processes that gloo connects."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes(world: int, tmp_path: Path) -> None:
    processes.run("distributed/context_worker.py", world, tmp_path / "rendezvous")


def test_a_few_random_draws(tmp_path: Path) -> None:
    """The first one is of decoding, too."""
    script = Path(__file__).with_name("random_draws.py")
    given = [script, "--draws", 4, "--first", 30, "--rendezvous", tmp_path / "rendezvous"]
    ranks = [processes.Python(*given, "--rank", rank) for rank in range(2)]
    for done in [rank.wait(200) for rank in ranks]:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
