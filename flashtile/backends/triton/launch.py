"""Runs a problem on the GPU: allocates the outputs and launches the planned kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backend_interface import Gradients, Results, Run, RunBackward
from ...gpu.hardware import multiprocessors
from ...gpu.launch import Launch, run
from ...gpu.launch_cache import Tensors, allocate_and_run_all, prepared_call, run_all
from ...gpu.memory import NewTensor, Scratch, filled, uninitialised
from ...gpu.rows import ALIGNMENT, is_aligned, is_in_place
from ...lru import memoised
from ...problem import (
    LARGE_LSE,
    AttentionProblem,
    NewTokens,
    Operands,
    captured_needs_grad,
    lse_shape,
)
from .kernel_launches import (
    OPERANDS,
    BackwardBuffers,
    backward_launches,
    column_sum_launch,
    forward_launches,
    listed_backward_launches,
    probabilities_launch,
    tangent_launches,
)
from .plan import adds_to_listed_keys, has_large_scores, is_short, plan, splits_of
from .score_gradients import gradients_of

PASS, BACKWARD = "triton forward", "triton backward"
OF_SCORES = "triton gradients of what scores read"
SINK = Operands._fields.index("sink")


def forward(
    problem: AttentionProblem, operands: Operands, new: NewTokens | tuple[()] = ()
) -> tuple[Tensor, ...]:
    """(out, lse) of a problem; `new` tokens are appended to the cache if it is `appending`. With
    `has_statistics`, also the largest score and the entropy of each row and, if a caller's tensors
    or function may make scores large, what `column_sum_launch` needs."""
    memory = operands.workspace
    if memory is None:
        splits = _splits_of(problem, operands)

        def describe(given: Tensors, made: Tensors) -> list[Launch]:
            out, lse, *rest = made
            parts = _parts(problem, operands, splits).named(rest) if splits > 1 else ()
            return forward_launches(problem, given, (out, lse, *parts))

        given, allocators = (*operands, *new), partial(_allocators, problem, operands, splits)
        made = allocate_and_run_all(PASS, problem, given, allocators, describe, lambda: None)
    else:
        with torch.cuda.device_of(operands.q):
            made = forward_buffers(problem, operands)
        call = problem, memory.data_ptr() % ALIGNMENT
        given = (*operands._replace(workspace=None), *new)  # the buffers are in the workspace
        run_all(f"{PASS} in a workspace", call, given, made, partial(forward_launches, problem))
    if not problem.has_statistics:
        return made[0], made[1]
    lse, largest, entropy, *lost = made[1].unbind()
    # No program writes rows that belong to no sequence.
    return made[0], lse, largest, entropy.masked_fill(lse == -torch.inf, 0.0), *lost


def forward_into(problem: AttentionProblem, operands: Operands, into: Results) -> Results:
    """`forward`, written to the tensors `into`; a copy where the kernel cannot write to them."""
    out, lse = into
    if _splits_of(problem, operands) > 1 or not (is_in_place(out) and lse.is_contiguous()):
        for target, x in zip(into, forward(problem, operands), strict=True):
            target.copy_(x)
        return into
    call = problem, out.stride(), *(x.data_ptr() % ALIGNMENT for x in into)
    describe = partial(forward_launches, problem)
    run_all(f"{PASS} into given tensors", call, tuple(operands), into, describe)
    return into


def prepared_forward(problem: AttentionProblem, tensors: Tensors) -> Run | None:
    """`forward` of calls like one that has been made with the operands and new tokens `tensors`;
    None if that one was not prepared, as in a workspace."""
    prepared = prepared_call(PASS, problem, tensors)
    return None if prepared is None else prepared.run


def backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    add_to: Tensor | None = None,
) -> Gradients:
    """Gradients of a problem, summed in float32: in one fixed order, but those of captured numbers
    and of `adds_to_listed_keys`.
    """
    if operands.page_table is not None or operands.cache_batch_idx is not None:
        return _backward_of_cache(problem, operands, out, lse, dout, dlse)
    if problem.has_key_index:
        return _backward_of_lists(problem, operands, (out, lse.contiguous(), dout, dlse))
    key_dtype = torch.float32 if problem.is_partial else operands.k.dtype
    dq = add_to if add_to is not None and is_in_place(add_to) else None
    found = _backward(problem, operands, out, lse.contiguous(), dout, dlse, key_dtype, dq)
    if add_to is None or add_to is dq:
        return found
    return found._replace(dq=add_to.add_(found.dq))


def prepared_backward(problem: AttentionProblem, tensors: Tensors) -> RunBackward | None:
    """`backward` of calls like an earlier one, whose operands, out, lse, dout and dlse were
    `tensors`; None if that one was not prepared, as is true of a cache."""
    first = Operands(*tensors[:OPERANDS])  # type: ignore[arg-type]  # its fields
    prepared = prepared_call(BACKWARD, (problem, first.k.dtype), tensors)
    if prepared is None:
        return None
    names = tuple(_backward_allocators(problem, first, first.k.dtype))

    def run(tensors: Tensors) -> Gradients:
        made = prepared.run(tensors)
        if {"dq", "dk", "dv", "delta", "pivot"}.issuperset(names) and tensors[SINK] is None:
            return Gradients(made[0], made[1], made[2])
        *operands, _, lse, _, _ = tensors
        assert lse is not None  # every forward with gradients keeps it
        given = Operands(*operands)  # type: ignore[arg-type]  # its fields
        return _gradients(problem, given, lse, _named(names, made))

    return run


def _backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    key_dtype: torch.dtype,
    dq: Tensor | None = None,
    name: str = BACKWARD,
) -> Gradients:
    given = (*operands, out, lse, dout, dlse)
    new = _backward_allocators(problem, operands, key_dtype, dq)
    if name == OF_SCORES:
        new = {buffer: x for buffer, x in new.items() if buffer not in ("dq", "dk", "dv")}

    def describe(given: Tensors, made: Tensors) -> list[Launch]:
        return backward_launches(problem, given, _named(new, made))

    made: Tensors
    if dq is None:
        call, allocators = (problem, key_dtype), list(new.values())
        made = allocate_and_run_all(name, call, given, lambda: allocators, describe, lambda: None)
    else:
        with torch.cuda.device_of(operands.q):
            made = tuple(allocate() for allocate in new.values())
        where = dq.dtype, dq.stride(), dq.data_ptr() % ALIGNMENT
        run_all(f"{BACKWARD} into a sum", (problem, key_dtype, where), given, made, describe)
    return _gradients(problem, operands, lse, _named(new, made))


def gradients_of_scores(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """The gradients of tensors that scores read; those of q, k and v are None."""
    call = problem, operands, out, lse.contiguous(), dout, dlse, operands.k.dtype
    return _backward(*call, name=OF_SCORES)


def _named(names: Iterable[str], made: Tensors) -> BackwardBuffers:
    """What `_backward_allocators` have made, by name."""
    found: dict[str, Any] = dict.fromkeys(("dq", "dk", "dv"))
    return BackwardBuffers(**found | dict(zip(names, made, strict=True)))


def _gradients(
    problem: AttentionProblem, operands: Operands, lse: Tensor, made: BackwardBuffers
) -> Gradients:
    """The gradients of what the launches of a backward have filled."""
    sink, bias, dbias = operands.sink, operands.bias, made.dbias
    dsink = None
    if sink is not None and made.delta is not None:
        dsink = _sink_gradient(sink, lse, made.delta)
    if bias is not None and dbias is not None and dbias.shape != bias.shape:
        dbias = dbias.sum_to_size(bias.shape).to(bias.dtype)
    by_distance: tuple[Tensor | None, Tensor | None] = (None, None)
    if made.distance_sums is not None:
        by_distance = gradients_of(made.distance_sums, operands, problem.options)
    dcaptured = made.dcaptured
    if dcaptured is not None and operands.captured is not None:
        dcaptured = dcaptured.to(operands.captured.dtype)
    return Gradients(made.dq, made.dk, made.dv, dbias, dsink, dcaptured, *by_distance)


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Softmax probabilities (batch, heads, M, N) in q's dtype, negative where dropped; 0 outside of
    the mask."""
    shape = (problem.B, problem.Hq, problem.M, problem.N)
    probs = operands.q.new_zeros(shape)
    run([probabilities_launch(problem, operands, lse.contiguous(), probs)], operands.q)
    if has_large_scores(problem):
        probs.mul_(_lost_factors(probs, operands, lse)[..., None])
    return probs


def tangents(
    problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, moved: Tensors
) -> Results:
    """The tangents of out and lse, from those of q, k, v, bias and sink; 0 in rows that belong to
    no sequence."""
    out, lse = out.contiguous(), lse.contiguous()
    made = torch.zeros_like(out), torch.zeros_like(lse)
    given = (*operands, *moved, out, lse)
    run_all("triton tangents", problem, given, made, partial(tangent_launches, problem))
    return made


def column_sums(problem: AttentionProblem, operands: Operands, lse: Tensor, into: Tensor) -> None:
    """Add up the probabilities of each key: `backend_interface.Measurer`."""
    lost = None
    # Log-sum-exps of large scores are not exact enough. Those of several parts are all there is.
    if has_large_scores(problem) and not problem.is_partial:
        measured = problem._replace(has_statistics=True)
        _, lse, *_, lost = forward(measured, operands._replace(workspace=None))
    run([column_sum_launch(problem, operands, lse.contiguous(), lost, into)], operands.q)


def _lost_factors(probs: Tensor, operands: Operands, lse: Tensor) -> Tensor:
    """(batch, heads, M): 1 over the sum of a row whose log-sum-exp is large; else 1. See
    `row_sums_kernel`.
    """
    if operands.cu_seqlens_q is not None:
        index = torch.arange(probs.shape[2], device=lse.device)
        index = operands.cu_seqlens_q[:-1, None] + index  # (batch, M)
        lse = lse[:, index.clamp(max=lse.shape[1] - 1)].transpose(0, 1)
    sums = torch.linalg.vector_norm(probs, 1, dim=-1, dtype=torch.float32)
    if operands.sink is not None:
        sums += torch.exp(operands.sink.float()[:, None] - lse)
    is_large = (lse.abs() >= LARGE_LSE) & lse.isfinite() & (sums > 0)
    return torch.where(is_large, 1 / sums, 1.0)


def forward_buffers(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, ...]:
    """(out, lse), and if the KV loop is split, (out, lse) of its parts, on the current device."""
    splits = _splits_of(problem, operands)
    out, lse = (allocate() for allocate in _outputs(problem, operands, splits))
    if splits == 1:
        return out, lse
    if operands.workspace is not None:
        return out, lse, *_parts_in(operands.workspace, problem, operands, splits)
    parts = _parts(problem, operands, splits)
    return out, lse, *parts.named([allocate() for allocate in parts.allocators])


def _allocators(problem: AttentionProblem, operands: Operands, splits: int) -> list[NewTensor]:
    """What makes `forward_buffers` without a workspace: out, lse, and what holds the parts."""
    new = list(_outputs(problem, operands, splits))
    return [*new, *_parts(problem, operands, splits).allocators] if splits > 1 else new


def _splits_of(problem: AttentionProblem, operands: Operands) -> int:
    aligned, tokens = is_aligned(operands.k, operands.v), operands.q.shape[:-2].numel()
    return _splits(problem, aligned, operands.q.device, tokens)


@memoised(4096)
def _splits(problem: AttentionProblem, aligned: bool, device: torch.device, tokens: int) -> int:
    return splits_of(problem, plan(problem, aligned).split.config, multiprocessors(device), tokens)


def _outputs(
    problem: AttentionProblem, operands: Operands, splits: int
) -> tuple[NewTensor, NewTensor]:
    """The functions that make out and lse. Merging parts writes every row, else rows that belong to
    no sequence are written by no program."""
    q = operands.q
    shape, lse_sizes = (*q.shape[:-1], problem.Dv), lse_shape(operands)
    if problem.has_statistics:
        lse_sizes = (3 + has_large_scores(problem), *lse_sizes)
    dtype = torch.float32 if problem.is_partial else q.dtype
    if problem.layout == "dense" or splits > 1:
        new_out = uninitialised(shape, dtype, q.device)
        new_lse = uninitialised(lse_sizes, torch.float32, q.device)
    else:
        new_out = filled(shape, dtype, 0.0, q.device)
        new_lse = filled(lse_sizes, torch.float32, -torch.inf, q.device)
    return new_out, new_lse


class Parts(NamedTuple):
    """What the programs of a split KV loop write to, in float32."""

    scratch: Scratch
    # Of packed queries: a row that no program writes has weight 0. With sums, row
    # maxima come first, then logarithms of row sums.
    lse: NewTensor | None

    @property
    def allocators(self) -> list[NewTensor]:
        """The functions that allocate it."""
        return [self.scratch.allocate] if self.lse is None else [self.scratch.allocate, self.lse]

    def named(self, made: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """(out, lse) of the parts, from what `allocators` have made."""
        found = self.scratch.parts(made[0])
        return found["out"], (found["lse"] if self.lse is None else made[1])


def _parts(problem: AttentionProblem, operands: Operands, splits: int) -> Parts:
    out, lse = _part_shapes(problem, operands, splits)
    kinds, device = {"out": (out, torch.float32)}, operands.q.device
    if problem.layout != "dense":
        new_lse = filled(lse, torch.float32, -torch.inf, device)
        return Parts(Scratch(kinds, device), new_lse)
    return Parts(Scratch(kinds | {"lse": (lse, torch.float32)}, device), None)


def _parts_in(
    workspace: Tensor, problem: AttentionProblem, operands: Operands, splits: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `Parts` in the caller's workspace."""
    shapes = _part_shapes(problem, operands, splits)
    sizes = [math.prod(shape) for shape in shapes]
    out, lse = workspace[: 4 * sum(sizes)].view(torch.float32).split(sizes)
    if problem.layout != "dense":
        lse.fill_(-torch.inf)
    return out.view(shapes[0]), lse.view(shapes[1])


def _part_shapes(
    problem: AttentionProblem, operands: Operands, splits: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    has_sums = has_large_scores(problem) or bool(problem.options.batch_invariant)
    rows = (1 + has_sums) * splits, *lse_shape(operands)
    return (splits, *operands.q.shape[:-1], problem.Dv), rows


def backward_buffers(
    problem: AttentionProblem, operands: Operands, key_dtype: torch.dtype
) -> BackwardBuffers:
    """Memory for the gradients, dk and dv in `key_dtype`, and for delta, on the current device."""
    new = _backward_allocators(problem, operands, key_dtype)
    return _named(new, tuple(allocate() for allocate in new.values()))


def _backward_allocators(
    problem: AttentionProblem,
    operands: Operands,
    key_dtype: torch.dtype,
    dq: Tensor | None = None,
) -> dict[str, NewTensor]:
    """The functions that make `backward_buffers`, for all calls of this kind unless `dq` is given.
    That of a partial problem is added to, unless it has whole queries."""
    q, k, v, bias = operands[:4]
    empty, zeros = (
        partial(uninitialised, device=q.device),
        partial(filled, value=0.0, device=q.device),
    )
    # Rows that belong to no sequence, or are past a used length, are written by no program.
    has_gaps = problem.layout != "dense" or problem.has_lengths
    new = zeros if has_gaps or 0 in (problem.M, problem.N) else empty
    is_added = problem.is_partial and not problem.has_whole_queries
    new_dq = zeros(q.shape, torch.float32) if is_added else new(q.shape, q.dtype)
    if problem.has_key_index and adds_to_listed_keys(problem):
        new, key_dtype = zeros, torch.float32
    found = {
        "dq": new_dq if dq is None else lambda: dq,
        "dk": new(k.shape, key_dtype),
        "dv": new(v.shape, key_dtype),
    }
    options, captured = problem.options, operands.captured
    is_by_distance = options.alibi_needs_grad or options.relative_bias_needs_grad
    if not is_short(problem) or is_by_distance or operands.sink is not None:
        rows = lse_shape(operands)
        found["delta"] = empty(rows, torch.float32)
        found["pivot"] = empty((1 + has_large_scores(problem), *rows), torch.float32)
    if bias is not None and problem.bias_needs_grad:
        found["dbias"] = zeros(bias.shape, bias.dtype)
        if is_short(problem):
            scores = torch.Size((problem.B, problem.Hq, problem.M, problem.N))
            found["dbias"] = empty(scores, bias.dtype if bias.shape == scores else torch.float32)
    if is_by_distance:
        distances = max(problem.M + problem.N - 1, 0)
        found["distance_sums"] = zeros((2, problem.B, problem.Hq, distances), torch.float32)
    if captured is not None and captured_needs_grad(options):
        found["dcaptured"] = zeros(captured.shape, torch.float32)
    return found


def _backward_of_lists(
    problem: AttentionProblem,
    operands: Operands,
    results: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> Gradients:
    """The backward over lists of keys. `results`: out, lse, dout and dlse."""
    dtype = operands.k.dtype
    with torch.cuda.device_of(operands.q):
        made = backward_buffers(problem, operands, dtype)
        launches = listed_backward_launches(problem, operands, results, made)
    run(launches, operands.q)
    made = made._replace(dk=made.dk.to(dtype), dv=made.dv.to(dtype))
    return _gradients(problem, operands, results[1], made)


def _backward_of_cache(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Sequences may share pages or cache rows: gather them, differentiate, and add up what was
    shared."""
    k, v = operands.k, operands.v
    if operands.page_table is not None:
        source = operands.page_table.long().clamp(0, k.shape[0] - 1)  # (B, pages per sequence)
    else:
        assert operands.cache_batch_idx is not None
        source = operands.cache_batch_idx.long().clamp(0, k.shape[0] - 1)[:, None]
    gathered = operands._replace(
        k=k[source].flatten(1, 2),  # (B, N, Hk, D)
        v=v[source].flatten(1, 2),
        page_table=None,
        cache_batch_idx=None,
    )
    gradients = _backward(
        problem._replace(page_size=0), gathered, out, lse.contiguous(), dout, dlse, torch.float32
    )

    def add_up(gradient: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        parts = gradient.unflatten(1, (source.shape[1], x.shape[1]))
        return total.index_put_((source,), parts, accumulate=True).to(x.dtype)

    return gradients._replace(dk=add_up(gradients.dk, k), dv=add_up(gradients.dv, v))


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(Hq,): the sink is a key with P = exp(sink - lse) and dP = 0; padding rows (lse -inf) have
    none."""
    heads = sink.float()[:, None]
    parts = (torch.exp(heads - lse) * delta).masked_fill(lse == -torch.inf, 0.0)
    over = (1,) if lse.dim() == 2 else (0, 2)
    return -parts.sum(over).to(sink.dtype)
