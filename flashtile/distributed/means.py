"""Means over the tokens of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import group_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group = dist.ProcessGroup | DeviceMesh | None


def global_mean(
    loss_sum: Tensor, count: int | Tensor, group: Group = None, averaged_over: Group = None
) -> Tensor:
    """A rank's part of the mean loss of all tokens, for gradients that are averaged over ranks.

    Ranks have unequal numbers of tokens with a loss, so the mean of their means is not that of one
    process. This is the rank's sum, divided by the number of tokens of all ranks and multiplied by
    the number of ranks over which FSDP or DDP average gradients. The mean of what it returns is the
    mean loss, and the averaged gradients are those of one process.

    Args:
        loss_sum: () the sum of the losses of the rank's own tokens, with its graph.
        count: how many tokens they are, 0 for none.
        group: the ranks that have the tokens, a group or a mesh; None is the default group. All of
            them call it.
        averaged_over: the ranks over which gradients are averaged; None is `group`.

    Returns:
        (), 0 where no rank has a token.
    """
    members = group_of(group)
    total = torch.as_tensor(count, dtype=torch.int64, device=loss_sum.device).clone()
    dist.all_reduce(total, group=members)
    averaged = members if averaged_over is None else group_of(averaged_over)
    return loss_sum * (dist.get_world_size(averaged) / total.clamp(min=1))
