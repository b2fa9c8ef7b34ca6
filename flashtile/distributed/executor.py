"""The forward and the backward of one rank: exchanges of keys around calls of a backend.

The key heads are taken in groups. While a backend attends with one group of heads, the keys of the
next group (or of the next stage) travel. With one stage each head is finished in one call, so no
partial results are merged, and every rank computes what one process would compute for its rows.
With more stages the partial outputs are float32 and are merged by their log-sum-exp.

The backward fetches the keys again. The gradients of fetched keys return to the ranks that own
them, which add them in float32, in the order of stages and ranks, so that results repeat bitwise.

The `Plan` of a call, at the end, holds its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import autocast_off
from ..autograd import is_batched
from ..backend_interface import Gradients, SharedGradients
from ..call import dispatch
from ..dropout import BLOCK_KEYS
from ..gpu.described import AbsentGpu, followed_by, representing
from ..gpu.hardware import multiprocessors
from ..lru import Memo
from ..masks import Span
from ..ops.merge.formula import merge, merge_entropies
from ..problem import (
    DIFFERENTIABLE,
    AttentionProblem,
    Operands,
    Options,
    allows_tf32,
    lse_dtype,
    needing_gradients,
)
from ..statistics import Statistics, add_column_sums, entropy_gradient, largest_of_heads, of_rows
from .arguments import PackedCall, UsedTokens, missing
from .buffers import (
    PackedKV,
    SequenceTensors,
    add_bias_gradient,
    bias_of_buffer,
    of_heads,
    rows_before,
    sequence_tensors,
    stream_of,
    tiles_of_buffer,
)
from .collectives import DONE, Communicator, Subgroup, exchange
from .layout import Layout
from .partition import first_documents
from .schedule import Schedule, Stage, Step, schedule, steps_of
from .strategy import Strategy
from .ulysses import Exchange, HeadShare, Ulysses, merged, share_heads


def forward(
    plan: Plan, operands: Operands, wants_grad: bool, bias_needs_grad: bool = False
) -> tuple[Any, ...]:
    """(out, lse) of the rank's own queries and, of a plan with `statistics`, also these.

    Args:
        wants_grad: whether `backward` will follow, which the backend must support, too.
        bias_needs_grad: as there.
        operands: the rank's own tokens, packed, with the padding of the plan: q (tokens, heads,
            head_dim), k and v; with `qv`, q also has its columns, and each call gets keys and
            values side by side; `bias` has all keys of the document in its last dimension;
            `alibi_slopes` has one row for all sequences, or one for each sequence of the schedule.

    Returns:
        out (tokens, heads, value_head_dim) in q's dtype, 0 in padding, and lse (heads, tokens
        without padding). `Statistics` of the rank's heads: the largest score over its own queries,
        the entropy shaped as lse, and for its own keys the column sums (keys, heads).
    """
    with_padding, operands = operands, plan.without_padding(operands)
    q, v = operands.q, operands.v
    padding = len(with_padding.q) - len(q)
    total = lse_dtype(q.dtype)
    is_partial = len(plan.schedule.stages) > 1
    # The first call of some heads writes all of their rows, and a rank without rows has no call.
    tokens, heads, _ = q.shape
    dtype = total if is_partial else q.dtype
    padded = q.new_empty(tokens + padding, heads, v.shape[-1], dtype=dtype)
    out = padded
    if padding:
        out = padded[:tokens]
        padded[tokens:].zero_()
    has_statistics = bool(plan.statistics) and of_rows(plan.statistics)
    rows = q.new_empty(3 if has_statistics else 1, q.shape[1], q.shape[0], dtype=total).unbind()
    # Waits for the keys of a step, after those of the next one have been sent.
    for step, keys, values in _fetched(plan, operands):
        totals = step.of_queries(out), *(x[step.query_heads] for x in rows)
        if step.has_call:
            step_operands = _operands(plan, operands, step, keys, values)
            problem = _problem(
                plan, step_operands, step, is_partial, is_partial or wants_grad,
                has_statistics=has_statistics,
            )  # fmt: skip
            into = totals if step.is_first and not has_statistics else None
            if step is plan.steps[0] and problem.capability is not None:
                settings = problem.capability, with_padding, wants_grad, bias_needs_grad
                with followed_by(partial(_describe, plan, *settings)):
                    found = _attend(problem, step_operands, into)
            else:
                found = _attend(problem, step_operands, into)
            if into is None:
                found = found if step.is_first else _merged(totals, found)
                for whole, x in zip(totals, found, strict=True):
                    whole.copy_(x)
    out = padded.to(q.dtype) if is_partial else padded
    if not plan.statistics:
        return out, rows[0]
    column_sum = _column_sums(plan, operands, rows[0]) if "column_sum" in plan.statistics else None
    if not has_statistics:
        return out, rows[0], *Statistics(column_sum=column_sum)
    lse, largest, entropy = rows
    return out, lse, *Statistics(largest_of_heads(largest), entropy, column_sum)


def _merged(whole: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a step's call, over the keys of earlier stages and its own."""
    out, lse, *rows = whole
    part_out, part_lse, *part_rows = part
    merged_out, merged_lse = merge(out, lse.mT, part_out, part_lse.mT)
    if not rows:
        return merged_out, merged_lse.mT
    largest = torch.maximum(rows[0], part_rows[0])
    return merged_out, merged_lse.mT, largest, merge_entropies(rows[1], lse, part_rows[1], part_lse)


def _column_sums(plan: Plan, operands: Operands, lse: Tensor) -> Tensor:
    """(keys, query heads): the probabilities of the rank's own keys, added up over the queries of
    all ranks. They follow from the whole log-sum-exp, so the keys travel again; the sums return
    like gradients of keys.
    """
    plan, k = plan._replace(gradient_dtype=None), operands.k
    group = lse.shape[0] // max(k.shape[1], 1)
    total = lse.new_zeros(*k.shape[:2], group)
    returning: list[KeyGradients] = []
    for step, keys, values in _fetched(plan, operands):
        sums = lse.new_zeros(keys.shape[1] * group, keys.shape[0])
        if step.has_call:
            step_operands = _operands(plan, operands, step, keys, values)
            problem = _problem(plan, step_operands, step, True)
            given = lse[step.query_heads], sums
            if problem.layout == "dense":
                given = given[0][None], sums[None]
            add_column_sums(problem, step_operands, *given)
        of_heads = sums.mT.reshape(keys.shape[0], keys.shape[1], group)
        returning.append(KeyGradients(plan, step, of_heads, of_heads[..., :0]))
        if len(returning) > 1:
            returning.pop(0).add_to(total, total[..., :0])
    for last in returning:
        last.add_to(total, total[..., :0])
    return total.flatten(1)


def backward(
    plan: Plan,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    bias_needs_grad: bool,
    entropy: Tensor | None = None,
    dentropy: Tensor | None = None,
) -> Gradients:
    """Gradients of the rank's own tensors, from what `forward` got and returned, but without rows
    of padding in `out` and `dout`: those of q, k and v in their dtype if no sum of them is needed,
    all others in the dtype of lse. Zeros in padding.
    """
    with_padding, operands = operands, plan.without_padding(operands)
    q, k, v = operands[:3]
    padding = len(with_padding.q) - len(q), len(with_padding.k) - len(k)
    has_shared_keys = plan.ulysses is not None and plan.ulysses.has_shared_keys
    steps = plan.steps
    has_one_call = len(steps) == 1 and steps[0].has_call
    # With one stage, one call computes each row of dq, so no sum has to be more precise.
    dtype = lse.dtype if len(plan.schedule.stages) > 1 else q.dtype
    makes_dq = has_one_call and padding[0] == 0
    all_dq, dq = q, None
    if not makes_dq:
        all_dq = q.new_zeros(q.shape[0] + padding[0], *q.shape[1:], dtype=dtype)
        dq = all_dq[: len(q)]
    is_final = len(steps) == 1 and steps[0].own is not None and not has_shared_keys
    dtype = k.dtype if is_final else lse.dtype
    makes_dk = has_one_call and padding[1] == 0 and steps[0].has_own_rows(len(k))
    if makes_dk and steps[0].own is None and k.dtype == lse.dtype:
        makes_dk = False  # nothing is rounded, and views would keep those of all fetched keys alive
    all_dk, all_dv = k, v
    if not makes_dk:
        all_dk, all_dv = new_sums(k, v, padding[1], dtype)
    dk, dv = all_dk[: len(k)], all_dv[: len(v)]
    needed = needing_gradients(operands, plan.options, bias_needs_grad)[3:]
    zeros = (x if x is None else torch.zeros_like(x, dtype=lse.dtype) for x in needed)
    shared = SharedGradients(*zeros)
    returning: list[KeyGradients] = []
    for step, keys, values in _fetched(plan, operands):
        heads = step.query_heads
        if not step.has_call:
            dk_part, dv_part = (torch.zeros_like(x, dtype=lse.dtype) for x in (keys, values))
        else:
            step_operands = _operands(plan, operands, step, keys, values)
            problem = _problem(
                plan, step_operands, step, True, needs_grad=True, bias_needs_grad=bias_needs_grad,
                has_whole_queries=makes_dq,
            )  # fmt: skip
            results = (
                step.of_queries(out),
                lse[heads],
                step.of_queries(dout),
                None if dlse is None else dlse[heads],
                None if dq is None else step.of_queries(dq),
            )
            part = _gradients(problem, step_operands, *results)
            if entropy is not None and dentropy is not None:
                given = lse[heads], entropy[heads], dentropy[heads]
                part = _with_entropy(problem, step_operands, part, *given)
            if makes_dq:
                all_dq = part.dq
            dk_part, dv_part = part.dk, part.dv
            if part.dk.shape[-1] > k.shape[-1]:  # values beside the keys
                dk_part, of_values = part.dk.split((k.shape[-1], v.shape[-1]), dim=-1)
                dv_part = dv_part + of_values
            _add_shared(shared, part, plan, step)
        returning.append(KeyGradients(plan, step, dk_part, dv_part))
        if len(returning) > 1:
            returning.pop(0).add_to(dk, dv)
    for last in returning:
        if makes_dk:
            all_dk, all_dv = (x.to(dtype) for x in last.in_place())
        else:
            last.add_to(dk, dv)
    return Gradients(all_dq, all_dk, all_dv, *shared)


def _describe(
    plan: Plan,
    capability: tuple[int, int],
    operands: Operands,
    wants_grad: bool,
    bias_needs_grad: bool,
) -> None:
    """A forward and its backward as on a GPU, with tensors that have no memory and no exchange."""
    nobody: Any = SimpleNamespace(exchange=lambda *messages: DONE)
    memo: Memo[Any, Any] | None = None if plan.memo is None else Memo(4 * len(plan.steps))
    rows = plan.statistics - {"column_sum"}
    plan = plan._replace(comm=nobody, memo=memo, statistics=rows)
    gpu = AbsentGpu(capability, multiprocessors(operands.q.device))
    described = operands.without_memory()
    with representing(gpu):
        out, lse, *_ = forward(plan, described, wants_grad, bias_needs_grad)
        if wants_grad:
            out = out[: lse.shape[1]]
            dlse = lse if plan.wants_lse else None
            backward(plan, described, out, lse, out, dlse, bias_needs_grad)


def _attend(
    problem: AttentionProblem, operands: Operands, into: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """(out, lse) of a step's call and its statistics of rows, packed; written to `into`, if it is
    given."""
    is_dense = problem.layout == "dense"
    results: Any = into
    if into is not None and is_dense:
        results = into[0][None], into[1][None]
    with autocast_off(operands.q):
        found = dispatch.BACKENDS[problem.options.backend].forward(problem, operands, results)
    return tuple(x[0] for x in found) if is_dense else found


def _gradients(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    add_to: Tensor | None,
) -> Gradients:
    """Those of a step's call, from results that are packed."""
    backward = dispatch.BACKENDS[problem.options.backend].backward
    with autocast_off(out):
        if problem.layout != "dense":
            return backward(problem, operands, out, lse, dout, dlse, add_to)
        dlse, add_to = (None if x is None else x[None] for x in (dlse, add_to))
        part = backward(problem, operands, out[None], lse[None], dout[None], dlse, add_to)
    return part._replace(dq=part.dq[0], dk=part.dk[0], dv=part.dv[0])


def _with_entropy(
    problem: AttentionProblem,
    operands: Operands,
    part: Gradients,
    lse: Tensor,
    entropy: Tensor,
    dentropy: Tensor,
) -> Gradients:
    """The gradients of a step's call, plus those of the entropy of each row."""
    is_dense = problem.layout == "dense"
    rows = (x[None] if is_dense else x for x in (lse, entropy, dentropy))
    with autocast_off(lse):
        more = entropy_gradient(problem, operands, *rows)
    of_qkv = (x[0] if is_dense else x for x in more[:3] if x is not None)
    dq, dk, dv = (g.add_(x) for g, x in zip(part[:3], of_qkv, strict=True))
    rest = zip(part[3:], more[3:], strict=True)
    return Gradients(dq, dk, dv, *(g if g is None or x is None else g + x for g, x in rest))


def _add_shared(shared: SharedGradients, part: Gradients, plan: Plan, step: Step) -> None:
    """Add the part of a step's call, which has only the heads of the step."""
    heads = step.query_heads
    if shared.dbias is not None and part.dbias is not None:
        total = of_heads(shared.dbias, heads)
        add_bias_gradient(total, part.dbias, plan.schedule, step.stage, plan.has_packed_bias)
    # Of the sink, captured numbers, slopes and the relative bias.
    indices: tuple[Any, ...] = heads, ..., (..., heads), heads
    for whole, x, index in zip(shared[1:], part[4:], indices, strict=True):
        if whole is not None and x is not None:
            whole[index] += x


def _fetched(plan: Plan, operands: Operands) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """The steps with their keys and values, (rows, key heads, head_dim). The exchange of the next
    step is under way while the caller works on this one."""
    steps, k, v = plan.steps, operands.k, operands.v
    if len(steps) == 1 and steps[0].own is not None and k.is_contiguous() and v.is_contiguous():
        start, stop = steps[0].own
        yield steps[0], k[start:stop], v[start:stop]
        return
    ahead: _Fetch | None = None
    words = PackedKV.of(k, v)
    for step in steps:
        fetch = _Fetch(plan.comm, step, words.of_heads(step.key_heads))
        if ahead is not None:
            yield ahead.step, *ahead.wait()
        ahead = fetch
    if ahead is not None:
        yield ahead.step, *ahead.wait()


class _Fetch:
    """The keys and values of a step on their way to the ranks that need them."""

    def __init__(self, comm: Communicator, step: Step, own: PackedKV) -> None:
        self.step, self.own, stage = step, own, step.stage
        sends = {message.peer: own.message(message.spans) for message in stage.sends}
        received = {message.peer: own.empty(message.rows) for message in stage.receives}
        self.sources = [own.rows]
        for message in stage.receives:
            self.sources.append(own.split(received[message.peer], message.rows))
        self.pending = exchange(comm, sends, received, "keys and values")

    def wait(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the order of the buffer."""
        self.pending.wait()
        rows = self.own.buffer(self.sources, self.step.stage.order)
        self.sources = []  # the messages are no longer needed
        return self.own.keys_and_values(rows)


def _operands(plan: Plan, operands: Operands, step: Step, keys: Tensor, values: Tensor) -> Operands:
    """The tensors of a step's call: packed sequences of which this rank has some rows, or a dense
    batch of one sequence."""
    schedule, stage, heads = plan.schedule, step.stage, step.query_heads
    if operands.q.shape[-1] > keys.shape[-1]:
        keys = torch.cat((keys, values), dim=-1)
    q = step.of_queries(operands.q)
    if _is_dense(plan, operands, step, len(keys)):
        return Operands(q[None], keys[None], values[None])
    sequences = _sequences(plan, operands, step)
    if plan.memo is not None:  # nothing but q, k and v
        ends = sequences._asdict()
        return Operands(q, keys, values, rng_state=operands.rng_state, **ends)
    slopes, bias, table = operands.alibi_slopes, operands.bias, operands.relative_bias
    if bias is not None:
        bias = bias_of_buffer(of_heads(bias, heads), schedule, stage, plan.has_packed_bias)
    spans = [
        x if x is None else rows_before(of_heads(x, heads), schedule.queries, stage.keys)
        for x in (operands.span_starts, operands.span_stops)
    ]
    local = operands._replace(
        q=q,
        k=keys,
        v=values,
        bias=bias,
        sink=operands.sink[heads] if operands.sink is not None and step.is_first else None,
        alibi_slopes=None if slopes is None else slopes[..., heads],
        relative_bias=None if table is None else table[heads],
        tile_kinds=of_heads(operands.tile_kinds, heads),
        partial_index=of_heads(operands.partial_index, heads),
        span_starts=spans[0],
        span_stops=spans[1],
        **sequences._asdict(),
    )
    return tiles_of_buffer(local, schedule, stage)


def _is_dense(plan: Plan, operands: Operands, step: Step, keys: int) -> bool:
    """Whether a step's call is one sequence of all queries and `keys` keys whose rows stand to each
    other as in a dense batch. Kernels for such batches are faster than those for packed sequences.
    """
    if plan.memo is None or operands.rng_state is not None or plan.options.score_mod:
        return False
    queries, stage = plan.schedule.queries, step.stage
    lengths = [x.length for x in (*queries, *stage.keys)]
    if lengths != [len(operands.q), keys] or min(lengths) == 0:
        return False
    if not _needs_positions(plan, operands, stage):
        return True
    # The last query stands at the last key. Chunks begin at multiples of their length.
    ends = [[run.position + run.length for run in x.runs] for x in (*queries, *stage.keys)]
    is_aligned = len(ends[0]) == len(ends[1]) == 1 and ends[0] == ends[1]
    return is_aligned and plan.options.attention_chunk == 0


def _sequences(plan: Plan, operands: Operands, step: Step) -> SequenceTensors:
    """The tensors that say which sequences a step's call has."""
    schedule, stage, device = plan.schedule, step.stage, operands.q.device
    stream = stream_of(device)
    key = "sequences", step.number, stream
    cached: SequenceTensors | None = None if plan.memo is None else plan.memo.get(key)
    if cached is not None:
        return cached
    sequence_numbers = None
    if operands.rng_state is not None or plan.options.score_mod:
        sequence_numbers = tuple(zip(schedule.documents, schedule.shifts, strict=True))
    with_positions = _needs_positions(plan, operands, stage)
    tensors = sequence_tensors(
        schedule.queries, stage.keys, with_positions, sequence_numbers, device, stream
    )
    if plan.memo is not None:
        plan.memo[key] = tensors
    return tensors


def _problem(
    plan: Plan,
    operands: Operands,
    step: Step,
    is_partial: bool,
    is_selected_as_partial: bool = True,
    needs_grad: bool = False,
    bias_needs_grad: bool = False,
    has_whole_queries: bool = False,
    has_statistics: bool = False,
) -> AttentionProblem:
    """The facts of a step's call, with its backend. Not every backend has gradients, so a backward
    says which it needs, and a forward before it selects a backend that also has partial results."""
    settings = is_partial, is_selected_as_partial, needs_grad, bias_needs_grad, has_whole_queries
    switch = operands.q.is_cuda and allows_tf32()
    key = "problem", step.number, *settings, has_statistics, dispatch.forced(), switch
    if dispatch.is_batch_invariant():
        raise missing("batch_invariant")
    cached: AttentionProblem | None = None if plan.memo is None else plan.memo.get(key)
    if cached is not None:
        return cached
    options = plan.options._replace(
        max_seqlen_q=max((p.length for p in plan.schedule.queries), default=0),
        max_seqlen_k=max((p.length for p in step.stage.keys), default=0),
        first_head=plan.first_head + step.query_heads.start,
    )
    blocks = options.dropout_p > 0 and all(
        p.begin_at_multiples(BLOCK_KEYS) for p in step.stage.keys
    )
    problem = AttentionProblem.of(operands, options)._replace(
        is_partial=is_selected_as_partial,
        has_key_blocks=blocks,
        reserved_processors=plan.reserved_processors,
        needs_grad=needs_grad,
        bias_needs_grad=bias_needs_grad,
        has_whole_queries=has_whole_queries,
        has_statistics=has_statistics,
    )
    options = options._replace(backend=dispatch.select(problem, plan.backend))
    problem = problem._replace(options=options, is_partial=is_partial)
    if plan.memo is not None:
        plan.memo[key] = problem
    return problem


def _needs_positions(plan: Plan, operands: Operands, stage: Stage) -> bool:
    """Whether a sequence is here only in part, and something in the call depends on positions."""
    counting = operands.alibi_slopes, operands.relative_bias, operands.rng_state
    has_rules = plan.options.facts or plan.options.score_mod
    return stage.has_parts and (bool(has_rules) or any(x is not None for x in counting))


def new_sums(k: Tensor, v: Tensor, padding: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dk and dv before anything is added; only the rows of padding are zero."""
    dk, dv = (x.new_empty(x.shape[0] + padding, *x.shape[1:], dtype=dtype) for x in (k, v))
    if padding:
        for x in (dk, dv):
            x[len(k) :].zero_()
    return dk, dv


class KeyGradients:
    """The gradients of the keys of a step on their way to the ranks that own the keys."""

    def __init__(self, plan: Plan, step: Step, dk: Tensor, dv: Tensor) -> None:
        self.step, stage = step, step.stage
        if step.own is not None:
            start, stop = step.own
            self.own, self.arrived, self.pending = [((start, stop), dk, dv)], {}, DONE
            return
        # For each source of the buffer: rows there, and rows of the buffer.
        by_source: list[list[tuple[Span, Span]]] = [[] for _ in range(1 + len(stage.receives))]
        row = 0
        for source, start, stop in stage.order:
            by_source[source].append(((start, stop), (row, row + stop - start)))
            row += stop - start
        own, *of_messages = by_source
        self.own = [(rows, dk[a:b], dv[a:b]) for rows, (a, b) in own]
        words = PackedKV.of(dk, dv)
        sends = {
            message.peer: words.message([span for _, span in sorted(spans)])
            for message, spans in zip(stage.receives, of_messages, strict=True)
        }
        received = {message.peer: words.empty(message.rows) for message in stage.sends}
        self.arrived = {
            message.peer: words.keys_and_values(words.split(received[message.peer], message.rows))
            for message in stage.sends
        }
        what = "gradients of keys and values"
        self.pending = exchange(plan.comm, sends, received, what, plan.gradient_dtype)

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
        self.pending.wait()
        for message in sorted(self.step.stage.sends):
            for total, x in zip(totals, self.arrived[message.peer], strict=True):
                row = 0
                for start, stop in message.spans:
                    total[start:stop] += x[row : row + stop - start]
                    row += stop - start


_BIAS = Operands._fields.index("bias")


class ContextAttention(torch.autograd.Function):
    """(plan, operands, precomputed (out, lse), the differentiable operands) -> (out, lse), and the
    three of `Statistics` if the plan has some.

    The exchanges of the forward and those of the backward are each in one node of autograd's graph,
    so that all ranks run them in the same order, also a rank that has no heads or no tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        operands: Operands,
        precomputed: tuple[Tensor, Tensor] | None,
        *differentiable: Tensor | None,
    ) -> tuple[Any, ...]:
        ulysses = plan.ulysses
        spread = operands if ulysses is None else ulysses.spread(operands)
        needed = ctx.needs_input_grad
        found = Statistics()
        if precomputed is None:
            out, lse, *more = forward(plan, spread, any(needed), needed[3 + _BIAS])
            found = Statistics(*more)
        elif ulysses is None:
            out, lse = precomputed[0].clone(), precomputed[1].clone()
        else:
            out, lse = ulysses.spread_out(precomputed[0]), ulysses.spread_lse(precomputed[1])
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.bias = plan, operands.bias
        ctx.save_for_backward(out, lse, found.entropy, *spread)
        if ulysses is not None:
            out, lse = ulysses.collect_results(out, lse)
            found = ulysses.collect_statistics(found)
        constants = (None if plan.wants_lse else lse), found.max_logit, found.column_sum
        ctx.mark_non_differentiable(*(x for x in constants if x is not None))
        return (out, lse, *found) if plan.statistics else (out, lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *of_statistics: Any) -> Any:
        dentropy = Statistics(*of_statistics).entropy
        if is_batched(dout) or is_batched(dlse) or is_batched(dentropy):
            raise NotImplementedError(
                "is_grads_batched: got True, want False under context parallelism"
            )
        # Of a derivative that will be differentiated, every use requires a gradient.
        differentiated = torch.ones((), requires_grad=torch.is_grad_enabled())
        gradients = _FirstDerivative.apply(ctx, dout, dlse, dentropy, differentiated)
        return None, None, None, *gradients


class _FirstDerivative(torch.autograd.Function):
    """The gradients of `ContextAttention`; their own derivative raises NotImplementedError."""

    @staticmethod
    def forward(
        _ctx: Any,
        ctx: Any,
        dout: Tensor | None,
        dlse: Tensor | None,
        dentropy: Tensor | None,
        __: Tensor,
    ) -> Any:
        plan = ctx.plan
        ulysses, tokens = plan.ulysses, plan.tokens
        out, lse, entropy, *saved = ctx.saved_tensors
        operands = Operands(*saved)
        heads = out.shape[1] if ulysses is None else ulysses.heads[0]
        if dout is None:
            rows = dentropy if dlse is None else dlse
            assert rows is not None
            dout = out.new_zeros(rows.shape[1], heads, out.shape[2])
        # What has no gradient on this rank may have one on the others.
        of_rows = heads, dout.shape[0] if tokens is None else tokens[0]
        if plan.wants_lse and dlse is None:
            dlse = lse.new_zeros(of_rows)
        if entropy is not None and dentropy is None:
            dentropy = lse.new_zeros(of_rows)
        if tokens is not None:
            out, dout = out[: tokens[0]], dout[: tokens[0]]
        if ulysses is not None:
            dout = ulysses.spread_out(dout)
            dlse, dentropy = (x if x is None else ulysses.spread_lse(x) for x in (dlse, dentropy))
        needed = ctx.needs_input_grad[3:]
        given = out, lse, dout, dlse, needed[_BIAS], entropy, dentropy
        gradients = backward(plan, operands, *given)
        if ulysses is not None:
            gradients = ulysses.collect_gradients(gradients, operands._replace(bias=ctx.bias))
        found = zip(gradients, operands[:DIFFERENTIABLE], needed, strict=True)
        return tuple(
            g.to(x.dtype) if wanted and g is not None and x is not None else None
            for g, x, wanted in found
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "context parallelism: got a gradient to differentiate again (create_graph=True); "
            "second derivatives need one process"
        )


def attend(
    plan: Plan, operands: Operands, precomputed: tuple[Tensor, Tensor] | None = None
) -> tuple[Any, ...]:
    """(out, lse) of a rank's own queries, recorded for gradients if some tensor needs them; and
    `Statistics`, if the plan has some.

    Args:
        precomputed: (out, lse), if an equal call has computed them.
    """
    differentiable = operands[:DIFFERENTIABLE]
    wants_grad = any(x is not None and x.requires_grad for x in differentiable)
    is_plain = plan.ulysses is None and precomputed is None
    if is_plain and not (wants_grad and torch.is_grad_enabled()):
        return forward(plan, operands, wants_grad)
    return ContextAttention.apply(plan, operands, precomputed, *differentiable)


def is_recomputing() -> bool:
    """Whether a backward is under way, which computes a checkpoint's forward again."""
    return torch._C._current_graph_task_id() != -1


# The plan of a call: what this rank does in all calls of its kind in a layout, made once. The
# layers of a model and the steps of a layout share it, and it is all that a repeated call looks up.


class Plan(NamedTuple):
    """Neighbours exchange heads; those with the same index among their neighbours, keys."""

    strategy: Strategy
    ulysses: Ulysses | None  # the neighbours of this rank
    schedule: Schedule  # of this rank and its neighbours
    steps: list[Step]
    comm: Communicator  # of the ranks that exchange keys
    options: Options  # of the whole call; the lengths are replaced
    backend: str | None  # forced by the caller
    first_head: int  # the number of the first query head here in the whole call
    gradient_dtype: torch.dtype | None  # of dK and dV as they are sent; None is that of their sums
    used: UsedTokens
    wants_lse: bool = True  # otherwise nobody sees lse, and it has no gradient
    statistics: frozenset[str] = frozenset()  # the names of those that the caller wants
    has_packed_bias: bool = False  # its rows are those of q: see `buffers`
    reserved_processors: int = 0  # see `AttentionProblem`
    # Rows of q and of k and v without padding, if these have padding; then out has it, too.
    tokens: tuple[int, int] | None = None
    # What earlier calls with this plan have found out: only if all of them have tensors with the
    # same metadata, and none but q, k and v.
    memo: Memo[Any, Any] | None = None

    def without_padding(self, operands: Operands) -> Operands:
        """The operands without the rows of padding."""
        if self.tokens is None:
            return operands
        queries, keys = self.tokens
        q, k, v = operands[:3]
        return operands._replace(q=q[:queries], k=k[:keys], v=v[:keys])


def plan_of(
    call: PackedCall,
    layout: Layout,
    strategy: Strategy,
    gradient_dtype: torch.dtype | None,
    **more: Any,
) -> Plan:
    """The plan of a call in its layout.

    Args:
        gradient_dtype: of dK and dV as they are sent; None is that of their sums.
        more: further fields of the plan.
    """
    comm, size = layout.comm, strategy.ulysses
    outer, inner = divmod(comm.rank, size)
    groups = [range(first, first + size) for first in range(0, comm.ranks, size)]
    queries, keys = (merged(x, groups) for x in (call.used.queries, call.used.keys))
    planned = schedule(queries, keys, call.options.facts, outer, strategy.stages, call.tiles)
    shares = share_heads(*call.heads, size)
    ulysses = None
    if size > 1:
        ulysses = _ulysses(call, layout, groups[outer], shares, gradient_dtype)
        comm = Subgroup(comm, [group[inner] for group in groups])
    return Plan(
        strategy,
        ulysses,
        planned,
        steps_of(planned, strategy.head_groups, shares[inner].counts),
        comm,
        call.options,
        first_head=shares[inner].queries.start,
        gradient_dtype=gradient_dtype,
        used=call.used,
        has_packed_bias=call.bias_has_rows and not layout.sequences,
        **more,
    )


def _ulysses(
    call: PackedCall,
    layout: Layout,
    members: range,
    shares: list[HeadShare],
    gradient_dtype: torch.dtype | None,
) -> Ulysses:
    """How this rank and its neighbours exchange tokens for heads."""
    comm = Subgroup(layout.comm, members)
    bias, rows = call.operands.bias, None
    if bias is not None and call.bias_has_rows:
        shards = call.used.queries
        if layout.sequences:  # where the bias has no batch, the rows of one stand for all
            shards = first_documents(layout.queries, bias.shape[0])
        rows = Exchange.of(comm, shards, members)
    return Ulysses(
        tuple(shares),
        Exchange.of(comm, call.used.queries, members),
        Exchange.of(comm, call.used.keys, members),
        rows,
        call.heads,
        gradient_dtype,
    )
