"""ring-flash-attention, unchanged, in two processes over gloo, where it imports flash_attn."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

TESTS = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ring_flash_attn") is None or not torch.distributed.is_available(),
    reason="needs ring-flash-attn and torch.distributed",
)


def test_ring_zigzag_stripe_and_packed_sequences(tmp_path):
    paths = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "ring_worker.py"), str(rank), "2", str(tmp_path / "meet")],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = []
    for process in processes:
        try:
            _, error = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            _, error = process.communicate()
        errors.append(error)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-4000:]
