"""Decoding over ranks: milliseconds of a step with a divided cache, against one device that has it
all; also of steps that append a token each, whose lengths the host knows or the device.

``torchrun --nproc-per-node 2 -m benchmarks.context.decode``

``--graph`` adds steps in a CUDA graph. ``--profile`` prints what the host of rank 0 does in steps
that append, instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist

import flashtile
from flashtile.distributed import ContextParallel

from .timing import Timed, in_turn, median_of, profile
from .together import Team, connected

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
STEPS = 500  # appended tokens, after which the sequences are cut again
PROFILED = 200

Call = Callable[[], object]


def calls_of(batch: int, tokens: int, device: str) -> dict[str, Call]:
    """A step of one device and those of all ranks, each of which has its blocks of the cache."""
    ranks, dtype = dist.get_world_size(), torch.bfloat16 if device == "cuda" else torch.float32
    parallel = ContextParallel()
    torch.manual_seed(0)  # the same on all ranks
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, device=device, dtype=dtype)
    cache = torch.randn(2, batch, tokens, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
    blocks = cache.unflatten(2, (-1, ranks, 64))[:, :, :, dist.get_rank()]
    part = blocks.flatten(2, 3).contiguous()
    new = torch.randn(2, batch, 1, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
    alone = partial(flashtile.attention_with_kvcache, q, *cache, cache_seqlens=tokens)
    together = partial(parallel.decode, q, *part, cache_seqlens=tokens)
    torch.testing.assert_close(together(), alone(), atol=1e-2, rtol=1e-2)
    # A cache of its own: what is appended here, the calls above must not see.
    step = partial(parallel.decode, q, *part.clone(), *new, causal=True)
    counts = cycle(range(max(tokens - STEPS, 0), tokens - 1))
    lengths = torch.full((batch,), tokens - 1, dtype=torch.int32, device=device)
    return {
        "one": alone,
        "ranks": together,
        "append, int": lambda: step(cache_seqlens=next(counts)),
        "append, tensor": lambda: step(cache_seqlens=lengths),
    }


def captured(step: Call) -> Call:
    """The step as a CUDA graph."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def measure(team: Team, batch: int, tokens: int, has_graph: bool) -> None:
    """Time the calls of a batch in turn and print their times on rank 0.

    The graph ends here. NCCL does not leave a group while there is a graph with its operations.
    """
    calls = calls_of(batch, tokens, team.device)
    if has_graph:
        calls["append, graph"] = captured(calls["append, tensor"])
    timed = {name: Timed(team, call, nullcontext) for name, call in calls.items()}
    failed = in_turn(team, timed)
    if failed:
        raise SystemExit(str(failed))
    if dist.get_rank() == 0:
        print(f"batch {batch}, {tokens:,} tokens, {dist.get_world_size()} ranks", flush=True)
        one = median_of(timed["one"].steady, max)
        for name, row in timed.items():
            steady, host = median_of(row.steady, max), median_of(row.host, max)
            times = f"{steady:8.3f} ms, host {host:.3f} ms ({one / steady:.2f}x)"
            print(f"  {name:16}{times}", flush=True)


def main() -> None:
    """Print a group of lines for each batch."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context.decode")
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    device = connected()
    team = Team.of(device)
    for batch in args.batch_size:
        if args.profile:
            profile(team, calls_of(batch, args.seq_len, device)["append, int"], PROFILED)
        else:
            measure(team, batch, args.seq_len, args.graph)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
