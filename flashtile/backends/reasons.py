"""Sentences of `unsupported_reasons` that backends share."""

from __future__ import annotations

import torch

from ..problem import FLOAT8, AttentionProblem, captured_needs_grad, dtype_name


def dtype_reasons(problem: AttentionProblem, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """For a backend that supports only `dtypes`."""
    if problem.dtype in dtypes:
        return []
    names = ", ".join(map(dtype_name, dtypes))
    return [f"dtype {dtype_name(problem.dtype)} (this backend: {names})"]


def head_dim_reasons(
    problem: AttentionProblem, largest: int, largest_value: int | None = None
) -> list[str]:
    """For a backend that supports head dims up to `largest`, and value head dims up to
    `largest_value` if that differs.
    """
    limits = (
        ("head_dim", problem.D, largest),
        ("value head_dim", problem.Dv, largest_value or largest),
    )
    return [f"{name}={size} (at most {most})" for name, size, most in limits if size > most]


def head_dim_step_reasons(problem: AttentionProblem, step: int, where: str = "") -> list[str]:
    """For a backend that supports only multiples of `step` as head dims; `where` may restrict the
    limit, such as to a dtype.
    """
    sizes = (("head_dim", problem.D), ("value head_dim", problem.Dv))
    wanted = f"{where}multiples of {step}"
    return [f"{name}={size} ({wanted})" for name, size in sizes if size % step]


def shard_reasons(problem: AttentionProblem) -> list[str]:
    """For a backend that attends to whole sequences only."""
    found = []
    if problem.runs:
        found.append(f"parts of sequences in {problem.runs} runs (this backend: whole sequences)")
    elif problem.has_sequences:
        found.append("dropout or a score_mod on parts of sequences (this backend: whole sequences)")
    if problem.is_partial:
        found.append("gradients of a shard in float32 (this backend: the dtype of the inputs)")
    return found


def score_mod_reasons(problem: AttentionProblem) -> list[str]:
    """What the GPU kernels do not have of a score function and its derivative."""
    options = problem.options
    if not options.score_mod:
        return []
    from ..gpu.score_source import untranslatable  # here: most calls have no score function

    for text in filter(None, (options.score_mod, options.score_mod_gradient)):
        missing = untranslatable(text)
        if missing:
            return [f"{missing} in a score_mod or its derivative (on a CPU)"]
    if options.deterministic and captured_needs_grad(options):
        return ["deterministic gradients of what a score_mod captures (on a CPU)"]
    return []


def invariance_reasons(problem: AttentionProblem) -> list[str]:
    """With what no call is `batch_invariant`."""
    options = problem.options
    is_part = problem.runs > 0 or problem.has_sequences or problem.is_partial
    facts = (
        (options.dropout_p > 0, "dropout_p (its mask depends on the place in the batch)"),
        (options.num_splits > 1, "num_splits > 1 (its parts depend on the number of keys)"),
        (problem.dtype in FLOAT8, "float8 queries (a cache may be float8)"),
        (is_part, "parts of sequences (this option: whole sequences)"),
        (options.k_unpack != "", "a cache_format"),
        (problem.has_key_index, "lists of keys (this option: key_blocks of several queries)"),
    )
    return [f"batch_invariant with {what}" for fact, what in facts if fact]


def dotted(numbers: tuple[int, int] | None) -> str:
    """A version or a compute capability as text, such as 9.0."""
    return "unknown" if numbers is None else f"{numbers[0]}.{numbers[1]}"
