"""What a backend offers, and the types of its arguments and results.

A backend module has

- ``HINTS``: the performance hints that it honours;
- ``unsupported_reasons(problem) -> list[str]``: plain sentences with the value and the limit; empty
  if the backend can run the problem;
- ``describe_plan(problem) -> str``: what it would run, for `explain`;
- ``forward(problem, operands, into=None) -> (out, lse)``, written to the tensors `into` if given;
- ``prepared_forward(problem, tensors) -> run``: ``run(tensors)`` is the forward of calls like an
  earlier one, whose operands were `tensors`, followed by `NewTokens` if the problem is `appending`;
  None if the backend cannot prepare it;
- ``backward(problem, operands, out, lse, dout, dlse, add_to=None) -> Gradients``, of which `dq` is
  added to `add_to` if given;
- ``prepared_backward(problem, tensors) -> run``: likewise, with the tensors of a backward;
- ``probabilities(problem, operands, lse) -> probs``.

A backend whose attention can also append new tokens to a cache has the functions of `Appender`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from .problem import AttentionProblem, NewTokens, Operands


class Gradients(NamedTuple):
    """Gradients in the order of `Operands`; None if there is no such operand."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None  # also None if it is not needed (`problem.bias_needs_grad`)
    dsink: Tensor | None = None
    # Also None if they are not needed, as `Options` says.
    dcaptured: Tensor | None = None
    dalibi_slopes: Tensor | None = None
    drelative_bias: Tensor | None = None


Tensors = tuple[Tensor | None, ...]
Results = tuple[Tensor, Tensor]  # (out, lse)
Run = Callable[[Tensors], tuple[Tensor, ...]]  # out, lse, and what else was allocated
RunBackward = Callable[[Tensors], Gradients]


class Backend(Protocol):
    """The interface of a backend's module."""

    HINTS: tuple[str, ...]

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        """Why this backend cannot run `problem`."""

    def describe_plan(self, problem: AttentionProblem) -> str:
        """What this backend would run."""

    def forward(
        self, problem: AttentionProblem, operands: Operands, into: Results | None = None
    ) -> Results:
        """(out, lse).

        Args:
            into: tensors to write them to, with any strides, in the results' dtypes. Rows of no
                sequence may keep what they hold.
        """

    def prepared_forward(self, problem: AttentionProblem, tensors: Tensors) -> Run | None:
        """The forward of calls whose tensors have the metadata of `tensors`."""

    def backward(
        self,
        problem: AttentionProblem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        add_to: Tensor | None = None,
    ) -> Gradients:
        """Gradients of (out, lse) with cotangents `dout`, `dlse`.

        Args:
            add_to: a tensor to add dq to, with any strides, in the dtype of `lse` or that of q, to
                which each sum is rounded once, for a problem that `is_partial` and has no whole
                queries; it is the `dq` of the result.
        """

    def prepared_backward(self, problem: AttentionProblem, tensors: Tensors) -> RunBackward | None:
        """The backward of calls whose tensors have the metadata of `tensors`: the operands, out,
        lse, dout and dlse.
        """

    def probabilities(self, problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
        """Softmax probabilities, negative where dropped."""


class IndexChecker(Protocol):
    """The further interface of a backend that refuses indices outside of captured tensors."""

    def check_indices(self, problem: AttentionProblem, operands: Operands) -> None:
        """Raise IndexError if the score function would read outside of a captured tensor."""


class Appender(Protocol):
    """The further interface of a backend that appends new tokens while it attends."""

    def appends(self, problem: AttentionProblem) -> bool:
        """Whether it does so for a `problem` with `appending`."""

    def append_and_forward(
        self, problem: AttentionProblem, operands: Operands, new: NewTokens
    ) -> tuple[Tensor, Tensor]:
        """(out, lse), with `new` appended to the cache in place.

        `operands` has queries that are not rotated yet, and the lengths before the append.
        """
