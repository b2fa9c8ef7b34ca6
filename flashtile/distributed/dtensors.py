"""DTensors in and out: tokens sharded over the ranks of the context, other dimensions kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .arguments import Arguments


def attend(
    run: Callable[[Arguments], tuple[Any, ...]], arguments: Arguments
) -> tuple[Tensor, Tensor]:
    """(out, lse) as DTensors, sharded as q.

    Args:
        run: the call on a rank's own tensors.
        arguments: q, k and v on one mesh with the same placements: tokens sharded over the ranks,
            heads or sequences perhaps over other dimensions of the mesh. Other tensors go to `run`
            as they are, and those of options are the rank's own ones. The layout is over processes.

    Raises:
        TypeError: some tensors are DTensors and others are not.
        ValueError, NotImplementedError: a placement does not fit; the message names the tensor.
    """
    qkv, layout, options, *_ = arguments
    q, k, v = qkv
    if not any(isinstance(x, DTensor) for x in qkv):
        return run(arguments)
    for name, x in zip("qkv", qkv, strict=True):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name}: got a plain tensor, want a DTensor, as the others are")
    if "return_stats" in options:
        raise NotImplementedError("return_stats: got DTensors, want this rank's own tensors")
    for name, x in options.items():
        if isinstance(x, DTensor):
            raise TypeError(f"{name}: got a DTensor, want this rank's own values")
    assert isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)
    for name, x in (("k", k), ("v", v)):
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            raise ValueError(f"{name}: got {x.placements}, want {q.placements}, as q")
    batch = 1 if layout.sequences else 0  # dimensions before the tokens
    for dim, placement in enumerate(q.placements):
        _check(placement, q.device_mesh.size(dim), q, k, batch, options)
    ranks = _ranks_of_tokens(q.device_mesh, q.placements, batch)
    want = tuple(layout.comm.global_ranks)
    if ranks != want:
        raise ValueError(f"q: got tokens sharded over the ranks {ranks}, want {want}")
    out, lse = run(arguments._replace(qkv=(q.to_local(), k.to_local(), v.to_local())))
    rows = {batch: batch + 1, batch + 1: batch}  # lse has its heads before its tokens
    of_lse = [Shard(rows.get(p.dim, p.dim)) if isinstance(p, Shard) else p for p in q.placements]
    mesh = q.device_mesh
    return (
        DTensor.from_local(out, mesh, q.placements, run_check=False),
        DTensor.from_local(lse, mesh, of_lse, run_check=False),
    )


def _check(
    placement: Placement, size: int, q: DTensor, k: DTensor, batch: int, options: Mapping[str, Any]
) -> None:
    """Raise unless a dimension of the mesh shards tokens, heads or sequences, or nothing."""
    if isinstance(placement, Replicate) or placement == Shard(batch):
        return
    if not isinstance(placement, Shard) or placement.dim not in range(batch + 2):
        raise ValueError(
            f"q: got {placement}, want Replicate, or Shard of the tokens, heads or sequences"
        )
    for name, x in (("q", q), ("k", k)):
        if x.shape[placement.dim] % size:
            raise ValueError(
                f"{name}: got {x.shape[placement.dim]} in dimension {placement.dim} for {size} "
                "ranks, want a multiple"
            )
    for name in ("dropout_p", "score_mod"):  # which count heads and sequences
        if options.get(name):
            raise NotImplementedError(
                f"{name}: got q with {placement}, want all heads and sequences on each rank"
            )


@torch.compiler.assume_constant_result  # a mesh is a constant of a graph
def _ranks_of_tokens(
    mesh: DeviceMesh, placements: tuple[Placement, ...], batch: int
) -> tuple[int, ...]:
    """The ranks over which the tokens are sharded here, in their order."""
    own = mesh.get_coordinate()
    assert own is not None
    index = tuple(
        slice(None) if placement == Shard(batch) else coordinate
        for placement, coordinate in zip(placements, own, strict=True)
    )
    return tuple(int(rank) for rank in mesh.mesh[index].flatten().tolist())
