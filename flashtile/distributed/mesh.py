"""The process group of a `DeviceMesh`, and what its dimensions say about the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from .strategy import Number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def of_mesh(mesh: DeviceMesh, ulysses: Number) -> tuple[dist.ProcessGroup, Number]:
    """The group of all ranks of the mesh, and how many neighbours exchange heads.

    Raises:
        ValueError: the mesh has more than two dimensions or does not count its ranks up, or
            `ulysses` is not its second dimension.
    """
    if mesh.ndim == 1:
        return mesh.get_group(), ulysses
    if mesh.ndim != 2:
        raise ValueError(f"group: got a mesh of {mesh.ndim} dimensions, want one or two")
    if ulysses not in ("auto", mesh.size(1)):
        raise ValueError(f"ulysses: got {ulysses}, want {mesh.size(1)}, as in the mesh, or 'auto'")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"group: got a mesh of ranks {ranks}, want ranks that count up")
    return mesh._flatten().get_group(), mesh.size(1)


def group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The group of all ranks of a mesh, or the default group for None."""
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    return (group if group.ndim == 1 else group._flatten()).get_group()
