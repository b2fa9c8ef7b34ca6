"""The CPU backend: always available, with every option."""

from __future__ import annotations

from ...backend_interface import Run, RunBackward, Tensors
from ...problem import AttentionProblem
from .launch import backward, check_indices, column_sums, forward, probabilities
from .plan import describe_plan, unsupported_reasons

HINTS = ()
defers = None

__all__ = [
    "HINTS",
    "backward",
    "check_indices",
    "column_sums",
    "defers",
    "describe_plan",
    "forward",
    "prepared_backward",
    "prepared_forward",
    "probabilities",
    "unsupported_reasons",
]


def prepared_forward(problem: AttentionProblem, tensors: Tensors) -> Run | None:
    """None: on a CPU there are no launches to prepare."""
    return None


def prepared_backward(problem: AttentionProblem, tensors: Tensors) -> RunBackward | None:
    """None: there is nothing to prepare, as in the forward."""
    return None
