"""Context parallelism: neighbouring processes read the same windows and divide their tokens.

`trainer.context_parallel` processes are a replica. Replicas read different windows, as single
processes do without context parallelism. The groups of DDP and FSDP2 span all processes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor

from flashtile.distributed import ContextParallel, Layout, Mask
from flashtile.models.gpt import GPTConfig

from .batches import Batch

IGNORED = -100  # the target of a token that fills up a process's part


class Sequences:
    """Which windows this process reads, and which of their tokens are its own.

    Attributes:
        ranks: processes that divide the tokens of a window.
        replicas, replica: how many groups of them there are, and the number of this one.
    """

    def __init__(self, fabric: Fabric, ranks: int, model: GPTConfig) -> None:
        self.ranks = ranks
        self.replicas, self.replica = fabric.world_size // ranks, fabric.global_rank // ranks
        self._parallel: ContextParallel | None = None
        if ranks > 1:
            group, _ = dist.new_subgroups(ranks)  # neighbours, which share a node if they fit
            self._parallel = ContextParallel(group)
        self._mask = Mask(True, model.window_size, layers=model.num_layers)
        self._dense: dict[tuple[int, int], Layout] = {}  # by the shape of a batch

    def own_part(self, batch: Batch) -> tuple[Batch, AbstractContextManager[object]]:
        """This process's tokens of a batch, and the block in which the model is to see them."""
        if self._parallel is None:
            return batch, nullcontext()
        layout = self._layout(batch, self._parallel)
        part = replace(
            batch,
            input_ids=layout.shard(batch.input_ids),
            targets=layout.shard(batch.targets, fill=IGNORED),
            cu_seqlens=None,  # the layout has them
            max_seqlen=None,
        )
        return part, layout

    def share_of_mean(self, loss_sum: Tensor, batch: Batch) -> Tensor:
        """What this process contributes to the mean loss of a batch, so that the mean over all
        processes, which DDP and FSDP2 take of gradients, is that of all tokens.

        Args:
            loss_sum: the sum over this process's tokens.
            batch: the tokens of all processes of the replica.
        """
        return loss_sum * (self.ranks / batch.targets.numel())

    def _layout(self, batch: Batch, parallel: ContextParallel) -> Layout:
        if batch.cu_seqlens is not None:
            return parallel.layout(batch.cu_seqlens, masks=[self._mask])
        windows, context = batch.input_ids.shape
        if (windows, context) not in self._dense:
            self._dense[windows, context] = parallel.layout(
                batch=windows, seq_len=context, masks=[self._mask]
            )
        return self._dense[windows, context]
