"""What CONTRIBUTING says of names in kernels, as far as their syntax trees show it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "flashtile"
SIZES = {"B", "M", "N"}  # the only capitals that are no compile-time constants
CONFIGURATIONS = {"cfg", "recipe", "rotation"}  # aggregates of constants in capitals


def kernels(source: str) -> Iterator[ast.FunctionDef]:
    """Every function that Triton compiles."""
    for node in ast.walk(ast.parse(source)):
        decorators = getattr(node, "decorator_list", [])
        if any("triton.jit" in ast.unparse(decorator) for decorator in decorators):
            assert isinstance(node, ast.FunctionDef)
            yield node


def wrong_names(kernel: ast.FunctionDef) -> Iterator[str]:
    """Every parameter of a kernel whose name does not say what it is."""
    parameters = {}
    for a in kernel.args.args:
        parameters[a.arg] = a.annotation is not None and "constexpr" in ast.unparse(a.annotation)
    for name, is_constant in parameters.items():
        if is_constant and not name.isupper() and name not in CONFIGURATIONS:
            yield f"{kernel.name}: the constant {name} is not in capitals"
        if not is_constant and name.isupper() and name not in SIZES:
            yield f"{kernel.name}: {name} is in capitals, but no constant"
    if not kernel.name.endswith("_kernel"):
        return
    for call in ast.walk(kernel):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("tl.load", "tl.store"):
            pointer = call.args[0]
            while isinstance(pointer, ast.BinOp):
                pointer = pointer.left
            name = ast.unparse(pointer)
            if name in parameters and not name.endswith("_ptr"):
                yield f"{kernel.name}: {name} is a pointer, but not called {name}_ptr"


def test_kernels_name_their_parameters_as_contributing_says():
    files = [*(PACKAGE / "ops").rglob("*.py"), *(PACKAGE / "backends" / "triton").rglob("*.py")]
    found = [kernel for path in files for kernel in kernels(path.read_text(encoding="utf-8"))]
    assert len(found) > 50
    assert not [wrong for kernel in found for wrong in wrong_names(kernel)]


def test_planted_names_are_found():
    source = """
@triton.jit(do_not_specialize=["COUNT"])
def copy_kernel(x, y_ptr, COUNT, block: tl.constexpr, cfg: tl.constexpr):
    tl.store(y_ptr + 1, tl.load(x + 2 * COUNT))
"""
    wrong = [name for kernel in kernels(source) for name in wrong_names(kernel)]
    assert wrong == [
        "copy_kernel: COUNT is in capitals, but no constant",
        "copy_kernel: the constant block is not in capitals",
        "copy_kernel: x is a pointer, but not called x_ptr",
    ]
