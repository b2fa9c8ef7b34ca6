"""The launches of a call on a GPU that is not here."""

from __future__ import annotations

from typing import Any

import torch
from compiled_kernels import DEVICES

from flashtile.backends.triton.kernel_launches import (
    backward_launches,
    column_sum_launch,
    forward_launches,
    listed_backward_launches,
    probabilities_launch,
    tangent_launches,
)
from flashtile.backends.triton.launch import backward_buffers, forward_buffers
from flashtile.backends.triton.support import unsupported_reasons
from flashtile.gpu.launch import Launch
from flashtile.ops.append.kernel import Appended, RotaryOptions, append_launch
from flashtile.ops.gather.kernel import gather_launch
from flashtile.ops.rotary.kernel import rotary_launch
from flashtile.problem import Appending, AttentionProblem, Operands, Options
from flashtile.statistics import column_shape


def launches(
    operands: Operands, options: Options, device: str, backward: bool = True, **facts: Any
) -> list[Launch]:
    """Every launch that the call would make on `device`; without the backward if that is refused
    there. `facts` are fields of the problem."""
    problem = _problem(operands, options, device)._replace(**facts)
    made = forward_buffers(problem, operands)
    found = forward_launches(problem, operands, made)
    if backward and not unsupported_reasons(problem._replace(needs_grad=True)):
        out, lse = made[:2]
        gradients = backward_buffers(problem, operands, operands.k.dtype)
        dout = torch.empty_like(out)
        if problem.has_key_index:
            results = (out, lse, dout, None)
            return found + listed_backward_launches(problem, operands, results, gradients)
        given = (*operands, out, lse, dout, None)
        found += backward_launches(problem, given, gradients)
    return found


def step_launches(
    operands: Operands, options: Options, rotary_dim: int, device: str
) -> list[Launch]:
    """The launches of the call as a decoding step."""
    q, k, v = operands[:3]
    B, M, Hk = *q.shape[:2], k.shape[-2]
    rotary = (None, None, None)
    if rotary_dim > 0:
        rotary = (*torch.empty(2, 40, rotary_dim // 2, dtype=q.dtype), operands.seqused_k)
    appending = Appending(M, rotary_dim // 2, is_interleaved=False, has_own_positions=True)
    problem = _problem(operands, options, device)._replace(appending=appending)
    k_new, v_new = (torch.empty(B, M, Hk, x.shape[-1], dtype=q.dtype) for x in (k, v))
    given = (*operands, k_new, v_new, *rotary)
    return forward_launches(problem, given, forward_buffers(problem, operands))


def probabilities_launches(operands: Operands, options: Options, device: str) -> list[Launch]:
    """The launch that makes the probabilities of the call."""
    problem = _problem(operands, options, device)
    lse = torch.empty(problem.B, problem.Hq, problem.M)
    probs = operands.q.new_empty(problem.B, problem.Hq, problem.M, problem.N)
    return [probabilities_launch(problem, operands, lse, probs)]


def launches_of_tangents(
    operands: Operands, options: Options, device: str, **facts: Any
) -> list[Launch]:
    """The launches of the call in forward mode, where all that can has a tangent. `facts` are
    fields of the problem."""
    problem = _problem(operands, options, device)._replace(**facts)
    results = forward_buffers(problem, operands)[:2]
    return tangent_launches(problem, (*operands, *operands[:5], *results), results)


def measuring_launches(operands: Operands, options: Options, device: str) -> list[Launch]:
    """The launches that make all statistics of the call."""
    problem = _problem(operands, options, device)
    measured = problem._replace(has_statistics=True)
    made = forward_buffers(measured, operands)
    _, *lost = made[1][2:]
    columns = torch.empty(column_shape(problem, operands))
    return [
        *forward_launches(measured, operands, made),
        column_sum_launch(problem, operands, made[1][0], lost[0] if lost else None, columns),
    ]


def append_launches(device: str) -> list[Launch]:
    """The launches that write new tokens to a contiguous cache and to a paged one, as they are and
    rotated by angles that queries share."""
    cache, new = torch.empty(2, 5, 16, 2, 64), torch.empty(2, 3, 4, 2, 64)
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    q, tables = torch.empty(3, 4, 6, 64), torch.empty(2, 40, 16)
    return [
        append_launch(
            Appended(*cache, *new, lengths, lengths, None, pages, None, None, None, *rotary),
            RotaryOptions(interleaved=True),
            DEVICES[device].capability,
        )
        for pages in (None, table)
        for rotary in ((), (q, q, *tables, lengths, None))
    ]


def gather_launches() -> list[Launch]:
    """The launch that gathers pages."""
    cache, rows = torch.empty(2, 5, 16, 2, 64), torch.empty(2, 3, 32, 2, 64)
    table, used = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    return [gather_launch(*cache, table, used, *rows)]


def rotary_launches() -> list[Launch]:
    """The launches that rotate a dense tensor in place, and a packed one into another tensor."""
    x, out, tables = torch.empty(3, 4, 6, 64), torch.empty(3, 4, 6, 64), torch.empty(2, 40, 16)
    starts = torch.zeros(4, dtype=torch.int32)
    packed = (x.flatten(0, 1), out.flatten(0, 1), *tables, None, 0, starts, True, True)
    return [
        rotary_launch(x, x, *tables, starts[1:], 0, None, False, False),
        rotary_launch(*packed),
    ]


def _problem(operands: Operands, options: Options, device: str) -> AttentionProblem:
    capability = DEVICES[device].capability
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(bias_needs_grad=problem.has_bias)
    return problem._replace(device_type="cuda", capability=capability)
