"""Compiles the launches of a call for a GPU that is not here, and reads the compiler's report."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from flashtile.backends.triton.launch import Launch, backward_launches, forward_launches
from flashtile.backends.triton.plan import plan
from flashtile.problem import AttentionProblem, Operands, Options

# Shared memory that one program may have, in bytes.
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
CDNA_SHARED_LIMIT = 65536


class Report(NamedTuple):
    """What became of one kernel."""

    kernel: str
    registers: int
    stack: int  # bytes a thread: spilled registers
    shared: int  # bytes a program


def report(launch: Launch, target: GPUTarget) -> Report:
    """Compile one launch for `target`."""
    fn = launch.kernel
    backend = make_backend(target)
    binder = create_function_from_signature(fn.signature, fn.params, backend)
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages}
    bound, specialization, kwargs = binder(**launch.arguments, **options)
    parsed, signature, constants, attributes = fn._pack_args(
        backend, kwargs, bound, specialization, kwargs
    )
    source = ASTSource(fn, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=parsed.__dict__)
    if target.backend != "cuda":
        text = compiled.asm["amdgcn"]
        spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
        registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
        assert spills is not None
        assert registers is not None
        return Report(fn.__name__, int(registers[1]), int(spills[1]), compiled.metadata.shared)
    usage = _resource_usage(compiled.asm["cubin"])
    return Report(fn.__name__, usage["REG"], usage["STACK"], compiled.metadata.shared)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK and more of the one kernel in `cubin`."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    finally:
        os.unlink(file.name)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


def target_of(capability: tuple[int, int] | None) -> GPUTarget:
    """None is AMD's gfx942."""
    if capability is None:
        return GPUTarget("hip", "gfx942", 64)
    return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)


def launches(
    operands: Operands, options: Options, capability: tuple[int, int] | None, backward: bool
) -> list[Launch]:
    """Every launch that the call would make on such a device."""
    problem = AttentionProblem.of(operands, options)._replace(capability=capability)
    plan.cache_clear()
    out, lse, found = forward_launches(problem, operands)
    if backward:
        dout = torch.empty_like(out)
        found += backward_launches(problem, operands, out, lse, dout, None)[2]
    return found
