"""Random cases of decoding with a cache over ranks, the same on every rank, and one process."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.distributed import ContextParallel
from flashtile.distributed.decode import BlockCyclic
from flashtile.testing.tolerance import assert_close


class CacheCase:
    """Sequences of odd lengths that grow by a few tokens at a time.

    Args:
        has_int: whether all sequences have one length, which is passed as an int.
    """

    def __init__(
        self, seed: int, ranks: int, dtype: torch.dtype | None = None, has_int: bool = False
    ) -> None:
        rng = random.Random(seed)
        self.g = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.ranks, self.block = ranks, rng.choice([1, 4, 7, 16])
        self.Hk, group, self.D, self.Dv = rng.choice([(1, 7, 8, 8), (2, 2, 16, 16), (4, 2, 8, 12)])
        self.Hq = self.Hk * group
        drawn = rng.choice([torch.float64, torch.float32])
        self.dtype = drawn if dtype is None else dtype
        self.batch = rng.choice([1, 3])
        self.before = [rng.choice([0, 1, 5, 33, 64, 129]) for _ in range(self.batch)]
        self.has_int = has_int
        if has_int:
            self.before = self.before[:1] * self.batch
        # New tokens and queries of every step: also none, and fewer queries than tokens.
        self.steps = [(t, rng.choice([t, t, 1])) for t in rng.choices([0, 1, 3, 9], k=3)]
        self.options: dict[str, Any] = {
            "causal": rng.random() < 0.7,
            "window_size": rng.choice([(-1, -1), (20, -1), (9, 4)]),
            "attention_chunk": rng.choice([0, 0, 16]),
            "softcap": rng.choice([0.0, 3.0]),
        }
        if rng.random() < 0.4:
            rows = () if rng.random() < 0.5 else (self.batch,)
            self.options["alibi_slopes"] = self.draw(*rows, self.Hq).abs().float()
        if rng.random() < 0.4:
            self.options["sink"] = self.draw(self.Hq)
        self.capacity = max(self.before) + sum(t for t, _ in self.steps)
        self.k_cache = self.draw(self.batch, self.capacity, self.Hk, self.D)
        self.v_cache = self.draw(self.batch, self.capacity, self.Hk, self.Dv)
        self.tensors = [
            (
                self.draw(self.batch, queries, self.Hq, self.D),
                self.draw(self.batch, new, self.Hk, self.D),
                self.draw(self.batch, new, self.Hk, self.Dv),
            )
            for new, queries in self.steps
        ]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64).to(self.dtype)

    def whole(self, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
        """(out, lse) of every step in one process, computed in `dtype`."""
        k_cache, v_cache = (x.to(dtype, copy=True) for x in (self.k_cache, self.v_cache))
        lengths = torch.tensor(self.before, dtype=torch.int32)
        options = {n: x.to(dtype) if n == "sink" else x for n, x in self.options.items()}
        results = []
        for q, k, v in self.tensors:
            tensors = (q.to(dtype), k_cache, v_cache, k.to(dtype), v.to(dtype))
            results.append(
                flashtile.attention_with_kvcache(
                    *tensors, cache_seqlens=lengths, return_lse=True, **options
                )
            )
            lengths = lengths + k.shape[1]
        return results

    def on_rank(
        self, parallel: ContextParallel, device: str = "cpu"
    ) -> list[tuple[Tensor, Tensor]]:
        """The same on a rank that has its part of the cache."""
        blocks = BlockCyclic(self.block, self.ranks, parallel.comm.rank)
        rows = int(blocks._replace(rank=0).below(self.capacity))
        own = [p for p in range(self.capacity) if blocks.owner(p) == blocks.rank]
        caches = []
        for x in (self.k_cache, self.v_cache):
            part = x.new_full((self.batch, rows, *x.shape[2:]), float("nan"))  # nobody reads these
            part[:, : len(own)] = x[:, own]
            caches.append(part.to(device))
        lengths = torch.tensor(self.before, dtype=torch.int32, device=device)
        options = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in self.options.items()}
        results = []
        for new in self.tensors:
            q, k, v = (x.to(device) for x in new)
            out, lse = parallel.decode(
                q,
                *caches,
                *((k, v) if k.shape[1] else ()),
                cache_seqlens=int(lengths[0]) if self.has_int else lengths,
                block=self.block,
                return_lse=True,
                **options,
            )
            results.append((out.cpu(), lse.cpu()))
            lengths = lengths + k.shape[1]
        for got, want in zip(caches, self.appended(), strict=True):
            assert torch.equal(got[:, : len(own)].cpu(), want[:, own]), "other rows are written"
        return results

    def appended(self) -> list[Tensor]:
        """The whole caches after all steps."""
        caches = [self.k_cache.clone(), self.v_cache.clone()]
        for sequence, length in enumerate(self.before):
            for _, *new in self.tensors:
                for whole, x in zip(caches, new, strict=True):
                    whole[sequence, length : length + x.shape[1]] = x[sequence]
                length += new[0].shape[1]
        return caches


# A mask that is no span, one of spans, and several queries.
STEPS_OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"window_size": (50, 0)},
    {"attention_chunk": 16, "causal": True, "queries": 2, "new": 2},
]


def compare_repeated_steps(
    comm: Any, options: Mapping[str, Any], has_int: bool, device: str
) -> None:
    """Compare steps of one `ContextParallel`, the latest of which are prepared, with the first step
    of others, bit for bit.

    Args:
        options: of `decode`; also "queries" and "new", how many there are, else 1.

    Raises:
        AssertionError: they differ.
    """
    given = dict(options)
    queries, new = given.pop("queries", 1), given.pop("new", 1)
    g = torch.Generator().manual_seed(1)  # the same on all ranks

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, torch.bfloat16)

    parallel = ContextParallel.over(comm)
    caches = [draw(2, 64, 2, 64) for _ in range(2)]
    for length in range(60, 100, 2):
        q, k, v = draw(2, queries, 4, 64), draw(2, new, 2, 64), draw(2, new, 2, 64)
        lengths = torch.tensor([length, length - 60], dtype=torch.int32, device=device)
        given |= {"cache_seqlens": length if has_int else lengths, "return_lse": True, "block": 8}
        copies = [x.clone() for x in caches]
        first = ContextParallel.over(comm).decode(q, *copies, k, v, **given)
        repeated = parallel.decode(q, *caches, k, v, **given)
        for got, want in zip((*repeated, *caches), (*first, *copies), strict=True):
            assert torch.equal(got, want), f"at {length} tokens"


def compare(case: CacheCase, results: list[list[tuple[Tensor, Tensor]]]) -> None:
    """Compare what the ranks have computed with one process, and with each other bit for bit."""
    exact = 1e-10 if case.dtype == torch.float64 else 2e-5
    for step, want in enumerate(case.whole()):
        for rank, result in enumerate(results):
            for got, expected, first in zip(result[step], want, results[0][step], strict=True):
                torch.testing.assert_close(got.double(), expected, rtol=exact, atol=exact)
                assert torch.equal(got, first), f"rank {rank} has other bits than rank 0"


def compare_rounded(case: CacheCase, results: list[list[tuple[Tensor, Tensor]]]) -> None:
    """The same of ranks that compute in 16 bits, by the rule of `flashtile.testing`."""
    for step, (want, plain) in enumerate(zip(case.whole(), case.whole(case.dtype), strict=True)):
        of_rank = results[0][step]
        for name, got, truth, low in zip(("out", "lse"), of_rank, want, plain, strict=True):
            assert_close(name, got, truth, low, dtype=case.dtype, seed=case.seed)
        for rank, result in enumerate(results):
            assert all(map(torch.equal, result[step], of_rank)), f"rank {rank} has other bits"
