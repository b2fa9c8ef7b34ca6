"""DTensors, sharded over batch or heads: two processes over gloo, and four simulated ones."""

from __future__ import annotations

import processes
import pytest
import torch.distributed

import flashtile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]


def test_shardings(tmp_path):
    processes.run("dtensor_worker.py", 2, tmp_path / "rendezvous")


@pytest.fixture
def mesh():
    """A mesh of two by two processes: this one is the first, the others are simulated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("over", "kv_heads", "stays"),
    [
        ("batch and heads", 2, True),
        ("shared and heads", 2, True),
        ("batch and batch", 2, True),
        ("heads and heads", 4, True),
        ("heads and heads", 6, False),  # shards of unequal size would mix groups of heads
    ],
)
def test_two_dimensional_meshes(over, kv_heads, stays, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    flashtile.integrations.dtensor.register()
    kinds = {"batch": Shard(0), "heads": Shard(2), "shared": Replicate()}
    placements = [kinds[kind] for kind in over.split(" and ")]
    q, k, v = (
        distribute_tensor(torch.randn(4, 9, heads, 8), mesh, placements).requires_grad_()
        for heads in (12, kv_heads, kv_heads)
    )
    with CommDebugMode() as communication:
        out = flashtile.attention(q, k, v, causal=True)
        gradients = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    for x in (out, *gradients):
        assert x.placements == (tuple(placements) if stays else (Replicate(), Replicate()))
    assert (communication.get_total_counts() == 0) == stays
