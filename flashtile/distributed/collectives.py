"""How ranks exchange tensors, and compare what they are about to do before they start. All ranks
start the same exchanges in the same order.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

# An optimizer imports this module. If that is after `init_process_group`, its functions' default
# arguments keep the group, and gloo's threads run on while Python ends, which may abort it.
import torch.distributed.nn.functional
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group = dist.ProcessGroup | DeviceMesh | None


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when what was to be received is there and what was sent may be overwritten."""


class Communicator(Protocol):
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


def connect(comm: Communicator, device: torch.device) -> None:
    """Bring all ranks together on a device before the first exchange there.

    NCCL connects the ranks of a group in its first operation, in which all of them have to take
    part. The agreement before an exchange is not that operation if the group also has gloo.
    """
    if device.type != "cpu":
        comm.all_gather(torch.zeros(1, device=device))


class _Done:
    def wait(self) -> None:
        pass


DONE: Pending = _Done()


class _Works:
    """The requests of one exchange.

    It keeps the tensors until `wait`: NCCL reads and writes them on a stream of its own, so their
    memory must not be used again before.
    """

    def __init__(
        self,
        works: list[dist.Work],
        comm: ProcessCommunicator,
        messages: Callable[[], list[str]],  # text for errors
        tensors: list[Tensor],
    ) -> None:
        self.works, self.comm, self.messages, self.tensors = works, comm, messages, tensors

    def wait(self) -> None:
        for number, work in enumerate(self.works):
            try:
                if self.comm.timeout is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self.comm.timeout))
            except RuntimeError as error:
                raise RuntimeError(
                    f"context parallel: rank {self.comm.rank} failed while it waited for "
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


class ProcessCommunicator:
    """The processes of a group of `torch.distributed`.

    Args:
        group: a process group; None is the default one.
        timeout: seconds to wait for an exchange; None leaves it to the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float | None = None
    ) -> None:
        group = dist.distributed_c10d._get_default_group() if group is None else group
        # torch.distributed keeps a group until it is destroyed. Kept here, its threads would run on
        # while Python ends, and gloo's may abort it.
        self._group = weakref.ref(group)
        self.timeout = timeout
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # Some ranks may call `all_to_all` while others send a batch, which PyTorch reports as an
        # error if it checks that all ranks call the same collectives.
        self._has_all_to_all = (
            dist.get_debug_level() != dist.DebugLevel.DETAIL
            and "nccl" in dist.get_backend_config(group)
        )
        self.global_ranks = [dist.get_global_rank(group, rank) for rank in range(self.ranks)]

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str
    ) -> Pending:
        """See `Communicator`. One operation of NCCL, or one of gloo for each message."""
        if (
            self._has_all_to_all
            and any(x.is_cuda for x in (*sends.values(), *receives.values()))
            and can_be_one_operation(self.rank, self.ranks, sends, receives)
        ):
            return self._all_to_all(sends, receives, what)
        group = self._group() or _destroyed()
        operations, directions = [], []
        for function, tensors, direction in (
            (dist.irecv, receives, "from"),
            (dist.isend, sends, "to"),
        ):
            for peer, x in sorted(tensors.items()):
                if x.numel():
                    there = self.global_ranks[peer]
                    sent = x.view(-1).view(torch.uint8)  # which every backend can send
                    operations.append(dist.P2POp(function, sent, there, group))
                    directions.append(f"{direction} rank {peer} ({what})")
        if not operations:  # torch.distributed does not take an empty batch
            return DONE
        works = dist.batch_isend_irecv(operations)
        buffers = [operation.tensor for operation in operations]
        sizes = [x.numel() for x in buffers]  # of bytes

        def messages() -> list[str]:
            return [
                f"{size:,} bytes {direction}"
                for size, direction in zip(sizes, directions, strict=True)
            ]

        return _Works(works, self, messages, buffers)

    def _all_to_all(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str
    ) -> Pending:
        """The exchange as one call of PyTorch. A batch of messages keeps the host busy longer."""
        buffers = [*sends.values(), *receives.values()]
        if not any(x.numel() for x in buffers):
            return DONE
        nothing = buffers[0].new_empty(0)
        out, into = (
            [_flat(tensors.get(rank, nothing)) for rank in range(self.ranks)]
            for tensors in (receives, sends)
        )
        group = self._group() or _destroyed()
        work = dist.all_to_all(out, into, group=group, async_op=True)

        def messages() -> list[str]:
            size = sum(x.numel() * x.element_size() for x in buffers)
            return [f"{size:,} bytes to ranks {sorted(sends)} and from {sorted(receives)} ({what})"]

        return _Works([work], self, messages, buffers)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Communicator`."""
        here, group = x, self._group() or _destroyed()
        if x.device.type == "cpu" and "cpu:" not in dist.get_backend_config(group):
            # The group connects only GPUs.
            here = x.to(group.bound_device_id or torch.device("cuda"))
        gathered = [torch.empty_like(here) for _ in range(self.ranks)]
        dist.all_gather(gathered, here, group=group)
        return [part.cpu() for part in gathered]


def _destroyed() -> NoReturn:
    raise RuntimeError(
        "group: got one that was destroyed by destroy_process_group; make another ContextParallel"
    )


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.view(-1)


def exchange(
    comm: Communicator,
    sends: Mapping[int, Tensor],
    receives: Mapping[int, Tensor],
    what: str,
    dtype: torch.dtype | None = None,
) -> Pending:
    """`Communicator.exchange`, which a rank without messages does not take part in.

    Args:
        dtype: in which all tensors travel, before they arrive in their own; None is their own.
    """
    if not sends and not receives:
        return DONE
    if dtype is None:
        return comm.exchange(sends, receives, what)
    arriving = {peer: torch.empty_like(x, dtype=dtype) for peer, x in receives.items()}
    compressed = {peer: x.to(dtype) for peer, x in sends.items()}
    return _Compressed(comm.exchange(compressed, arriving, what), arriving, receives)


class _Compressed:
    """An exchange of tensors that arrive in another dtype."""

    def __init__(
        self, pending: Pending, arriving: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        self.pending, self.arriving, self.receives = pending, arriving, receives

    def wait(self) -> None:
        self.pending.wait()
        for peer, x in self.receives.items():
            x.copy_(self.arriving[peer])


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


class Subgroup:
    """Some ranks of a communicator, as a communicator of their own."""

    def __init__(self, comm: Communicator, members: Sequence[int]) -> None:
        self.comm, self.members = comm, tuple(members)
        self.rank, self.ranks = self.members.index(comm.rank), len(self.members)
        self.global_ranks = [comm.global_ranks[member] for member in self.members]

    def exchange(self, sends: Any, receives: Any, what: str) -> Any:
        """See `Communicator`."""
        there = self.members
        return self.comm.exchange(
            {there[peer]: x for peer, x in sends.items()},
            {there[peer]: x for peer, x in receives.items()},
            what,
        )

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The `x` of the members. All ranks of the whole communicator take part."""
        everyone = self.comm.all_gather(x)
        return [everyone[member] for member in self.members]


def group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The group of all ranks of a mesh, or the default group for None."""
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    return (group if group.ndim == 1 else group._flatten()).get_group()


# All ranks compare what they are about to do, so that they fail together or not at all.
#
# A rank that sends less than another one expects goes unnoticed by gloo and hangs NCCL. Before the
# first exchange of a call with a new signature each rank therefore sends a record to all others:
# what it has, or why it refuses. Then either all go on or all raise the same error. Later calls
# with that signature send no record, unless ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set: then every
# call is compared. Ranks that otherwise make different calls later on wait for each other until the
# timeout of the group.


RECORD_BYTES = 2048
MOST_SIGNATURES = 1024  # that ranks have compared; the oldest one is dropped

Result = TypeVar("Result")
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError)
}


def verify_across_ranks(
    comm: Communicator, prepare: Callable[[], tuple[Result, Mapping[str, Any]]]
) -> Result:
    """What `prepare` makes, once all ranks have made the same.

    Args:
        prepare: returns a result and the facts that have to be equal on all ranks, by a name that
            a user understands. It may raise.

    Raises:
        ValueError: the ranks disagree; the message says on what, and which rank has what.
        ValueError, TypeError, NotImplementedError: some rank raised it; all ranks do.
        RuntimeError: some rank raised another error, which the message names.
    """
    reason = None
    try:
        result, facts = prepare()
        record: dict[str, Any] = {"facts": {name: str(fact) for name, fact in facts.items()}}
    except Exception as error:  # whatever it is, the other ranks wait to be told
        reason = error
        error_name = next(
            (name for name, error_type in _ERRORS.items() if isinstance(error, error_type)), ""
        )
        text = str(error) if error_name else f"{type(error).__name__}: {error}"
        record = {"kind": error_name, "error": text}
    records = all_gather_objects(comm, record)
    for rank, other in enumerate(records):
        if "error" in other:
            error_type = _ERRORS.get(other["kind"], RuntimeError)
            raise error_type(f"context parallel: rank {rank}: {other['error']}") from reason
    for name in records[0]["facts"]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, other in enumerate(records):
            ranks_by_value.setdefault(other["facts"].get(name, "none"), []).append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{_ranks(ranks)} {fact}" for fact, ranks in ranks_by_value.items())
            raise ValueError(f"context parallel: the ranks disagree on {name}: {values}")
    return result


class VerifiedCalls:
    """The signatures of calls that all ranks have compared.

    All ranks add a signature in the same call and drop the oldest one in the same call, so none of
    them compares while the others do not. `clear_caches`, which only some ranks may call, leaves
    them.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self._signatures = comm, dict[Any, None]()
        self._compares_every_call = dist.get_debug_level() == dist.DebugLevel.DETAIL

    def __contains__(self, signature: Any) -> bool:
        return signature in self._signatures and not self._compares_every_call

    def verify(
        self, signature: Any, prepare: Callable[[], tuple[Result, Mapping[str, Any]]]
    ) -> Result:
        """`verify_across_ranks`, for the first call with a signature."""
        result = verify_across_ranks(self.comm, prepare)
        self._signatures[signature] = None
        if len(self._signatures) > MOST_SIGNATURES:
            del self._signatures[next(iter(self._signatures))]
        return result


def all_gather_objects(comm: Communicator, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of all ranks, on all ranks; each fits into `RECORD_BYTES` as JSON."""
    text = json.dumps(record)
    if len(text) > RECORD_BYTES and "error" in record:
        text = json.dumps({**record, "error": record["error"][: RECORD_BYTES // 4]})
    written = torch.frombuffer(bytearray(text.encode().ljust(RECORD_BYTES)), dtype=torch.uint8)
    return [json.loads(bytes(x.tolist())) for x in comm.all_gather(written)]


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"
