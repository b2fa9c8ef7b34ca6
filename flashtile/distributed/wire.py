"""How ranks exchange tensors. All ranks start the same exchanges in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when what was to be received is there and what was sent may be overwritten."""


class Wire(Protocol):
    """A group of ranks that can send tensors to each other."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    @property
    def global_ranks(self) -> list[int]:
        """The numbers of the ranks in the default group."""

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str
    ) -> Pending:
        """Start to send a tensor to each rank of `sends` and to fill those of `receives`.

        Args:
            sends, receives: contiguous tensors by rank. A rank that sends a tensor and the one that
                receives it agree on its size; a rank without an entry exchanges nothing.
            what: names the exchange in an error.
        """

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The `x` of every rank, on the CPU: a few bytes, of equal size on all ranks. A tensor
        of a GPU travels as in `exchange`, one of a CPU in any way."""


def connect(wire: Wire, device: torch.device) -> None:
    """Bring all ranks together on a device before the first exchange there.

    NCCL connects the ranks of a group in its first operation, in which all of them have to take
    part. The agreement before an exchange is not that operation if the group also has gloo.
    """
    if device.type != "cpu":
        wire.all_gather(torch.zeros(1, device=device))


class _Done:
    def wait(self) -> None:
        pass


class _Works:
    """The requests of one exchange.

    It keeps the tensors until `wait`: NCCL reads and writes them on a stream of its own, so their
    memory must not be used again before.
    """

    def __init__(
        self,
        works: list[dist.Work],
        wire: ProcessWire,
        messages: Callable[[], list[str]],  # text for errors
        tensors: list[Tensor],
    ) -> None:
        self.works, self.wire, self.messages, self.tensors = works, wire, messages, tensors

    def wait(self) -> None:
        for number, work in enumerate(self.works):
            try:
                if self.wire.timeout is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self.wire.timeout))
            except RuntimeError as error:
                raise RuntimeError(
                    f"context parallel: rank {self.wire.rank} failed while it waited for "
                    f"{self._what(number)}: {error}"
                ) from error
        self.works, self.messages, self.tensors = [], list, []

    def _what(self, number: int) -> str:
        # NCCL makes one request of a whole batch, gloo one of each message.
        messages = self.messages()
        return messages[number] if len(messages) == len(self.works) else "; ".join(messages)


def can_be_one_operation(
    rank: int, ranks: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
) -> bool:
    """Whether this rank may exchange these messages by `torch.distributed.all_to_all`.

    `all_to_all` also sends an empty message to each rank without an entry, and NCCL waits for ever
    for a rank that does not expect one. Where no message is empty, the other ranks may use either
    method. Of two ranks, each takes part whenever the other does.
    """
    if ranks == 2:
        return True
    return all(
        peer in tensors and tensors[peer].numel() > 0
        for peer in range(ranks)
        if peer != rank
        for tensors in (sends, receives)
    )


class ProcessWire:
    """The processes of a group of `torch.distributed`.

    Args:
        group: a process group; None is the default one.
        timeout: seconds to wait for an exchange; None leaves it to the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float | None = None
    ) -> None:
        self.group = dist.distributed_c10d._get_default_group() if group is None else group
        self.timeout = timeout
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        # Some ranks may call `all_to_all` while others send a batch, which PyTorch reports as an
        # error if it checks that all ranks call the same collectives.
        self._has_all_to_all = (
            dist.get_debug_level() != dist.DebugLevel.DETAIL
            and "nccl" in dist.get_backend_config(self.group)
        )
        self.global_ranks = [dist.get_global_rank(self.group, rank) for rank in range(self.ranks)]

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str
    ) -> Pending:
        """See `Wire`. One operation of NCCL, or one of gloo for each message."""
        if (
            self._has_all_to_all
            and any(x.is_cuda for x in (*sends.values(), *receives.values()))
            and can_be_one_operation(self.rank, self.ranks, sends, receives)
        ):
            return self._all_to_all(sends, receives, what)
        operations, ways = [], []
        for function, tensors, way in ((dist.irecv, receives, "from"), (dist.isend, sends, "to")):
            for peer, x in sorted(tensors.items()):
                if x.numel():
                    there = self.global_ranks[peer]
                    operations.append(dist.P2POp(function, _as_bytes(x), there, self.group))
                    ways.append(f"{way} rank {peer} ({what})")
        if not operations:  # torch.distributed does not take an empty batch
            return _Done()
        works = dist.batch_isend_irecv(operations)
        given = [operation.tensor for operation in operations]
        sizes = [x.numel() for x in given]  # of bytes

        def messages() -> list[str]:
            return [f"{size:,} bytes {way}" for size, way in zip(sizes, ways, strict=True)]

        return _Works(works, self, messages, given)

    def _all_to_all(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str
    ) -> Pending:
        """The exchange as one call of PyTorch. A batch of messages keeps the host busy longer."""
        given = [*sends.values(), *receives.values()]
        if not any(x.numel() for x in given):
            return _Done()
        nothing = given[0].new_empty(0)
        out, into = (
            [_flat(tensors.get(rank, nothing)) for rank in range(self.ranks)]
            for tensors in (receives, sends)
        )
        work = dist.all_to_all(out, into, group=self.group, async_op=True)

        def messages() -> list[str]:
            size = sum(x.numel() * x.element_size() for x in given)
            return [f"{size:,} bytes to ranks {sorted(sends)} and from {sorted(receives)} ({what})"]

        return _Works([work], self, messages, given)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Wire`."""
        here = x if x.device.type != "cpu" else x.to(self._device)
        gathered = [torch.empty_like(here) for _ in range(self.ranks)]
        dist.all_gather(gathered, here, group=self.group)
        return [part.cpu() for part in gathered]

    @property
    def _device(self) -> torch.device:
        """The CPU, unless the group connects only GPUs."""
        if "cpu:" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        if self.group.bound_device_id is not None:
            return self.group.bound_device_id
        return torch.device("cuda", torch.cuda.current_device())


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.view(-1)


def _as_bytes(x: Tensor) -> Tensor:
    """A view that every backend can send, whatever the dtype."""
    return x.view(-1).view(torch.uint8)


def exchanged(
    wire: Wire, sends: dict[int, Tensor], received: dict[int, Tensor], what: str
) -> Pending | None:
    """None if this rank has no part in it."""
    return wire.exchange(sends, received, what) if sends or received else None
