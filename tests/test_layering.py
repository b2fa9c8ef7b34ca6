"""Who may import whom, and how big a file may grow: the architecture, read off the syntax trees.

A call flows one way through the rooms of the package. Imports follow it: a room imports rooms that
stand below it in `ROOMS`, never one above, so every file can be read with only those below in mind.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "flashtile"

# From top to bottom. Rooms of one line do not import each other. A room is a module or a folder; a
# folder may have rooms of its own, such as "call.checks", which count for themselves. "" is the
# package itself, that is its `__init__.py`.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("__main__", "as_flash_attn"),
    ("cli",),
    ("integrations",),
    ("testing",),
    ("models",),
    ("modules", "losses"),
    ("",),
    ("flash_attn_3_interface",),
    ("flash_attn_2_interface", "flash_attn_4_interface"),
    ("flash_attn_4_layouts",),
    (
        "flash_attn_2_cuda",
        "flash_attn_interface",
        "flash_blocksparse_attn_interface",
        "quantize",
    ),
    ("combine",),
    ("api",),
    ("call.kvcache", "call.explain"),
    ("call.prefill",),
    ("call.prepare",),
    ("call.layouts", "call.attn_mask"),
    ("bert_padding", "layers"),
    ("call.checks", "call.memo", "call.absorbed"),
    ("call.dispatch",),
    ("call",),
    ("autograd",),
    ("backends",),
    ("ops",),
    ("gpu",),
    # The words that all the rooms above share: a call described, its mask, its dropout, its parts.
    ("problem",),
    ("masks", "dropout", "flops", "lazy", "lru"),
    ("autocast",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

# Inside one backend, from top to bottom; any other file of a backend is one of its kernels.
STAGES = {"": 0, "launch": 1, "kernel": 2, "plan": 3}

# The folders inside one backend: what each of them may import from.
FOLDERS = {
    "shared": {"shared"},
    "forward": {"shared", "forward"},
    "backward": {"shared", "forward", "backward"},
    "float8": {"shared", "forward", "float8"},
}

# What may be imported besides the standard library: torch and what torch itself requires, and, in
# some rooms alone, the optional packages.
REQUIRED = {"torch", "typing_extensions"}
OPTIONAL = {
    "cli": {"triton"},
    "integrations": {"diffusers", "transformers"},
    "backends": {"triton"},
    "ops": {"triton"},
    "gpu": {"triton"},
}

FORBIDDEN_NAMES = {"common", "helpers", "misc", "util", "utils"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60  # of the body, without the docstring
MAX_KERNEL_LINES, MAX_KERNEL_PARAMETERS = 150, 30


Module = tuple[str, ...]  # ("backends", "cpu", "plan"); () is the package


def module_of(path: Path, package: Path) -> Module:
    """The dotted name of a file, without the package's own."""
    parts = path.relative_to(package).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def exists(module: Module, package: Path) -> bool:
    """Whether `module` is a file or a folder of the package."""
    path = package.joinpath(*module)
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(path: Path, package: Path) -> Iterator[tuple[int, Module | None, str]]:
    """(line, module of ours or None, absolute name) of every import, in functions too."""
    module = module_of(path, package)
    parent = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, None, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, None, node.module or ""
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                child = (*base, alias.name)
                yield node.lineno, child if exists(child, package) else base, ""


def room_of(module: Module) -> str:
    """The room that a module stands in: the innermost one that `ROOMS` lists."""
    names = [".".join(module[:length]) for length in range(len(module), 0, -1)]
    return next((name for name in names if name in LEVEL), module[0] if module else "")


def complaint(importer: Module, imported: Module, package: Path) -> str | None:
    """Why `importer` may not import `imported`, or None when it may."""
    here, there = room_of(importer), room_of(imported)
    for room in (here, there):
        if room not in LEVEL:
            return f"room {room!r} has no place in ROOMS"
    if here != there:
        if LEVEL[here] < LEVEL[there]:
            return None
        return f"{here!r} imports {there or '__init__'!r}, which does not stand below it"
    ours, theirs = backend_of(importer, package), backend_of(imported, package)
    if theirs is None or here != "backends":
        return None
    if ours != theirs:
        return f"{ours or 'backends'!r} imports backend {theirs!r}"
    allowed = FOLDERS.get(importer[2], set()) if len(importer) > 3 < len(imported) else None
    if allowed is not None and imported[2] not in allowed:
        return f"{importer[2]!r} of a backend imports its {imported[2]!r}"
    if importer == imported or STAGES[stage(importer)] <= STAGES[stage(imported)]:
        return None
    return f"{stage(importer)!r} of a backend imports its {stage(imported) or '__init__'!r}"


def backend_of(module: Module, package: Path) -> str | None:
    """The backend that a module belongs to; None for what all the backends share."""
    if module[:1] != ("backends",) or not package.joinpath(*module[:2]).is_dir():
        return None
    return module[1] if len(module) > 1 else None


def stage(module: Module) -> str:
    """What a file of a backend is for: a key of STAGES."""
    name = module[-1] if len(module) > 2 else ""
    return name if name in STAGES else "kernel"


def foreign(importer: Module, name: str, package: Path) -> str | None:
    """Why the absolute import `name` is not allowed in `importer`, or None when it is."""
    top = name.split(".")[0]
    if top == package.name:
        return f"imports {name!r} absolutely; inside the package imports are relative"
    allowed = REQUIRED | OPTIONAL.get(room_of(importer), set()) | set(sys.stdlib_module_names)
    return None if top in allowed else f"imports {top!r}, which is not a dependency of this room"


def import_violations(package: Path) -> list[str]:
    """Every import that breaks the order of the rooms, as "file:line: why"."""
    found = []
    for path in sorted(package.rglob("*.py")):
        importer = module_of(path, package)
        for line, imported, name in imports_of(path, package):
            if imported is None:
                reason = foreign(importer, name, package)
            else:
                reason = complaint(importer, imported, package)
            if reason:
                found.append(f"{path.relative_to(package.parent)}:{line}: {reason}")
    return found


def function_violations(path: Path) -> Iterator[str]:
    """Every function of a file that is longer, or takes more, than the budget allows."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        # A public signature takes a line a parameter and its docstring as many: neither is logic.
        has_docstring = ast.get_docstring(node, clean=False) is not None
        first = (node.body[0].end_lineno or 0) + 1 if has_docstring else node.body[0].lineno
        lines = (node.end_lineno or first) - first + 1
        parameters = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
        if lines > limit:
            yield f"{path.name}:{node.lineno}: {node.name} has {lines} lines, the limit is {limit}"
        if is_kernel and parameters > MAX_KERNEL_PARAMETERS:
            yield (
                f"{path.name}:{node.lineno}: {node.name} takes {parameters} parameters, "
                f"the limit is {MAX_KERNEL_PARAMETERS}"
            )


def plant(root: Path, files: dict[str, str]) -> Path:
    """A small package of the given files, to try the checks on."""
    package = root / "flashtile"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_imports_follow_the_flow():
    assert not import_violations(PACKAGE)


def test_every_room_in_the_table_exists():
    missing = [room for room in LEVEL if room and not exists(tuple(room.split(".")), PACKAGE)]
    assert not missing


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("problem.py", "from .call.dispatch import select", "does not stand below"),
        ("backends/cpu/launch.py", "from ...api import attention", "does not stand below"),
        ("backends/cpu/launch.py", "def f():\n    from ... import api", "does not stand below"),
        ("backends/cpu/launch.py", "from ..triton import plan", "imports backend 'triton'"),
        ("backends/shared.py", "from .cpu import plan", "imports backend 'cpu'"),
        ("backends/cpu/plan.py", "from . import launch", "imports its 'launch'"),
        ("backends/cpu/tiles.py", "from .launch import run", "imports its 'launch'"),
        ("backends/gpu/shared/x.py", "from ..forward.y import z", "imports its 'forward'"),
        ("api.py", "from .testing import reference", "does not stand below"),
        ("__init__.py", "from . import testing", "does not stand below"),
        ("api.py", "if TYPE_CHECKING:\n    from . import testing", "does not stand below"),
        ("call/dispatch.py", "from ..integrations import sdpa", "does not stand below"),
        ("call/checks/tensors.py", "from ..prepare import X", "does not stand below"),
        ("masks.py", "from . import __version__", "does not stand below"),
        ("api.py", "from flashtile.problem import AttentionProblem", "absolutely"),
        ("api.py", "import triton", "not a dependency"),
        ("api.py", "import numpy as np", "not a dependency"),
        ("attic.py", "from .problem import AttentionProblem", "no place"),
    ],
)
def test_the_check_catches_a_planted_violation(tmp_path, name, text, why):
    rooms = ("__init__", "api", "call/dispatch", "call/prepare", "problem", "masks")
    files = {f"{room}.py": "" for room in rooms}
    files |= {"testing/reference.py": "", "integrations/sdpa.py": ""}
    files |= {"backends/triton/plan.py": "", "backends/cpu/plan.py": ""}
    files |= {"backends/gradients.py": "from ..problem import X"}
    files |= {"backends/cpu/launch.py": "from .plan import plan\nfrom ..gradients import X"}
    files |= {"backends/gpu/shared/x.py": "", "backends/gpu/forward/y.py": "from ..shared import x"}
    assert not import_violations(plant(tmp_path, files))
    found = import_violations(plant(tmp_path, {name: text}))
    assert len(found) == 1
    assert why in found[0]


def test_files_and_functions_stay_within_the_budget():
    found = []
    for folder in ("flashtile", "training", "tests", "docs", "benchmarks", "examples"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_FILE_LINES:
                found.append(f"{path.name}: {lines} lines, the limit is {MAX_FILE_LINES}")
            if FORBIDDEN_NAMES & {path.stem, path.parent.name}:
                found.append(f"{path.name}: a helper gets a room with a name")
            if folder in ("flashtile", "benchmarks", "examples"):
                found.extend(function_violations(path))
    assert not found


def test_the_budget_check_catches_a_planted_violation(tmp_path):
    body = "    x = 0\n" * 61
    parameters = ", ".join(f"p{i}" for i in range(31))
    kernel = f"@triton.jit\ndef kernel({parameters}):\n    pass\n"
    path = tmp_path / "long.py"
    path.write_text(f"def long():\n{body}\n\n{kernel}")
    assert [violation.split(": ")[1] for violation in function_violations(path)] == [
        "long has 61 lines, the limit is 60",
        "kernel takes 31 parameters, the limit is 30",
    ]
