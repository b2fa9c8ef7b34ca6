"""Which strategy a call runs by: the cheapest of three, or what the caller asks for.

- Gather: every rank fetches the keys that its queries see.
- Ulysses inside a node: the ranks of a node exchange tokens for heads, keys are gathered across
  nodes.
- Ulysses over all ranks: they exchange tokens for heads, and no keys travel.

The price is what the slowest rank takes for its scores and exchanges in both passes, without
overlap. It knows neither stragglers nor congestion, nor the masks that are on a device (spans).
`benchmarks.context.cost_model` prices all strategies in detail: on up to 8 ranks the best of these
three is within a few percent of the best of all. All ranks price the same facts, so they agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from math import gcd
from typing import Literal, NamedTuple

import torch

from ..lru import memoised
from ..masks import Visibility
from .collectives import Communicator, connect
from .partition import Facts, ShardMap, TileMap, area
from .schedule import distances, keys_received
from .ulysses import merged, share_heads

Number = int | Literal["auto"]

FLOAT32 = 4
SAMPLES = 8  # parts of a piece, in each of which the number of visible keys changes linearly
MOST_ROWS = 32  # of a table


class Strategy(NamedTuple):
    """How the ranks run a call."""

    ulysses: int  # neighbours that exchange tokens for heads
    stages: int  # exchanges in which the keys of the other ranks arrive
    head_groups: int  # groups of key heads, which take turns

    def __str__(self) -> str:
        """In the words of the arguments of `ContextParallel`."""
        return f"ulysses={self.ulysses}, stages={self.stages}, head_groups={self.head_groups}"


class Requested(NamedTuple):
    """What the caller asks for."""

    ulysses: Number
    stages: Number
    head_groups: int | None
    stage_tokens: int | None  # the most keys of other ranks in one exchange; None is any number

    def checked(self, ranks: int) -> Requested:
        """Itself.

        Raises:
            ValueError: a number does not fit the ranks.
        """
        neighbours = 1 if self.ulysses == "auto" else self.ulysses
        if not _is_number(neighbours) or neighbours < 1 or ranks % neighbours:
            raise ValueError(
                f"ulysses: got {self.ulysses!r}, want a divisor of {ranks} ranks or 'auto'"
            )
        stages = 1 if self.stages == "auto" else self.stages
        if not _is_number(stages) or not 1 <= stages <= ranks // neighbours:
            raise ValueError(
                f"stages: got {self.stages!r}, want 1 to {ranks // neighbours} or 'auto'"
            )
        for name in ("head_groups", "stage_tokens"):
            number = getattr(self, name)
            if number is not None and (not _is_number(number) or number < 1):
                raise ValueError(f"{name}: got {number!r}, want at least 1")
        return self


class Workload(NamedTuple):
    """The facts of a call that strategies are priced by."""

    machine: Machine
    heads: tuple[int, int]  # of queries and of keys
    head_dims: tuple[int, int, int]  # of queries, keys and values
    sizes: tuple[int, int]  # bytes of q, k, v and out, and of dK and dV as they are sent
    queries: ShardMap
    keys: ShardMap
    facts: Facts
    tiles: TileMap | None = None

    def held_by_groups(self, ulysses: int) -> tuple[ShardMap, ShardMap]:
        """The queries and keys of each group of `ulysses` neighbouring ranks, which pool theirs."""
        if ulysses == 1:
            return self.queries, self.keys
        groups = [range(first, first + ulysses) for first in range(0, self.queries.ranks, ulysses)]
        queries = merged(self.queries, groups)
        return queries, queries if self.keys == self.queries else merged(self.keys, groups)

    def scores(self, queries: ShardMap, rank: int) -> float:
        """About how many scores one head of a rank's queries has; all of partial tiles."""
        total = 0.0
        for document, start, stop in queries.pieces[rank]:
            visibility = Visibility(
                self.facts, queries.lengths[document], self.keys.lengths[document]
            )
            tile = 1 if self.tiles is None else self.tiles.BM
            step = -(-(stop - start) // (SAMPLES * tile)) * tile
            for first in range(start, stop, step):
                last = min(first + step, stop)
                total += area(visibility, self.tiles, document, first, last)
        return total


def select_strategy(requested: Requested, workload: Workload) -> Strategy:
    """The candidate with the smallest price.

    Raises:
        ValueError: `head_groups` does not divide the key heads of a rank, or no strategy keeps to
            `stage_tokens`.
    """
    strategies = candidates(requested, workload)
    if len(strategies) == 1:
        return strategies[0]
    return min(strategies, key=lambda strategy: (seconds(strategy, workload), strategy))


def candidates(requested: Requested, workload: Workload) -> list[Strategy]:
    """For each number of neighbours, the strategy with the fewest stages, and then the fewest
    groups of heads, that keeps to `stage_tokens`.

    Raises:
        ValueError: as `select_strategy`.
    """
    if requested.ulysses != "auto":
        degrees = [requested.ulysses]
    else:  # no neighbours exchange heads, those of a node do, or all ranks
        ranks, (query_heads, key_heads) = workload.queries.ranks, workload.heads
        inside = gcd(ranks, workload.machine.node, key_heads)
        everyone = ranks if ranks <= query_heads else gcd(ranks, key_heads)
        stages = 1 if requested.stages == "auto" else requested.stages
        degrees = [n for n in sorted({1, inside, everyone}) if n <= ranks // stages]
    every = [list(_strategies(requested, workload, ulysses)) for ulysses in degrees]
    if not any(every):
        sizes = {n for ulysses in degrees for n in _key_heads(workload, ulysses)}
        raise ValueError(
            f"head_groups: got {requested.head_groups}, want a divisor of the key heads of every "
            f"rank, {sorted(sizes)}"
        )
    limit = requested.stage_tokens
    if limit is None:
        return [strategies[0] for strategies in every if strategies]
    buffered = {s: keys_at_once(s, workload) for strategies in every for s in strategies}
    fitting = [[s for s in strategies if buffered[s] <= limit] for strategies in every]
    if not any(fitting):
        raise ValueError(
            f"stage_tokens: got {limit}, want at least {-(-min(buffered.values()) // 1):.0f} in "
            "this layout"
        )
    return [strategies[0] for strategies in fitting if strategies]


def _strategies(requested: Requested, workload: Workload, ulysses: int) -> Iterator[Strategy]:
    """Those with so many neighbours, fewest stages and groups first."""
    counts = _key_heads(workload, ulysses)
    groups = [g for g in range(1, min(counts) + 1) if all(n % g == 0 for n in counts)]
    if requested.head_groups is not None:
        groups = [g for g in groups if g == requested.head_groups]
    ranks = workload.queries.ranks // ulysses
    if requested.stages != "auto":
        stages = [requested.stages]
    else:  # 1, and one more than powers of two up to one stage for every rank
        doubled = [1 + (1 << n) for n in range(ranks.bit_length())]
        stages = sorted({1, ranks, *(number for number in doubled if number < ranks)})
    for number in stages:
        for group in groups if ranks > 1 else groups[:1]:
            yield Strategy(ulysses, number, group)


def keys_at_once(strategy: Strategy, workload: Workload) -> float:
    """The most keys of others that a rank fetches in one exchange, in units of a key with all
    heads."""
    mask = workload.facts, workload.tiles
    received = keys_received(*workload.held_by_groups(strategy.ulysses), mask)
    share = max(_key_heads(workload, strategy.ulysses)) / workload.heads[1] / strategy.head_groups
    return share * max(
        sum(row[(rank - distance) % len(received)] for distance in away)
        for away in distances(len(received), strategy.stages)
        for rank, row in enumerate(received)
    )


def seconds(strategy: Strategy, workload: Workload) -> float:
    """What the slowest rank takes for its scores and exchanges in both passes. Stages and groups of
    heads have the price of one exchange."""
    machine, ulysses = workload.machine, strategy.ulysses
    counts = [share.counts for share in share_heads(*workload.heads, ulysses)]
    query_heads, key_heads = (max(heads) for heads in zip(*counts, strict=True))
    D, _, Dv = workload.head_dims
    # Two matrix products in the forward, five in the backward.
    score = 2 * (D + Dv) / machine.forward + 2 * (3 * D + 2 * Dv) / machine.backward
    of_key = key_heads * sum(workload.head_dims[1:])
    element, gradient = workload.sizes
    queries, keys = workload.held_by_groups(ulysses)
    received = keys_received(queries, keys, (workload.facts, workload.tiles))
    slowest = 0.0
    for group, row in enumerate(received):
        nodes = [source * ulysses // machine.node for source in range(len(row))]
        inside = sum(n for n, node in zip(row, nodes, strict=True) if node == nodes[group])
        # Keys and values in both passes, and their gradients.
        size = of_key * (2 * element + gradient)
        taken = _exchanges(machine, 3, inside * size, (sum(row) - inside) * size)
        slowest = max(slowest, taken + workload.scores(queries, group) * query_heads * score)
    if ulysses == 1:
        return slowest
    # The exchanges of tokens for heads in both passes: of q, k, v, out and their gradients.
    query_heads, key_heads = workload.heads[0], sum(_key_heads(workload, ulysses))
    tokens = max(map(workload.queries.tokens, range(workload.queries.ranks)))
    size = tokens * query_heads * (D * (element + FLOAT32) + Dv * 2 * element)
    keys_held = max(map(workload.keys.tokens, range(workload.queries.ranks)))
    size += keys_held * key_heads * sum(workload.head_dims[1:]) * (element + gradient)
    near, to_one = min(ulysses, machine.node), size / ulysses
    return slowest + _exchanges(machine, 8, to_one * (near - 1), to_one * (ulysses - near))


def _exchanges(machine: Machine, count: int, inside: float, across: float) -> float:
    """Seconds of some exchanges of so many bytes together, inside the node and across nodes: both
    links work at the same time. Buffers are written and read in memory before and after."""
    if not inside + across:
        return 0.0
    links = machine.inside.seconds(inside / count), machine.across.seconds(across / count)
    return count * (machine.host.exchange + max(links)) + 4 * (inside + across) / machine.memory


def explained(requested: Requested, workload: Workload, strategy: Strategy) -> str:
    """A table of what every rank does, and why it goes by `strategy`."""
    ranks, (query_heads, key_heads) = workload.queries.ranks, workload.heads
    lines = [
        f"{sum(workload.queries.lengths):,} tokens on {ranks} ranks, {query_heads}:{key_heads} "
        f"heads, head dim {workload.head_dims[1]}",
        "rank   tokens  of the scores   keys received",
    ]
    queries, keys = workload.held_by_groups(strategy.ulysses)
    scores = [workload.scores(queries, group) for group in range(queries.ranks)]
    rows = keys_received(queries, keys, (workload.facts, workload.tiles))
    received = [sum(row) for row in rows]
    total = max(sum(scores), 1.0) * query_heads
    shares = share_heads(*workload.heads, strategy.ulysses)
    for rank in range(min(ranks, MOST_ROWS)):
        group, member = divmod(rank, strategy.ulysses)
        query_share, key_share = shares[member].counts
        of_scores = scores[group] * query_share / total
        of_keys = received[group] * key_share / key_heads
        tokens = workload.queries.tokens(rank)
        lines.append(f"{rank:4} {tokens:8,} {of_scores:14.1%} {of_keys:15,.0f}")
    if ranks > MOST_ROWS:
        lines.append(f" ... and {ranks - MOST_ROWS} more")
    fixed = ", ".join(
        f"{name}={number}"
        for name, number in requested._asdict().items()
        if number not in (None, "auto")
    )
    strategies = candidates(requested, workload)
    if len(strategies) == 1:
        return "\n".join(
            [*lines, f"strategy: {strategy}: {'requested' if fixed else 'the only one'}"]
        )
    reason = f"the fastest of {len(strategies)}" + (f" with {fixed}" if fixed else "")
    lines.append(f"strategy: {strategy}: {reason}; estimated ms on {workload.machine.name}:")
    for candidate in strategies:
        lines.append(f"{seconds(candidate, workload) * 1e3:9.3f}  {candidate}")
    return "\n".join(lines)


def _key_heads(workload: Workload, ulysses: int) -> list[int]:
    """The numbers of key heads of the neighbours that have some."""
    counts = (share.counts[1] for share in share_heads(*workload.heads, ulysses))
    return [count for count in counts if count]


def _is_number(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


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


def measured(comm: Communicator, machine: Machine, device: torch.device) -> Machine:
    """`machine` with the links that this group has. All ranks call it, and get the same.

    Inside a node every rank sends to the next one of its node. Between nodes, ranks with the same
    index in their nodes send to each other, all at the same time. A link that the group does not
    have stays as it is.
    """
    connect(comm, device)
    sizes = min(machine.node, comm.ranks)
    first = comm.rank // sizes * sizes
    here = min(sizes, comm.ranks - first)
    index = comm.rank - first
    inside = machine.inside
    if sizes > 1:
        peers = first + (index + 1) % here, first + (index - 1) % here
        inside = _link(comm, device, *peers)
    across = machine.across
    if comm.ranks > sizes:
        peers = (comm.rank + sizes) % comm.ranks, (comm.rank - sizes) % comm.ranks
        across = _link(comm, device, *peers)
    return machine._replace(name=f"{machine.name}, links measured", inside=inside, across=across)


def _link(comm: Communicator, device: torch.device, to: int, source: int) -> Link:
    """The link by which this rank sends to one rank and receives from another."""
    small, large = (_seconds(comm, device, to, source, size) for size in (SMALL, LARGE))
    times = comm.all_gather(torch.tensor([small, large], dtype=torch.float64))
    latency, seconds = (max(float(x[i]) for x in times) for i in range(2))
    return Link(LARGE / max(seconds - latency, seconds / 2), latency)


def _seconds(comm: Communicator, device: torch.device, to: int, source: int, size: int) -> float:
    """The median time of an exchange of `size` bytes, after one that is not counted."""
    if to == comm.rank:
        return 0.0
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        comm.exchange({to: sent}, {source: received}, "a message to measure the link").wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
