"""One process of `test_dtensor`: sharded calls against the same calls of whole tensors.

Run as ``python dtensor_worker.py rank world_size rendezvous-file``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flashtile
from flashtile.integrations import dtensor

BATCH, HEADS, SEQUENCE = Shard(0), Shard(2), Shard(1)


DIFFERENTIABLE = ("bias", "sink", "relative_bias", "alibi_slopes")


def inputs(heads, kv_heads):
    """q, k, v and the gradient of out: whole, the same in all processes."""
    torch.manual_seed(0)
    shapes = [(2, 9, heads, 8), (2, 11, kv_heads, 8), (2, 11, kv_heads, 8), (2, 9, heads, 8)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def results(q, k, v, dout, options):
    """out, lse and the gradients of all that has one."""
    given = [q, k, v, *(options[o] for o in DIFFERENTIABLE if o in options)]
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, **options)
    return [out, lse, *torch.autograd.grad(out, given, dout)]


def compare(name, mesh, heads, placement, options, placements):
    """A call of DTensors; without communication where they are sharded over batch or heads."""
    whole = inputs(*heads)
    for x in (*whole[:3], *(options[o] for o in DIFFERENTIABLE if o in options)):
        x.requires_grad_()
    want = results(*whole, options)
    shared = [distribute_tensor(x.detach(), mesh, [placement]) for x in whole]
    sharded = {
        option: distribute_tensor(x.detach(), mesh, [placements.get(option, Replicate())])
        for option, x in options.items()
    }
    for x in (*shared[:3], *(sharded[o] for o in DIFFERENTIABLE if o in sharded)):
        x.requires_grad_()
    with CommDebugMode() as communication:
        got = results(*shared, sharded)
    if placement in (BATCH, HEADS) and heads[1] % mesh.size() == 0:
        assert communication.get_total_counts() == 0, f"{name}: {communication.get_comm_counts()}"
        assert got[0].placements == (placement,), f"{name}: {got[0].placements}"
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        mine = mine.full_tensor()
        torch.testing.assert_close(
            mine, theirs, atol=1e-12, rtol=1e-10, msg=lambda m, i=i: f"{name} result {i}: {m}"
        )


def main(rank, world, rendezvous):
    """Shardings, then options under them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    dtensor.register()
    for placement in (BATCH, HEADS, SEQUENCE, Replicate()):
        compare(f"plain {placement}", mesh, (4, 2), placement, {}, {})
    compare("three key heads", mesh, (6, 3), HEADS, {}, {})
    for placement in (BATCH, HEADS):
        dim = 0 if placement == BATCH else 1
        options = {
            "sink": torch.randn(4, dtype=torch.float64),
            "bias": torch.randn(2, 4, 9, 11, dtype=torch.float64),
            "alibi_slopes": torch.rand(4, dtype=torch.float64),
            "relative_bias": torch.randn(4, 5, dtype=torch.float64),
            "seqused_k": torch.tensor([11, 6], dtype=torch.int32),
        }
        placements = {"bias": Shard(dim)}
        if placement == HEADS:
            placements |= {"sink": Shard(0), "alibi_slopes": Shard(0), "relative_bias": Shard(0)}
        else:
            placements |= {"seqused_k": Shard(0)}
        for option in ("sink", "bias", "relative_bias", "alibi_slopes"):
            one = {option: options[option]}
            compare(f"{option} {placement}", mesh, (4, 2), placement, one, placements)
        rest = {o: options[o] for o in ("alibi_slopes", "seqused_k")}
        compare(f"lengths {placement}", mesh, (4, 2), placement, rest, placements)
        shared_bias = {"bias": torch.randn(1, 1, 9, 11, dtype=torch.float64)}
        compare(f"shared bias {placement}", mesh, (4, 2), placement, shared_bias, {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
