"""All ranks compare what they are about to do, so that they fail together or not at all.

A rank that sends less than another one expects goes unnoticed by gloo and hangs NCCL. Before the
first exchange of a call with a new signature each rank therefore sends a record to all others: what
it has, or why it refuses. Then either all go on or all raise the same error. Later calls with that
signature send no record, unless ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set: then every call is
compared. Ranks that otherwise make different calls later on wait for each other until the timeout
of the group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .collectives import Communicator

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
