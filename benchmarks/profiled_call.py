"""Four calls of the Hopper backend for a profiler: head dim 128, causal, 16,384 tokens, bfloat16.

    ncu --clock-control none --kernel-name "regex:^forward_kernel" \
        --launch-skip 2 --launch-count 1 \
        --section SpeedOfLight --section LaunchStats --section SchedulerStats \
        --section WarpStateStats --section ComputeWorkloadAnalysis \
        --section MemoryWorkloadAnalysis --print-details all \
        python -m benchmarks.profiled_call forward

and the same with `backward` twice. What it printed is in `results/h200/profiles`.
"""

from __future__ import annotations

import sys

import torch

import flashtile

if __name__ == "__main__":
    q, k, v, dout = (
        torch.randn(1, 16384, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(4)
    )
    for _ in range(4):
        out = flashtile.attention(q, k, v, causal=True, backend="hopper")
        if sys.argv[1] == "backward":
            torch.autograd.grad(out, (q, k, v), dout.detach())
    torch.cuda.synchronize()
