"""DTensors, sharded over batch or heads, in two processes over gloo."""

from __future__ import annotations

import processes
import pytest
import torch.distributed


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_shardings(tmp_path):
    processes.run("dtensor_worker.py", 2, tmp_path / "rendezvous")
