"""Compiles the launch of a call for sm_90a without a GPU, and reads what came out."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from flashtile.backends.hopper.forward.launch import (
    forward_launch,
    lists_of,
    outputs,
    tile_list,
)
from flashtile.backends.hopper.forward.plan import plan
from flashtile.gpu.launch import Launch
from flashtile.problem import AttentionProblem, Operands, Options

from .inputs import unwritten_spans

CAPABILITY = (9, 0)
TARGET = GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132


class Report(NamedTuple):
    """What became of a kernel."""

    registers: int
    spilled: int  # bytes a thread
    shared: int  # bytes a program
    warnings: list[str]
    unused_barriers: list[str]  # mbarriers that no role but the first one uses
    value_products: list[str]  # left operand of every wgmma with V: a register, or a descriptor
    blocks: list[list[str]]  # names of the instructions of every innermost loop with a product


def launch_of(operands: Operands, options: Options, **facts: object) -> Launch:
    """The launch that the call would make on the device; `facts` of its problem may be set."""
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(capability=CAPABILITY, device_type="cuda", **facts)
    counter = torch.zeros(2, dtype=torch.int32)
    config = plan(problem)
    out, lse = (allocate() for allocate in outputs(operands, config))
    tiles = next((allocate() for allocate in tile_list(problem, config, operands)), None)
    launch = forward_launch(problem, config, operands, out, lse, MULTIPROCESSORS, counter, tiles)
    launch.arguments["blocks"] = lists_of(problem, config, operands)
    if problem.spans > 0:
        launch.arguments["blocks"] = unwritten_spans(problem, config, operands)
    return launch


def specialize(launch: Launch) -> tuple[ASTSource, dict[str, object]]:
    """What Triton compiles a launch from, and with which options."""
    fn = launch.kernel
    backend = make_backend(TARGET)
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialization, kwargs = bind(**launch.arguments, num_warps=launch.warps)
    parsed, signature, constants, attributes = fn._pack_args(
        backend, kwargs, bound, specialization, kwargs
    )
    source = GluonASTSource if fn.is_gluon() else ASTSource
    return source(fn, signature, constants, attributes), parsed.__dict__


def report(launch: Launch) -> Report:
    """Compile a launch."""
    source, options = specialize(launch)
    compiled = triton.compile(source, target=TARGET, options=options)
    log = _assembler_log(compiled.asm["ptx"])
    assembly = _disassembled(compiled.asm["cubin"])
    # Only V is read transposed.
    products = re.findall(r"HGMMA\S* R\d+, (\w+).*\.tnspB", assembly)
    return Report(
        registers=_number(r"Used (\d+) registers", log),
        spilled=_number(r"(\d+) bytes spill stores", log),
        shared=compiled.metadata.shared,
        warnings=re.findall(r".*(?:warning|Potential).*", log),
        unused_barriers=_unused_barriers(compiled.asm["ttgir"]),
        value_products=products,
        blocks=_blocks(assembly.splitlines()),
    )


def _unused_barriers(code: str) -> list[str]:
    """The mbarriers that a program with roles allocates but does not hand to one of them. Triton
    gives their memory to other tensors, which changed there when the GPU switched to another
    process.
    """
    handed = {name for names in re.findall(r"warp_specialize\((.*?)\)", code) for name in
              re.findall(r"%\w+", names)}  # fmt: skip
    barriers = re.findall(r"(%\w+) = ttg.local_alloc : \(\) -> !ttg.memdesc<\d+x1xi64", code)
    return [name for name in barriers if handed and name not in handed]


def _blocks(lines: list[str]) -> list[list[str]]:
    """The innermost loops with a product. A wait jumps out of line and back, which is no loop."""
    labels = {m[1]: n for n, line in enumerate(lines) if (m := re.match(r"\s*(\.L_\w+):", line))}
    jumps = ((re.search(r"BRA.*`\((\.L_\w+)\)", line), n) for n, line in enumerate(lines))
    spans = [(labels[m[1]], n + 1) for m, n in jumps if m and labels[m[1]] < n]
    products = [n for n, line in enumerate(lines) if "GMMA" in line]
    ends = [n for n, line in enumerate(lines) if re.search("EXIT|USETMAXREG|UTMASTG", line)]
    spans = [s for s in spans if _within(products, s) and not _within(ends, s)]
    inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    return [re.findall(r"\*/ +(?:@\S+ )?([A-Z]\S+)", "\n".join(lines[a:b])) for a, b in inner]


def _within(numbers: list[int], span: tuple[int, int]) -> bool:
    return any(span[0] <= n < span[1] for n in numbers)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])


def _assembler_log(ptx: str) -> str:
    """The assembler's remarks on a program; the newer assembler knows the newer language."""
    nvidia = triton.knobs.nvidia
    log = ""
    for tool in (nvidia.ptxas, getattr(nvidia, "ptxas_blackwell", nvidia.ptxas)):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "kernel.ptx")
            with open(path, "w", encoding="utf-8") as file:
                file.write(ptx)
            command = [tool.path, "-v", "--gpu-name=sm_90a", path, "-o", path + ".cubin"]
            found = subprocess.run(command, capture_output=True, text=True)
        log = found.stdout + found.stderr
        if found.returncode == 0:
            break
    return log


def _disassembled(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
