"""The time of the first call of a process, with an empty disk cache of kernels and with a full one.

    python -m benchmarks.first_call                      # all cases, about two minutes on a GPU
    python -m benchmarks.first_call --cases dense-128    # one of them

Every case runs in fresh processes: one with an empty cache, and then some with the cache that it
left. The measured call is a forward and backward (or one step of decoding) that ends when the GPU
has finished. It includes the import of the backend and of Triton, which the call does itself, but
neither `import torch, flashtile` nor the start of CUDA, which are reported on their own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

STAGES = ("imports", "device", "first_call", "second_call")
WARM_RUNS = 5


def dense(head_dim: int, backend: Literal["triton"] | None = None) -> Callable[[], None]:
    """A forward and backward of 4,096 tokens."""
    import torch

    import flashtile

    tensors = [
        torch.randn(1, 4096, 8, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    ]

    def call() -> None:
        q, k, v = tensors
        out = flashtile.attention(q, k, v, causal=True, backend=backend)
        out.backward(out.detach())

    return call


def packed(head_dim: int) -> Callable[[], None]:
    """A forward and backward of four packed sequences."""
    import torch

    import flashtile

    tensors = [
        torch.randn(4096, 8, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    ]
    offsets = torch.tensor([0, 1000, 1100, 3000, 4096], device="cuda", dtype=torch.int32)

    def call() -> None:
        q, k, v = tensors
        out = flashtile.attention_varlen(
            q, k, v, offsets, offsets, max_seqlen_q=1900, max_seqlen_k=1900, causal=True
        )
        out.backward(out.detach())

    return call


def decode(head_dim: int) -> Callable[[], None]:
    """One new token for each of 16 sequences."""
    import torch

    import flashtile

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = zeros(16, 1, 32, head_dim), zeros(16, 1, 8, head_dim), zeros(16, 1, 8, head_dim)
    k_cache, v_cache = zeros(16, 4096, 8, head_dim), zeros(16, 4096, 8, head_dim)
    lengths = torch.full((16,), 4000, device="cuda", dtype=torch.int32)

    def call() -> None:
        flashtile.attention_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True
        )

    return call


CASES: dict[str, Callable[[], Callable[[], None]]] = {
    "dense-64": lambda: dense(64),
    "dense-128": lambda: dense(128),
    "dense-256": lambda: dense(256),
    "packed-128": lambda: packed(128),
    "triton-128": lambda: dense(128, backend="triton"),
    "decode-128": lambda: decode(128),
}


def stages(name: str) -> dict[str, float]:
    """Seconds of each of `STAGES` of a case in this process, which has imported nothing yet."""
    marks = [time.perf_counter()]
    import torch

    import flashtile  # noqa: F401  # what the user's program imports

    marks.append(time.perf_counter())
    call = CASES[name]()
    torch.cuda.synchronize()
    for _ in range(2):
        marks.append(time.perf_counter())
        call()
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    spans = (later - earlier for earlier, later in pairwise(marks))
    return dict(zip(STAGES, spans, strict=True))


def in_fresh_processes(name: str, warm_runs: int) -> Iterator[tuple[str, dict[str, float]]]:
    """The stages with an empty cache, then those with the cache that it filled."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + warm_runs):
            command = [sys.executable, "-m", "benchmarks.first_call", "--measure", name]
            done = subprocess.run(
                command,
                env={**os.environ, "TRITON_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            yield ("cold", "warm")[number > 0], json.loads(done.stdout.splitlines()[-1])


def measure(names: list[str], warm_runs: int, output: Path | None) -> None:
    """Print the stages of the cases, medians where the cache is warm; also write them to a CSV."""
    from flashtile.cli.machine import provenance

    origin = provenance("cuda", "python -m benchmarks.first_call")
    rows = []
    print(f"{'case':12s} {'cache':5s} " + " ".join(f"{stage:>12s}" for stage in STAGES))
    for name in names:
        found: dict[str, list[dict[str, float]]] = {}
        for cache, seconds in in_fresh_processes(name, warm_runs):
            found.setdefault(cache, []).append(seconds)
        for cache, runs in found.items():
            medians = [statistics.median(run[stage] for run in runs) for stage in STAGES]
            print(f"{name:12s} {cache:5s} " + " ".join(f"{x:11.3f}s" for x in medians), flush=True)
            timed = {stage: f"{x:.4f}" for stage, x in zip(STAGES, medians, strict=True)}
            rows.append({"case": name, "cache": cache, "runs": len(runs), **timed, **origin})
    if output is not None:
        with output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="NAME",
        help=f"of {', '.join(CASES)} (default: all)",
    )
    parser.add_argument(
        "--warm-runs",
        type=int,
        default=WARM_RUNS,
        metavar="N",
        help="processes that find the kernels on disk (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="CSV file (default: none)")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(stages(chosen.measure)))
    else:
        measure(chosen.cases, chosen.warm_runs, chosen.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
