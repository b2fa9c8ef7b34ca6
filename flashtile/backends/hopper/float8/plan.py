"""Which float8 problems the Hopper backend supports, and with which tiles; pure Python."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ....lru import memoised
from ....problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK, AttentionProblem, dtype_name
from ...reasons import head_dim_step_reasons, shard_reasons
from ..forward.plan import CONSUMER_ROWS, KernelConfig, Tile, is_cached, plan, unsupported_reasons

DTYPE = torch.float8_e4m3fn

# TMA needs rows that start at multiples of 16 bytes.
HEAD_DIM_STEP = 16

# Larger head dim of keys and values, rounded up -> tile. `once` and `held` are not supported.
TILES = {
    64: Tile(3, FLOAT8_KEY_BLOCK, 3, False, "registers", "late"),
    128: Tile(2, FLOAT8_KEY_BLOCK, 2, True, "registers", "freely"),
    256: Tile(2, FLOAT8_KEY_BLOCK, 2, True, "apart", "freely"),
}

# The head dim at which a polynomial computes one exponential in eight: with two consumers at head
# dim 128, the tensor cores and the exponential unit are equally busy. At 64 a third consumer fills
# the gaps, and at 256 the tensor cores are busy for longer.
POLYNOMIAL_HEAD_DIM = 128

# The rows of a consumer share a scale.
assert CONSUMER_ROWS == FLOAT8_QUERY_BLOCK


@dataclass(frozen=True)
class Float8Config(KernelConfig):
    """The compile-time constants of the float8 kernel."""

    HAS_BLOCK_SCALES: bool  # per-block instead of per-head scales
    HAS_POLYNOMIAL: bool  # a polynomial computes one exponential in eight


def float8_reasons(problem: AttentionProblem) -> list[str]:
    """Why the float8 kernel cannot run `problem`; empty when it can."""
    reasons = unsupported_reasons(problem._replace(dtype=torch.bfloat16))
    if problem.dtype != DTYPE:
        name = dtype_name(problem.dtype)
        reasons.append(f"dtype {name} (the float8 kernel: {dtype_name(DTYPE)})")
    reasons += head_dim_step_reasons(problem, HEAD_DIM_STEP, "float8: ")
    reasons += shard_reasons(problem)
    not_here = {
        "ALiBi": problem.has_alibi,
        "sink": problem.has_sink,
        "dropout": problem.options.dropout_p > 0,
        "attention_chunk": problem.options.attention_chunk > 0,
        "block_mask": problem.block_tile is not None,
        "a mask of spans": problem.spans > 0,
        "gradients": problem.needs_grad,
        "statistics": problem.has_statistics,
        "a score_mod that reads more than the score": problem.options.has_indexed_scores,
        "pages, rows or left pads of a cache, or its packed queries": is_cached(problem),
        "a dense batch with lengths": problem.layout == "dense" and problem.has_lengths,
    }
    where = "not in float8 on this backend"
    return reasons + [f"{name} ({where})" for name, asked in not_here.items() if asked]


@memoised(4096)
def float8_plan(problem: AttentionProblem, block_scales: bool) -> Float8Config:
    """The compile-time constants for a problem."""
    head_dim = next(size for size in TILES if max(problem.D, problem.Dv) <= size)
    tile = TILES[head_dim]
    whole = problem._replace(D=head_dim, Dv=head_dim)  # no tail
    options = asdict(plan(whole)) | {
        "BITS": 8,
        "CONSUMERS": tile.consumers,
        "BLOCK_M": tile.consumers * CONSUMER_ROWS,
        "BLOCK_N": tile.BLOCK_N,
        "LAST_KEYS": tile.BLOCK_N,
        "STAGES": tile.stages,
        "Q_SLOTS": tile.consumers * (2 if tile.q == "twice" else 1),
        "HAS_Q_IN_REGISTERS": tile.q == "registers",
        "IS_Q_REUSED": False,
        "IS_ASCENDING": False,  # `Float8Math` goes to the block before
        "HAS_PING_PONG": tile.ping_pong,
        "WAITS": tile.waits,
        "DV": problem.Dv,
    }
    return Float8Config(
        **options,
        HAS_BLOCK_SCALES=block_scales,
        HAS_POLYNOMIAL=head_dim == POLYNOMIAL_HEAD_DIM,
    )


def describe_float8(problem: AttentionProblem) -> str:
    """The plan as text, for `explain`."""
    config = float8_plan(problem, block_scales=False)
    return (
        f"forward in float8: tiles of {config.BLOCK_M} x {config.BLOCK_N}, head dim padded to "
        f"{config.BLOCK_D}, {config.CONSUMERS} consumer warpgroups and a producer warp, "
        f"{config.STAGES} stages"
    )
