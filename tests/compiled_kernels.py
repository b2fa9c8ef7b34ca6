"""Kernels compiled for GPUs that are not here, and what became of each.

A kernel takes seconds to compile. So `compiled_kernels.txt` keeps a line for each one that the
tests compile: Triton's release, the device, the kernel, a key and a report. The key is a hash of
everything that changes what is compiled: a kernel whose key has a line is not compiled again. One
in `CHECKED` compiles always and must equal its line. `make compiled` writes the lines that are used
and compiles what has none; without the file it compiles all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import tokenize
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import triton
from configurations import FULL
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import jit
from triton.runtime.jit import DependenciesFinder, JITCallable, create_function_from_signature

from flashtile.gpu.launch import Launch, precompute_key

CHECKED = 40  # in the whole file, about a dozen
FILE = Path(__file__).with_suffix(".txt")
# Where each process writes the lines of a new file.
PARTS = os.environ.get("FLASHTILE_COMPILED")


def without_comments(source: str) -> str:
    """Source text without comments, docstrings and empty lines."""
    lines, before = source.splitlines(), tokenize.NEWLINE
    for token in tokenize.generate_tokens(StringIO(source).readline):
        (row, column), (last_row, _) = token.start, token.end
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        elif token.type == tokenize.STRING and before in (tokenize.INDENT, tokenize.NEWLINE):
            lines[row - 1 : last_row] = [""] * (last_row + 1 - row)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return "\n".join(line.rstrip() for line in lines if line.strip())


class _Finder(DependenciesFinder):
    """Finds what goes into the hash of a function."""

    def __init__(self, *, src: str, **names: Any) -> None:
        super().__init__(src=without_comments(src), **names)


# Triton's hash of a function includes its line number, comments and docstring, which change nothing
# that is compiled.
JITCallable.starting_line_number = property(lambda self: 0, lambda self, number: None)
jit.DependenciesFinder = _Finder


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


# An instruction of a disassembled kernel, and those among them that tests ask for.
NAME = r"\*/ +(?:@\S+ )?([A-Z]\S+)"
COUNTED = re.compile(
    r"(BAR\.\w+|CS2R|FSEL|HGMMA|IMAD\.WIDE\.U32|LDL|MUFU\.\w+|STL|VOTE|WARPGROUP\.DEPBAR)"
)


class Block(NamedTuple):
    """The instructions of an innermost loop with a product."""

    length: int
    counts: dict[str, int]  # of the instructions of `COUNTED`
    exponentials: list[int]  # before the first wait for products, before the second, ..., at last

    def count(self, start: str) -> int:
        """How many instructions have a name that starts so."""
        return sum(n for name, n in self.counts.items() if name.startswith(start))


class Report(NamedTuple):
    """What became of a kernel."""

    registers: int = 0
    shared: int = 0  # bytes a program
    spilled: int = 0  # bytes a thread
    # Names of instructions that read and write global memory, and the bytes of asynchronous copies.
    accesses: Sequence[str] = ()
    # A kernel of Triton waits for each wgmma, where its PTX waits for groups of them.
    is_serialised: bool = False
    added_products: int = 0  # sums of a product and something else that the compiler left alone
    # Of Gluon's kernels:
    warnings: Sequence[str] = ()
    unused_barriers: Sequence[str] = ()  # mbarriers that no role but the first one uses
    value_products: Sequence[str] = ()  # left operands of wgmmas with V: registers or descriptors
    blocks: Sequence[Block] = ()


def report(launch: Launch, device: str = "sm_90") -> Report:
    """What becomes of the kernel of a launch on `device`, as recorded or compiled now."""
    name = key(launch, device)
    line = _lines.get(name)
    if line is None or int(name, 16) % CHECKED == 0:
        made = _as_json(_compiled(launch, device))
        wrong = f"{FILE.name} says {line} of {name}: delete the file and run `make compiled`"
        assert line in (None, made), wrong
        if line is None and PARTS is None and not FULL:
            text = f"kernels that {FILE.name} does not have: run `make compiled`"
            warnings.warn(text, stacklevel=1)
        _lines[name] = line = made
    if PARTS is not None:
        _write(f"{triton.__version__} {device} {launch.kernel.__name__} {name} {line}")
    facts = json.loads(line)
    facts["blocks"] = [Block(*block) for block in facts.get("blocks", ())]
    return Report(**facts)


def key(launch: Launch, device: str = "sm_90") -> str:
    """A hash of what changes the compiled kernel. Launches with the same key share a kernel."""
    precompute_key(launch.kernel)
    source, options = _specialized(launch, device)
    options.pop("extern_libs")  # paths, of files that belong to the release
    text = (
        f"{triton.__version__} {DEVICES[device].target} {source.hash()} {sorted(options.items())}"
    )
    return sha256(text.encode()).hexdigest()[:16]


def _known_lines() -> dict[str, str]:
    """The reports of the file by key."""
    if not FILE.is_file():
        return {}
    split = (line.split(" ", 4) for line in FILE.read_text(encoding="utf-8").splitlines())
    return {name: report for *_, name, report in split}


_lines = _known_lines()


def _as_json(made: Report) -> str:
    facts = {name: value for name, value in made._asdict().items() if value}
    return json.dumps(facts, separators=(",", ":"))


@cache
def _write(line: str) -> None:
    """Add a line to the new file, once in each process."""
    with open(Path(str(PARTS)) / str(os.getpid()), "a", encoding="utf-8") as part:
        part.write(line + "\n")


def _specialized(launch: Launch, device: str) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles a launch from, and with which options."""
    fn, target = launch.kernel, DEVICES[device].target
    given: dict[str, Any] = {"num_warps": launch.warps}
    if launch.stages is not None:
        given["num_stages"] = launch.stages
    if launch.registers is not None and target.backend == "cuda":
        given["maxnreg"] = launch.registers
    backend = make_backend(target)
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialization, options = bind(**launch.arguments, **given)
    parsed, *described = fn._pack_args(backend, options, bound, specialization, options)
    source = GluonASTSource if fn.is_gluon() else ASTSource
    return source(fn, *described), dict(parsed.__dict__)


def _compiled(launch: Launch, device: str) -> Report:
    """Compile a launch.

    Triton makes a kernel that only traps of some that it cannot compile, and says nothing.
    """
    target = DEVICES[device].target
    source, options = _specialized(launch, device)
    compiled = triton.compile(source, target=target, options=options)
    assert "llvm.trap" not in compiled.asm["llir"], f"{launch.kernel.__name__} only traps"
    if target.backend == "hip":
        read = _read_amd
    else:
        read = _read_gluon if launch.kernel.is_gluon() else _read_triton
    return read(compiled.asm, compiled.metadata.shared)


def _read_amd(asm: dict[str, Any], shared: int) -> Report:
    registers, spilled = (
        _number(rf"\.{name}:\s*(\d+)", asm["amdgcn"]) for name in ("vgpr_count", "vgpr_spill_count")
    )
    return Report(registers, shared, 4 * spilled)


def _read_triton(asm: dict[str, Any], shared: int) -> Report:
    """A stack that no instruction reads back holds no spilled register: the assembler makes such
    stacks of 8 bytes for sm_120.

    ptxas makes a kernel for sm_90 wait for each wgmma where it cannot follow the accumulators (its
    remark C7515).
    """
    usage = _of_cubin("cuobjdump", "-res-usage", asm["cubin"])
    registers, stack = (_number(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    groups = asm["ptx"].count("wgmma.wait_group")
    assembly = _of_cubin("cuobjdump", "-sass", asm["cubin"]) if stack or groups else ""
    return Report(
        registers,
        shared,
        stack if re.search(r"\bLDL\b", assembly) else 0,
        _accesses(asm["ptx"]),
        len(re.findall(r"WARPGROUP\.DEPBAR", assembly)) > groups,
        _added_products(asm["ttir"]),
    )


def _added_products(code: str) -> int:
    products = set(re.findall(r"(%\w+) = tt\.dot ", code))
    sums = re.findall(r"arith\.addf (%\w+), (%\w+)", code)
    return sum(not products.isdisjoint(terms) for terms in sums)


def _read_gluon(asm: dict[str, Any], shared: int) -> Report:
    log = _assembler_log(asm["ptx"])
    assembly = _of_cubin("nvdisasm", "-c", asm["cubin"])
    # Only V is read transposed.
    products = re.findall(r"HGMMA\S* R\d+, (\w+).*\.tnspB", assembly)
    return Report(
        _number(r"Used (\d+) registers", log),
        shared,
        _number(r"(\d+) bytes spill stores", log),
        _accesses(asm["ptx"]),
        warnings=re.findall(r".*(?:warning|Potential).*", log),
        unused_barriers=_unused_barriers(asm["ttgir"]),
        value_products=sorted({"register" if x.startswith("R") else x for x in products}),
        blocks=_blocks(assembly.splitlines()),
    )


def _accesses(ptx: str) -> list[str]:
    found = re.findall(r"((?:ld|st)\.global\S*)|(cp\.async\.c[ag]\S*) .*(, 0x\w+)", ptx)
    return sorted({"".join(parts) for parts in found})


def _unused_barriers(code: str) -> list[str]:
    """The mbarriers that a program with roles allocates but does not hand to one of them. Triton
    gives their memory to other tensors, which changed there when the GPU switched to another
    process.
    """
    handed = {name for names in re.findall(r"warp_specialize\((.*?)\)", code) for name in
              re.findall(r"%\w+", names)}  # fmt: skip
    barriers = re.findall(r"(%\w+) = ttg.local_alloc : \(\) -> !ttg.memdesc<\d+x1xi64", code)
    return [name for name in barriers if handed and name not in handed]


def _blocks(lines: list[str]) -> list[Block]:
    """The innermost loops with a product. A wait jumps out of line and back, which is no loop."""
    labels = {m[1]: n for n, line in enumerate(lines) if (m := re.match(r"\s*(\.L_\w+):", line))}
    jumps = ((re.search(r"BRA.*`\((\.L_\w+)\)", line), n) for n, line in enumerate(lines))
    spans = [(labels[m[1]], n + 1) for m, n in jumps if m and labels[m[1]] < n]
    products = [n for n, line in enumerate(lines) if "GMMA" in line]
    ends = [n for n, line in enumerate(lines) if re.search("EXIT|USETMAXREG|UTMASTG", line)]
    spans = [s for s in spans if _within(products, s) and not _within(ends, s)]
    inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    return [_block(re.findall(NAME, "\n".join(lines[a:b]))) for a, b in inner]


def _block(names: list[str]) -> Block:
    counted = [m[1] for name in names if (m := COUNTED.match(name))]
    between = " ".join(counted).split("WARPGROUP.DEPBAR")
    counts = dict(sorted(Counter(counted).items()))
    return Block(len(names), counts, [part.count("MUFU.EX2") for part in between])


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
            path = Path(folder, "kernel.ptx")
            path.write_text(ptx, encoding="utf-8")
            command = [tool.path, "-v", "--gpu-name=sm_90a", path, "-o", f"{path}.cubin"]
            found = subprocess.run(command, capture_output=True, text=True)
        log = found.stdout + found.stderr
        if found.returncode == 0:
            break
    return log


def _of_cubin(tool: str, what: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(triton.knobs.nvidia, tool).path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
