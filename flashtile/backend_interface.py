"""What a backend offers, and the types of its arguments and results.

A backend module has

- ``HINTS``: the performance hints that it honours;
- ``defers(problem) -> str``: why other backends that can run the problem come first, empty if they
  do not; None if they never do;
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

A call that is made often keeps its prepared launches: `PreparedForward`, `PreparedBackward`.

A backend whose attention can also append new tokens to a cache has the functions of `Appender`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from .gpu.rows import ALIGNMENT
from .problem import AttentionProblem, NewTokens, Operands, Presence


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

    @property
    def has_those_of_scores(self) -> bool:
        """Whether it has gradients of tensors that scores read."""
        of_scores = self.dbias, self.dcaptured, self.dalibi_slopes, self.drelative_bias
        return any(x is not None for x in of_scores)


class SharedGradients(NamedTuple):
    """Those of `Gradients` to which each part of a call adds its own; None where not needed."""

    dbias: Tensor | None
    dsink: Tensor | None
    dcaptured: Tensor | None
    dalibi_slopes: Tensor | None
    drelative_bias: Tensor | None


Tensors = tuple[Tensor | None, ...]
Results = tuple[Tensor, Tensor]  # (out, lse)
Run = Callable[[Tensors], tuple[Tensor, ...]]  # out, lse, and what else was allocated
RunBackward = Callable[[Tensors], Gradients]


class Backend(Protocol):
    """The interface of a backend's module."""

    HINTS: tuple[str, ...]
    defers: Callable[[AttentionProblem], str] | None

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        """Why this backend cannot run `problem`."""

    def describe_plan(self, problem: AttentionProblem) -> str:
        """What this backend would run."""

    def forward(
        self, problem: AttentionProblem, operands: Operands, into: Results | None = None
    ) -> tuple[Tensor, ...]:
        """(out, lse) and, of a problem with `has_statistics`, the largest capped score and the
        entropy of each row, shaped as lse: see `flashtile.statistics`.

        Every row of a sequence is written; one that sees no key has out 0, lse and largest score
        -inf, and entropy 0. So have the rows of no sequence (behind the last one, or behind
        `seqused_q`).

        Args:
            into: tensors to write them to, with any strides, in the results' dtypes. Their rows of
                no sequence may keep what they hold: the caller fills them.
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


class ForwardMode(Protocol):
    """The further interface of a backend with kernels for forward mode."""

    def tangents(
        self,
        problem: AttentionProblem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        moved: Tensors,
    ) -> Results | None:
        """The tangents of out and lse, from those of the differentiable operands, `moved`; None if
        no kernel has them.
        """


class Measurer(Protocol):
    """The further interface of a backend whose forward has problems with `has_statistics`."""

    def column_sums(
        self, problem: AttentionProblem, operands: Operands, lse: Tensor, into: Tensor
    ) -> None:
        """Add the probabilities of each key to `into`, (batch, heads, seq_k) or (heads, total_k),
        which is 0.
        """


class ScoreGradients(Protocol):
    """The further interface of a backend that computes the gradients of tensors that scores read
    (`AttentionProblem.has_score_gradients`) for one whose backward leaves them out.
    """

    def gradients_of_scores(
        self,
        problem: AttentionProblem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> Gradients:
        """These gradients; those of q, k and v are None."""


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
    ) -> tuple[Tensor, ...]:
        """(out, lse), with `new` appended to the cache in place.

        `operands` has queries that are not rotated yet, and the lengths before the append.
        """


class PreparedForward:
    """The forward of calls whose tensors differ only in their contents and addresses.

    Preparing takes longer than a call, and many calls occur only a few times, so the first calls
    run as any other.
    """

    _FIRST_CALLS = 3

    def __init__(self, problem: AttentionProblem, backend: Backend) -> None:
        self.problem = problem
        self._backend = backend  # the one that `problem` names
        self.presence: Presence | None = None  # of the operands, once a call has been recorded
        self.backward = PreparedBackward(problem, backend)
        # Whether nothing checks its gradients or adds to them.
        self.has_plain_backward = not (
            problem.options.batch_invariant or problem.has_score_gradients
        )
        self._calls = 0
        # Out, lse, and what else was allocated, from the operands, followed by `NewTokens` to
        # append to the cache if the problem is `appending`.
        self.run: Run = self._run_unprepared

    def _run_unprepared(self, tensors: Tensors) -> tuple[Tensor, ...]:
        problem, backend = self.problem, self._backend
        count = len(Operands._fields)
        # Only the optional fields are None.
        operands = Operands(*tensors[:count])  # type: ignore[arg-type]  # its fields
        new = tensors[count:]
        if new:
            tokens = NewTokens(*new)  # type: ignore[arg-type]  # its fields
            appender = cast(Appender, backend)
            results = appender.append_and_forward(problem, operands, tokens)
        else:
            results = backend.forward(problem, operands)
        if self._calls < self._FIRST_CALLS:
            self._calls += 1
            if self._calls == self._FIRST_CALLS:
                self.run = backend.prepared_forward(problem, tensors) or self.run
        return results


class PreparedBackward:
    """The backward of the calls of one `PreparedForward`.

    Their tensors have the same shapes and dtypes. Strides and addresses may differ: those of a
    gradient depend on what made it, and those of saved tensors on hooks that pack them.
    """

    _MOST_FAILURES = 4  # after which it no longer tries: some calls cannot be prepared

    def __init__(self, problem: AttentionProblem, backend: Backend) -> None:
        self._problem, self._backend = problem, backend
        self._failures = 0
        self._last: Any = None  # what is known of the tensors of the last call
        self._known: tuple[Any, RunBackward] | None = None

    def __call__(self, tensors: Tensors, present: tuple[Tensor, ...]) -> Gradients:
        """The gradients.

        Args:
            tensors: the operands, out, lse, dout and dlse.
            present: those of them that are not None.
        """
        facts: list[Any] = [x.data_ptr() % ALIGNMENT for x in present]
        # Asking whether it is contiguous makes no tuple of strides.
        facts += [x.is_contiguous() or x.stride() for x in present]
        known = self._known  # another thread may replace it
        if known is not None and known[0] == facts:
            return known[1](tensors)
        problem, backend = self._problem, self._backend
        *operands, out, lse, dout, dlse = tensors
        assert out is not None and lse is not None and dout is not None
        # Only the optional fields are None.
        given = Operands(*operands)  # type: ignore[arg-type]  # its fields
        gradients = backend.backward(problem, given, out, lse, dout, dlse)
        if self._last != facts:
            self._last = facts
        elif self._failures < self._MOST_FAILURES:
            run = backend.prepared_backward(problem, tensors)
            if run is None:
                self._failures += 1
            else:
                self._known = facts, run
        return gradients
