"""Calls on parts of sequences, as a rank of context parallelism makes them, and what one process
computes for their rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from kernels.parts import runs_of
from torch import Tensor

from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.masks import Positions, Span
from flashtile.problem import Operands, Options
from flashtile.testing import attention_reference, cu_seqlens, generator, normal, qkv

from .score_functions import FUNCTIONS, described

M, N = 420, 450  # of both whole sequences
Spans = tuple[Span, ...]

# Queries and keys of each sequence. Runs begin and end anywhere.
PIECES: dict[str, tuple[tuple[Spans, Spans], ...]] = {
    "zigzag": ((((0, 128), (292, 420)), ((0, 450),)), (((128, 292),), ((0, 322),))),
    "ragged": (
        (((3, 130), (141, 143), (260, 390)), ((0, 90), (100, 131), (200, 450))),
        (((0, 25), (138, 271), (400, 420)), ((20, 21), (133, 277), (401, 450))),
    ),
    "unseen keys": ((((0, 90),), ((0, 60), (200, 450))), (((40, 130), (300, 301)), ())),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (120, 40)},
    "causal window": {"window_size": (90, 0)},
    "softcap": {"softcap": 3.0, "causal": True},
    "causal chunk": {"attention_chunk": 100, "causal": True},
    "sink": {"sink": normal(generator(0), 2), "causal": True},
    "score function": {"score_mod": FUNCTIONS["softcap"], "causal": True},
}


class PartCall(NamedTuple):
    """The call on parts."""

    operands: Operands
    options: Options
    q_index: tuple[Tensor, Tensor]  # sequence and row of each query in the whole
    k_index: tuple[Tensor, Tensor]
    whole: tuple[Tensor, ...]  # q, k, v
    given: dict[str, Any]

    def reference(self, dtype: torch.dtype, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
        """out, lse and gradients of the parts' rows in `dtype`, from the whole sequences, of which
        a bias hides the keys that the parts lack."""
        hidden = torch.full((len(self.whole[1]), 1, 1, N), -torch.inf, dtype=dtype)
        hidden[self.k_index[0], :, :, self.k_index[1]] = 0.0
        leaves = [x.detach().clone().requires_grad_() for x in self.whole]
        given = dict(self.given)
        if "sink" in given:
            given["sink"] = given["sink"].clone().requires_grad_()
            leaves.append(given["sink"])
        found = attention_reference(*leaves[:3], bias=hidden, compute_dtype=dtype, **given)
        out = found.out[self.q_index]
        lse = found.lse.movedim(2, 1)[self.q_index].mT
        wanted = (out * dout.to(dtype)).sum()
        wanted = wanted + (lse.masked_fill(lse == -torch.inf, 0) * dlse.to(dtype)).sum()
        dq, dk, dv, *dsink = torch.autograd.grad(wanted, leaves)
        gradients = (dq[self.q_index], dk[self.k_index], dv[self.k_index], *dsink)
        names = ("out", "lse", "dq", "dk", "dv", "dsink")
        results = zip(names, (out, lse, *gradients), strict=False)
        return {name: x.detach() for name, x in results}


def part_call(parts: str, option: str, D: int, seed: int, **more: Any) -> PartCall:
    """A call of `PIECES` and `OPTIONS`, with two query heads and one key head."""
    given, sides = OPTIONS[option], list(zip(*PIECES[parts], strict=True))
    whole = qkv(generator(seed), B=2, M=M, N=N, Hq=2, Hk=1, D=D, dtype=torch.bfloat16)
    make = described if "score_mod" in given else describe
    operands, options = make(whole, Dense(), given | more)
    indices = [
        torch.tensor([(b, i) for b, spans in enumerate(side) for s in spans for i in range(*s)])
        for side in sides
    ]
    q_index, k_index = (tuple(x.unbind(1)) for x in indices)
    queries, keys = ([Positions.of(spans) for spans in side] for side in sides)
    lengths = [[positions.length for positions in side] for side in (queries, keys)]
    q, k, v = whole
    operands = operands._replace(
        q=q[q_index],
        k=k[k_index],
        v=v[k_index],
        cu_seqlens_q=cu_seqlens(lengths[0]),
        cu_seqlens_k=cu_seqlens(lengths[1]),
        q_runs=runs_of([positions.shifted(N - M) for positions in queries]),
        k_runs=runs_of(keys),
    )
    options = options._replace(max_seqlen_q=max(lengths[0]), max_seqlen_k=max(lengths[1]))
    return PartCall(operands, options, q_index, k_index, whole, given)
