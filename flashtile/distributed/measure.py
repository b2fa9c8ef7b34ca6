"""How fast the ranks of a group exchange tensors: measured once, for the cost model."""

from __future__ import annotations

import statistics
import time

import torch

from .machine import Link, Machine
from .wire import Wire, connect

ROUNDS = 5
SMALL, LARGE = 64, 1 << 24  # bytes of a message


def measured(wire: Wire, machine: Machine, device: torch.device) -> Machine:
    """`machine` with the links that this group has. All ranks call it, and get the same.

    Inside a node every rank sends to the next one of its node. Between nodes, ranks with the same
    index in their nodes send to each other, all at the same time. A link that the group does not
    have stays as it is.
    """
    connect(wire, device)
    sizes = min(machine.node, wire.ranks)
    first = wire.rank // sizes * sizes
    here = min(sizes, wire.ranks - first)
    index = wire.rank - first
    inside = machine.inside
    if sizes > 1:
        peers = first + (index + 1) % here, first + (index - 1) % here
        inside = _link(wire, device, *peers)
    across = machine.across
    if wire.ranks > sizes:
        peers = (wire.rank + sizes) % wire.ranks, (wire.rank - sizes) % wire.ranks
        across = _link(wire, device, *peers)
    return machine._replace(name=f"{machine.name}, links measured", inside=inside, across=across)


def _link(wire: Wire, device: torch.device, to: int, source: int) -> Link:
    """The link by which this rank sends to one rank and receives from another."""
    small, large = (_seconds(wire, device, to, source, size) for size in (SMALL, LARGE))
    times = wire.all_gather(torch.tensor([small, large], dtype=torch.float64))
    latency, seconds = (max(float(x[i]) for x in times) for i in range(2))
    return Link(LARGE / max(seconds - latency, seconds / 2), latency)


def _seconds(wire: Wire, device: torch.device, to: int, source: int, size: int) -> float:
    """The median time of an exchange of `size` bytes, after one that is not counted."""
    if to == wire.rank:
        return 0.0
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        wire.exchange({to: sent}, {source: received}, "a message to measure the link").wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
