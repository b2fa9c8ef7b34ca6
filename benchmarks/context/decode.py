"""Decoding over ranks: milliseconds of a step with a divided cache, against one device that has it
all.

``torchrun --nproc-per-node 2 -m benchmarks.context.decode``
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

import flashtile
from flashtile.distributed import ContextParallel

from .timing import Timed, in_turn, median_of
from .together import Team, connected

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def calls_of(batch: int, tokens: int, device: str, team: Team) -> dict[str, Timed]:
    """A step of one device and one of all ranks, each of which has its blocks of the cache."""
    ranks, dtype = dist.get_world_size(), torch.bfloat16 if device == "cuda" else torch.float32
    parallel = ContextParallel()
    torch.manual_seed(0)  # the same on all ranks
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, device=device, dtype=dtype)
    cache = torch.randn(2, batch, tokens, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
    blocks = cache.unflatten(2, (-1, ranks, 64))[:, :, :, dist.get_rank()]
    part = blocks.flatten(2, 3).contiguous()
    alone = partial(flashtile.attention_with_kvcache, q, *cache, cache_seqlens=tokens)
    together = partial(parallel.decode, q, *part, cache_seqlens=tokens)
    torch.testing.assert_close(together(), alone(), atol=1e-2, rtol=1e-2)
    return {"alone": Timed(team, alone, nullcontext), "all": Timed(team, together, nullcontext)}


def main() -> None:
    """Measure, and print a row for each batch."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context.decode")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    device = connected()
    team = Team.of(device)
    for batch in args.batches:
        calls = calls_of(batch, args.tokens, device, team)
        failed = in_turn(team, calls)
        if failed:
            raise SystemExit(str(failed))
        one, every = (median_of(calls[name].steady, max) for name in ("alone", "all"))
        host = median_of(calls["all"].host, max)
        if dist.get_rank() == 0:
            print(
                f"batch {batch}, {args.tokens:,} tokens: one {one:.3f} ms, {dist.get_world_size()} "
                f"ranks {every:.3f} ms ({one / every:.2f}x), host {host:.3f} ms",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
