"""What ranks tell each other about their calls, without processes: they share a store."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from flashtile.distributed import watch
from flashtile.distributed.agreement import agreed
from flashtile.distributed.watch import Note, Watch
from flashtile.distributed.wire import ProcessWire

A, B = (Note.of({"causal": causal}, {"options": causal}) for causal in (True, False))


class Ranks:
    """Watches whose threads do not run."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watch, "PERIOD", 1e6)
        store, self.stopped = dist.HashStore(), [0] * ranks
        self.watches = [
            Watch(rank, ranks, lambda: store, lambda rank=rank: self.stop(rank))
            for rank in range(ranks)
        ]

    def stop(self, rank: int) -> None:
        self.stopped[rank] += 1

    def errors(self) -> set[str]:
        """After all have looked, and looked again."""
        for _ in range(2):
            for one in self.watches:
                if not one.error:
                    one.look()
        return {one.error for one in self.watches}


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(3, monkeypatch)


def test_a_rank_that_is_behind_differs_from_nobody(three: Ranks) -> None:
    for rank, one in enumerate(three.watches):
        for note in (A, B, A, B)[: 2 + rank]:
            one.begin(note)
    assert three.errors() == {""}
    three.watches[0].begin(B)  # the others have A
    assert three.errors() == {
        "context parallel: the ranks disagree on causal in call 3 of attention over all ranks: "
        "rank 0 has False; rank 1 has True"
    } or three.errors() == {
        "context parallel: the ranks disagree on causal in call 3 of attention over all ranks: "
        "rank 0 has False; rank 2 has True"
    }
    assert three.stopped == [1, 1, 1]
    with pytest.raises(ValueError, match="causal in call 3"):
        three.watches[1].begin(A)


def test_an_earlier_difference_is_found(three: Ranks) -> None:
    """Though it was over when the ranks looked."""
    for rank, one in enumerate(three.watches):
        for note in (A, B if rank == 2 else A, A):
            one.begin(note)
    (error,) = three.errors()
    assert error.endswith("disagree on what they called before call 3 of attention over all ranks")


def test_a_rank_that_looks_late_differs_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it has made more calls than are kept."""
    ranks = Ranks(2, monkeypatch)
    for call in range(watch.KEPT + 4000):
        for one in ranks.watches:
            one.begin(A if call % 3 else B)
        if call % 1000 == 0:
            ranks.watches[0].look()
    assert ranks.errors() == {""}
    ranks.watches[0].begin(A)
    ranks.watches[1].begin(B)
    assert "disagree on causal in call" in ranks.errors().pop()


def test_without_a_store_an_error_keeps_its_reason() -> None:
    """The store ends with the process that has it, and another error has come before."""
    store: list[dist.Store] = [dist.HashStore()]
    alone = Watch(0, 2, lambda: store[0], lambda: None)
    alone.begin(A)
    store.clear()
    assert alone.reason() == ""


@pytest.mark.parametrize("ends", [(True, True), (False, False), (True, False)])
def test_what_ranks_compare_themselves_is_left_to_them(
    ends: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with arguments that differ in form, which they agree on, refuse, or still compare."""
    ranks = Ranks(2, monkeypatch)
    for one, note, has_agreed in zip(ranks.watches, (A, B), ends, strict=True):
        one.begin(Note.of(note.facts, {}), is_compared=True)
        if has_agreed:
            one.confirm(Note.of(note.facts, {"options": "equal"}))
    assert ranks.errors() == {""}
    if ends[0] == ends[1]:
        for one in ranks.watches:
            one.begin(A)
        assert ranks.errors() == {""}


@pytest.mark.parametrize("has_agreed", [True, False])
def test_one_that_compares_alone_is_a_difference(
    has_agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has had this kind before, and sends nothing but its tokens."""
    ranks = Ranks(2, monkeypatch)
    ranks.watches[0].begin(A)
    ranks.watches[1].begin(Note.of(B.facts, {}), is_compared=True)
    if has_agreed:
        ranks.watches[1].confirm(B)
    (error,) = ranks.errors()
    assert "disagree on causal in call 1 of attention" in error


def test_notes_that_a_stopped_group_leaves_unwritten_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL ends a collective that it stops without an error."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wire = ProcessWire()

        def stopped(*_: object, **__: object) -> None:
            wire.watch.error = "the ranks disagree on causal"

        monkeypatch.setattr(dist, "all_gather", stopped)
        with pytest.raises(ValueError, match=r"^the ranks disagree on causal$"):
            agreed(wire, lambda: (None, {}))
    finally:
        dist.destroy_process_group()
