"""The backends, one folder each. A backend never imports another one.

A backend module has

- ``HINTS``: the performance hints that it honours;
- ``unsupported_reasons(problem) -> list[str]``: plain sentences with the value and the limit; empty
  if the backend can run the problem;
- ``describe_plan(problem) -> str``: what it would run, for `explain`;
- ``forward(problem, operands) -> (out, lse)``;
- ``backward(problem, operands, out, lse, dout, dlse) -> Gradients``;
- ``probabilities(problem, operands, lse) -> probs``.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from ..problem import AttentionProblem, Operands


class Gradients(NamedTuple):
    """Gradients in the order of `Operands`; None if there is no such operand."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None  # also None if it is not needed (`problem.bias_needs_grad`)
    dsink: Tensor | None


class Backend(Protocol):
    """The interface of a backend's module."""

    HINTS: tuple[str, ...]

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        """Why this backend cannot run `problem`."""

    def describe_plan(self, problem: AttentionProblem) -> str:
        """What this backend would run."""

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse)."""

    def backward(
        self,
        problem: AttentionProblem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> Gradients:
        """Gradients of (out, lse) with cotangents `dout`, `dlse`."""

    def probabilities(self, problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
        """Softmax probabilities, negative where dropped."""


_loaded: dict[str, Backend] = {}


def load(name: str) -> Backend:
    """The backend module `name`, imported once; the first launch imports its kernels."""
    if name not in _loaded:
        _loaded[name] = cast(Backend, import_module(f".{name}", __name__))
    return _loaded[name]
