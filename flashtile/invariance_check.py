"""Under ``FLASHTILE_CHECK=1``: does a call that is `batch_invariant` keep its promise?

The last query of the last sequence is computed again, by itself, from a batch of one: its output,
log-sum-exp and gradient, and the gradients of the last key, if no other query sees that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .problem import AttentionProblem, Operands

Forward = Callable[[AttentionProblem, Operands], tuple[Tensor, ...]]
Tensors = tuple[Tensor | None, ...]
# Operands with a row for each sequence, if they have more than one.
BY_SEQUENCE = ("seqused_k", "leftpad_k", "page_table", "cache_batch_idx", "k_descale", "v_descale")


def checks_everything() -> bool:
    """Whether ``FLASHTILE_CHECK=1`` asks for the checks that make the host wait. While a CUDA graph
    records, the host cannot wait, so nothing is checked.
    """
    if os.environ.get("FLASHTILE_CHECK", "") in ("", "0"):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class _LastQuery(NamedTuple):
    """The call of one query, and where it and its last key are in the whole call."""

    problem: AttentionProblem
    operands: Operands
    of_row: tuple[int, ...]  # in out
    at: tuple[int, ...]  # of its sequence in a dense batch of queries
    of_key: tuple[int, ...]  # in k
    key: int  # in its own k
    where: str

    def row(self, x: Tensor) -> Tensor:
        """(1, 1, heads, head_dim) of out or a gradient of queries."""
        return x[self.of_row][None, None]

    def stat(self, x: Tensor) -> Tensor:
        """(1, heads, 1) of the log-sum-exp or its gradient."""
        return x[self.at][:, self.of_row[-1], None][None]


def _last_query(problem: AttentionProblem, o: Operands) -> _LastQuery | None:
    """None for a block mask or a score function that reads indices, whose queries count from the
    first one of the call, and for a sequence without queries."""
    options, b = problem.options, problem.B - 1
    rows = slice(0, problem.M)
    if o.cu_seqlens_q is not None and b >= 0:
        rows = slice(*o.cu_seqlens_q[b:].tolist())
    if o.seqused_q is not None and b >= 0:
        rows = slice(rows.start, min(rows.stop, rows.start + int(o.seqused_q[b])))
    counts_rows = problem.block_tile is not None or options.has_indexed_scores
    if counts_rows or o.q.is_meta or b < 0 or rows.start >= rows.stop:
        return None
    row, at = rows.stop - 1, () if o.cu_seqlens_q is not None else (b,)
    named = ((name, getattr(o, name)) for name in BY_SEQUENCE)
    own: dict[str, Any] = {n: x[b : b + 1] for n, x in named if x is not None and len(x) > 1}
    if o.alibi_slopes is not None and o.alibi_slopes.dim() == 2:
        own["alibi_slopes"] = o.alibi_slopes[b : b + 1]
    keys = slice(0, o.k.shape[1])
    if o.cu_seqlens_k is not None:
        keys = slice(*o.cu_seqlens_k[b:].tolist())
        own |= {"k": o.k[None, keys], "v": o.v[None, keys]}
    elif o.page_table is None and o.cache_batch_idx is None:
        own |= {"k": o.k[b : b + 1], "v": o.v[b : b + 1]}
    count = keys.stop - keys.start if o.seqused_k is None else int(o.seqused_k[b])
    # Of spans, the rows of packed queries follow each other; of a bias, each sequence has its own.
    for name, number in (("bias", row - rows.start), ("span_starts", row), ("span_stops", row)):
        x = getattr(o, name)
        if x is not None:
            x = x if len(x) == 1 else x[b : b + 1]
            own[name] = x if x.shape[2] == 1 else x[:, :, number : number + 1]
    own |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "workspace"))
    alone = o._replace(q=o.q[(*at, row)][None, None], **own)
    longest = alone.k.shape[1] if o.cu_seqlens_k is not None else options.max_seqlen_k
    options = options._replace(max_seqlen_q=1, max_seqlen_k=longest)
    of_key = (keys.start + count - 1,) if o.cu_seqlens_k is not None else (b, count - 1)
    where = f"{row - rows.start} of sequence {b}"
    described = AttentionProblem.of(alone, options)
    return _LastQuery(described, alone, (*at, row), at, of_key, count - 1, where)


def check_bits(
    forward: Forward, problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor
) -> None:
    """Compare the results of a forward.

    Raises:
        RuntimeError: the bits of the output or of the log-sum-exp differ.
    """
    with torch.no_grad():
        last = _last_query(problem, operands)
        if last is None:
            return
        one, one_lse, *_ = forward(last.problem, last.operands)
    _compare(f"output of query {last.where}", one, last.row(out))
    _compare(f"log-sum-exp of query {last.where}", one_lse, last.stat(lse))


def check_gradient_bits(
    backward: Callable[..., Any], problem: AttentionProblem, tensors: Tensors, gradients: Any
) -> None:
    """Compare the gradients of a backward, whose arguments were `tensors`.

    Raises:
        RuntimeError: the bits of one differ.
    """
    *given, out, lse, dout, dlse = tensors
    assert out is not None and lse is not None and dout is not None
    with torch.no_grad():
        last = _last_query(problem, Operands(*given))  # type: ignore[arg-type]  # its fields
        if last is None:
            return
        rows = last.row(out), last.stat(lse), last.row(dout)
        of_lse = None if dlse is None else last.stat(dlse)
        found = backward(last.problem, last.operands, *rows, of_lse)
    _compare(f"gradient of query {last.where}", found.dq, last.row(gradients.dq))
    right, o = problem.options.window_right, last.operands
    is_cache = o.page_table is not None or o.cache_batch_idx is not None
    if right is not None and right <= 0 <= last.key and not is_cache:
        for name in ("dk", "dv"):
            one, whole = getattr(found, name)[0, last.key], getattr(gradients, name)[last.of_key]
            _compare(f"{name} of the last key of query {last.where}", one, whole)


def _compare(what: str, x: Tensor, y: Tensor) -> None:
    if not torch.equal(x.nan_to_num(), y.nan_to_num()):
        off = (x - y).abs().max().item()
        raise RuntimeError(
            f"batch_invariant: the {what} has other bits when computed alone, off by {off:.2g}"
        )
