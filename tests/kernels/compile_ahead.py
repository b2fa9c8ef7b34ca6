"""Compile the launches of a call for an absent GPU, and read the compiler's report."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from flashtile.backends.triton.kernel_launches import (
    backward_launches,
    forward_launches,
    probabilities_launch,
)
from flashtile.backends.triton.launch import backward_buffers, forward_buffers
from flashtile.backends.triton.support import unsupported_reasons
from flashtile.gpu.launch import Launch
from flashtile.ops.append.kernel import Appended, RotaryOptions, append_launch
from flashtile.ops.gather.kernel import gather_launch
from flashtile.ops.rotary.kernel import rotary_launch
from flashtile.problem import Appending, AttentionProblem, Operands, Options


class Device(NamedTuple):
    """A GPU to compile for."""

    target: GPUTarget
    capability: tuple[int, int]  # as PyTorch gives it
    shared: int  # bytes that one program may have


def _nvidia(major: int, minor: int, shared: int) -> Device:
    return Device(GPUTarget("cuda", 10 * major + minor, 32), (major, minor), shared)


DEVICES = {
    "sm_80": _nvidia(8, 0, 166912),
    "sm_86": _nvidia(8, 6, 101376),
    "sm_89": _nvidia(8, 9, 101376),
    "sm_90": _nvidia(9, 0, 232448),
    "sm_100": _nvidia(10, 0, 232448),
    "sm_120": _nvidia(12, 0, 101376),
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), (9, 4), 65536),
}


def launches(
    operands: Operands, options: Options, device: str, backward: bool = True
) -> list[Launch]:
    """Every launch that the call would make on `device`; without the backward if that is refused
    there."""
    problem = _problem(operands, options, device)
    made = forward_buffers(problem, operands)
    found = forward_launches(problem, operands, made)
    if backward and not unsupported_reasons(problem._replace(needs_grad=True)):
        out, lse = made[:2]
        gradients = backward_buffers(problem, operands, operands.k.dtype)
        dout = torch.empty_like(out)
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


class Report(NamedTuple):
    """The compiler's report on one kernel."""

    kernel: str
    registers: int
    spilled: int  # bytes a thread
    shared: int  # bytes a program


def report(launch: Launch, device: str) -> Report:
    """Compile one launch for `device`.

    Triton makes a kernel that only traps of some that it cannot compile, and says nothing.
    """
    compiled = _compiled(launch, device)
    assert "llvm.trap" not in compiled.asm["llir"], f"{launch.kernel.__name__} only traps"
    read = _read_nvidia if DEVICES[device].target.backend == "cuda" else _read_amd
    return Report(launch.kernel.__name__, *read(compiled.asm), compiled.metadata.shared)


def ptx(launch: Launch) -> str:
    """The PTX of one launch."""
    text: str = _compiled(launch, "sm_90").asm["ptx"]
    return text


def serialises_wgmma(launch: Launch) -> bool:
    """Whether ptxas makes a kernel for sm_90 wait for each wgmma, where its PTX waits for groups of
    them.

    ptxas does so where it cannot follow the accumulators (its remark C7515).
    """
    asm = _compiled(launch, "sm_90").asm
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", _cuobjdump("-sass", asm["cubin"])))
    return waits > asm["ptx"].count("wgmma.wait_group")


def _compiled(launch: Launch, device: str) -> Any:
    target, fn = DEVICES[device].target, launch.kernel
    backend, (bound, specialized, kwargs) = _bind(launch, target)
    options, signature, constants, attributes = fn._pack_args(
        backend, kwargs, bound, specialized, kwargs
    )
    source = ASTSource(fn, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def specialization(launch: Launch, device: str) -> str:
    """The key of a launch in the cache of compiled kernels."""
    _, (_, specialized, _) = _bind(launch, DEVICES[device].target)
    return str(specialized)


def _bind(launch: Launch, target: GPUTarget) -> tuple[Any, Any]:
    """Triton's own reading of the arguments."""
    fn, backend = launch.kernel, make_backend(target)
    binder = create_function_from_signature(fn.signature, fn.params, backend)
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.registers is not None and target.backend == "cuda":
        options["maxnreg"] = launch.registers
    return backend, binder(**launch.arguments, **options)


def _read_nvidia(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers a thread, and bytes of them that spill.

    A stack that no instruction reads back holds no spilled register: the assembler makes such
    stacks of 8 bytes for sm_120.
    """
    usage = _cuobjdump("-res-usage", asm["cubin"])
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    if stack and not re.search(r"\bLDL\b", _cuobjdump("-sass", asm["cubin"])):
        stack = 0
    return registers, stack


def _cuobjdump(what: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _read_amd(asm: dict[str, Any]) -> tuple[int, int]:
    registers, spilled = (
        int(re.findall(rf"\.{name}:\s*(\d+)", asm["amdgcn"])[0])
        for name in ("vgpr_count", "vgpr_spill_count")
    )
    return registers, 4 * spilled
