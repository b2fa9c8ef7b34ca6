"""Drawn shapes: what attention is called with in the field, not only the round sizes of papers.

A seed draws `COUNT` cases. Every quantity is stratified, so that another seed draws other shapes of
the same distribution, and a mean over all cases moves little with the seed:

- masks and packing are counted (`KINDS`): 28 causal, 8 full, 4 windowed (and causal); 13 packed;
- lengths, batches and query heads are log-uniform integers, one from each of `COUNT` equal strata,
  and so are, in four strata, the widths of the windows;
- every head dim and every number of query heads for each key head is drawn as often as any other,
  or once more.

Each quantity is shuffled independently of the others. Where the batch then has more than `TOKENS`
tokens, or the forward more than `OPERATIONS`, the batch shrinks; if one sequence is still too much,
the number of heads does. So the forward takes at most about 7 ms on an H200 and the backward 20 ms.
Only where the fewest heads still exceed this, at head dims and lengths close to the largest, a
forward takes up to 20 ms. A tensor has less than 3 GB.

A packed case has the tokens of its batch, cut into sequences of log-normal lengths. Their median is
a quarter of the drawn length, and none is longer than that length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from random import Random

from .shapes import Case, flops

COUNT = 40
# (mask, packed) -> how many cases.
KINDS = {
    ("causal", False): 19,
    ("causal", True): 9,
    ("full", False): 5,
    ("full", True): 3,
    ("window", False): 3,
    ("window", True): 1,
}
WINDOWS = sum(count for (mask, _), count in KINDS.items() if mask == "window")
LENGTHS, BATCHES, HEADS = (512, 32768), (1, 32), (8, 64)
NARROWEST = 128  # window; the widest is half of the length
HEAD_DIMS = range(64, 257, 16)
GROUPS = (1, 2, 4, 6, 8, 0)  # query heads for each key head; 0: all for a single one
SPREAD = 0.8  # standard deviation of the logarithm of a packed length
TOKENS = 65536
OPERATIONS = 4e12  # of a forward


def draw(seed: int) -> list[Case]:
    """The `COUNT` cases that a seed draws, in bfloat16; their inputs have the same seed."""
    random = Random(seed)
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    widths = iter(_spread(random, WINDOWS))
    facts = zip(
        random.sample(kinds, COUNT),
        _logarithmic(random, LENGTHS),
        _logarithmic(random, BATCHES),
        _logarithmic(random, HEADS),
        _evenly(random, GROUPS),
        _evenly(random, HEAD_DIMS),
        strict=True,
    )
    cases = []
    for (mask, packed), length, batch, wanted, group, head_dim in facts:
        heads_q, heads_kv = _heads(wanted, group)
        case = Case(
            dtype="bfloat16",
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=head_dim,
            head_dim_v=head_dim,
            seqlen_q=length,
            seqlen_k=length,
            causal=mask != "full",
            seed=seed,
        )
        if mask == "window":
            width = _between(NARROWEST, length // 2, next(widths))
            case = replace(case, window=(width - 1, 0), variant=f"window {width}")
        case = _bounded(case, group)
        cases.append(_packed(case, random) if packed else case)
    return cases


def _spread(random: Random, count: int) -> list[float]:
    """A number from each of `count` equal parts of [0, 1), shuffled."""
    return random.sample([(part + random.random()) / count for part in range(count)], count)


def _between(least: int, most: int, share: float) -> int:
    """The integer at `share`, in [0, 1), of the logarithmic scale from `least` to `most`.

    >>> _between(1, 32, 0.0), _between(1, 32, 0.5), _between(1, 32, 0.999)
    (1, 5, 32)
    """
    return int(least * ((most + 1) / least) ** share)


def _logarithmic(random: Random, limits: tuple[int, int]) -> list[int]:
    return [_between(*limits, share) for share in _spread(random, COUNT)]


def _evenly(random: Random, values: Sequence[int]) -> list[int]:
    """`COUNT` of the values, each as often as any other or once more, shuffled."""
    times, remainder = divmod(COUNT, len(values))
    return random.sample([*list(values) * times, *random.sample(values, remainder)], COUNT)


def _heads(wanted: int, group: int) -> tuple[int, int]:
    """Query and key heads of a group size: at most `wanted` query heads, if these suffice for
    `HEADS`.

    >>> _heads(63, 6), _heads(9, 6), _heads(9, 0), _heads(1, 0)
    ((60, 10), (12, 2), (9, 1), (8, 1))
    """
    least, _ = HEADS
    if not group:
        return max(wanted, least), 1
    heads_kv = max(wanted // group, -(-least // group))
    return group * heads_kv, heads_kv


def _bounded(case: Case, group: int) -> Case:
    """The case with a smaller batch, and if that is not enough with fewer heads."""
    of_one_head = flops(replace(case, batch=1, heads_q=1, heads_kv=1), "forward")
    heads = int(OPERATIONS / of_one_head)  # of all sequences together
    batch = min(case.batch, TOKENS // case.seqlen_k, heads // case.heads_q)
    if batch:
        return replace(case, batch=batch)
    heads_q, heads_kv = _heads(heads, group)
    return replace(case, batch=1, heads_q=heads_q, heads_kv=heads_kv)


def _packed(case: Case, random: Random) -> Case:
    """The batch's tokens, as sequences of log-normal lengths."""
    tokens = left = case.batch * case.seqlen_k
    lengths = []
    while left:
        length = round(random.lognormvariate(log(case.seqlen_k / 4), SPREAD))
        lengths.append(max(1, min(length, case.seqlen_k, left)))
        left -= lengths[-1]
    return replace(
        case,
        batch=1,
        seqlen_q=tokens,
        seqlen_k=tokens,
        documents=len(lengths),
        lengths=tuple(lengths),
        variant=f"packed {case.variant}".removesuffix(" dense"),
    )
