"""ring-flash-attention, unchanged, in two processes over gloo, where it imports flash_attn."""

from __future__ import annotations

import importlib.util

import processes
import pytest
import torch.distributed

pytestmark = pytest.mark.slow


@pytest.mark.skipif(
    importlib.util.find_spec("ring_flash_attn") is None or not torch.distributed.is_available(),
    reason="needs ring-flash-attn and torch.distributed",
)
def test_ring_zigzag_stripe_and_packed_sequences(tmp_path):
    processes.run("ring_worker.py", 2, tmp_path / "rendezvous")
