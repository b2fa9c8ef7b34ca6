"""One call of `cases.py` through a backend's own functions, judged by `design.md`'s rule."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from summation import PlainRuns, Run
from torch import Tensor

from flashtile.backends import cpu
from flashtile.backends.cpu import plan as cpu_plan
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import assert_close, generator

from .cases import make_call

MAX_ORDERS = 64


def converted(operands: Operands, dtype: torch.dtype) -> Operands:
    """Floating operands in another dtype."""
    floating = (x is not None and x.is_floating_point() for x in operands)
    return Operands(*(x.to(dtype) if f else x for x, f in zip(operands, floating, strict=True)))


def everything(
    backend: Any,
    operands: Operands,
    options: Options,
    dout: Tensor,
    dlse: Tensor,
    capability: tuple[int, int] | None = None,
) -> Run:
    """Outputs and gradients by name, on the CPU."""
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(bias_needs_grad=problem.has_bias)
    if capability is not None:
        problem = problem._replace(capability=capability)
    out, lse = backend.forward(problem, operands)
    dlse = dlse.masked_fill(lse.cpu() == -torch.inf, 0.0).to(lse)
    gradients = backend.backward(problem, operands, out, lse, dout.to(out), dlse)
    results = {"out": out, "lse": lse} | gradients._asdict()
    return {name: x.cpu() for name, x in results.items() if x is not None}


def plain_runs(
    operands: Operands, options: Options, dout: Tensor, dlse: Tensor, seed: int
) -> PlainRuns:
    """What the CPU backend makes of a call in the call's own precision, as it is and then with the
    columns of the heads in other orders and the rows and keys in smaller tiles.

    Tiles count where a head has few columns to reorder: dK sums over the rows.
    """
    D, Dv = operands.q.shape[-1], operands.v.shape[-1]
    g = generator(seed + 1)

    def tile_sizes() -> list[int]:
        return torch.randint(4, 33, (2,), generator=g).tolist()

    def run(number: int) -> Run:
        order, value_order = torch.arange(D), torch.arange(Dv)
        if number > 0:
            order = torch.randperm(D, generator=g)
            value_order = torch.randperm(Dv, generator=g)
        q, k, v = operands.q[..., order], operands.k[..., order], operands.v[..., value_order]
        shuffled = operands._replace(q=q, k=k, v=v)
        with contextlib.nullcontext() if number == 0 else plain_tiles(*tile_sizes()):
            results = everything(cpu, shuffled, options, dout[..., value_order], dlse)
        orders = {"dq": order, "dk": order, "out": value_order, "dv": value_order}
        return {
            name: x[..., orders[name].argsort()] if name in orders else x
            for name, x in results.items()
        }

    return PlainRuns(run, MAX_ORDERS)


def plain_tiles(BLOCK_M: int, BLOCK_N: int) -> mock._patch:
    """The CPU backend with plain tiles of a size of its own, where it would else leave the sums to
    PyTorch's kernel, too; its plans are not remembered."""
    return mock.patch.multiple(
        cpu_plan,
        PLAIN_BLOCK_M=BLOCK_M,
        PLAIN_BLOCK_N=BLOCK_N,
        _plan=cpu_plan._plan.__wrapped__,
        _not_native=lambda *_: ["other orders of the sums"],
    )


def assert_case(
    backend: Any,
    name: str,
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
    capability: tuple[int, int] | None = None,
) -> None:
    """Compare outputs and gradients of a case with the CPU backend's in float64.

    `capability`: plan as for such a device, whatever the tensors are on.
    """
    operands, options = make_call(name, dtype, seed)
    rows, Hq, Dv = operands.q.shape[:-1], operands.q.shape[-2], operands.v.shape[-1]
    dout = torch.randn(*rows[:-1], Hq, Dv).to(dtype)
    packed = operands.cu_seqlens_q is not None
    dlse = torch.randn((Hq, rows[0]) if packed else (rows[0], Hq, rows[1]))
    truth = everything(cpu, converted(operands, torch.float64), options, dout, dlse)
    plain = plain_runs(operands, options, dout, dlse, seed)
    there = Operands(*(None if x is None else x.to(device) for x in operands))
    got = everything(backend, there, options, dout, dlse, capability)
    assert got.keys() == truth.keys()
    for field, x in got.items():
        assert_close(field, x, truth[field], plain.results(field), dtype=dtype, seed=seed)
