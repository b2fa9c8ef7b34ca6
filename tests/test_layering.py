"""Who may import whom: the architecture, read off the syntax trees.

A call goes in one direction through the package, and so do the imports: a unit (a module or a
folder) imports units that are below it in `ORDER`, never one above, so a reader of a file has to
know only those below it. No imports form a cycle, not even inside a unit. A backend is loaded by
its name: nothing outside its folder imports from it, except the commands of `cli`. The dispatch,
which chooses a backend, and `autograd`, which runs it, load backends; all other units get them from
the dispatch, and their types from `backend_interface`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "flashtile"

# From top to bottom. Units of one line do not import each other. A unit is a module or a folder.
# Parts of a folder can be listed by themselves, such as "call.dispatch". "" is the package itself,
# that is its `__init__.py`.
ORDER: tuple[tuple[str, ...], ...] = (
    ("__main__", "as_flash_attn"),
    ("cli",),
    ("integrations",),
    ("distributed",),
    ("testing",),
    ("models",),
    ("modules", "losses"),
    ("",),
    ("flash_attn_3_interface",),
    ("flash_attn_1_interface", "flash_attn_2_interface", "flash_attn_4_interface"),
    (
        "flash_attn_2_cuda",
        "flash_attn_interface",
        "flash_attn_triton",
        "flash_blocksparse_attn_interface",
        "quantize",
    ),
    ("combine",),
    ("api",),
    ("call.shared_prefix",),
    ("call.cached", "call.explain"),
    ("call.prepare",),
    ("call.options", "call.converted_masks", "call.packing"),
    ("bert_padding", "layers"),
    ("call.checks", "call.memo", "call.fold_qv"),
    ("call.dispatch",),
    ("call.layouts",),
    ("call",),
    ("statistics",),
    ("autograd",),
    ("backends",),
    ("ops",),
    ("backend_interface", "invariance_check"),
    ("gpu",),
    # What all units above share: the description of a call, its mask, its dropout, its options.
    ("problem", "cache_formats"),
    ("score_mod",),
    ("masks", "dropout", "lazy", "lru"),
    ("gpu.described", "current_layout", "operators"),
    ("autocast",),
)
# The units that may import from the package of the backends, which loads them.
LOADERS = ("cli", "call.dispatch", "autograd", "statistics", "backends")
LEVEL = {unit: level for level, units in enumerate(ORDER) for unit in units}

# Inside one backend, from top to bottom; any other file of a backend is one of its kernels.
STAGES = {"": 0, "derivatives": 0, "statistics": 0, "launch": 1, "kernel": 2, "plan": 3}

# The files of one op: the `__init__` of its folder chooses between its kernel and its formula, and
# those two do not import each other. Other files, such as a matrix that both need, are below. An op
# may use another op, a kernel another op's kernel, and a formula another op's formula.
OP_STAGES = {"": 0, "kernel": 1, "formula": 1}
# Files of ops/ and gpu/ that may import Triton.
HAS_TRITON = (
    "kernel",
    "intrinsics",
    "dropout",
    "launch",
    "launch_cache",
)

# The folders inside one backend: what each of them may import from.
FOLDERS = {
    "shared": {"shared"},
    "forward": {"shared", "forward"},
    "backward": {"shared", "forward", "backward"},
    "float8": {"shared", "forward", "float8"},
    "latent": {"shared", "forward", "latent"},
}

# What may be imported besides the standard library: torch and what torch itself requires, and, in
# some units only, the optional packages.
REQUIRED = {"torch", "typing_extensions"}
OPTIONAL = {
    "__main__": {"flashtile_command"},  # beside the package, because it must not import PyTorch
    "cli": {"transformers", "triton"},
    "integrations": {"diffusers", "transformers", "vllm"},
    "models": {"safetensors", "sentencepiece", "transformers"},  # from_pretrained
    "backends": {"triton"},
    "ops": {"triton"},
    "gpu": {"triton"},
}

FORBIDDEN_NAMES = {"common", "helpers", "misc", "util", "utils"}


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


def unit_of(module: Module) -> str:
    """The unit that a module belongs to: the innermost one that `ORDER` lists."""
    names = [".".join(module[:length]) for length in range(len(module), 0, -1)]
    return next((name for name in names if name in LEVEL), module[0] if module else "")


def complaint(importer: Module, imported: Module, package: Path) -> str | None:
    """Why `importer` may not import `imported`, or None when it may."""
    here, there = unit_of(importer), unit_of(imported)
    for unit in (here, there):
        if unit not in LEVEL:
            return f"{unit!r} is not in ORDER"
    ours, theirs = backend_of(importer, package), backend_of(imported, package)
    if theirs is not None and here not in ("backends", "cli"):
        return f"{here!r} imports backend {theirs!r}, which is loaded by its name"
    if there == "backends" and here not in LOADERS:
        return f"{here!r} imports from 'backends', and has to get a backend from the dispatch"
    if here != there:
        if LEVEL[here] < LEVEL[there]:
            return None
        return f"{here!r} imports {there or '__init__'!r}, which is not below it"
    if here == "ops":
        return op_complaint(importer, imported)
    if theirs is None or here != "backends":
        return None
    if ours != theirs and importer != ("backends",):
        return f"{ours or 'backends'!r} imports backend {theirs!r}"
    allowed = FOLDERS.get(importer[2], set()) if len(importer) > 3 < len(imported) else None
    if allowed is not None and imported[2] not in allowed:
        return f"{importer[2]!r} of a backend imports its {imported[2]!r}"
    if importer == imported or STAGES[stage(importer)] <= STAGES[stage(imported)]:
        return None
    return f"{stage(importer)!r} of a backend imports its {stage(imported) or '__init__'!r}"


def op_complaint(importer: Module, imported: Module) -> str | None:
    """Why a file of an op may not import one of an op."""
    ours, theirs = (module[2] if len(module) > 2 else "" for module in (importer, imported))
    above, below = OP_STAGES.get(ours, 2), OP_STAGES.get(theirs, 2)
    if above < below or ours == theirs or above == below == 2:
        return None
    return f"{ours!r} of an op imports {theirs or '__init__'!r}"


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
    allowed = REQUIRED | OPTIONAL.get(unit_of(importer), set()) | set(sys.stdlib_module_names)
    if unit_of(importer) in ("ops", "gpu") and importer[-1] not in HAS_TRITON:
        allowed -= {"triton"}  # so that flashtile can be imported without it
    return None if top in allowed else f"imports {top!r}, which is not a dependency of this module"


def import_violations(package: Path) -> list[str]:
    """Every import that breaks the order of the units, as "file:line: why"."""
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


def import_cycles(package: Path) -> list[str]:
    """Every import that closes a cycle of modules, as "a -> b -> a"."""
    imports: dict[Module, set[Module]] = {}
    for path in sorted(package.rglob("*.py")):
        found = imports_of(path, package)
        ours = {imported for _, imported, _ in found if imported is not None}
        imports[module_of(path, package)] = ours - {module_of(path, package)}
    cycles, done = [], set()

    def follow(module: Module, trail: tuple[Module, ...]) -> None:
        if module in trail:
            cycle = (*trail[trail.index(module) :], module)
            cycles.append(" -> ".join(".".join(m) or "__init__" for m in cycle))
        elif module not in done:
            for imported in sorted(imports.get(module, ())):
                follow(imported, (*trail, module))
            done.add(module)

    for module in imports:
        follow(module, ())
    return cycles


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


def test_no_imports_form_a_cycle():
    assert not import_cycles(PACKAGE)


@pytest.mark.parametrize(
    ("files", "cycle"),
    [
        (
            {"bench/a.py": "from .b import x", "bench/b.py": "from . import a"},
            "bench.a -> bench.b -> bench.a",
        ),
        (
            {"q/a.py": "def f():\n    from . import b", "q/b.py": "from .c import x", "q/c.py": ""},
            None,
        ),
        (
            {
                "q/a.py": "def f():\n    from . import b",
                "q/b.py": "from .c import x",
                "q/c.py": "if TYPE_CHECKING:\n    from ..q.a import f",
            },
            "q.a -> q.b -> q.c -> q.a",
        ),
        ({"q/__init__.py": "from .a import x", "q/a.py": "from . import x"}, "q -> q.a -> q"),
    ],
    ids=["two modules", "none", "three modules", "a package and its module"],
)
def test_the_check_catches_a_planted_cycle(tmp_path, files, cycle):
    assert import_cycles(plant(tmp_path, files)) == ([] if cycle is None else [cycle])


def test_every_unit_in_the_table_exists():
    missing = [unit for unit in LEVEL if unit and not exists(tuple(unit.split(".")), PACKAGE)]
    assert not missing


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("problem.py", "from .call.dispatch import select", "is not below"),
        ("backends/cpu/launch.py", "from ...api import attention", "is not below"),
        ("backends/cpu/launch.py", "def f():\n    from ... import api", "is not below"),
        ("backends/cpu/launch.py", "from ..triton import plan", "imports backend 'triton'"),
        ("backends/shared.py", "from .cpu import plan", "imports backend 'cpu'"),
        ("backends/cpu/plan.py", "from . import launch", "imports its 'launch'"),
        ("backends/cpu/tiles.py", "from .launch import run", "imports its 'launch'"),
        ("backends/gpu/shared/x.py", "from ..forward.y import z", "imports its 'forward'"),
        ("api.py", "from .backends.triton import plan", "imports backend 'triton'"),
        ("integrations/sdpa.py", "from ..backends import cpu", "imports backend 'cpu'"),
        ("call/dispatch.py", "from ..backends.cpu import plan", "imports backend 'cpu'"),
        ("call/prepare.py", "from .. import backends", "imports from 'backends'"),
        ("call/prepare.py", "from ..backends import BACKENDS", "imports from 'backends'"),
        ("distributed/executor.py", "from .. import backends", "imports from 'backends'"),
        ("ops/rotate/kernel.py", "from .formula import x", "'kernel' of an op imports 'formula'"),
        ("ops/rotate/formula.py", "from . import x", "'formula' of an op imports '__init__'"),
        ("ops/rotate/formula.py", "from ..merge.kernel import x", "imports 'kernel'"),
        ("ops/rotate/__init__.py", "import triton", "not a dependency"),
        ("api.py", "from .testing import reference", "is not below"),
        ("__init__.py", "from . import testing", "is not below"),
        ("api.py", "if TYPE_CHECKING:\n    from . import testing", "is not below"),
        ("call/dispatch.py", "from ..integrations import sdpa", "is not below"),
        ("call/checks.py", "from .prepare import X", "is not below"),
        ("masks.py", "from . import __version__", "is not below"),
        ("api.py", "from flashtile.problem import AttentionProblem", "absolutely"),
        ("api.py", "import triton", "not a dependency"),
        ("api.py", "import numpy as np", "not a dependency"),
        ("attic.py", "from .problem import AttentionProblem", "not in ORDER"),
    ],
)
def test_the_check_catches_a_planted_violation(tmp_path, name, text, why):
    units = ("__init__", "api", "call/dispatch", "call/prepare", "problem", "masks")
    files = {f"{unit}.py": "" for unit in units}
    files |= {"testing/reference.py": "", "integrations/sdpa.py": ""}
    files |= {"ops/rotate/__init__.py": "from . import kernel\nfrom .. import merge"}
    files |= {"ops/rotate/kernel.py": "import triton\nfrom ..merge.kernel import x"}
    files |= {"ops/rotate/formula.py": "from .matrix import x\nfrom ..merge.formula import x"}
    files |= {f"ops/merge/{name}.py": "" for name in ("formula", "kernel", "__init__")}
    files |= {"ops/rotate/matrix.py": "", "cli/tune.py": "from ..backends.triton import plan"}
    files |= {"backends/triton/plan.py": "", "backends/cpu/plan.py": ""}
    files |= {"backends/gradients.py": "from ..problem import X", "backends/__init__.py": ""}
    files |= {"backends/cpu/launch.py": "from .plan import plan\nfrom ..gradients import X"}
    files |= {
        "autograd.py": "from . import backends",
        "call/dispatch.py": "from .. import backends",
    }
    files |= {"backends/gpu/shared/x.py": "", "backends/gpu/forward/y.py": "from ..shared import x"}
    assert not import_violations(plant(tmp_path, files))
    found = import_violations(plant(tmp_path, {name: text}))
    assert len(found) == 1
    assert why in found[0]


def test_helpers_have_modules_with_telling_names():
    found = []
    for folder in ("flashtile", "training", "tests", "docs", "benchmarks", "examples"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            if FORBIDDEN_NAMES & {path.stem, path.parent.name}:
                found.append(path.name)
    assert not found
