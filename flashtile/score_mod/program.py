"""Score functions as programs: a few lines of text that say how one score is computed.

A program is a list of operations on single numbers, one in each line, in the notation of Python::

    t0: float32 = values(0, (8,), h)
    t1: int64 = sub.Tensor(j, i)
    t2: float32 = mul.Tensor(t0, t1)
    t3: float32 = add.Tensor(s, t2)
    return t3

``s`` is the score; ``b``, ``h``, ``i`` and ``j`` are the indices of its sequence, query head, query
and key; ``g``, in the program of a derivative only, is the gradient of the result. `values` and
`integers` read a captured tensor: its first element in the buffer of all captured numbers, its
sizes, and an index for each dimension. All other operations are PyTorch's ``torch.ops.aten``.

The text itself is what describes a score function to the backends: equal functions have equal
programs, whatever numbers their captured tensors hold. It travels through the registered ops as a
string, so nothing has to be looked up where it arrives.
"""

from __future__ import annotations

import ast
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ..lru import memoised

VALUES, INTEGERS = "values", "integers"  # the operations that read captured tensors
CONSTANT = "constant"  # of the line's dtype
INDICES = ("b", "h", "i", "j")


class Name(str):
    """The name of an input or of an earlier line, as an argument of an operation."""

    __slots__ = ()

    __repr__ = str.__str__


ELEMENT = Name("d")  # the index of an element, of a program that reads rows of bytes: see `rows`


class Line(NamedTuple):
    """One operation: ``name: dtype = op(*arguments, **options)``."""

    name: Name
    dtype: torch.dtype
    op: str  # VALUES, INTEGERS, CONSTANT or the name of an aten operation with its overload
    arguments: tuple[Any, ...]  # names, numbers, dtypes, and the sizes of a captured tensor
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        given = [_text(x) for x in self.arguments]
        given += [f"{name}={_text(x)}" for name, x in self.options]
        return f"{self.name}: {_text(self.dtype)} = {self.op}({', '.join(given)})"

    @property
    def names(self) -> list[Name]:
        """The inputs and lines that this one reads."""
        given = (*self.arguments, *(x for _, x in self.options))
        return [x for x in given if isinstance(x, Name)]


@dataclass(frozen=True)
class Program:
    """The lines, the name of the result, and the names of further results.

    The derivative of a program has the gradient of the score as its result. `captured` then are
    pairs of a line that reads a captured number and the name of the gradient of that number.
    """

    lines: tuple[Line, ...]
    result: Name
    captured: tuple[tuple[Name, Name], ...] = ()

    def __str__(self) -> str:
        captured = ", ".join(f"{line}: {gradient}" for line, gradient in self.captured)
        result = f"{self.result}, {{{captured}}}" if captured else self.result
        return "\n".join([*map(str, self.lines), f"return {result}"])

    @property
    def operations(self) -> int:
        """How many operations it has, without constants."""
        return sum(line.op != CONSTANT for line in self.lines)

    @property
    def reads(self) -> Program:
        """What finds and reads captured numbers by indices; no lines if nothing is read so."""
        reads = [x.name for x in self.lines if x.op in (VALUES, INTEGERS) and x.arguments[1]]
        if not reads:
            return Program((), self.result)
        return Program(self.lines, reads[-1], tuple((x, x) for x in reads)).without_unused()

    def without_unused(self) -> Program:
        """The program without the lines whose results nobody reads."""
        needed = {self.result, *(x for pair in self.captured for x in pair)}
        kept = []
        for line in reversed(self.lines):
            if line.name in needed:
                kept.append(line)
                needed.update(line.names)
        return Program(tuple(reversed(kept)), self.result, self.captured)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def fact(function: _Function) -> _Function:
    """Decorate a function of a program's text: it is memoised, and while ``torch.compile`` traces a
    call, the result is a constant.
    """
    cached = memoised(256)(function)

    @wraps(function)
    def known(*arguments: Any, **named: Any) -> Any:
        return cached(*arguments, **named)

    # As `torch.compiler.assume_constant_result` does, which first imports the compiler.
    known._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a mark on a function
    return cast(_Function, known)


# Two threads that parse at once can fail with a SystemError (CPython 3.11, gh-106905).
_parsing = threading.Lock()


@memoised(256)
def parsed(text: str) -> Program:
    """The program of a text that ``str(program)`` has made."""
    with _parsing:
        *lines, last = ast.parse(text).body
    assert isinstance(last, ast.Return)
    result, captured = last.value, []
    if isinstance(result, ast.Tuple):
        result, gradients = result.elts
        assert isinstance(gradients, ast.Dict)
        pairs = zip(gradients.keys, gradients.values, strict=True)
        captured = [(_name(line), _name(gradient)) for line, gradient in pairs]
    return Program(tuple(map(_line, lines)), _name(result), tuple(captured))


@fact
def reads_only_score(text: str) -> bool:
    """Whether a program reads neither indices nor captured numbers: then it does not matter where a
    score is.
    """
    return all(
        line.op not in (VALUES, INTEGERS) and not set(line.names) & set(INDICES)
        for line in parsed(text).lines
    )


@fact
def has_gradients_of_captured(text: str) -> bool:
    """Whether the program of a derivative computes gradients of captured numbers."""
    return bool(parsed(text).captured)


def _line(statement: ast.stmt) -> Line:
    assert isinstance(statement, ast.AnnAssign)
    assert isinstance(statement.value, ast.Call)
    call = statement.value
    return Line(
        _name(statement.target),
        getattr(torch, _name(statement.annotation)),
        ast.unparse(call.func),
        tuple(map(_argument, call.args)),
        tuple((str(x.arg), _argument(x.value)) for x in call.keywords),
    )


def _name(node: ast.expr | None) -> Name:
    assert isinstance(node, ast.Name)
    return Name(node.id)


def _argument(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        if node.id in ("inf", "nan"):
            return float(node.id)
        dtype = getattr(torch, node.id, None)
        return dtype if isinstance(dtype, torch.dtype) else Name(node.id)
    if isinstance(node, ast.UnaryOp):  # a negative number
        return -_argument(node.operand)
    return ast.literal_eval(node)


def _text(x: Any) -> str:
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)  # inf, -inf or nan, which `_argument` reads
    return repr(x)
