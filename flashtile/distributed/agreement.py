"""All ranks compare what they are about to do, so that they fail together or not at all.

A rank that sends less than another one expects goes unnoticed by gloo and hangs NCCL. Before the
first exchange of a new kind of call each rank therefore sends a short note to all others: what it
has, or why it refuses. Then either all go on or all raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from .watch import Note
from .wire import ProcessWire, Wire

NOTE_BYTES = 2048
KINDS = 1024  # of calls that ranks have compared; the cache drops the oldest one

Result = TypeVar("Result")
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError)
}


def agreed(wire: Wire, prepare: Callable[[], tuple[Result, Mapping[str, Any]]]) -> Result:
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
        note: dict[str, Any] = {"facts": {name: str(fact) for name, fact in facts.items()}}
    except Exception as error:  # whatever it is, the other ranks wait to be told
        reason = error
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "")
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        note = {"kind": kind, "error": text}
    notes = told(wire, note)
    for rank, other in enumerate(notes):
        if "error" in other:
            error_type = _ERRORS.get(other["kind"], RuntimeError)
            raise error_type(f"context parallel: rank {rank}: {other['error']}") from reason
    for name in notes[0]["facts"]:
        holders: dict[str, list[int]] = {}
        for rank, other in enumerate(notes):
            holders.setdefault(other["facts"].get(name, "none"), []).append(rank)
        if len(holders) > 1:
            found = "; ".join(f"{_ranks(ranks)} {fact}" for fact, ranks in holders.items())
            raise ValueError(f"context parallel: the ranks disagree on {name}: {found}")
    return result


class Compared:
    """The kinds of calls that all ranks have compared.

    All ranks add a kind in the same call and drop the oldest one in the same call, so none of them
    compares while the others do not. `clear_caches`, which only some ranks may call, leaves them.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire, self._notes = wire, dict[Any, Note]()
        self._watch = wire.watch if isinstance(wire, ProcessWire) else None

    def knows(self, kind: Any) -> bool:
        """Whether the ranks have compared it; if they have, a call of it begins."""
        note = self._notes.get(kind)
        if note is not None and self._watch is not None:
            self._watch.begin(note)
        return note is not None

    def agreed(
        self,
        kind: Any,
        facts: Mapping[str, Any],
        prepare: Callable[[], tuple[Result, Mapping[str, Any]]],
    ) -> Result:
        """As the function `agreed`, for the first call of a kind.

        Args:
            facts: what the kind is, by names that a user understands.
        """
        equal: Mapping[str, Any] = {}

        def prepared() -> tuple[Result, Mapping[str, Any]]:
            nonlocal equal
            result, equal = prepare()
            return result, equal

        if self._watch is not None:
            self._watch.begin(Note.of(facts, {}), is_compared=True)
        result = agreed(self.wire, prepared)
        note = Note.of(facts, equal)
        if self._watch is not None:
            self._watch.confirm(note)
        self._notes[kind] = note
        if len(self._notes) > KINDS:
            del self._notes[next(iter(self._notes))]
        return result


def told(wire: Wire, note: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The notes of all ranks, on all ranks; each fits into `NOTE_BYTES` as JSON."""
    return [_read(x.numpy().tobytes()) for x in wire.all_gather(_written(note))]


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"


def _written(note: Mapping[str, Any]) -> torch.Tensor:
    text = json.dumps(note)
    if len(text) > NOTE_BYTES and "error" in note:
        text = json.dumps({**note, "error": note["error"][: NOTE_BYTES // 4]})
    return torch.frombuffer(bytearray(text.encode().ljust(NOTE_BYTES)), dtype=torch.uint8)


def _read(note: bytes) -> dict[str, Any]:
    return dict(json.loads(note))
