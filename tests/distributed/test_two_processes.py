"""The examples of two processes run as they say, and their threads end with the group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

ONE_PROCESS = """
import os, sys, torch
import torch.distributed as dist
import flashtile.distributed
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=0, world_size=1)
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
parallel = flashtile.distributed.ContextParallel()
layout = parallel.layout(seq_len=8)
q, k, v = (torch.randn(1, 8, 1, 8, requires_grad=True) for _ in range(3))
out = parallel.attention(q, k, v, layout, causal=True)
out.sum().backward()
dist.barrier()
dist.destroy_process_group()
try:
    parallel.layout(seq_len=16)
    parallel.attention(*torch.randn(3, 1, 16, 1, 8), parallel.layout(seq_len=16))
    raise SystemExit("a group that was destroyed was used")
except RuntimeError as error:
    assert "destroyed" in str(error), error
threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
assert not [name for name in threads if "gloo" in name], threads
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two_gpus.py", "2 ranks give what one process gives, by float64"),
        ("long_document.py", "equal up to rounding"),
    ],
)
def test_two_processes_give_what_one_gives(name: str, words: str) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = processes.python(*launch, ROOT / "examples/distributed" / name)
    assert result.returncode == 0, result.stderr[-4000:]
    assert words in result.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lists threads in /proc")
def test_no_thread_of_a_group_is_left_when_python_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONE_PROCESS, str(tmp_path / "rendezvous")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
