"""How many variants of each kernel calls in unusual layouts compile: what they ask of the cache of
compiled kernels. Nothing is compiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from compiled_kernels import key

from flashtile.backends import hopper
from flashtile.backends.hopper.backward import launch as hopper_backward
from flashtile.backends.hopper.forward import launch as hopper_forward
from flashtile.backends.hopper.forward.plan import plan
from flashtile.backends.hopper.shared.launch import readable
from flashtile.backends.triton import launch as triton_launch
from flashtile.backends.triton.plan import FEW_ROWS
from flashtile.gpu.hardware import H100
from flashtile.gpu.launch import Launch
from flashtile.problem import AttentionProblem, Operands

from .launches import launches
from .unusual_layouts import Call, calls

MOST = 4


@pytest.fixture(autouse=True)
def _a_gpu_of_usual_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_launch, "multiprocessors", lambda device: H100.multiprocessors)
    monkeypatch.setattr(hopper_backward, "gpu_of", lambda device: H100)


def triton_launches(call: Call) -> list[Launch]:
    return launches(*call, "sm_90")


def hopper_launches(call: Call) -> list[Launch]:
    """None where the backend refuses the call."""
    operands, options = call
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(device_type="cuda", capability=(9, 0), needs_grad=True)
    if hopper.unsupported_reasons(problem):
        return []
    config = plan(problem)
    out, lse = (allocate() for allocate in hopper_forward.outputs(operands, config))
    counter = torch.zeros(2, dtype=torch.int32)
    made = hopper_backward.allocation(problem, operands).buffers()
    new_tiles = hopper_forward.tile_list(problem, config, operands)
    tiles = next((allocate() for allocate in new_tiles), None)
    forward = hopper_forward.forward_launch(
        problem, config, operands, out, lse, H100.multiprocessors, counter, tiles
    )
    return [
        *hopper_forward.with_list(problem, config, forward),
        *hopper_backward.backward_launches(
            problem, operands, out, lse, readable(torch.empty_like(out)), None, made, None
        ),
    ]


BACKENDS = {"triton": triton_launches, "hopper": hopper_launches}


def kind_of(operands: Operands) -> tuple[bool, bool]:
    """What the manual says kernels are compiled for, among what these calls differ in: packed
    sequences, and tiles of few queries."""
    return operands.cu_seqlens_q is not None, operands.q.shape[-3] <= FEW_ROWS


def variants(backend: str, named: Iterator[tuple[str, Call]]) -> dict[str, dict[str, list[str]]]:
    """The names of the layouts by kernel, with its kind of call, and by variant of it."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, call in named:
        for launch in BACKENDS[backend](call):
            found[f"{launch.kernel.__name__} {kind_of(call[0])}"][key(launch)].append(name)
    return found


@pytest.mark.parametrize("dim", [64, 72, 33])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fifty_layouts_compile_four_variants_at_most(backend: str, dim: int):
    if backend == "hopper" and dim % 8:
        pytest.skip(f"the Hopper backend has no head dim {dim}")
    named = list(calls(dim))
    assert len(named) == len(dict(named)) == 50
    found = variants(backend, iter(named))
    counts = {kernel: len(by_key) for kernel, by_key in found.items()}
    assert counts
    assert {kernel: n for kernel, n in counts.items() if n > MOST} == {}, dict(found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_whatever_strides_compile_two_variants_at_most(backend: str):
    """Aligned, so that tiles are loaded 16 bytes at a time, or not."""
    sizes = [(name, call) for name, call in calls(64) if call[0].q.shape[:2] == (3, 77)]
    assert len(sizes) == 20
    found = variants(backend, iter(sizes))
    assert found and max(len(by_key) for by_key in found.values()) <= 2
