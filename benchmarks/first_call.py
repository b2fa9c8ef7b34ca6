"""The time of the first call of a process, with an empty disk cache of kernels and with a full one.

    python -m benchmarks.first_call                      # all cases, some minutes on a GPU
    python -m benchmarks.first_call --cases dense-128    # one of them
    python -m benchmarks.first_call --cases masks        # next to FlexAttention
    python -m benchmarks.first_call --cases quick --warm-runs 1    # about a minute

Every case runs in fresh processes: one with an empty cache, and then some with the cache that it
left. The measured call is a forward and backward (or one step of decoding), each of which ends when
the GPU has finished. It includes the import of the backend and of Triton, which the call does
itself, but neither `import torch, flashtile` nor the start of CUDA, which are reported on their
own. The calls with a mask or a score function include making the mask; FlexAttention's include
compiling it, but not its import, which is part of `device_start`.
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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # what is imported before the first call is part of the measurement
    from torch import Tensor

STAGES = ("imports", "device_start", "forward", "backward", "first_call", "second_call")
WARM_RUNS = 5
DISK_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def dense(
    head_dim: int, backend: Literal["triton"] | None = None, causal: bool = True
) -> Callable[[], Tensor]:
    """Attention of 4,096 tokens."""
    import torch

    import flashtile

    tensors = [
        torch.randn(1, 4096, 8, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    ]

    def call() -> Tensor:
        q, k, v = tensors
        return flashtile.attention(q, k, v, causal=causal, backend=backend)

    return call


def packed(head_dim: int) -> Callable[[], Tensor]:
    """Attention of four packed sequences."""
    import torch

    import flashtile

    tensors = [
        torch.randn(4096, 8, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    ]
    offsets = torch.tensor([0, 1000, 1100, 3000, 4096], device="cuda", dtype=torch.int32)

    def call() -> Tensor:
        q, k, v = tensors
        return flashtile.attention_varlen(
            q, k, v, offsets, offsets, max_seqlen_q=1900, max_seqlen_k=1900, causal=True
        )

    return call


def decode(head_dim: int) -> Callable[[], Tensor]:
    """One new token for each of 16 sequences."""
    import torch

    import flashtile

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = zeros(16, 1, 32, head_dim), zeros(16, 1, 8, head_dim), zeros(16, 1, 8, head_dim)
    k_cache, v_cache = zeros(16, 4096, 8, head_dim), zeros(16, 4096, 8, head_dim)
    lengths = torch.full((16,), 4000, device="cuda", dtype=torch.int32)

    def call() -> Tensor:
        return flashtile.attention_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True
        )

    return call


TOKENS, HEADS, REACH = 4096, 8, 128  # of the calls with a mask or a score function
EDGES = 0, 1000, 1100, 3000, TOKENS  # where documents begin


def device() -> str:
    """A GPU if there is one; a CPU is for tests of this file."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def qkv() -> list[Tensor]:
    """q, k and v of one sequence, (1, tokens, heads, 128)."""
    import torch

    return [
        torch.randn(
            1, TOKENS, HEADS, 128, device=device(), dtype=torch.bfloat16, requires_grad=True
        )
        for _ in "qkv"
    ]


def score_function() -> Callable[..., Tensor]:
    """ALiBi as a function of one score."""
    import torch

    slopes = torch.linspace(0.5, 0.01, HEADS, device=device())

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + slopes[h] * (j - i)

    return alibi


def with_score_function() -> Callable[[], Tensor]:
    """Attention with ALiBi as a function."""
    import flashtile

    q, k, v = qkv()
    alibi = score_function()

    def call() -> Tensor:
        return flashtile.attention(q, k, v, causal=True, score_mod=alibi)

    return call


def with_relative_bias() -> Callable[[], Tensor]:
    """Attention with a number for each distance, which has a gradient."""
    import torch

    import flashtile

    q, k, v = qkv()
    table = torch.zeros(HEADS, 2 * REACH + 1, device=q.device, requires_grad=True)

    def call() -> Tensor:
        return flashtile.attention(q, k, v, causal=True, relative_bias=table)

    return call


def with_spans() -> Callable[[], Tensor]:
    """Attention of documents in one sequence."""
    import torch

    import flashtile

    q, k, v = qkv()
    lengths = torch.tensor([EDGES], device=q.device).diff()

    def call() -> Tensor:
        mask = flashtile.Spans.documents_of_lengths(lengths, TOKENS)
        return flashtile.attention(q, k, v, mask=mask)

    return call


def flex(kind: Literal["score function", "relative bias", "spans"]) -> Callable[[], Tensor]:
    """The same by FlexAttention, compiled. Forward only on a CPU, where it has no backward."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv())
    table = torch.zeros(HEADS, 2 * REACH + 1, device=q.device, requires_grad=True)
    ends = torch.tensor(EDGES[1:], device=q.device)
    document = torch.bucketize(torch.arange(TOKENS, device=q.device), ends, right=True)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def in_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document[i] == document[j])

    def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, (j - i).clamp(-REACH, REACH) + REACH]

    mask = in_document if kind == "spans" else causal
    scores = {"score function": score_function(), "relative bias": relative}.get(kind)
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)

    def call() -> Tensor:
        lengths = TOKENS, TOKENS
        block_mask = create_block_mask(mask, None, None, *lengths, device=q.device.type)
        if q.device.type == "cpu":
            with torch.no_grad():
                return compiled(*(x.detach() for x in (q, k, v)), scores, block_mask)
        return compiled(q, k, v, scores, block_mask)

    return call


MASK_CASES: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "score-function-128": with_score_function,
    "flex-score-function-128": partial(flex, "score function"),
    "relative-bias-128": with_relative_bias,
    "flex-relative-bias-128": partial(flex, "relative bias"),
    "spans-128": with_spans,
    "flex-spans-128": partial(flex, "spans"),
}
CASES: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "dense-64": lambda: dense(64),
    "dense-128": lambda: dense(128),
    "dense-256": lambda: dense(256),
    "full-128": lambda: dense(128, causal=False),
    "packed-128": lambda: packed(128),
    "triton-128": lambda: dense(128, backend="triton"),
    "decode-128": lambda: decode(128),
    **MASK_CASES,
}
GROUPS = {
    "masks": list(MASK_CASES),
    "quick": [
        "full-128",
        "dense-128",
        "triton-128",
        "decode-128",
        "score-function-128",
        "spans-128",
    ],
}


def stages(name: str) -> dict[str, float]:
    """Seconds of each of `STAGES` of a case in this process, which has imported nothing yet."""
    marks = [time.perf_counter()]
    import torch

    import flashtile  # noqa: F401  # what the user's program imports

    marks.append(time.perf_counter())
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call = CASES[name]()
    wait()
    marks.append(time.perf_counter())
    for _ in range(2):
        out = call()
        wait()
        marks.append(time.perf_counter())
        if out.requires_grad:
            out.backward(out.detach())
            wait()
        marks.append(time.perf_counter())
    imports, start, forward, backward, *second = (b - a for a, b in pairwise(marks))
    times = imports, start, forward, backward, forward + backward, sum(second)
    return dict(zip(STAGES, times, strict=True))


def in_fresh_processes(name: str, warm_runs: int) -> Iterator[tuple[str, dict[str, float]]]:
    """The stages with an empty cache, then those with the cache that it filled."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + warm_runs):
            command = [sys.executable, "-m", "benchmarks.first_call", "--measure", name]
            done = subprocess.run(
                command,
                env={**os.environ, **dict.fromkeys(DISK_CACHES, folder)},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            yield ("cold", "warm")[number > 0], json.loads(done.stdout.splitlines()[-1])


def measure(names: list[str], warm_runs: int, output: Path | None) -> None:
    """Print the stages of the cases, medians where the cache is warm; also write them to a CSV."""
    from flashtile.cli.machine import provenance

    origin = provenance(device(), "python -m benchmarks.first_call")
    rows = []
    print(f"{'case':23s} {'cache':5s} " + " ".join(f"{stage:>12s}" for stage in STAGES))
    for name in names:
        found: dict[str, list[dict[str, float]]] = {}
        for cache, seconds in in_fresh_processes(name, warm_runs):
            found.setdefault(cache, []).append(seconds)
        for cache, runs in found.items():
            medians = [statistics.median(run[stage] for run in runs) for stage in STAGES]
            print(f"{name:23s} {cache:5s} " + " ".join(f"{x:11.3f}s" for x in medians), flush=True)
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
        choices=[*GROUPS, *CASES],
        default=list(CASES),
        metavar="NAME",
        help=f"of {', '.join(CASES)}, or masks for the last six, or quick for six of all kinds "
        "(default: all)",
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
        names = [name for given in chosen.cases for name in GROUPS.get(given, [given])]
        measure(names, chosen.warm_runs, chosen.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
