"""How fast machines compute and exchange, by which strategies are priced.

The numbers of GPUs are round ones: rates that attention kernels are known to reach in bfloat16 at
head dim 128, memory and links at what programs usually get of the data sheet. They say which
strategy is likely to be the fastest, not how fast it is. `ContextParallel.measure` replaces the
links by measured ones.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from ..lru import memoised
from .wire import Wire, connect

ROUNDS = 5
SMALL, LARGE = 64, 1 << 24  # bytes of a message


class Link(NamedTuple):
    """A connection between two ranks."""

    bandwidth: float  # bytes per second that a rank sends, and as many that it receives meanwhile
    latency: float  # seconds of an exchange of nothing

    def seconds(self, size: float) -> float:
        """Seconds of one exchange of `size` bytes; none for nothing."""
        return self.latency + size / self.bandwidth if size else 0.0


class Host(NamedTuple):
    """Seconds that the host of a rank needs to start the work of its GPU, which may be done before
    the host is: NCCL and launches take as long for little data as for much."""

    call: float  # of a pass, besides the next two
    exchange: float
    attention: float  # one of the backend

    def seconds(self, exchanges: int, attentions: int) -> float:
        """Seconds of a pass; none if it does nothing."""
        if not exchanges and not attentions:
            return 0.0
        return self.call + exchanges * self.exchange + attentions * self.attention


class Machine(NamedTuple):
    """A rank's processor, and the links between ranks."""

    name: str
    forward: float  # operations per second of attention
    backward: float
    memory: float  # bytes per second
    processors: int  # tiles that are computed at the same time
    launch: float  # seconds that a call of a kernel costs besides its work
    inside: Link  # between ranks of a node
    across: Link  # between nodes
    node: int = 8  # ranks of a node
    host: Host = Host(0.0, 0.0, 0.0)
    contention: float = 0.0  # by how many times its time an exchange in a node delays kernels


# On four H200s, two groups of heads instead of one lengthened the forward kernels by 3.0 times the
# exchange that ran meanwhile, four groups by 4.6 times; on two, two groups by 2.8 times: NCCL runs
# on multiprocessors that a persistent kernel was to have. Not measured on other GPUs.
CONTENTION = 3.0

# Two and four H200 over NCCL: a forward took the host 0.52 and 0.45 ms with one exchange and one
# call of the backend, and 0.75 and 0.92 ms with two of each.
HOST = Host(150e-6, 200e-6, 100e-6)
NVLINK = Link(360e9, 20e-6)
INFINIBAND = Link(45e9, 40e-6)  # 400 Gbit/s for each GPU

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            *("H200", 650e12, 560e12, 4.2e12, 132, 12e-6, NVLINK, INFINIBAND),
            host=HOST,
            contention=CONTENTION,
        ),
        Machine(
            *("H100", 620e12, 530e12, 2.8e12, 132, 12e-6, NVLINK, INFINIBAND),
            host=HOST,
            contention=CONTENTION,
        ),
        Machine(
            *("A100", 190e12, 170e12, 1.7e12, 108, 12e-6),
            *(Link(230e9, 20e-6), Link(22e9, 40e-6)),
            host=HOST,
            contention=CONTENTION,
        ),
        Machine("CPU", 40e9, 30e9, 10e9, 1, 50e-6, Link(1.5e9, 200e-6), Link(1e9, 400e-6), 1 << 30),
    )
}


@memoised(16)
def machine_of(device: torch.device) -> Machine:
    """The machine of the table that a GPU's name contains, such as "NVIDIA H100 80GB HBM3"; an H100
    for other GPUs."""
    if device.type == "cpu":
        return MACHINES["CPU"]
    name = torch.cuda.get_device_name(device)
    return next((machine for part, machine in MACHINES.items() if part in name), MACHINES["H100"])


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
