"""What CONTRIBUTING says of names in kernels, as far as their syntax trees show it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "flashtile"
SIZES = {"B", "M", "N"}  # the only capitals that are no compile-time constants
# Constants that are no numbers: configurations, dtypes and functions.
NOT_IN_CAPITALS = {
    "cfg",
    "recipe",
    "rotation",
    "dtype",
    "out_dtype",
    "load_keys",
    "math_of",
    "unpack",
}
POINTER_USERS = {f"{x}.{y}" for x in ("tl", "gl") for y in ("load", "store", "atomic_add")}
JITS = ("triton.jit", "gluon.jit", "kernel(")


def kernels(source: str) -> Iterator[ast.FunctionDef]:
    """Every function that Triton or Gluon compiles."""
    for node in ast.walk(ast.parse(source)):
        decorators = getattr(node, "decorator_list", [])
        if any(ast.unparse(decorator).startswith(JITS) for decorator in decorators):
            assert isinstance(node, ast.FunctionDef)
            yield node


def wrong_names(kernel: ast.FunctionDef) -> Iterator[str]:
    """Every parameter of a kernel whose name does not say what it is."""
    parameters = {}
    for a in kernel.args.args:
        parameters[a.arg] = a.annotation is not None and "constexpr" in ast.unparse(a.annotation)
    for name, is_constant in parameters.items():
        if is_constant and not name.isupper() and name not in NOT_IN_CAPITALS:
            yield f"{kernel.name}: the constant {name} is not in capitals"
        if not is_constant and name.isupper() and name not in SIZES:
            yield f"{kernel.name}: {name} is in capitals, but no constant"
    for name in sorted(flags(kernel)):
        if not name.startswith(("IS_", "HAS_")):
            yield f"{kernel.name}: the flag {name} starts with neither IS_ nor HAS_"
    if not kernel.name.endswith("_kernel"):
        return
    for call in ast.walk(kernel):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in POINTER_USERS:
            name = ast.unparse(leftmost(call.args[0], kernel))
            if name in parameters and not name.endswith("_ptr"):
                yield f"{kernel.name}: {name} is a pointer, but not called {name}_ptr"


def leftmost(pointer: ast.expr, kernel: ast.FunctionDef) -> ast.expr:
    """The pointer to which offsets are added, also where a local name holds some of the sum."""
    sums = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(kernel)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
    }
    while True:
        if isinstance(pointer, ast.BinOp):
            pointer = pointer.left
        elif ast.unparse(pointer) in sums:
            pointer = sums.pop(ast.unparse(pointer))
        else:
            return pointer


def flags(kernel: ast.FunctionDef) -> set[str]:
    """The names in capitals that some condition takes for true or false, as they are."""
    conditions: list[ast.expr] = []
    for node in ast.walk(kernel):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            conditions.append(node.test)
        elif isinstance(node, ast.BoolOp):
            conditions += node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            conditions.append(node.operand)
    plain = (x for x in conditions if isinstance(x, (ast.Name, ast.Attribute)))
    names = {ast.unparse(x).split(".")[-1] for x in plain}
    return {name for name in names if name.isupper()}


def test_kernels_name_their_parameters_as_contributing_says():
    folders = [PACKAGE / name for name in ("ops", "backends/triton", "backends/hopper")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = [kernel for path in files for kernel in kernels(path.read_text(encoding="utf-8"))]
    assert len(found) > 150
    assert not [wrong for kernel in found for wrong in wrong_names(kernel)]


def test_planted_names_are_found():
    source = """
@triton.jit(do_not_specialize=["COUNT"])
def copy_kernel(x, y_ptr, COUNT, block: tl.constexpr, cfg: tl.constexpr, FAST: tl.constexpr):
    if cfg.IS_EVEN and not FAST and cfg.SIZE > 0 and cfg.EARLY:
        start = x + 2 * COUNT
        tl.store(y_ptr + 1, tl.load(start + 1))

@gluon.jit
def count_kernel(counter, y_ptr):
    gl.store(y_ptr, gl.atomic_add(counter, 1))
"""
    wrong = [name for kernel in kernels(source) for name in wrong_names(kernel)]
    assert wrong == [
        "copy_kernel: COUNT is in capitals, but no constant",
        "copy_kernel: the constant block is not in capitals",
        "copy_kernel: the flag EARLY starts with neither IS_ nor HAS_",
        "copy_kernel: the flag FAST starts with neither IS_ nor HAS_",
        "copy_kernel: x is a pointer, but not called x_ptr",
        "count_kernel: counter is a pointer, but not called counter_ptr",
    ]
