"""Run a call of `cases.py` through a backend's own functions and check it by the rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import assert_close, floor_of, rounding_variance

from .cases import Call, make_call
from .reference import reference

DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")
Run = dict[str, Tensor]  # results by name


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
    **facts: Any,
) -> Run:
    """Outputs and gradients by name, on the CPU; `facts` are fields of the problem."""
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(bias_needs_grad=problem.has_bias, **facts)
    if capability is not None:
        problem = problem._replace(capability=capability)
    out, lse = backend.forward(problem, operands)
    dlse = dlse.masked_fill(lse.cpu() == -torch.inf, 0.0).to(lse)
    gradients = backend.backward(
        problem, operands, out.to(dout.dtype), lse, dout.to(out.device), dlse
    )
    results = {"out": out, "lse": lse} | gradients._asdict()
    return {name: x.cpu() for name, x in results.items() if x is not None}


def expected(operands: Operands, options: Options, dout: Tensor, dlse: Tensor, **how: Any) -> Run:
    """The reference's results for the same call; `how` is the precision."""
    names = DIFFERENTIABLE
    names += ("alibi_slopes",) if options.alibi_needs_grad else ()
    names += ("relative_bias",) if options.relative_bias_needs_grad else ()
    leaves = {
        name: x.detach().to(how["compute_dtype"]).requires_grad_()
        for name in names
        if (x := getattr(operands, name)) is not None
    }
    found = reference(operands._replace(**leaves), options, **how)
    cotangents = dout.to(found.out), dlse.masked_fill(found.lse == -torch.inf, 0.0).to(found.lse)
    gradients = torch.autograd.grad(
        (found.out, found.lse), list(leaves.values()), cotangents, materialize_grads=True
    )
    named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"out": found.out, "lse": found.lse} | named


def assert_case(
    backend: Any,
    name: str,
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
    capability: tuple[int, int] | None = None,
) -> None:
    """Compare outputs and gradients of a case with the reference's in float64.

    `capability`: plan for such a device, on whichever device the tensors are.
    """
    assert_call(backend, make_call(name, dtype, seed), dtype, seed, device, capability)


def assert_call(
    backend: Any,
    call: Call,
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
    capability: tuple[int, int] | None = None,
    calm: Call | None = None,
) -> None:
    """`assert_case` for any call.

    `calm`: an equal call with scores of ordinary size, whose floor holds for `call`. Gradients then
    flow back only through the output, because in float64, too, the log-sum-exp of huge scores has
    lost the sum that its gradient needs.
    """
    operands, options = call
    rows, Hq, Dv = operands.q.shape[:-1], operands.q.shape[-2], operands.v.shape[-1]
    dout = torch.randn(*rows[:-1], Hq, Dv).to(dtype)
    packed = operands.cu_seqlens_q is not None
    dlse = torch.randn((Hq, rows[0]) if packed else (rows[0], Hq, rows[1]))
    if calm is not None:
        dlse.zero_()
    given = operands, options, dout, dlse
    with_floor = given if calm is None else (*calm, dout, dlse)
    truth = expected(*given, compute_dtype=torch.float64)
    plain = expected(*given, compute_dtype=dtype)
    attend = rounding_variance(dtype)
    variance = expected(*with_floor, compute_dtype=torch.float64, attend=attend)
    there = Operands(*(None if x is None else x.to(device) for x in operands))
    got = everything(backend, there, options, dout, dlse, capability)
    assert got.keys() == truth.keys()
    for field, x in got.items():
        floor, wanted, low = floor_of(variance[field]), truth[field], plain[field]
        if calm is not None and field == "lse":
            huge = wanted.isfinite() & (wanted.abs() > 1e4)
            torch.testing.assert_close(x[huge].double(), wanted[huge], rtol=1e-6, atol=0.0)
            x, wanted, low = (y.masked_fill(huge, 0.0) for y in (x, wanted, low))
        assert_close(field, x, wanted, low, floor=floor, dtype=dtype, seed=seed)
