"""Which decoding steps over latent keys the kernel runs, and how many programs share a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....gpu.hardware import multiprocessors
from ....gpu.memory import MAX_SPLITS, MOST_PART_ROWS
from ....lru import memoised
from ....problem import AttentionProblem
from ...reasons import dtype_reasons
from ..forward.plan import DTYPES, device_reasons

# Columns of values, and of keys after them.
VALUES, TAIL = 512, 64
HALF = VALUES // 2  # of a warpgroup
# Rows (queries times heads) and keys of a tile.
ROWS, KEYS = 64, 64
PAIR = 2 * KEYS  # a tile for each warpgroup
MOST_QUERIES = 4
# Costs in steps of the KV loop, each a pair of tiles: starting and ending a program; merging parts.
START_STEPS, MERGE_STEPS = 1.5, 2


@dataclass(frozen=True)
class LatentConfig:
    """Compile-time parameters of the kernel."""

    PAGE_SIZE: int  # 0: not paged
    HAS_RIGHT: bool  # causal: the last query sees the last key, the one before all but that


def is_latent(problem: AttentionProblem) -> bool:
    """Whether a call is one for this kernel, which may still lack an option."""
    return problem.has_values_in_keys and problem.D == VALUES + TAIL


def has_few_rows(problem: AttentionProblem) -> bool:
    """Whether most rows of a tile would be padding: Triton has a faster tile for them."""
    return problem.M * problem.Hq <= ROWS // 4


def latent_reasons(problem: AttentionProblem) -> list[str]:
    """Why the kernel cannot run a call on latent keys; empty when it can."""
    options = problem.options
    reasons = device_reasons(problem) + dtype_reasons(problem, DTYPES)
    if problem.Dv != VALUES:
        reasons.append(f"value_head_dim={problem.Dv} of latent keys (this kernel: {VALUES})")
    if problem.Hk != 1:
        reasons.append(f"{problem.Hk} heads of latent keys (this kernel: 1)")
    if not 1 <= problem.M <= MOST_QUERIES:
        reasons.append(f"{problem.M} queries of latent keys (this kernel: 1 to {MOST_QUERIES})")
    if problem.page_size % KEYS:
        reasons.append(f"pages of {problem.page_size} latent keys (multiples of {KEYS})")
    if (options.window_left, options.window_right) not in ((None, None), (None, 0)):
        reasons.append("a window over latent keys")
    not_here = {
        "no sequences, heads or keys": 0 in (problem.B, problem.Hq, problem.N),
        "packed queries": problem.layout != "dense",
        "gradients": problem.needs_grad,
        "probabilities or statistics": problem.wants_probabilities or problem.has_statistics,
        "a softmax_scale of 0 or less": options.softmax_scale <= 0,
        "a score function, softcap, ALiBi, bias or dropout": bool(options.score_mod)
        or options.softcap > 0
        or problem.has_alibi
        or problem.has_bias
        or problem.relative_distance is not None
        or options.dropout_p > 0,
        "a sink": problem.has_sink,
        "a mask or a chunk": problem.has_own_mask or options.attention_chunk > 0,
        "parts of sequences": problem.runs > 0 or problem.has_sequences or problem.is_partial,
        "left pads or rows of a cache": problem.has_cache_rows,
        "float8 keys and values": problem.has_float8_keys or problem.has_descale,
    }
    asked = [f"{name} with latent keys (not in this kernel)" for name, x in not_here.items() if x]
    return reasons + asked


@memoised(4096)
def latent_parts(problem: AttentionProblem, sm_count: int) -> int:
    """How many programs share the keys of a sequence: the caller's number, or the cheapest. A
    multiprocessor runs one program at a time.
    """
    if problem.options.num_splits > 0:
        return problem.options.num_splits
    rows = problem.M * problem.Hq
    programs, steps = problem.B * -(-rows // ROWS), -(-problem.N // PAIR)
    most = min(steps, MAX_SPLITS, max(MOST_PART_ROWS * sm_count // (problem.B * rows), 1))

    def cost(parts: int) -> float:
        rounds = -(-programs * parts // sm_count)
        return rounds * (-(-steps // parts) + START_STEPS) + (MERGE_STEPS if parts > 1 else 0)

    return min(range(1, most + 1), key=cost)


def describe_latent(problem: AttentionProblem) -> str:
    """The plan as text, for `explain`."""
    parts = latent_parts(problem, multiprocessors(torch.device(problem.device_type)))
    shared = f", keys split into {parts} parts" if parts > 1 else ""
    return f"forward of latent keys: tiles of {ROWS} x {KEYS}, a tile of keys has values{shared}"
