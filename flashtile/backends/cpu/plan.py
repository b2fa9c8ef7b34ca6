"""How the CPU backend runs a problem: with PyTorch's kernel if possible, else with plain tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...lru import memoised
from ...problem import FLOAT8, FLOAT8_KEY_BLOCK, AttentionProblem, dtype_name
from ..reasons import head_dim_reasons, invariance_reasons

MAX_HEAD_DIM = 576

# Rows and keys of a plain tile: large enough to hide PyTorch's cost per operation, small enough for
# the cache.
PLAIN_BLOCK_M, PLAIN_BLOCK_N = 256, 256
# The same of a call that is `batch_invariant`: a decoded query is padded to that many rows.
# PyTorch's kernel has blocks of as many rows in calls of up to 191.
WHOLE_BLOCK_M, WHOLE_BLOCK_N = 32, 256
# Rows of a native tile if the mask has a left edge; smaller tiles compute fewer masked scores.
NATIVE_WINDOW_BLOCK_M = 64
# Rows of a native tile under a mask as spans, which is made tile by tile.
NATIVE_SPANS_BLOCK_M = 256
# Rows of a native tile if the bias has to be converted or masked, which copies it tile by tile.
NATIVE_BIAS_BLOCK_M = 256
# With at least this many rows, the native kernel works in blocks of 256 rows; else in smaller ones.
NATIVE_LARGE_BLOCKS = 768
KERNEL_KEYS = 512  # the native kernel visits keys, and skips masked ones, in blocks of this many
# Smallest native tile, in rows, of a 16-bit backward, which rounds after every block of rows.
NATIVE_ROUNDING_BLOCK_M = 1024


class Plan(NamedTuple):
    """Kernel and tiles of one pass."""

    # "native" (PyTorch's kernel on the unmasked pieces), "plain" (tiles.py), "native whole" and
    # "whole" (the same two in whole_tiles.py) or "float8" (float8.py)
    kernel: str
    compute_dtype: torch.dtype
    BLOCK_M: int
    BLOCK_N: int  # unused by the native kernel, which tiles the keys itself
    reasons: tuple[str, ...]  # why the native kernel cannot run the problem


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why the CPU backend cannot run `problem`; empty when it can."""
    reasons = []
    if problem.device_type not in ("cpu", "meta"):  # meta tensors have only sizes
        reasons.append(f"tensors are on {problem.device_type} (this backend: cpu)")
    if problem.options.batch_invariant:
        reasons += invariance_reasons(problem)
    if problem.has_key_index and problem.spans > 0:
        reasons.append("lists of keys with a mask of spans")
    return reasons + head_dim_reasons(problem, MAX_HEAD_DIM)


@memoised(1024)
def plan_forward(problem: AttentionProblem) -> Plan:
    """Kernel and tiles of the forward pass, whether or not it records gradients."""
    return _plan(problem._replace(needs_grad=False, bias_needs_grad=False), "forward", False)


def plan_backward(problem: AttentionProblem, lse_has_grad: bool) -> Plan:
    """Kernel and tiles of the backward pass."""
    return _plan(problem, "backward", lse_has_grad)


def describe_plan(problem: AttentionProblem) -> str:
    """The plan in words, for `explain`."""
    return "\n".join(
        f"{name}: {_describe(plan)}"
        for name, plan in (
            ("forward", plan_forward(problem)),
            ("backward", plan_backward(problem._replace(has_statistics=False), False)),
        )
    )


def _describe(plan: Plan) -> str:
    dtype = dtype_name(plan.compute_dtype)
    if plan.kernel == "native":
        return f"PyTorch's CPU flash kernel on the unmasked pieces, in {dtype}"
    if plan.kernel == "float8":
        return (
            f"tiles of {plan.BLOCK_M} x {plan.BLOCK_N} with the roundings of a GPU's float8 units"
        )
    if plan.kernel == "native whole":
        return (
            f"PyTorch's CPU flash kernel on tiles of {plan.BLOCK_M} x {plan.BLOCK_N} at fixed "
            f"positions, in {dtype} (batch_invariant)"
        )
    if plan.kernel == "whole":
        return (
            f"tiles of {plan.BLOCK_M} x {plan.BLOCK_N} at fixed positions, of one key head at a "
            f"time, in {dtype} (batch_invariant)"
        )
    why = "; ".join(plan.reasons)
    return (
        f"plain tiles of {plan.BLOCK_M} x {plan.BLOCK_N} in {dtype} (not the native kernel: {why})"
    )


@memoised(1024)
def _plan(problem: AttentionProblem, direction: str, lse_has_grad: bool) -> Plan:
    if problem.dtype in FLOAT8 and direction == "forward":
        return Plan("float8", torch.float32, PLAIN_BLOCK_M, FLOAT8_KEY_BLOCK, ())
    reasons = _not_native(problem, lse_has_grad)
    if problem.options.batch_invariant:
        dtype = _compute_dtype(problem, direction, native=False)
        # A bias may need other tiles where log-sum-exps are large, which another row would decide.
        if reasons or problem.has_bias or problem.has_sink:
            return Plan("whole", dtype, WHOLE_BLOCK_M, WHOLE_BLOCK_N, ())
        return Plan("native whole", dtype, WHOLE_BLOCK_M, KERNEL_KEYS, ())
    compute_dtype = _compute_dtype(problem, direction, native=not reasons)
    if reasons:
        return Plan("plain", compute_dtype, PLAIN_BLOCK_M, PLAIN_BLOCK_N, tuple(reasons))
    BLOCK_M = _native_rows(problem, direction == "backward" and compute_dtype.itemsize == 2)
    return Plan("native", compute_dtype, BLOCK_M, max(problem.N, 1), ())


def _native_rows(problem: AttentionProblem, is_rounding: bool) -> int:
    """Rows of a native tile: all of them, unless the visible keys have a left edge or the kernel
    rounds its sums over rows after every block (`is_rounding`).
    """
    options = problem.options
    if is_rounding:
        tiles = max(1, problem.M // NATIVE_ROUNDING_BLOCK_M)
        return max(-(-problem.M // tiles), 1)
    if options.window_left is not None:
        return NATIVE_WINDOW_BLOCK_M
    if problem.spans > 0 or problem.has_key_index:
        return NATIVE_SPANS_BLOCK_M
    if problem.has_bias and (problem.dtype.itemsize == 2 or not _is_square(problem)):
        return NATIVE_BIAS_BLOCK_M
    if options.attention_chunk > 0:  # each chunk is one tile, full or a causal square
        return max(options.attention_chunk, NATIVE_WINDOW_BLOCK_M)
    return max(problem.M, 1)


def _not_native(problem: AttentionProblem, lse_has_grad: bool) -> list[str]:
    """The options of the problem that PyTorch's kernel does not support."""
    options = problem.options
    facts = (
        (problem.dtype in FLOAT8, "float8 inputs"),
        (problem.has_float8_keys, "float8 keys and values"),
        (problem.has_descale, "scales of float8 numbers"),
        (problem.Dv != problem.D, f"value head_dim {problem.Dv} is not {problem.D}"),
        # The kernel masks before it scales, and -inf times a scale of 0 or less is not -inf.
        (options.softmax_scale <= 0, f"softmax_scale {options.softmax_scale} is not positive"),
        (options.softcap > 0, "softcap"),
        (options.dropout_p > 0, "dropout"),
        (problem.has_alibi, "ALiBi"),
        (options.score_mod != "", "a score function"),
        (problem.relative_distance is not None, "a relative bias"),
        (problem.bias_needs_grad, "gradient of the bias"),
        (lse_has_grad, "gradient of the log-sum-exp"),
        (problem.has_statistics, "statistics of rows"),
    )
    return [reason for fact, reason in facts if fact]


def _compute_dtype(problem: AttentionProblem, direction: str, native: bool) -> torch.dtype:
    """float32 for 16-bit inputs, unless a matrix unit of the CPU makes 16-bit products faster.

    Without a matrix unit the kernel converts inside its loops, and converting once outside is
    faster. Pieces are merged in float32, so only a call of a single piece stays in 16 bits.
    """
    if problem.dtype in (torch.float32, torch.float64):
        return problem.dtype
    one_piece = (
        problem.layout == "dense"
        and not problem.is_partial  # its results are added to those of other parts
        and not problem.has_lengths
        and not problem.has_bias
        and not problem.has_sink
        and problem.page_size == 0
        and problem.block_tile is None
        and problem.spans == 0
        and not problem.has_key_index
        and _is_square(problem)
    )
    if not (native and one_piece and problem.dtype == torch.bfloat16):
        return torch.float32
    # AVX512-BF16 without AMX is faster only in the backward of many rows: it takes a fifth less
    # time on Zen 4, but twice as much at 100 rows.
    fast = torch.cpu._is_amx_tile_supported() or (
        direction == "backward"
        and problem.M >= NATIVE_LARGE_BLOCKS
        and torch.cpu._is_avx512_bf16_supported()
    )
    return torch.bfloat16 if fast else torch.float32


def _is_square(problem: AttentionProblem) -> bool:
    """Full attention, or causal attention with as many queries as keys."""
    options = problem.options
    if options.window_left is not None or options.attention_chunk > 0:
        return False
    return options.window_right is None or (options.window_right == 0 and problem.M == problem.N)
