"""Seconds that a strategy of attention over ranks would take: a model, not a measurement.

The package selects one of three strategies by a much simpler price (`distributed.strategy`). This
model compares all of them, for predictions of many GPUs. A strategy says how many ranks exchange
tokens for heads, in how many stages keys travel, and how many groups of heads take turns. The model
prices the schedules that the executor would run:

- a call takes its operations at the machine's rate, plus the launch and what is lost when the last
  tiles end at different times;
- an exchange takes its latency, plus the bytes over the bandwidth; buffers are copied in memory;
- the exchange of a step runs while the step before computes, so the longer one counts; but inside
  a node it takes multiprocessors from the kernels, which then take longer by more than what is
  hidden; the first fetch, the last return of gradients and exchanges for heads are waited for;
- merging partial results takes `MERGE_BYTES` of memory for each element;
- the host needs time for each exchange and call; on an idle GPU, work waits for it.

It knows neither stragglers nor congestion. Of the mask, it knows windows, chunks and the tiles of
block masks, but not spans, which are on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from flashtile.distributed.partition import Facts, ShardMap, TileMap
from flashtile.distributed.schedule import distances
from flashtile.distributed.strategy import Machine, Strategy
from flashtile.distributed.ulysses import HeadShare, merged, share_heads

from .comm_volume import CommVolume, Transfer

MOST_RANKS = 8  # of which schedules are priced: evenly spread over more ranks
TILE_ROWS = 128
FLOAT32 = 4
MERGE_BYTES = 36  # read and written for each element: two products, a sum and a copy


class Shape(NamedTuple):
    """Heads of a call, and the size of its numbers."""

    query_heads: int
    key_heads: int
    head_dim: int
    value_head_dim: int
    element_size: int  # bytes of q, k, v and out
    gradient_size: int = FLOAT32  # bytes of dK and dV as they are sent
    # Wider than the head dim of keys if the scores also read the values.
    query_head_dim: int | None = None

    @property
    def score_dim(self) -> int:
        """The columns of a query."""
        return self.query_head_dim or self.head_dim


class CostEstimate(NamedTuple):
    """What a rank does in one call, and the seconds it takes by the model."""

    scores: float  # visible ones, of one head
    received: float  # keys of other ranks in the forward, in units of a key with all heads
    buffered: float  # the most of them in one exchange
    calls: int  # of the backend in the forward
    forward: float  # seconds
    backward: float

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward + self.backward


class _Stage(NamedTuple):
    """The transfers of one exchange together."""

    scores: float
    received: int  # keys
    # (received, sent) keys, inside the node and across nodes.
    by_link: tuple[tuple[int, int], tuple[int, int]]


class CostModel:
    """Prices of the strategies for calls of one kind.

    Args:
        machine: what the ranks run on.
        shape: of the call.
        queries, keys: who holds which tokens.
        facts: the mask rules.
        tiles: the block mask, of whose partial tiles all scores count.
    """

    def __init__(
        self,
        machine: Machine,
        shape: Shape,
        queries: ShardMap,
        keys: ShardMap,
        facts: Facts,
        tiles: TileMap | None = None,
    ) -> None:
        self.machine, self.shape = machine, shape
        self.queries, self.keys, self.facts, self.tiles = queries, keys, facts, tiles
        self.ranks = queries.ranks
        self._merged: dict[int, tuple[ShardMap, ShardMap]] = {}
        self._volumes: dict[int, CommVolume] = {}
        self._transfers: dict[tuple[int, int], list[Transfer]] = {}
        self._of_heads: dict[tuple[int, int], tuple[float, float]] = {}
        self._stages: dict[tuple[int, int, int], list[_Stage]] = {}

    def shares(self, ulysses: int) -> list[HeadShare]:
        """The heads of every member of a group of neighbours."""
        return share_heads(self.shape.query_heads, self.shape.key_heads, ulysses)

    def slowest(self, strategy: Strategy) -> CostEstimate:
        """The largest of all numbers over the ranks, or over `MOST_RANKS` of them."""
        prices = [self.price(strategy, rank) for rank in self._sampled(strategy.ulysses)]
        return CostEstimate(*(max(column) for column in zip(*prices, strict=True)))

    def at_least(self, strategy: Strategy) -> float:
        """A lower bound of `slowest` in seconds, from one rank: much cheaper for many ranks."""
        return self.price(strategy, self._sampled(strategy.ulysses)[-1]).seconds

    def price(self, strategy: Strategy, rank: int) -> CostEstimate:
        """What one rank does and takes."""
        outer, inner = divmod(rank, strategy.ulysses)
        share = self.shares(strategy.ulysses)[inner]
        query_heads = _count(share.queries) / strategy.head_groups
        key_heads = _count(share.keys) / strategy.head_groups
        stages = self._stages_of(strategy.ulysses, strategy.stages, rank)
        rows = self._shards(strategy.ulysses)[0].tokens(outer)
        per_key = key_heads * (self.shape.head_dim + self.shape.value_head_dim)
        steps = [
            self._step(strategy, stage, rows, query_heads, per_key, is_first=number == 0)
            for number, stage in enumerate(stages)
        ]
        steps *= strategy.head_groups  # which are alike
        share_of_keys = key_heads / self.shape.key_heads
        received = [stage.received * share_of_keys for stage in stages]
        where = strategy.ulysses, rank
        if where not in self._of_heads:
            self._of_heads[where] = self._exchanges_of_heads(*where)
        spread, collected = self._of_heads[where]
        forward, backward = spread + _forward_seconds(steps), collected + _backward_seconds(steps)
        calls = sum(step.calls for step in steps)
        fetches = sum(step.fetch > 0 for step in steps)
        has_heads = spread > 0  # exchanges of q, k, v, out and lse, and of dout, dq, dk and dv
        return CostEstimate(
            sum(stage.scores for stage in stages),
            sum(received) * strategy.head_groups,
            max(received),
            calls,
            self._with_host(forward, 5 * has_heads, fetches, calls),
            self._with_host(backward, 4 * has_heads, 2 * fetches, calls),
        )

    def _with_host(self, seconds: float, of_heads: int, of_keys: int, calls: int) -> float:
        """Seconds of a pass whose work takes `seconds`, with what the host does for it: the mean of
        a pass that follows others, during which the host works ahead, and of one that begins on an
        idle GPU, which waits until two exchanges of keys and the first call have been started.

        Args:
            of_heads, of_keys: numbers of exchanges.
            calls: of the backend.
        """
        first = self._host(of_heads + min(of_keys, 2), min(calls, 1))
        following = max(seconds, self._host(of_heads + of_keys, calls))
        return (following + first + seconds) / 2

    def _host(self, exchanges: int, calls: int) -> float:
        """Seconds that the host needs to start these; none if it starts nothing."""
        host = self.machine.host
        if not exchanges and not calls:
            return 0.0
        return host.call + exchanges * host.exchange + calls * host.attention

    def _step(
        self,
        strategy: Strategy,
        stage: _Stage,
        rows: int,
        query_heads: float,
        per_key: float,
        *,
        is_first: bool,
    ) -> _Step:
        """One exchange and the call on what it brings."""
        machine, shape = self.machine, self.shape
        D, Dv = shape.score_dim, shape.value_head_dim
        scores = stage.scores * query_heads
        has_call = rows > 0 and query_heads > 0 and (is_first or scores > 0)
        tiles = max(1.0, rows / TILE_ROWS * query_heads)
        # Two matrix products in the forward, five in the backward.
        forward = backward = 0.0
        if has_call:
            forward = self._call(2 * (D + Dv) * scores / machine.forward, tiles)
            backward = self._call(2 * (3 * D + 2 * Dv) * scores / machine.backward, tiles)
        if has_call and strategy.stages > 1:
            forward += MERGE_BYTES * rows * query_heads * Dv / machine.memory
        buffer = stage.received * per_key
        copied = 4 * buffer / machine.memory  # read and written, into messages and in order
        forward += copied * shape.element_size
        backward += copied * (shape.element_size + FLOAT32)
        of_fetch, of_back = per_key * shape.element_size, per_key * shape.gradient_size
        fetch, back = self._exchange(stage, of_fetch), self._exchange(stage, of_back)
        delays = self._delay(stage, of_fetch), self._delay(stage, of_back)
        return _Step(forward, backward, fetch, back, *delays, int(has_call))

    def _call(self, seconds: float, tiles: float) -> float:
        """Seconds of a kernel: while the last tiles run, a quarter of a tile is idle on average."""
        tile = seconds * self.machine.processors / tiles
        return max(seconds, tile) + tile / 4 + self.machine.launch

    def _exchange(self, stage: _Stage, size: float) -> float:
        """Seconds of one exchange of keys of `size` bytes: both links work at the same time, and so
        do both directions."""
        inside, across = stage.by_link
        machine = self.machine
        seconds = machine.inside.seconds(max(inside) * size)
        return max(seconds, machine.across.seconds(max(across) * size))

    def _delay(self, stage: _Stage, size: float) -> float:
        """Seconds that kernels take longer while this exchange is under strategy."""
        inside, _ = stage.by_link
        return self.machine.contention * self.machine.inside.seconds(max(inside) * size)

    def _by_link(
        self, rank: int, received: Mapping[int, int], sent: Mapping[int, int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """(received, sent) in all, inside the node and across nodes, from numbers by peer."""
        totals = [[0, 0], [0, 0]]
        node = rank // self.machine.node
        for direction, sizes in enumerate((received, sent)):
            for peer, size in sizes.items():
                if peer != rank:
                    totals[peer // self.machine.node != node][direction] += size
        (a, b), (c, d) = totals
        return (a, b), (c, d)

    def _exchanges_of_heads(self, ulysses: int, rank: int) -> tuple[float, float]:
        """Seconds of the exchanges of tokens for heads in the forward and in the backward."""
        if ulysses == 1:
            return 0.0, 0.0
        shape, shares, inner = self.shape, self.shares(ulysses), rank % ulysses
        members = range(rank - inner, rank - inner + ulysses)

        def seconds(shards: ShardMap, heads: list[int], size: int) -> float:
            """Of one tensor of `size` bytes for each token and head, in either direction."""
            mine = shards.tokens(rank)
            away = {peer: mine * n for peer, n in zip(members, heads, strict=True)}
            here = {peer: shards.tokens(peer) * heads[inner] for peer in members}
            # Copied before and after, as the buffers of keys are.
            copied = 4 * size * sum(here.values()) / self.machine.memory
            return copied + self._exchange(_Stage(0, 0, self._by_link(rank, here, away)), size)

        query_heads = [_count(share.queries) for share in shares]
        key_heads = [_count(share.keys) for share in shares]
        D, Dv, element = shape.head_dim, shape.value_head_dim, shape.element_size
        q = seconds(self.queries, query_heads, shape.score_dim * element)
        out = seconds(self.queries, query_heads, Dv * element)  # and dout
        k = seconds(self.keys, key_heads, D * element)
        v = seconds(self.keys, key_heads, Dv * element)
        dq = seconds(self.queries, query_heads, shape.score_dim * FLOAT32)
        dk = seconds(self.keys, key_heads, D * shape.gradient_size)
        dv = seconds(self.keys, key_heads, Dv * shape.gradient_size)
        return q + k + v + out, out + dq + dk + dv

    def _sampled(self, ulysses: int) -> list[int]:
        """Ranks that stand for all: with every number of heads, of groups that are far apart."""
        members = {share_size(share): inner for inner, share in enumerate(self.shares(ulysses))}
        groups = self.ranks // ulysses
        count = min(groups, MOST_RANKS)
        chosen = sorted({i * (groups - 1) // max(count - 1, 1) for i in range(count)})
        return [group * ulysses + inner for group in chosen for inner in sorted(members.values())]

    def _shards(self, ulysses: int) -> tuple[ShardMap, ShardMap]:
        """The owners of queries and keys, if neighbouring ranks share theirs."""
        if ulysses not in self._merged:
            groups = [range(a, a + ulysses) for a in range(0, self.ranks, ulysses)]
            queries = merged(self.queries, groups)
            same = self.keys == self.queries
            self._merged[ulysses] = queries, queries if same else merged(self.keys, groups)
        return self._merged[ulysses]

    def _stages_of(self, ulysses: int, stages: int, rank: int) -> list[_Stage]:
        """The exchanges of a rank."""
        if (ulysses, stages, rank) not in self._stages:
            outer, inner = divmod(rank, ulysses)
            transfers = self._transfers_of(ulysses, outer)
            found = []
            for away in distances(len(transfers), stages):
                group = [transfers[distance] for distance in away]
                received = {
                    transfer.source * ulysses + inner: transfer.received for transfer in group
                }
                sent = {transfer.target * ulysses + inner: transfer.sent for transfer in group}
                scores = sum(transfer.scores for transfer in group)
                total = sum(received.values())
                found.append(_Stage(scores, total, self._by_link(rank, received, sent)))
            self._stages[ulysses, stages, rank] = found
        return self._stages[ulysses, stages, rank]

    def _transfers_of(self, ulysses: int, outer: int) -> list[Transfer]:
        """What a rank does for those that hold other tokens, by distance."""
        if ulysses not in self._volumes:
            self._volumes[ulysses] = CommVolume(*self._shards(ulysses), self.facts, self.tiles)
        if (ulysses, outer) not in self._transfers:
            self._transfers[ulysses, outer] = self._volumes[ulysses].transfers(outer)
        return self._transfers[ulysses, outer]


class _Step(NamedTuple):
    """Seconds of an exchange and of the call on what it brings."""

    forward: float
    backward: float
    fetch: float
    back: float  # of the gradients to the owners of the keys
    fetch_delay: float  # of kernels that run meanwhile
    back_delay: float
    calls: int


def _forward_seconds(steps: list[_Step]) -> float:
    ahead = [(step.fetch, step.fetch_delay) for step in steps[1:]] + [(0.0, 0.0)]
    pairs = zip(steps, ahead, strict=True)
    computed = sum(max(step.forward + delay, fetch) for step, (fetch, delay) in pairs)
    return steps[0].fetch + computed


def _backward_seconds(steps: list[_Step]) -> float:
    ahead = [(step.fetch, step.fetch_delay) for step in steps[1:]] + [(0.0, 0.0)]
    behind = [(0.0, 0.0)] + [(step.back, step.back_delay) for step in steps[:-1]]
    between = sum(
        max(step.backward + fetch_delay + back_delay, fetch + back)
        for step, (fetch, fetch_delay), (back, back_delay) in zip(steps, ahead, behind, strict=True)
    )
    return steps[0].fetch + between + steps[-1].back


def share_size(share: HeadShare) -> tuple[int, int]:
    """Query heads and key heads of a rank."""
    return _count(share.queries), _count(share.keys)


def _count(heads: slice) -> int:
    return int(heads.stop - heads.start)


def fastest(model: CostModel) -> Strategy:
    """The strategy with the smallest predicted time of a forward and a backward. Only those that
    may be it are priced on all ranks."""
    bounds = {strategy: model.at_least(strategy) for strategy in strategies(model)}
    best: tuple[float, Strategy] | None = None
    for strategy in sorted(bounds, key=lambda strategy: (bounds[strategy], strategy)):
        if best is not None and bounds[strategy] > best[0]:
            break
        found = model.slowest(strategy).seconds, strategy
        best = found if best is None else min(best, found)
    assert best is not None
    return best[1]


def strategies(model: CostModel) -> Iterator[Strategy]:
    """All that fit, but of many stages only some numbers."""
    most = min(model.ranks, model.shape.query_heads)
    for ulysses in (n for n in range(1, most + 1) if model.ranks % n == 0):
        counts = {keys for _, keys in map(share_size, model.shares(ulysses)) if keys}
        groups = [g for g in range(1, min(counts) + 1) if all(n % g == 0 for n in counts)]
        ranks = model.ranks // ulysses
        doubled = [1 + (1 << n) for n in range(ranks.bit_length())]
        for stages in sorted({1, ranks, *(number for number in doubled if number < ranks)}):
            for group in groups if ranks > 1 else groups[:1]:
                yield Strategy(ulysses, stages, group)
