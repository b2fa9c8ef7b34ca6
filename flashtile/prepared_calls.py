"""Calls that are made often: the backend prepares their launches once and repeats them."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from .backend_interface import Appender, Backend, Gradients, Run, RunBackward, Tensors
from .gpu.rows import ALIGNMENT
from .problem import AttentionProblem, NewTokens, Operands, Presence


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
        self._calls = 0
        # Out, lse, and what else was allocated, from the operands, followed by `NewTokens` to
        # append to the cache if the problem is `appending`.
        self.run: Run = self._run_unprepared

    def _run_unprepared(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
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
