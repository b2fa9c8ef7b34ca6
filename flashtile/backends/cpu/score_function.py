"""A score function on the tiles of a segment, and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vjp
from torch.utils._pytree import tree_map

from ...problem import Operands, Options
from ...score_mod.evaluate import add_to_captured, evaluate
from ...score_mod.program import INDICES, Program, parsed
from .segments import Indices, KeyRun, Segment

T = TypeVar("T")

# Shapes in which indices of sequences, query heads, queries and keys broadcast over a tile.
_SHAPES = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))


class TileFunction(NamedTuple):
    """The program of a score function, for the sequences and query heads of a segment."""

    program: Program
    derivative: Program | None  # None if no gradients are recorded
    values: Tensor | None
    integers: Tensor | None
    indices: Indices

    @classmethod
    def of(cls, operands: Operands, options: Options, segment: Segment) -> TileFunction | None:
        """The score function of a call, if it has one."""
        if not options.score_mod:
            return None
        gradient = options.score_mod_gradient
        return cls(
            parsed(options.score_mod),
            parsed(gradient) if gradient else None,
            operands.captured,
            operands.captured_integers,
            Indices.of(operands, options, segment),
        )

    def scores(self, S: Tensor, rows: tuple[int, int], run: KeyRun) -> Tensor:
        """The function of the scores S (batch, heads, rows, keys)."""
        found = evaluate(self.program, self._inputs(S, rows, run), self.values, self.integers)
        result = found[self.program.result]
        return result.expand(S.shape).contiguous()

    def read(self, rows: tuple[int, int], run: KeyRun) -> None:
        """Read all captured numbers that `scores` reads, and no scores; IndexError if there is no
        such number.
        """
        reads = self.program.reads
        if reads.lines:
            score = torch.zeros(1, 1, 1, 1)
            evaluate(reads, self._inputs(score, rows, run), self.values, self.integers)

    def gradient(
        self, S: Tensor, dS: Tensor, rows: tuple[int, int], run: KeyRun, dcaptured: Tensor | None
    ) -> Tensor:
        """The gradient of S, from that of `scores(S)`; adds those of captured values to
        `dcaptured`.
        """
        assert self.derivative is not None
        inputs = self._inputs(S, rows, run) | {"g": dS}
        found = evaluate(self.derivative, inputs, self.values, self.integers)
        lines = {line.name: line for line in self.derivative.lines}
        for name, gradient in self.derivative.captured:
            if dcaptured is not None:
                add_to_captured(dcaptured, lines[name], _seen(found[gradient], dS, run), found)
        return _seen(found[self.derivative.result], dS, run).contiguous()

    def tangent(
        self, S: Tensor, dS: Tensor, dvalues: Tensor | None, rows: tuple[int, int], run: KeyRun
    ) -> Tensor:
        """The tangent of `scores(S)`, from those of S and of the captured values."""

        def of(S: Tensor, values: Tensor | None) -> Tensor:
            return self._replace(values=values).scores(S, rows, run)

        if dvalues is None:
            moved = pushed(lambda S: of(S, self.values), (S,), (dS,))[1]
        else:
            moved = pushed(of, (S, self.values), (dS, dvalues))[1]
        return _seen(moved, dS, run).contiguous()

    def _inputs(self, S: Tensor, rows: tuple[int, int], run: KeyRun) -> dict[str, Tensor]:
        found = self.indices
        numbers = found.batch, found.heads, found.queries(*rows), found.keys(run)
        shaped = (x.view(shape) for x, shape in zip(numbers, _SHAPES, strict=True))
        return {"s": S, **dict(zip(INDICES, shaped, strict=True))}


def pushed(
    function: Callable[..., T], start: tuple[Any, ...], directions: tuple[Any, ...]
) -> tuple[T, T]:
    """A function's result and its derivative along `directions`: that of its pull-back, which is
    linear. PyTorch does not nest its own forward mode.
    """
    result, pull, *_ = vjp(function, *start)
    (moved,) = vjp(pull, tree_map(torch.zeros_like, result))[1](directions)
    return result, moved


def _seen(gradient: Tensor, dS: Tensor, run: KeyRun) -> Tensor:
    """A gradient of the shape of `dS`, 0 where the mask hides the score: the derivative may be NaN
    there.
    """
    gradient = gradient.expand(dS.shape)
    return gradient if run.visible is None else gradient.masked_fill(~run.visible, 0.0)
