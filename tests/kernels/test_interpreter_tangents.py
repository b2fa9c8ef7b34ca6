"""Forward mode of the kernels in Triton's interpreter, by the rule, against the reference's."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from configurations import one_kind_each
from tangent_error import tangent_variance, tangents_of
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import cpu
from flashtile.backends.triton import launch, plan
from flashtile.problem import AttentionProblem, Operands
from flashtile.testing import assert_close, floor_of, normal

from .cases import Call, make_call
from .compare import converted
from .reference import reference

CASES = (
    "causal, full tiles",
    "causal, dead rows",
    "window",
    "packed",
    "odd head dims",
    "softcap",
    "alibi",
    "bias",
    "bias of keys, 80 keys",
    "sink",
    "lengths",
    "negative scale",
    "no keys",
    "relative bias of all distances",
    "block mask",
    "spans of heads",
    "packed dropout",
    "score function of many operations",
)
NAMES = ("q", "k", "v", "bias", "sink")


def directions(operands: Operands) -> dict[str, Tensor]:
    """Random tangents of the operands that can have one in a kernel."""
    generator = torch.Generator().manual_seed(3)
    present = {name: x for name in NAMES if (x := getattr(operands, name)) is not None}
    return {n: normal(generator, *x.shape, dtype=x.dtype) for n, x in present.items()}


def expected(
    call: Call, tangents: dict[str, Tensor], dtype: torch.dtype, **how: Any
) -> list[Tensor]:
    """The tangents of out and lse of the reference, computed in `dtype`."""
    operands, options = call

    def results(*x: Tensor) -> tuple[Tensor, Tensor]:
        moved = operands._replace(**dict(zip(tangents, x, strict=True)))
        found = reference(moved, options, compute_dtype=dtype, **how)
        return found.out, found.lse.masked_fill(found.lse == -torch.inf, 0.0)

    point = [getattr(operands, name).to(dtype) for name in tangents]
    return tangents_of(results, point, [x.to(dtype) for x in tangents.values()])


def assert_tangents(
    name: str, dtype: torch.dtype, seed: int, names: tuple[str, ...], **facts: Any
) -> None:
    operands, options = call = make_call(name, dtype, seed)
    tangents = {n: x for n, x in directions(operands).items() if n in names}
    exact = converted(operands, torch.float64)
    out, lse = cpu.forward(AttentionProblem.of(exact, options), exact)
    problem = AttentionProblem.of(operands, options)._replace(**facts)
    along = tuple(tangents.get(n) for n in NAMES)
    found = launch.tangents(problem, operands, out.to(dtype), lse.float(), along)
    truth = expected(call, tangents, torch.float64)
    plain = expected(call, tangents, dtype)
    floors = map(floor_of, expected(call, tangents, torch.float64, attend=tangent_variance(dtype)))
    compared = zip(("out", "lse"), found, truth, plain, floors, strict=True)
    for result, got, exactly, plainly, floor in compared:
        assert_close(result, got, exactly, plainly, floor=floor, dtype=dtype, seed=seed)


@pytest.mark.parametrize(
    ("name", "dtype"),
    one_kind_each(CASES, (torch.float32, torch.float16)),
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_of_every_option(name: str, dtype: torch.dtype, seed: int) -> None:
    assert_tangents(name, dtype, seed, NAMES)


@pytest.mark.parametrize("names", [(n,) for n in NAMES] + [("q", "v"), ("k", "v")], ids="+".join)
def test_of_some_inputs(names: tuple[str, ...], seed: int) -> None:
    name = {"bias": "bias", "sink": "sink"}.get(names[0], "packed dropout")
    assert_tangents(name, torch.float32, seed, names)


@pytest.mark.parametrize(("name", "first"), [("lengths", 13), ("window before the query", 80)])
def test_hidden_keys_may_hold_anything(name: str, first: int, seed: int) -> None:
    """Keys that no query of a sequence sees, and their tangents."""
    operands, options = make_call(name, torch.float16, seed)
    problem = AttentionProblem.of(operands, options)
    out, lse = cpu.forward(problem, operands)
    found = []
    for number in (0.0, torch.nan):
        tangents = directions(operands)
        hidden = {n: x.clone() for n, x in zip("kv", operands[1:3], strict=True)}
        for x in (*hidden.values(), tangents["k"], tangents["v"]):
            x[1, first:] = number
        along = tuple(tangents.get(n) for n in NAMES)
        found.append(launch.tangents(problem, operands._replace(**hidden), out, lse, along))
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)


@pytest.mark.parametrize("name", ["causal, full tiles", "packed", "odd head dims"])
def test_through_tensor_descriptors(name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
    plan.plan.cache_clear()
    assert_tangents(name, torch.float16, seed, NAMES, capability=(9, 0))


def test_float32_in_six_products(seed: int) -> None:
    assert_tangents("causal, full tiles", torch.float32, seed, NAMES, capability=(9, 0))
