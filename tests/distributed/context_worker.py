"""One process of `test_gloo`: the random cases of `cases` over torch.distributed.

Run as ``python context_worker.py rank world_size rendezvous-file``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import caches
import pytest
import torch
import torch.distributed as dist
from caches import CacheCase
from cases import Case, compare
from sharded_training import a_step_of_fsdp, dtensors
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flashtile.distributed import ContextParallel, Layout

CASES = 12


def check(
    case: Any, mine: Any, compare: Any = compare, group: dist.ProcessGroup | None = None
) -> None:
    """The first rank of a group sees that the ranks together compute what one process does."""
    results = [None] * dist.get_world_size(group)
    dist.all_gather_object(results, mine, group=group)
    if dist.get_rank(group) == 0:
        compare(case, results)


def random_cases(rank: int, world: int) -> None:
    seeds = range(100 * world, 100 * world + CASES)
    cases = [*(Case(seed, world) for seed in seeds), Case(seeds[0], world, wanted="return_stats")]
    for case in cases:
        context = ContextParallel(ulysses=case.ulysses, stages=case.stages, timeout=60)
        check(case, case.on_rank(context))


def a_smaller_group(rank: int, world: int) -> None:
    """Ranks 1 and on form the group; rank 0 is outside."""
    members = list(range(1, world))
    group = dist.new_group(members)
    if rank == 0:
        return
    case = Case(7, len(members))
    context = ContextParallel(group, ulysses=case.ulysses, stages=case.stages)
    check(case, case.on_rank(context), group=group)


def a_mesh(rank: int, world: int) -> None:
    """A dimension of a mesh is the group."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "context"))
    case = Case(11, world)
    check(case, case.on_rank(ContextParallel(mesh["context"], stages=world)))


def a_mesh_of_two_dimensions(rank: int, world: int) -> None:
    """Its second dimension exchanges tokens for heads."""
    if world % 2:
        return
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("keys", "heads"))
    case = Case(13, world)
    context = ContextParallel(mesh)
    check(case, case.on_rank(context))
    assert context.requested.ulysses == 2
    with pytest.raises(ValueError, match="ulysses: got 1, want 2, as in the mesh, or 'auto'"):
        ContextParallel(mesh, ulysses=1)


def a_cache(rank: int, world: int) -> None:
    """A cache that is dealt out to the ranks."""
    for seed in range(200 * world, 200 * world + 3):
        case = CacheCase(seed, world)
        check(case, case.on_rank(ContextParallel()), caches.compare)


def disagreement(rank: int, world: int) -> None:
    """All ranks raise the same error."""
    context = ContextParallel()
    layout = context.layout(seq_len=64)
    x = torch.randn(1, layout.local_tokens, 2, 8)
    with pytest.raises(ValueError, match="context parallel: the ranks disagree on options"):
        context.attention(x, x, x, layout, causal=rank == 0)


def vmap(rank: int, world: int) -> None:
    """No rank waits for one that maps its call."""
    context = ContextParallel()
    layout = context.layout(seq_len=64)
    x = torch.randn(2, 1, layout.local_tokens, 2, 8)
    with pytest.raises(NotImplementedError, match=r"rank 0: .* got a transform"):
        torch.func.vmap(lambda x: context.attention(x, x, x, layout))(x)
    context.attention(*x[:1].expand(3, -1, -1, -1, -1), layout)


@torch._dynamo.config.patch(error_on_recompile=True)
def compiled(rank: int, world: int) -> None:
    """One graph for all batches of documents whose shards have the same sizes."""
    if world != 3:  # compiling takes seconds
        return
    for numbers in ({"ulysses": 1, "stages": world}, {"ulysses": world}):
        context = ContextParallel(**numbers)

        def attend(x: Tensor, sink: Tensor, layout: Layout, context=context) -> Tensor:
            q, k, v = (x * scale for scale in (1, 2, 3))
            out, lse = context.attention(
                q, k, v, layout, causal=True, dropout_p=0.2, sink=sink, return_lse=True
            )
            return out.sin().sum() + lse.clamp(min=-9).sum()

        torch._dynamo.reset()
        graph = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for ends in ([0, 120], [0, 24, 120], [0, 24, 72, 120]):
            layout = context.layout(ends, way="zigzag", grain=1)
            x = layout.shard(torch.randn(120, 4, 8)).requires_grad_()
            sink = torch.randn(4, requires_grad=True)
            losses, gradients = [], []
            for call in (attend, graph):
                torch.manual_seed(3)
                losses.append(call(x, sink, layout))
                gradients.append(torch.autograd.grad(losses[-1], (x, sink)))
            torch.testing.assert_close(*losses)
            torch.testing.assert_close(*gradients)


def a_silent_rank(rank: int, world: int) -> None:
    """The others stop waiting for the last rank, and say for what they waited."""
    context = ContextParallel(timeout=1)
    layout = context.layout(seq_len=64)
    x = torch.randn(1, layout.local_tokens, 2, 8)
    context.attention(x, x, x, layout)  # all ranks agree here
    store = dist.distributed_c10d._get_default_store()
    if rank == world - 1:  # stays away until the others have given up
        store.wait([f"rank {peer} gave up" for peer in range(world - 1)])
        return
    message = (
        rf"context parallel: rank {rank} failed .* bytes from rank {world - 1} \(keys and values"
    )
    with pytest.raises(RuntimeError, match=message):
        context.attention(x, x, x, layout)
    store.set(f"rank {rank} gave up", "")


if __name__ == "__main__":
    rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo" if world > 2 else None,  # None: PyTorch's backend for each kind of device
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    for step in (
        random_cases,
        a_smaller_group,
        a_mesh,
        a_cache,
        a_mesh_of_two_dimensions,
        disagreement,
        vmap,
        compiled,
        dtensors,
        a_step_of_fsdp,
        a_silent_rank,
    ):
        step(rank, world)
