"""What every rank of a call does, and what the cost model expects of it, as a table."""

from __future__ import annotations

from .balance import contiguous
from .choice import Wanted, candidates
from .cost import Price, Pricing, Way

MOST_ROWS = 32  # of the table
OTHERS = 3  # ways that were not chosen


def explained(pricing: Pricing, wanted: Wanted, way: Way) -> str:
    """The report of a call that goes by `way`."""
    shape, machine, ranks = pricing.shape, pricing.machine, pricing.ranks
    tokens = sum(pricing.queries.lengths)
    lines = [
        f"{tokens:,} tokens on {ranks} ranks, {shape.query_heads}:{shape.key_heads} heads, head "
        f"dim {shape.head_dim}; times of a model of {machine.name}, not measured",
        "rank   tokens  of the scores   keys received  calls  forward ms  backward ms",
    ]
    shown = range(min(ranks, MOST_ROWS))
    prices = [pricing.price(way, rank) for rank in shown]
    total = _one_process(pricing)
    scores = total.scores * way.ulysses  # neighbours count those that they compute together
    for rank, price in zip(shown, prices, strict=True):
        lines.append(
            f"{rank:4} {pricing.queries.tokens(rank):8,} {price.scores / max(scores, 1):14.1%} "
            f"{price.received:15,.0f} {price.calls:6} {price.forward * 1e3:11.3f} "
            f"{price.backward * 1e3:12.3f}"
        )
    if ranks > MOST_ROWS:
        lines.append(f" ... and {ranks - MOST_ROWS} more")
    slowest = pricing.slowest(way)
    efficiency = total.seconds / ranks / slowest.seconds if slowest.seconds else 1.0
    lines.append(
        f"one process {_milliseconds(total)}, the slowest rank {_milliseconds(slowest)}: "
        f"efficiency {efficiency:.0%}"
    )
    return "\n".join([*lines, *_why(pricing, wanted, way)])


def _why(pricing: Pricing, wanted: Wanted, way: Way) -> list[str]:
    """The way, and what it was chosen from."""
    ways = list(candidates(wanted, pricing))
    given = [
        f"{name}={number}"
        for name, number in wanted._asdict().items()
        if number not in (None, "auto")
    ]
    if len(ways) == 1:
        return [f"way: {way}: " + ("given" if given else "there is no other")]
    prices = {other: pricing.slowest(other) for other in ways if other != way}
    nearest = sorted(prices, key=lambda other: prices[other].seconds)[:OTHERS]
    lines = [
        f"way: {way}: the fastest of {len(ways)} by the model"
        + (f", given {', '.join(given)}" if given else "")
    ]
    for other in nearest:
        too_much = wanted.stage_tokens is not None and (
            prices[other].buffered > wanted.stage_tokens
        )
        reason = ", more keys at once than stage_tokens" if too_much else ""
        lines.append(f"     {other}: {_milliseconds(prices[other])}{reason}")
    return lines


def _one_process(pricing: Pricing) -> Price:
    """The price of the whole in one process."""
    queries, keys = (contiguous(x.lengths, 1, 1) for x in (pricing.queries, pricing.keys))
    alone = Pricing(pricing.machine, pricing.shape, queries, keys, pricing.facts, pricing.tiles)
    return alone.slowest(Way(1, 1, 1))


def _milliseconds(price: Price) -> str:
    return f"{price.seconds * 1e3:.3f} ms"
