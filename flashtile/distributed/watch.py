"""Ranks that begin different calls hear of it within seconds, without a message in each call.

After all ranks have compared a kind of call, further calls of it send nothing extra. If a rank then
makes another call than the others, it waits for messages that they never send, and they wait for
its messages. So every rank counts its calls, and a thread writes to the store of the group, twice a
second, which call is the latest one. The thread compares what the ranks next to it have written
with this rank's own call of the same number. The first one that finds a difference writes what it
is; all ranks read that, stop waiting and raise it.

A rank that has made fewer calls differs from no other one: only calls of the same number are
compared.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet, ref

PERIOD = 0.5  # seconds between two looks at the store
KEPT = 1 << 14  # of the latest calls; ranks are never so far apart

_log = logging.getLogger(__name__)
_stopped = threading.Event()  # the process ends


class Note(NamedTuple):
    """What a call is."""

    facts: Mapping[str, str]  # by names that a user understands
    digest: int  # of what the ranks have agreed on, equal on all of them

    @classmethod
    def of(cls, facts: Mapping[str, Any], agreed: Mapping[str, Any]) -> Note:
        """Whatever the facts are, as text."""
        text = json.dumps({name: str(fact) for name, fact in agreed.items()})
        digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        return cls({name: str(fact) for name, fact in facts.items()}, digest)


class _Entry(NamedTuple):
    """A call of a rank."""

    number: int
    is_compared: bool  # by a message to all ranks, because this rank has not had its kind before
    history: int  # a hash of this call and of all before it
    facts: Mapping[str, str]

    def differs_from(self, other: _Entry) -> bool:
        """Whether two ranks have made other calls, and will not find out by themselves, because
        not both of them compare what they do."""
        if self.is_compared or other.is_compared:
            return self.is_compared != other.is_compared
        return self.history != other.history


class Watch:
    """The calls of one rank, and a thread that compares them with those of others.

    Args:
        rank, ranks: this one, and how many there are.
        store: returns the store of the group, and raises when the group is gone.
        stop: makes operations of the group fail that this rank waits for.
    """

    def __init__(
        self, rank: int, ranks: int, store: Callable[[], Any], stop: Callable[[], None]
    ) -> None:
        self.rank, self.ranks, self._store, self._stop = rank, ranks, store, stop
        self.error = ""  # what the ranks disagree on, the same text on all of them
        # Written where the calls are made, and read by the thread.
        self._entries: dict[int, _Entry] = {}
        self._latest = _Entry(0, False, 0, {})
        self._written: _Entry | None = None
        self._name = ""

    def begin(self, note: Note, is_compared: bool = False) -> None:
        """Count a call. If the ranks compare it and agree, `confirm` follows.

        Raises:
            ValueError: the ranks disagree on an earlier call.
        """
        if self.error:
            raise ValueError(self.error)
        if not self._name and self.ranks > 1:
            self._start()
        self._enter(self._latest.number + 1, is_compared, note)

    def confirm(self, note: Note) -> None:
        """Say what the ranks have agreed on in the latest call, which they have compared."""
        self._enter(self._latest.number, True, note)

    def reason(self) -> str:
        """Why an operation of the group may have failed: what the ranks disagree on, or nothing."""
        if self._name and not self.error:
            with suppress(Exception):  # the store is gone, which need not be the reason
                self._read_error(self._store())
        return self.error

    def look(self) -> None:
        """Write what is the latest call, and read those of others."""
        store, latest = self._store(), self._latest
        if latest is not self._written and latest.number:
            self._written = latest
            store.set(self._key(self.rank), json.dumps(latest))
        self._read_error(store)
        for peer in {(self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks} - {self.rank}:
            if not self.error and store.check([self._key(peer)]):
                self._compare(store, peer, _Entry(*json.loads(store.get(self._key(peer)))))

    def _start(self) -> None:
        # Ranks use the objects of a group in one order, as all that communicate in it.
        self._name = f"flashtile {self._store().add(f'flashtile contexts {self.rank}', 1)}"
        thread = threading.Thread(
            target=_look_now_and_then, args=(ref(self),), daemon=True, name="flashtile watch"
        )
        _threads.add(thread)
        thread.start()

    def _key(self, what: object) -> str:
        return f"{self._name} {what}"

    def _enter(self, number: int, is_compared: bool, note: Note) -> None:
        before = self._entries.get(number - 1)
        history = hash((before.history if before else 0, note.digest))
        self._entries[number] = self._latest = _Entry(number, is_compared, history, note.facts)
        self._entries.pop(number - KEPT, None)

    def _compare(self, store: Any, peer: int, theirs: _Entry) -> None:
        mine = self._entries.get(theirs.number)
        if mine is None or not mine.differs_from(theirs):
            return
        if store.add(self._key("errors"), 1) == 1:
            store.set(self._key("error"), _difference({self.rank: mine, peer: theirs}))
        self._read_error(store)

    def _read_error(self, store: Any) -> None:
        if self.error or not store.check([self._key("error")]):
            return
        self.error = store.get(self._key("error")).decode()
        _log.error(self.error)
        self._stop()


def _difference(entries: dict[int, _Entry]) -> str:
    """What differs between the calls of two ranks."""
    (rank, one), (other_rank, other) = sorted(entries.items())
    where = f"call {one.number} of attention over all ranks"
    for name in [*one.facts, *other.facts]:
        found = one.facts.get(name, "none"), other.facts.get(name, "none")
        if found[0] != found[1]:
            return (
                f"context parallel: the ranks disagree on {name} in {where}: rank {rank} has "
                f"{found[0]}; rank {other_rank} has {found[1]}"
            )
    return (
        f"context parallel: ranks {rank} and {other_rank} disagree on what they called before "
        f"{where}"
    )


_threads: WeakSet[threading.Thread] = WeakSet()


def _look_now_and_then(watch: ref[Watch]) -> None:
    while not _stopped.wait(PERIOD):
        alive = watch()
        if alive is None:
            return
        try:
            alive.look()
        except Exception:  # the group or its store is gone
            return
        if alive.error:
            return
        del alive


@atexit.register
def _end_threads() -> None:
    """While Python shuts down, a thread that comes back from the store ends the process."""
    _stopped.set()
    for thread in list(_threads):
        thread.join(timeout=1.0)
