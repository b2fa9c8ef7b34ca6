"""The accuracy of float8 attention and the effect of each technique: the table of
docs/log/float8.md.

    python -m benchmarks.fp8_accuracy                  # emulated on the CPU, ten minutes
    python -m benchmarks.fp8_accuracy --device cuda    # by the kernel

The inputs are those of table 3 of FlashAttention-3 (Shah et al. 2024): N(0, 1) + N(0, 100) *
Bernoulli(0.001), in float16. An error is the root mean square over all elements of the output,
against float64. One head, 4,096 keys; fewer queries, which affects only the spread of the errors.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.cli import integer
from flashtile.ops.quantize.formula import dequantized
from flashtile.problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from flashtile.quantize import rotation
from flashtile.quantize.tensors import rows_of
from flashtile.testing import attention_reference, generator, normal

from .command import Command

HEAD_DIMS = (64, 128, 256)
FOUND = {"head_dim": 8, "scheme": 36, "rmse": 9, "spread": 8}
COLUMNS = {**FOUND, "queries": 7, "keys": 7, "seeds": 5}
NONE: dict[str, Any] = {"scales": "tensor", "hadamard": False}

Attend = Callable[[Tensor, Tensor, Tensor], Any]


def float8(**how: Any) -> Attend:
    """`attention_fp8` with some options."""
    return lambda q, k, v: flashtile.attention_fp8(q, k, v, **how)


def without_rounded_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Q, K and V in float8, and exact weights: the error without the rounding of P."""
    small = flashtile.quantize_qkv(q, k, v, **NONE)
    scales = {name: getattr(small, name) for name in ("q_descale", "k_descale", "v_descale")}
    return attention_reference(*(x.cpu() for x in small[:3]), **scales).out


def rounding_alone(names: str) -> Attend:
    """The error of the default recipe if only `names` of Q, K and V are rounded, and no weight."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        small = flashtile.quantize_qkv(q, k, v)
        R = rotation(q.shape[-1], device=q.device).double()
        rows_q, rows_k = rows_of(q, k, None)
        of_keys = rows_k, FLOAT8_KEY_BLOCK
        blocks = {"q": (rows_q, FLOAT8_QUERY_BLOCK), "k": of_keys, "v": of_keys}
        operands = {"q": q.double(), "k": k.double(), "v": v.double()}
        for name in names:
            x8, descale = getattr(small, name), getattr(small, f"{name}_descale")
            x = dequantized(x8, descale, *blocks[name], torch.float64)
            operands[name] = x if name == "v" else x @ R.mT
        return attention_reference(*(operands[name].cpu() for name in ("q", "k", "v"))).out

    return attend


SCHEMES: dict[str, Attend] = {
    "bfloat16, no float8": lambda *qkv: flashtile.attention(*(x.bfloat16() for x in qkv)),
    "one scale a tensor": float8(**NONE),
    "the same, weights not rounded": without_rounded_weights,
    "per-block scales only": float8(scales="block", hadamard=False),
    "K smoothed only": float8(**NONE, smooth_k=True),
    "V rotated only": float8(**NONE, hadamard_v=True),
    "Q and K rotated only": float8(scales="tensor"),
    "Q and K rotated, per-block scales": float8(),
    "the same, V rotated, K smoothed": float8(hadamard_v=True, smooth_k=True),
    "the default, Q and K rounded alone": rounding_alone("qk"),
    "the default, V rounded alone": rounding_alone("v"),
}


def inputs(
    seed: int, queries: int, keys: int, head_dim: int, outliers: float = 0.001
) -> list[Tensor]:
    """q, k, v of one head; a share of `outliers`."""
    g = generator(seed)
    found = []
    for length in (queries, keys, keys):
        shape = (1, length, 1, head_dim)
        x = normal(g, *shape, dtype=torch.float64)
        rare = torch.rand(shape, generator=g) < outliers
        found.append((x + normal(g, *shape, dtype=torch.float64, scale=10.0) * rare).half())
    return found


def errors(scheme: Attend, runs: list[tuple[list[Tensor], Tensor]], device: str) -> list[float]:
    """The error of a scheme on each of the inputs."""
    found = []
    for qkv, truth in runs:
        out = scheme(*(x.to(device) for x in qkv)).cpu().double()
        found.append((out - truth).square().mean().sqrt().item())
    return found


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """A line for each scheme at each head dim."""
    for head_dim in args.head_dim:
        runs = []
        for seed in range(args.seeds):
            qkv = inputs(seed, args.queries, args.keys, head_dim)
            runs.append((qkv, attention_reference(*qkv).out))
        for name in args.schemes:
            found = errors(SCHEMES[name], runs, args.device)
            mean, spread = statistics.mean(found), statistics.pstdev(found)
            how = args.queries, args.keys, args.seeds
            yield head_dim, name, f"{mean:.4g}", f"{spread:.2g}", *how


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the errors."""
    command = Command("fp8_accuracy", __doc__, device="cpu")
    integer(command, "--queries", 1024, "length of the queries, in tokens")
    integer(command, "--keys", 4096, "length of the keys, in tokens")
    integer(command, "--seeds", 24, "random inputs for each head dim")
    integer(command, "--head-dim", HEAD_DIMS, "sizes of a head, in elements")
    meaning = f"ways to quantize, of {', '.join(map(repr, SCHEMES))} (default: all)"
    command.add_argument(
        "--schemes", nargs="+", choices=SCHEMES, default=SCHEMES, metavar="NAME", help=meaning
    )
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
