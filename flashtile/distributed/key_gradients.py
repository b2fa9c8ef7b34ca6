"""The gradients of keys: from the ranks that computed them to those that own the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..positions import Span
from .row_copies import KeyWords
from .steps import Step
from .wire import Wire, exchanged


def new_sums(k: Tensor, v: Tensor, padding: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dk and dv before anything is added; only the rows of padding are zero."""
    dk, dv = (x.new_empty(x.shape[0] + padding, *x.shape[1:], dtype=dtype) for x in (k, v))
    if padding:
        for x in (dk, dv):
            x[len(k) :].zero_()
    return dk, dv


class KeyGradients:
    """The gradients of the keys of a step on their way to the ranks that own the keys."""

    def __init__(self, wire: Wire, step: Step, dk: Tensor, dv: Tensor) -> None:
        self.step, stage = step, step.stage
        if step.own is not None:
            start, stop = step.own
            self.own, self.arrived, self.pending = [((start, stop), dk, dv)], {}, None
            return
        # For each source of the buffer: rows there, and rows of the buffer.
        by_source: list[list[tuple[Span, Span]]] = [[] for _ in range(1 + len(stage.receives))]
        row = 0
        for source, start, stop in stage.order:
            by_source[source].append(((start, stop), (row, row + stop - start)))
            row += stop - start
        own, *of_messages = by_source
        self.own = [(rows, dk[a:b], dv[a:b]) for rows, (a, b) in own]
        words = KeyWords.of(dk, dv)
        sends = {
            message.peer: words.message([span for _, span in sorted(spans)])
            for message, spans in zip(stage.receives, of_messages, strict=True)
        }
        received = {message.peer: words.empty(message.rows) for message in stage.sends}
        self.arrived = {
            message.peer: words.numbers(words.split(received[message.peer], message.rows))
            for message in stage.sends
        }
        self.pending = exchanged(wire, sends, received, "gradients of keys and values")

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        """Add what was computed here and what arrived to the gradients of the rank's own keys. The
        first stage of some heads finds nothing there yet."""
        heads = self.step.key_heads
        totals = (dk[:, heads], dv[:, heads])
        if self.step.is_first and sum(b - a for (a, b), _, _ in self.own) < len(dk):
            for total in totals:
                total.zero_()
        for (start, stop), *parts in self.own:
            for total, x in zip(totals, parts, strict=True):
                if self.step.is_first:
                    total[start:stop] = x
                else:
                    total[start:stop] += x
        self._add_arrived(totals)

    def in_place(self) -> tuple[Tensor, Tensor]:
        """The sums of a step with `has_own_rows` that is the only one, in the memory of what was
        computed here."""
        ((_, dk, dv),) = self.own
        self._add_arrived((dk, dv))
        return dk, dv

    def _add_arrived(self, totals: tuple[Tensor, Tensor]) -> None:
        if self.pending is not None:
            self.pending.wait()
        for message in sorted(self.step.stage.sends):
            for total, x in zip(totals, self.arrived[message.peer], strict=True):
                _add_rows(total, message.spans, x)


def _add_rows(total: Tensor, spans: Sequence[Span], x: Tensor) -> None:
    row = 0
    for start, stop in spans:
        total[start:stop] += x[row : row + stop - start]
        row += stop - start
