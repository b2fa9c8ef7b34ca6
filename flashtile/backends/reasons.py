"""Sentences of `unsupported_reasons` that more than one backend says."""

from __future__ import annotations

import torch

from ..problem import AttentionProblem, dtype_name


def dtype_reasons(problem: AttentionProblem, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """For a backend that takes `dtypes` alone."""
    if problem.dtype in dtypes:
        return []
    names = ", ".join(map(dtype_name, dtypes))
    return [f"dtype {dtype_name(problem.dtype)} (this backend: {names})"]


def head_dim_reasons(
    problem: AttentionProblem, largest: int, largest_value: int | None = None
) -> list[str]:
    """For a backend that takes head dims up to `largest`, of values up to `largest_value` if that
    differs."""
    limits = (
        ("head_dim", problem.D, largest),
        ("value head_dim", problem.Dv, largest_value or largest),
    )
    return [f"{name}={size} (at most {most})" for name, size, most in limits if size > most]


def head_dim_step_reasons(problem: AttentionProblem, step: int, where: str = "") -> list[str]:
    """For a backend, or what it names as `where`, that takes head dims that are multiples of
    `step`."""
    sizes = (("head_dim", problem.D), ("value head_dim", problem.Dv))
    wanted = f"{where}multiples of {step}"
    return [f"{name}={size} ({wanted})" for name, size in sizes if size % step]


def dotted(numbers: tuple[int, int] | None) -> str:
    """A version or a compute capability."""
    return "unknown" if numbers is None else f"{numbers[0]}.{numbers[1]}"
