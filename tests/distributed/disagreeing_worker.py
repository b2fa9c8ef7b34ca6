"""One process of `test_disagreement`: ranks that make other calls than before, over gloo or NCCL.

Run as ``python disagreeing_worker.py rank world_size rendezvous-file scenario [nccl]``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flashtile
from flashtile.distributed import ContextParallel, Layout, watch

DEVICE = "cuda" if sys.argv[5:] == ["nccl"] else "cpu"
# Seconds from the end of the first call, which compiles, until all ranks have raised; the group
# would wait for much longer.
LIMIT = 10.0


class Model:
    """Calls of one layout."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.last = rank, world - 1
        self.parallel = ContextParallel()
        self.layout = self.parallel.layout(seq_len=64 * world)
        self.began = 0.0  # when the first call had ended

    def of_documents(self, world: int) -> Layout:
        """A layout in which nothing travels."""
        return self.parallel.layout([64 * n for n in range(world + 1)])

    def call(self, layout: Layout | None = None, **options: object) -> Tensor:
        layout = layout or self.layout
        shape = (1,) if layout.sequences else ()
        x = torch.randn(*shape, layout.local_tokens, 2, 8, device=DEVICE)
        grad = bool(options.pop("grad", False))
        out = self.parallel.attention(x, x, x.requires_grad_(grad), layout, **options)
        self.began = self.began or time.monotonic()
        return out

    def is_late(self) -> bool:
        """Whether the ranks should have raised by now."""
        return self.began > 0 and time.monotonic() - self.began > LIMIT


def another_option(model: Model, world: int) -> str:
    """One that the last rank has not had before."""
    model.call()
    model.call(**({"causal": True} if model.rank == model.last else {}))
    return "causal"


def gradients(model: Model, world: int) -> str:
    """Only the last rank records its call."""
    model.call()
    model.call(grad=model.rank == model.last)
    return "gradients"


def another_shape(model: Model, world: int) -> str:
    """The last rank would refuse its call."""
    model.call()
    options = {"sink": torch.zeros(3, device=DEVICE)} if model.rank == model.last else {}
    model.call(**options)
    return "sink"


def known_calls(model: Model, world: int) -> str:
    """All ranks know both calls, which exchange the same bytes, and make them in another order."""
    for softcap in (1.0, 2.0):
        model.call(softcap=softcap)
    while True:
        model.call(softcap=1.0 if model.rank == model.last else 2.0)
        time.sleep(0.05)


def without_messages(model: Model, world: int) -> str:
    """Ranks that need nothing of each other go on alone, until they hear of it."""
    layout = model.of_documents(world)
    model.call(layout)
    if model.rank == model.last:
        model.call(layout, softcap=1.0)
    while True:
        model.call(layout)
        time.sleep(0.05)


def decoding(model: Model, world: int) -> str:
    """The last rank decodes with another window."""
    cache = torch.randn(2, 1, 64, 2, 8, device=DEVICE)
    q = torch.randn(1, 1, 2, 8, device=DEVICE)
    for window in (-1, 5 if model.rank == model.last else -1):
        model.parallel.decode(q, *cache, cache_seqlens=40, window_size=(window, -1))
    return "window_size"


REFUSED: dict[str, tuple[Callable[[Model, int], str], str]] = {
    "another option": (another_option, "causal"),
    "gradients": (gradients, "gradients"),
    "another shape": (another_shape, "sink"),
    "known calls": (known_calls, "softcap"),
    "without messages": (without_messages, "softcap"),
    "decoding": (decoding, "window_size"),
}


def refused(scenario: str, rank: int, world: int) -> None:
    """All ranks raise the same error, which names what differs."""
    call, name = REFUSED[scenario]
    model, found = Model(rank, world), ""
    try:
        call(model, world)
        while not model.is_late():  # a GPU waits, and the host goes on
            model.call()
            time.sleep(0.05)
    except ValueError as error:
        found = str(error)
    assert not model.is_late()
    assert found.startswith(f"context parallel: the ranks disagree on {name} in call "), found
    store = dist.distributed_c10d._get_default_store()
    store.set(f"error of {rank}", found)
    assert {store.get(f"error of {peer}").decode() for peer in range(world)} == {found}
    with pytest.raises(ValueError, match=name) as later:
        model.call()
    assert str(later.value) == found


def accepted(rank: int, world: int) -> None:
    """What is up to each rank: caches, which tensors require gradients, when it calls."""
    model = Model(rank, world)
    looked = 2.4 * watch.PERIOD  # seconds after which every rank has looked at the others' calls
    for _ in range(3):
        x = torch.randn(3, 1, model.layout.local_tokens, 2, 8, device=DEVICE)
        q, k, v = x.unbind()
        (q, k, v)[rank % 3].requires_grad_()
        model.parallel.attention(q, k, v, model.layout, causal=True).sum().backward()
        if rank == 0:
            flashtile.clear_caches()
            time.sleep(looked)
    with pytest.raises(ValueError, match="rank 0: softcap"):  # all compare, and go on
        model.call(softcap=-1.0 if rank == 0 else 1.0)
    time.sleep(looked)
    for _ in range(2):
        model.call(**({"causal": False} if rank == 0 else {}))  # the default
        time.sleep(looked)
        model.call(softcap=1.0)
        model.call(model.of_documents(world))
    dist.barrier()


if __name__ == "__main__":
    watch.PERIOD = 0.2
    rank, world, rendezvous, scenario = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    if scenario == "accepted":
        accepted(rank, world)
    else:
        refused(scenario, rank, world)
