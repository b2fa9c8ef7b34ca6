"""Measure one case: errors, then times, of one process and of every peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .cases import ContextCase
from .peers import PEERS, Ready, alone
from .rows import ALONE, ContextRow
from .timing import Timed, in_turn, median_of
from .together import Team
from .truth import Results, exact

DIRECTIONS = ("forward", "both")
MOST_ERROR = 0.1  # relative: a peer that attends to other keys is further away
Errors = tuple[float, ...]  # of the fields of `Results`


class Data(NamedTuple):
    """What a call gets, and what it should find for the first key head and its queries."""

    inputs: tuple[Tensor, ...]  # q, k, v and the gradient of out
    truth: Results


class Running(NamedTuple):
    """A peer with its part of a case on this rank."""

    ready: Ready
    data: Data
    errors: Errors  # of all ranks together


def measured(case: ContextCase, team: Team) -> Iterator[ContextRow]:
    """The rows of a case. All peers take turns, and so does one process on the whole sequence."""
    lengths = case.lengths(dist.get_world_size())
    whole = _whole(case, lengths, team)
    peers, reasons = _prepared(case, lengths, whole, team)
    row = ContextRow(
        "", "", documents=len(lengths), ranks=dist.get_world_size(),
        process_group=dist.get_backend(), **case._asdict(),
    )  # fmt: skip
    for direction in DIRECTIONS:
        calls = {
            name: Timed(team, _pass(peer, direction), peer.ready.around)
            for name, peer in peers.items()
            if name not in reasons
        }
        reasons |= in_turn(team, calls)
        for name in (ALONE, *PEERS):
            mine = replace(row, peer=name, direction=direction)
            if name in reasons:
                yield replace(mine, skipped=reasons[name])
            else:
                yield replace(mine, **_results(name, peers, calls, direction))


def prepared_peer(case: ContextCase, name: str, direction: str, team: Team) -> Any:
    """The call of one peer, in which kernels have been compiled.

    Raises:
        RuntimeError: the peer cannot run the case.
    """
    lengths = case.lengths(dist.get_world_size())
    peers, reasons = _prepared(case, lengths, _whole(case, lengths, team), team, [name])
    if name in reasons:
        raise RuntimeError(f"{name}: {reasons[name]}")
    return _pass(peers[name], direction)


def _prepared(
    case: ContextCase,
    lengths: list[int],
    whole: Data,
    team: Team,
    only: Sequence[str] = (),
) -> tuple[dict[str, Running], dict[str, str]]:
    """The peers that find the right result, and why the others do not. This compiles kernels."""
    peers: dict[str, Running] = {}
    reasons: dict[str, str] = {}
    makers = {ALONE: lambda case, lengths: Ready(alone(case, lengths), None), **PEERS}
    for name in only or makers:
        make = makers[name]

        def prepare(name: str = name, make: Any = make) -> None:
            ready = make(case, lengths)
            data = whole
            if ready.layout is not None:
                shard = ready.layout.shard
                data = Data(tuple(map(shard, whole.inputs)), Results(*map(shard, whole.truth)))
            squares = _squares(ready, data)
            team.finish()
            peers[name] = Running(ready, data, squares)

        reason = team.problem(prepare)
        if not reason:
            of_ranks = torch.tensor(team.tell(peers[name].errors), dtype=torch.float64).sum(0)
            off, size = of_ranks.unflatten(0, (2, -1))
            errors = tuple((off / size).sqrt().tolist())
            peers[name] = peers[name]._replace(errors=errors)
            if not max(errors) <= MOST_ERROR:
                reason = f"wrong result: relative errors of out, dq, dk, dv {errors}"
        if reason:
            reasons[name] = reason
    return peers, reasons


def _whole(case: ContextCase, lengths: list[int], team: Team) -> Data:
    """Random inputs of all tokens, the same on all ranks, and the truth."""
    batch = () if case.variant == "packed" else (1,)
    dtype = getattr(torch, case.dtype)
    inputs = []
    for heads in (case.heads_q, case.heads_kv, case.heads_kv, case.heads_q):
        x = torch.randn(*batch, sum(lengths), heads, case.head_dim, device=team.device, dtype=dtype)
        dist.broadcast(x, 0)
        inputs.append(x)
    group = case.heads_q // case.heads_kv
    counts = (group, 1, 1, group)
    q, k, v, dout = (x.flatten(0, -3)[:, :n] for x, n in zip(inputs, counts, strict=True))
    truth = exact(q, k, v, dout, lengths, case.window)
    return Data(tuple(inputs), Results(*(x.unflatten(0, (*batch, -1)) for x in truth)))


def _squares(ready: Ready, data: Data) -> Errors:
    """Sums of squares on this rank: of the errors of all results, then of the truth."""
    leaves = [x.detach().requires_grad_() for x in data.inputs[:3]]
    with ready.around(), torch.enable_grad():
        out = ready.call(*leaves)
        found = (out.detach(), *torch.autograd.grad(out, leaves, data.inputs[3]))
    off = [
        float((x[..., : want.shape[-2], :].double() - want).square().sum())
        for x, want in zip(found, data.truth, strict=True)
    ]
    return (*off, *(float(want.square().sum()) for want in data.truth))


def _pass(peer: Running, direction: str) -> Any:
    """A call of one pass."""
    q, k, v, dout = peer.data.inputs
    if direction == "forward":

        def forward() -> None:
            with torch.no_grad():
                peer.ready.call(q, k, v)

        return forward
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def both() -> None:
        with torch.enable_grad():
            torch.autograd.grad(peer.ready.call(*leaves), leaves, dout)

    return both


def _results(
    name: str, peers: Mapping[str, Running], calls: Mapping[str, Timed], direction: str
) -> dict[str, Any]:
    """The numbers of a row."""
    ranks = dist.get_world_size()
    found: dict[str, Any] = {"way": peers[name].ready.way}
    for column, of_ranks in (("single", "single_efficiency"), ("steady", "efficiency")):
        # All ranks compute the same alone, and the fastest one counts.
        slowest = median_of(getattr(calls[name], column), min if name == ALONE else max)
        found[f"{column}_ms"] = slowest
        if name != ALONE and ALONE in calls and calls[ALONE].single:
            one = median_of(getattr(calls[ALONE], column), min)
            found[of_ranks] = one / ranks / slowest
    found["host_ms"] = median_of(calls[name].host, max)
    errors = peers[name].errors
    names = [f"{field}_error" for field in Results._fields]
    found |= zip(names, errors, strict=True)
    if ALONE in peers:
        found["worst_error_ratio"] = max(
            x / one for x, one in zip(errors, peers[ALONE].errors, strict=True)
        )
    return found
