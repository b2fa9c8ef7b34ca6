"""What a Python function depends on besides its arguments, so that a trace of it can be reused.

The same function may compute something else in a later call: a variable that it uses may have
another value by then. A trace is reused only if everything that the function can reach is of a kind
that can be compared: numbers, tensors, modules, other such functions, and tuples, lists and
dictionaries of them.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..lru import memoised

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Packages whose modules, classes and functions do not change.
_FIXED = ("builtins", "functools", "math", "operator", "torch", "_operator")
# Functions of Python that read variables which the code does not name.
_READ_VARIABLES = frozenset(("__import__", "eval", "exec", "globals", "vars"))


class _CannotBeCompared(Exception):
    """Something of another kind."""


def dependencies(function: Any) -> tuple[Any, tuple[Tensor, ...]] | None:
    """A hashable description of all that `function` can reach, and the tensors among it in the
    order of the description, which has only their metadata; None if it cannot be described.
    """
    tensors: list[Tensor] = []
    seen: dict[int, int] = {}
    try:
        facts = tuple(_facts(function, tensors, seen))
        hash(facts)
    except (_CannotBeCompared, TypeError):
        return None
    return facts, tuple(tensors)


def _facts(x: Any, tensors: list[Tensor], seen: dict[int, int]) -> Iterator[Any]:
    """The description of one object, flat."""
    yield type(x)
    if isinstance(x, _PLAIN):
        yield repr(x) if isinstance(x, float) else x  # 0.0 equals -0.0, and nan not itself
    elif _is_fixed(x):
        yield x
    elif id(x) in seen:  # a function that calls itself, a tensor that is used twice
        yield seen[id(x)]
    else:
        seen[id(x)] = len(seen)
        yield from _new_facts(x, tensors, seen)


def _is_fixed(x: Any) -> bool:
    """Whether `x` is a part of Python or PyTorch. Functions and classes of others can have a name
    that says so: `functools.wraps` copies names, and `exec` gives none.
    """
    if isinstance(x, BuiltinFunctionType):  # PyTorch's do not all say where they are
        is_method = not isinstance(x.__self__, (ModuleType, type, type(None)))  # such as of a dict
        return not is_method and _is_fixed_name(x.__module__ or "torch")
    if isinstance(x, ModuleType):
        return _is_fixed_name(x.__name__) and sys.modules.get(x.__name__) is x
    if isinstance(x, FunctionType) and not _is_fixed_name(x.__globals__.get("__name__")):
        return False
    if not isinstance(x, (FunctionType, type)) or not _is_fixed_name(x.__module__):
        return False
    here: Any = sys.modules.get(x.__module__)
    for name in x.__qualname__.split("."):
        here = getattr(here, name, None)
    return here is x


def _is_fixed_name(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in _FIXED


def _new_facts(x: Any, tensors: list[Tensor], seen: dict[int, int]) -> Iterator[Any]:
    if type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided and not x.is_nested:
        tensors.append(x)
        yield from (tuple(x.shape), x.dtype, x.device)
    elif type(x) is FunctionType:
        if _reads_unnamed_variables(x.__code__):
            raise _CannotBeCompared
        yield x.__code__
        cells = [_content(cell) for cell in x.__closure__ or ()]
        names = sorted(_global_names(x.__code__) & x.__globals__.keys())
        yield from (*names, len(cells))
        for value in (*cells, *(x.__globals__[name] for name in names), x.__defaults__):
            yield from _facts(value, tensors, seen)
        yield from _facts(x.__kwdefaults__, tensors, seen)
        yield from _facts(x.__dict__, tensors, seen)
    elif type(x) is functools.partial:
        for value in (x.func, x.args, x.keywords):
            yield from _facts(value, tensors, seen)
    elif type(x) in (tuple, list):
        yield len(x)
        for value in x:
            yield from _facts(value, tensors, seen)
    elif type(x) is dict:
        yield len(x)
        for key, value in x.items():
            yield from _facts(key, tensors, seen)
            yield from _facts(value, tensors, seen)
    else:
        raise _CannotBeCompared


def _content(cell: CellType) -> Any:
    """The value of a variable of an enclosing function."""
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        raise _CannotBeCompared from None


def _global_names(code: CodeType) -> set[str]:
    """Names of global variables, and others, that the code and the functions inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


@memoised(256)
def _reads_unnamed_variables(code: CodeType) -> bool:
    """Whether the code, or a function inside it, imports modules that may change or looks up
    variables by strings.
    """
    if not _READ_VARIABLES.isdisjoint(code.co_names):
        return True
    imported = (x.argval for x in dis.get_instructions(code) if x.opname == "IMPORT_NAME")
    if any(name.partition(".")[0] not in _FIXED for name in imported):
        return True
    inside = (x for x in code.co_consts if isinstance(x, CodeType))
    return any(map(_reads_unnamed_variables, inside))
