"""What the Triton backend cannot run, and why.

Pure Python, as `plan.py`.
"""

from __future__ import annotations

import torch

from ...gpu import hardware
from ...problem import AttentionProblem
from ..reasons import (
    dotted,
    dtype_reasons,
    head_dim_reasons,
    invariance_reasons,
    score_mod_reasons,
)
from .plan import MAX_HEAD_DIM, MAX_KEY_HEAD_DIM, architecture, device_name
from .unpack_source import untranslatable_unpack

OLDEST_FLOAT8_CAPABILITY = (8, 9)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_LISTED_HEAD_DIM = 256  # with a list of keys for each query
MAX_RUNS = 16  # of positions; a tile reads those of its sequence one after the other


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why the Triton backend cannot run `problem`; empty when it can."""
    reasons, options = [], problem.options
    if problem.device_type != "cuda":
        reasons.append(f"tensors are on {problem.device_type} (this backend: cuda)")
    elif _is_too_old(problem.capability):
        oldest = dotted(hardware.OLDEST_CAPABILITY)
        reasons.append(f"compute capability {dotted(problem.capability)} (at least {oldest})")
    if not hardware.TRITON_IS_INSTALLED:
        reasons.append("the package triton is not installed (pip install triton)")
    reasons += dtype_reasons(problem, DTYPES)
    if problem.has_float8_keys and _lacks_float8(problem.capability):
        oldest = dotted(OLDEST_FLOAT8_CAPABILITY)
        reasons.append(
            f"float8 keys and values on {device_name(problem)} (NVIDIA from {oldest} on)"
        )
    reasons += head_dim_reasons(problem, MAX_KEY_HEAD_DIM, MAX_HEAD_DIM)
    if problem.runs > MAX_RUNS:
        reasons.append(f"parts of sequences in {problem.runs} runs (at most {MAX_RUNS})")
    if problem.runs and (options.alibi_needs_grad or options.relative_bias_needs_grad):
        names = "alibi_slopes and relative_bias"
        reasons.append(f"gradients of {names} over parts of sequences (on a CPU)")
    reasons += score_mod_reasons(problem)
    if options.batch_invariant:
        reasons += invariance_reasons(problem) + _not_invariant(problem)
    reasons += _unpack_reasons(problem)
    if problem.has_key_index:
        reasons += _listed_reasons(problem)
    if problem.D > MAX_HEAD_DIM:
        reasons += _forward_only_reasons(problem)
    if _is_too_wide_to_train(problem):
        reasons.append(
            f"gradients in float32 at head_dim={max(problem.D, problem.Dv)} (at most 256 with the "
            f"99 KiB of shared memory of {device_name(problem)})"
        )
    return reasons


def _unpack_reasons(problem: AttentionProblem) -> list[str]:
    """What the kernels, or those of an older GPU, do not have of a cache format."""
    options = problem.options
    for text, head_dim in ((options.k_unpack, problem.D), (options.v_unpack, problem.Dv)):
        missing = untranslatable_unpack(text, head_dim) if text else ""
        if missing:
            return [f"{missing} in a cache_format (on a CPU)"]
        if "float8_e4m3fn" in text and _lacks_float8(problem.capability):
            oldest = dotted(OLDEST_FLOAT8_CAPABILITY)
            device = device_name(problem)
            return [f"e4m3 in a cache_format on {device} (NVIDIA from {oldest} on)"]
    return []


def _not_invariant(problem: AttentionProblem) -> list[str]:
    """With what a row's bits depend on the tile that the row is in: full tiles of a list or of
    spans come first. dK would read a bias and captured numbers before the first query. Relative
    biases and float8 caches were never tried.
    """
    facts = (
        (problem.has_bias, "a bias"),
        (problem.relative_distance is not None, "a relative_bias"),
        (problem.options.score_mod != "", "a score_mod"),
        (problem.block_tile is not None, "a block_mask"),
        (problem.spans > 0, "a mask of spans"),
        (problem.has_float8_keys, "a float8 cache"),
    )
    return [f"batch_invariant with {what} (on a CPU)" for fact, what in facts if fact]


def _listed_reasons(problem: AttentionProblem) -> list[str]:
    """What the kernels for a list of keys of each query do not have."""
    options = problem.options
    is_cached = problem.page_size or problem.has_cache_rows or problem.has_float8_keys
    head_dim = max(problem.D, problem.Dv)
    facts = (
        (problem.has_alibi, "ALiBi"),
        (problem.has_bias, "a bias"),
        (problem.relative_distance is not None, "a relative_bias"),
        (options.score_mod != "", "a score_mod"),
        (options.dropout_p > 0, "dropout"),
        (problem.block_tile is not None, "a block_mask"),
        (problem.spans > 0, "a mask of spans"),
        (is_cached, "pages, rows of a cache, left pads or a float8 cache"),
        (problem.wants_probabilities, "probabilities"),
        (problem.has_statistics, "return_stats"),
        (options.k_unpack != "", "a cache_format"),
        (head_dim > MAX_LISTED_HEAD_DIM, f"head dims above {MAX_LISTED_HEAD_DIM}"),
    )
    return [f"lists of keys with {what} (on a CPU)" for fact, what in facts if fact]


def _forward_only_reasons(problem: AttentionProblem) -> list[str]:
    """What keys wider than MAX_HEAD_DIM do not support."""
    facts = (
        (problem.needs_grad, "gradients"),
        (problem.wants_probabilities, "probabilities"),
        (problem.has_float8_keys, "float8 keys and values"),
    )
    where = f"at head_dim={problem.D} (forward only, in 16 bits or float32, above {MAX_HEAD_DIM})"
    return [f"{what} {where}" for fact, what in facts if fact]


def _is_too_old(capability: tuple[int, int] | None) -> bool:
    is_old = capability is not None and capability < hardware.OLDEST_CAPABILITY
    return is_old and not hardware.is_rocm()


def _lacks_float8(capability: tuple[int, int] | None) -> bool:
    return hardware.is_rocm() or (capability is not None and capability < OLDEST_FLOAT8_CAPABILITY)


def _is_too_wide_to_train(problem: AttentionProblem) -> bool:
    """Whether the backward does not fit shared memory: above head dim 256, the smallest float32
    tiles of q, k, v and dO take 128 KiB.
    """
    wide = problem.dtype == torch.float32 and max(problem.D, problem.Dv) > 256
    return wide and problem.needs_grad and architecture(problem.capability) == "sm_86"
