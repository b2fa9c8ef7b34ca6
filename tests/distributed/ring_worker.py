"""One process of `test_bench_context`: the zigzag ring of the benchmarks against one process.

Run as ``python ring_worker.py rank world_size rendezvous-file``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import flashtile
from benchmarks.context.zigzag_ring import zigzag_ring
from flashtile.distributed import ContextParallel
from flashtile.testing import generator, normal


def gradients_match(world: int) -> None:
    g = generator(3)
    whole = [normal(g, 1, 12 * world, heads, 8).double() for heads in (4, 2, 2)]
    leaves = [x.clone().requires_grad_() for x in whole]
    want = flashtile.attention(*leaves, causal=True)
    dout = normal(g, *want.shape).double()
    want.backward(dout)
    layout = ContextParallel().layout(seq_len=12 * world, way="zigzag", grain=2)
    mine = [layout.shard(x).requires_grad_() for x in whole]
    out = zigzag_ring(*mine)
    out.backward(layout.shard(dout))
    # Partial results are added up in float32, as plain rings do.
    torch.testing.assert_close(out, layout.shard(want.detach()), rtol=1e-4, atol=1e-5)
    for x, leaf in zip(mine, leaves, strict=True):
        torch.testing.assert_close(x.grad, layout.shard(leaf.grad), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    gradients_match(world)
