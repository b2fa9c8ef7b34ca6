"""Layers and models that processes share equal the whole ones, in both passes."""

from __future__ import annotations

import processes
import pytest

pytestmark = pytest.mark.slow


def test_layers_and_models_of_two_processes(tmp_path):
    processes.run("tensor_parallel_worker.py", 2, tmp_path / "rendezvous")
