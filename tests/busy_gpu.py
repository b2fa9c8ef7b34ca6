"""Keeps the GPU busy until it is killed: ``python tests/busy_gpu.py``."""

import torch

x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("busy", flush=True)
while True:
    for _ in range(50):
        x @ x
    torch.cuda.synchronize()
