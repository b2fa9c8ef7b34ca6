"""The time of the first call of a process, with an empty disk cache of kernels and with a full one.

    python -m benchmarks.first_call                      # all cases, some minutes on a GPU
    python -m benchmarks.first_call --cases dense-128    # one of them
    python -m benchmarks.first_call --cases masks        # next to FlexAttention
    python -m benchmarks.first_call --cases quick --warm-runs 1    # about a minute

Every case runs in fresh processes: one with an empty cache, and then some with the cache that it
left. A process passes these stages, each of which ends when the GPU has finished:

    imports        import torch, flashtile
    peer_import    of FlexAttention and most of the compiler that it needs; 0 for flashtile
    device_start   the start of CUDA, and making the inputs
    forward        with the import of the backend and of Triton, which the call does itself, and
                   with making the mask; FlexAttention's also with compiling it
    backward       of a scalar loss, as in training; 0 for a step of decoding
    first_call     forward and backward
    with_import    peer_import and first_call: what a user of FlexAttention waits for
    second_call    forward and backward again

For a case that fails, such as one that does not fit into the GPU's shared memory, the report has
the line that names its error. Each line of the CSV is written as soon as it has been measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # what is imported before the first call is part of the measurement
    from torch import Tensor

STAGES = (
    "imports", "peer_import", "device_start", "forward", "backward", "first_call", "with_import",
    "second_call",
)  # fmt: skip
WARM_RUNS = 5
DISK_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def dense(
    head_dim: int,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    heads: tuple[int, int] = (8, 8),
    has_bias: bool = False,
    **options: Any,
) -> Callable[[], Tensor]:
    """Attention of 4,096 tokens, causal unless `options` say otherwise."""
    import torch

    import flashtile

    made: dict[str, Any] = {
        "device": "cuda", "dtype": getattr(torch, dtype), "requires_grad": True,
    }  # fmt: skip
    tensors = [torch.randn(1, 4096, n, head_dim, **made) for n in (heads[0], heads[1], heads[1])]
    options = {"causal": True} | options
    if has_bias:
        options["bias"] = torch.randn(1, heads[0], 4096, 4096, **made)

    def call() -> Tensor:
        q, k, v = tensors
        return flashtile.attention(q, k, v, **options)

    return call


def packed(head_dim: int, backend: Literal["triton"] | None = None) -> Callable[[], Tensor]:
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
            q, k, v, offsets, offsets, max_seqlen_q=1900, max_seqlen_k=1900, causal=True,
            backend=backend,
        )  # fmt: skip

    return call


def decode(head_dim: int, page_size: int = 4096) -> Callable[[], Tensor]:
    """One new token for each of 16 sequences, whose caches are contiguous or in pages."""
    import torch

    import flashtile

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = zeros(16, 1, 32, head_dim), zeros(16, 1, 8, head_dim), zeros(16, 1, 8, head_dim)
    pages = 16 * 4096 // page_size
    k_cache, v_cache = (zeros(pages, page_size, 8, head_dim) for _ in "kv")
    lengths = torch.full((16,), 4000, device="cuda", dtype=torch.int32)
    table = torch.arange(pages, device="cuda", dtype=torch.int32).view(16, -1)

    def call() -> Tensor:
        return flashtile.attention_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True,
            page_table=table if pages > 16 else None,
        )  # fmt: skip

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


def import_flex() -> None:
    """Import the module and most of what `torch.compile` needs: it imports more in a call."""
    import torch
    import torch._inductor.compile_fx
    from torch.nn.attention.flex_attention import flex_attention

    torch.compile(flex_attention)


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
    "dropout-128": lambda: dense(128, dropout_p=0.1),
    "training-128": lambda: dense(128, heads=(32, 8)),
    "triton-128": lambda: dense(128, backend="triton"),
    "triton-packed-128": lambda: packed(128, backend="triton"),
    "float32-128": lambda: dense(128, "float32"),
    "bias-128": lambda: dense(128, has_bias=True),
    "decode-128": lambda: decode(128),
    "pages-128": lambda: decode(128, page_size=16),
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
    if name.startswith("flex-"):
        import_flex()
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
            # A scalar loss. `out.backward(gradient)` would make PyTorch import sympy to check the
            # gradient's shape, up to 2 s for every library, which no training program waits for.
            # A plain `sum()` would give a gradient with strides of 0, which some kernels copy.
            out.square().sum().backward()
            wait()
        marks.append(time.perf_counter())
    imports, peer, start, forward, backward, *second = (b - a for a, b in pairwise(marks))
    peer = peer if name.startswith("flex-") else 0.0
    first = forward + backward
    times = imports, peer, start, forward, backward, first, peer + first, sum(second)
    return dict(zip(STAGES, times, strict=True))


class Failed(Exception):
    """A process that ended with an error; the line that names it."""


def in_fresh_processes(name: str, warm_runs: int) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """The stages of the process with an empty cache, then those of all that find what it left.

    Raises:
        Failed: a process has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield "cold", [_in_fresh_process(name, folder)]
        if warm_runs:
            yield "warm", [_in_fresh_process(name, folder) for _ in range(warm_runs)]


def _in_fresh_process(name: str, cache: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call", "--measure", name],
        env={**os.environ, **dict.fromkeys(DISK_CACHES, cache)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(_named_error(done.stderr) or f"exit status {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _named_error(stderr: str) -> str:
    """The last line that begins with an error's name, else the last line: hints may follow it."""
    lines = stderr.strip().splitlines()
    named = [x for x in lines if re.match(r"[\w.]+(Error|Exception|OutOfResources)\b", x)]
    return next(reversed(named or lines), "")


def rows(name: str, warm_runs: int) -> Iterator[dict[str, str | int]]:
    """The lines of the CSV for a case: with an empty cache, then medians with a full one. Where a
    process fails, its line says so and is the last one.
    """
    cache = "cold"
    try:
        for cache, runs in in_fresh_processes(name, warm_runs):
            medians = {stage: statistics.median(run[stage] for run in runs) for stage in STAGES}
            timed = {stage: f"{seconds:.4f}" for stage, seconds in medians.items()}
            yield {"case": name, "cache": cache, "runs": len(runs), **timed, "failed": ""}
            cache = "warm"
    except Failed as error:
        empty = dict.fromkeys(STAGES, "")
        yield {"case": name, "cache": cache, "runs": 0, **empty, "failed": str(error)}


def measure(names: list[str], warm_runs: int, output: Path | None) -> None:
    """Print the stages of the cases, medians where the cache is warm; also write them to a CSV."""
    from flashtile.cli.machine import provenance

    from .rows import recorded

    command = recorded(["python", "-m", "benchmarks.first_call"], sys.argv[1:])
    origin = provenance(device(), command)
    columns = ("case", "cache", "runs", *STAGES, "failed", *origin)
    print(f"{'case':23s} {'cache':5s} " + " ".join(f"{stage:>12s}" for stage in STAGES))
    with output.open("w", 1, "utf-8", newline="") if output else nullcontext() as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n") if file else None
        if writer:
            writer.writeheader()
        for name in names:
            for row in rows(name, warm_runs):
                _show(row)
                if writer:  # at once, because the file is buffered by lines
                    writer.writerow(row | origin)


def _show(row: dict[str, str | int]) -> None:
    seconds = " ".join(f"{float(row[stage]):11.3f}s" for stage in STAGES if row[stage])
    shown = f"failed: {row['failed']}" if row["failed"] else seconds
    print(f"{row['case']:23s} {row['cache']:5s} {shown}", flush=True)


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
    parser.add_argument("--csv", type=Path, metavar="FILE", help="CSV file (default: none)")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(stages(chosen.measure)))
    else:
        names = [name for given in chosen.cases for name in GROUPS.get(given, [given])]
        measure(names, chosen.warm_runs, chosen.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
