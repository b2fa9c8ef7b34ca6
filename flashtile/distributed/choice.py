"""Which way to run a call: the one that the cost model says is fastest, or the caller's own.

All ranks choose from the same facts, so they choose alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from .cost import Pricing, Way, share_size

Number = int | Literal["auto"]


class Wanted(NamedTuple):
    """What the caller asks for; "auto" leaves a number to the cost model."""

    ulysses: Number
    stages: Number
    head_groups: int | None  # None is "auto"
    stage_tokens: int | None  # the most keys of other ranks in one exchange; None is any number

    def checked(self, ranks: int) -> Wanted:
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


def choose(wanted: Wanted, pricing: Pricing) -> Way:
    """The way with the smallest predicted time of a forward and a backward.

    Raises:
        ValueError: `head_groups` does not divide the key heads of a rank, or no way keeps to
            `stage_tokens`.
    """
    ways = list(candidates(wanted, pricing))
    if not ways:
        sizes = [_key_heads(pricing, ulysses) for ulysses in _degrees(wanted, pricing)]
        heads = sorted({count for counts in sizes for count in counts})
        raise ValueError(
            f"head_groups: got {wanted.head_groups}, want a divisor of the key heads of every "
            f"rank, {heads}"
        )
    if len(ways) == 1 and wanted.stage_tokens is None:
        return ways[0]
    if wanted.stage_tokens is None:
        return _fastest(ways, pricing)
    buffered = {way: pricing.slowest(way).buffered for way in ways}
    least = min(buffered.values())
    if least > wanted.stage_tokens:
        raise ValueError(
            f"stage_tokens: got {wanted.stage_tokens}, want at least {-(-least // 1):.0f} in this "
            "layout"
        )
    return _fastest([way for way in ways if buffered[way] <= wanted.stage_tokens], pricing)


def _fastest(ways: list[Way], pricing: Pricing) -> Way:
    """The way with the smallest time. Only ways that may be it are priced on all ranks."""
    bounds = {way: pricing.at_least(way) for way in ways}
    best: tuple[float, Way] | None = None
    for way in sorted(ways, key=lambda way: (bounds[way], way)):
        if best is not None and bounds[way] > best[0]:
            break
        found = pricing.slowest(way).seconds, way
        best = found if best is None else min(best, found)
    assert best is not None
    return best[1]


def candidates(wanted: Wanted, pricing: Pricing) -> Iterator[Way]:
    """The ways that are compared: all that fit, but of many stages only some numbers."""
    for ulysses in _degrees(wanted, pricing):
        counts = _key_heads(pricing, ulysses)
        groups = [g for g in range(1, min(counts) + 1) if all(n % g == 0 for n in counts)]
        if wanted.head_groups is not None:
            groups = [g for g in groups if g == wanted.head_groups]
        ranks = pricing.ranks // ulysses
        stages = [wanted.stages] if wanted.stages != "auto" else _stage_numbers(ranks)
        for number in stages:
            for group in groups if ranks > 1 else groups[:1]:
                yield Way(ulysses, number, group)


def _degrees(wanted: Wanted, pricing: Pricing) -> list[int]:
    """Numbers of neighbours that exchange heads; no more than there are heads."""
    if wanted.ulysses != "auto":
        return [wanted.ulysses]
    stages = 1 if wanted.stages == "auto" else wanted.stages
    most = min(pricing.ranks // stages, pricing.shape.query_heads)
    return [u for u in range(1, most + 1) if pricing.ranks % u == 0]


def _key_heads(pricing: Pricing, ulysses: int) -> list[int]:
    """The numbers of key heads that ranks have."""
    return sorted({keys for _, keys in map(share_size, pricing.shares(ulysses)) if keys})


def _stage_numbers(ranks: int) -> list[int]:
    """1, and one more than powers of two up to one stage for every rank."""
    doubled = [1 + (1 << n) for n in range(ranks.bit_length())]
    return sorted({1, ranks, *(number for number in doubled if number < ranks)})


def _is_number(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
