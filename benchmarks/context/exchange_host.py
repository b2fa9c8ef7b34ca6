"""What an exchange of two messages costs the host and the GPU, by the function of PyTorch that
starts it.

``torchrun --nproc-per-node 2 -m benchmarks.context.exchange_host``

Each call is repeated without waiting for the GPU, so the host's time is that of starting it. The
time of the GPU is that of many calls in a row, which is the host's if that is longer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from .together import Team, connected

CALLS, ROUNDS = 50, 6

Exchange = Callable[[], object]


def exchanges(send: Tensor, receive: Tensor) -> dict[str, Exchange]:
    """Ways to send `send` to the other of two ranks and to fill `receive`, without waiting on the
    host. Later work of the current stream sees what has arrived."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    group = dist.distributed_c10d._get_default_group()
    nothing = send.new_empty(0)
    into = [nothing, nothing]
    out = [nothing, nothing]
    into[peer], out[peer] = send, receive
    splits = [0, 0]
    splits[peer] = send.numel()
    options = AllToAllOptions()
    options.asyncOp = False
    both = send.new_empty(2 * send.numel())

    def batch() -> None:
        operations = [dist.P2POp(dist.irecv, receive, peer), dist.P2POp(dist.isend, send, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def alternating() -> None:
        """Two operations that are not grouped."""
        for function, x in ((dist.send, send), (dist.recv, receive))[:: 1 if rank else -1]:
            function(x, peer)

    def single(is_async: bool) -> None:
        work = dist.all_to_all_single(receive, send, splits, splits, async_op=is_async)
        if work is not None:
            work.wait()

    def own() -> None:
        work = group.alltoall_base(receive, send, splits, splits, options)
        if work is not None:
            work.wait()

    def lists(is_async: bool) -> None:
        work = dist.all_to_all(out, into, async_op=is_async)
        if work is not None:
            work.wait()

    return {
        "all_to_all, asynchronous (as calls do it)": lambda: lists(True),
        "all_to_all, on the current stream": lambda: lists(False),
        "all_to_all_single, asynchronous": lambda: single(True),
        "all_to_all_single, on the current stream": lambda: single(False),
        "the group's own alltoall_base": own,
        "a batch of isend and irecv": batch,
        "send and recv one after the other": alternating,
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(both, send),
        "a copy on this GPU": lambda: receive.copy_(send),
    }


def measured(call: Exchange, finish: Callable[[], None]) -> tuple[float, float]:
    """Microseconds of a call: of the host, and from begin to end of many in a row; the least of
    some rounds."""
    best_host = best = float("inf")
    for _ in range(ROUNDS):
        finish()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        host = time.perf_counter() - started
        finish()
        best_host = min(best_host, host)
        best = min(best, time.perf_counter() - started)
    return best_host / CALLS * 1e6, best / CALLS * 1e6


def main() -> None:
    """Measure, and print a row for each way and size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context.exchange_host")
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 16384])
    args = parser.parse_args()
    device = connected()
    team = Team.of(device)
    if dist.get_world_size() != 2:
        raise SystemExit(f"ranks: got {dist.get_world_size()}, want 2")

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        team.finish()

    for kib in args.kib:
        send, receive = torch.empty(2, kib * 1024, dtype=torch.uint8, device=device)
        for name, call in exchanges(send, receive).items():
            try:
                call()
                host, whole = measured(call, finish)
                row = f"{host:8.0f} us host {whole:8.0f} us in a row"
            except RuntimeError as error:  # not every backend has every way
                row = f"not available: {str(error).splitlines()[0][:60]}"
            if dist.get_rank() == 0:
                print(f"{kib:8,} KiB  {name:44}{row}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
