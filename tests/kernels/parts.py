"""Calls on parts of sequences, and the same calls on the whole sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.distributed.buffers import rows_before
from flashtile.masks import Positions, Span
from flashtile.problem import NO_RUN, Operands, Options
from flashtile.testing import alibi_slopes, cu_seqlens, generator, normal, qkv

from .cases import random_spans

B, M, N = 2, 90, 100  # of the whole sequences

# Queries and keys of both sequences. Runs begin and end anywhere; the last part has no keys.
RAGGED = (
    ([(3, 30), (41, 43), (60, 90)], [(0, 90)]),
    ([(0, 25), (38, 71), (90, 100)], [(20, 21), (33, 77)]),
)
ONE_RUN = (([(20, 60)], [(50, 90)]), ([(11, 51)], [(0, 70)]))
NO_KEYS = (([(0, 10), (50, 60)], [(80, 90)]), ([(7, 90)], []))
FEW_QUERIES = (([(40, 41), (88, 90)], [(70, 73)]), ([(0, 33), (50, 100)], [(1, 3), (9, 99)]))
EQUAL = (([(0, 20), (70, 90)], [(30, 70)]), ([(10, 45), (60, 70)], [(0, 45)]))

# Runs of keys begin at multiples of 64.
BLOCKS = (([(3, 30), (60, 89)], [(38, 71)]), ([(64, 100)], [(0, 64)]))

PARTS = {
    "full": (RAGGED, {}),
    "causal": (RAGGED, {"causal": True}),
    "one run": (ONE_RUN, {"causal": True}),
    "no keys": (NO_KEYS, {"causal": True}),
    "few queries": (FEW_QUERIES, {"causal": True}),
    "equal lengths": (EQUAL, {"window_size": (30, 3)}),
    "window": (RAGGED, {"window_size": (20, 7)}),
    "left window": (RAGGED, {"window_size": (33, -1)}),
    "window after the query": (RAGGED, {"window_size": (-9, 40)}),
    "chunk": (RAGGED, {"attention_chunk": 13}),
    "causal chunk": (ONE_RUN, {"attention_chunk": 26, "causal": True}),
    "alibi": (RAGGED, {"alibi_slopes": alibi_slopes(generator(1), 2), "causal": True}),
    "spans": (RAGGED, {"mask": random_spans(generator(3), (B, 2, M, 2), N), "causal": True}),
    "softcap and sink": (RAGGED, {"softcap": 2.0, "sink": normal(generator(2), 2)}),
    "dropout": (RAGGED, {"causal": True, "dropout_p": 0.3}),
    "dropout of blocks": (BLOCKS, {"window_size": (70, 0), "dropout_p": 0.3}),
    "rare dropout": (RAGGED, {"causal": True, "dropout_p": 0.03}),
    "rare dropout of blocks": (BLOCKS, {"causal": True, "dropout_p": 0.03}),
    "dropout of few queries": (FEW_QUERIES, {"window_size": (40, 0), "dropout_p": 0.3}),
}


class Parts(NamedTuple):
    """A call on parts, and where its rows are in the whole."""

    operands: Operands
    options: Options
    whole: Operands  # dense; a bias hides the keys that no part has
    whole_options: Options
    q_index: tuple[Tensor, Tensor]  # sequence and row of each query of the parts
    k_index: tuple[Tensor, Tensor]


def make_parts(name: str, dtype: torch.dtype, seed: int, Hk: int = 1) -> Parts:
    """The call of a case, with two query heads."""
    (queries, keys), given = PARTS[name]
    given = dict(given)
    dropout_p = given.pop("dropout_p", 0.0)
    g = generator(seed)
    q, k, v = qkv(g, B=B, M=M, N=N, Hq=2, Hk=Hk, D=16, dtype=dtype)
    q_index, k_index = _index(queries), _index(keys)
    hidden = torch.full((B, 1, 1, N), -torch.inf, dtype=dtype)
    hidden[k_index[0], :, :, k_index[1]] = 0.0
    whole, options = describe((q, k, v), Dense(), given | {"bias": hidden})
    if dropout_p:
        whole = whole._replace(rng_state=torch.tensor([seed, 7]))
        options = options._replace(dropout_p=dropout_p)
    shift = N - M
    lengths = [[sum(b - a for a, b in spans) for spans in side] for side in (queries, keys)]
    positions = [Positions.of(spans) for spans in queries], [Positions.of(s) for s in keys]
    operands = whole._replace(
        q=q[q_index],
        k=k[k_index],
        v=v[k_index],
        bias=None,
        cu_seqlens_q=cu_seqlens(lengths[0]),
        cu_seqlens_k=cu_seqlens(lengths[1]),
        q_runs=runs_of([p.shifted(shift) for p in positions[0]]),
        k_runs=runs_of(positions[1]),
        sequences=torch.tensor([(b, shift) for b in range(B)], dtype=torch.int32),
    )
    if whole.span_starts is not None:
        ends = (whole.span_starts, whole.span_stops)
        packed = (x[q_index[0], :, q_index[1]].transpose(0, 1)[None] for x in ends)
        starts, stops = (rows_before(x, *positions) for x in packed)
        operands = operands._replace(span_starts=starts, span_stops=stops)
    part_options = options._replace(max_seqlen_q=max(lengths[0]), max_seqlen_k=max(lengths[1]))
    return Parts(operands, part_options, whole, options, q_index, k_index)


def runs_of(sequences: list[Positions], width: int = 4) -> Tensor:
    """`Operands.q_runs` of sequences."""
    rows: list[Any] = []
    for positions in sequences:
        used = [(run.row, run.position) for run in positions.runs]
        rows.append(used + [(NO_RUN, 0)] * (width - len(used)))
    return torch.tensor(rows, dtype=torch.int32)


def _index(sides: tuple[list[Span], ...]) -> tuple[Tensor, Tensor]:
    rows = [(b, i) for b, spans in enumerate(sides) for span in spans for i in range(*span)]
    return tuple(torch.tensor(rows, dtype=torch.int64).view(-1, 2).unbind(1))
