"""Attention over one sequence that two GPUs share, forward and backward.

    torchrun --standalone --nproc-per-node 2 examples/distributed/two_gpus.py

With fewer than two GPUs, two processes share it on the CPU.
"""

import os

import torch
import torch.distributed as dist

from flashtile.distributed import ContextParallel

on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")

tokens, dtype = 512, torch.bfloat16 if on_gpus else torch.float32
parallel = ContextParallel()
layout = parallel.layout(seq_len=tokens)
shape = (1, layout.local_tokens, 8, 64)  # (batch, tokens of this process, heads, head_dim)
q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
out = parallel.attention(q, k, v, layout, causal=True)
out.sum().backward()
report = parallel.check(q, k, v, layout, causal=True)  # for a few thousand tokens only
print(f"rank {dist.get_rank()}: {layout.local_tokens} of {tokens} tokens on {device}")
if dist.get_rank() == 0:
    print(report)
dist.destroy_process_group()
