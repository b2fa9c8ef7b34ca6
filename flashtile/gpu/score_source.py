"""Write the program of a score function as the source of functions of Triton or of Gluon.

Pure Python. Every line of a program becomes one statement on tiles: indices of queries and keys are
int32 tensors that broadcast against each other, scores are float32. The statements are the same in
both languages, because the name ``tl`` is the language's own.

First comes what can be known in advance of the numbers that a score function computes in a tile.
The difference j - i of a query and a key decides most of what score functions read. All scores of a
diagonal share it, and in a tile it lies between that of two corners. So kernels need not look at
every index.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..lru import memoised
from ..score_mod.program import (
    CONSTANT,
    INDICES,
    INTEGERS,
    VALUES,
    Line,
    Name,
    Program,
    fact,
    parsed,
)

# On what a number of a tile depends: its query, its key, and the difference of both. Without the
# first or the second, a tile has one number for each key, or for each query.
QUERY, KEY, DIFFERENCE = "i", "j", "d"
# The keys of a sequence less its queries, of programs that only Gluon's kernels run: query i is at
# the position of key i + shift.
SHIFT = "shift"
Axes = frozenset[str]
Bounds = tuple[str, str]

# Integers that hold every index; narrower ones wrap around.
_WIDE = (torch.int32, torch.int64)
# Operations whose result has the bounds of the first argument, but for the limits given.
_SAME = ("_to_copy", "detach", "alias", "clone")


def is_everywhere(axes: Axes) -> bool:
    """Whether every score of a tile may have another number."""
    return DIFFERENCE in axes or {QUERY, KEY} <= axes


class Facts:
    """Facts of the numbers of a program's lines, by name."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = {line.name: line for line in lines}
        self._axes: dict[Any, Axes] = {Name(x): frozenset(x) for x in (QUERY, KEY)}
        self._axes |= {Name(x): frozenset((QUERY, KEY)) for x in "sg"}
        self._slopes: dict[Any, tuple[int, int]] = {Name("i"): (1, 0), Name("j"): (0, 1)}
        for line in lines:
            self._learn(line)

    def axes(self, x: Any) -> Axes:
        """On what a number depends."""
        return self._axes.get(x, frozenset())

    def bounds(self, x: Any) -> Bounds | None:
        """The least and the greatest value of an index in a tile, as expressions of `corners`; None
        if they are not known.
        """
        if isinstance(x, int) or x == SHIFT:
            return f"{x}", f"{x}"
        if x in ("i", "j"):
            of = "row" if x == "i" else "key"
            return f"corners.first_{of}", f"corners.last_{of}"
        line = self._lines.get(x)
        if line is None:
            return None
        if line.op == CONSTANT:
            return self.bounds(line.arguments[0])
        return self._bounds_of(line) if line.dtype == torch.int32 else None

    def _learn(self, line: Line) -> None:
        """The axes of a line and, if it is a multiple of i plus one of j plus a number that is the
        same for all scores, these factors.
        """
        slopes = self._slope_of(line)
        axes: Axes = frozenset().union(*(self.axes(x) for x in line.names))
        if slopes is not None:
            self._slopes[line.name] = slopes
            if slopes[0] == -slopes[1] != 0:
                axes = frozenset(DIFFERENCE)
        self._axes[line.name] = axes

    def _slope_of(self, line: Line) -> tuple[int, int] | None:
        name = line.op.partition(".")[0]
        if name not in ("add", "sub", "neg", *_SAME) or line.dtype not in _WIDE:
            return None
        known = [self._slopes.get(x, None if self.axes(x) else (0, 0)) for x in line.arguments[:2]]
        one, *others = known
        other = others[0] if others else (0, 0)
        if one is None or other is None:
            return None
        factor = dict(line.options).get("alpha", 1)
        if name == "add":
            return one[0] + factor * other[0], one[1] + factor * other[1]
        if name == "sub":
            return one[0] - factor * other[0], one[1] - factor * other[1]
        if name == "neg":
            return -one[0], -one[1]
        return one

    def _bounds_of(self, line: Line) -> Bounds | None:
        name, options = line.op.partition(".")[0], dict(line.options)
        if options.get("alpha", 1) != 1:
            return None
        least, greatest = self.bounds(line.arguments[0]) or ("", "")
        if not least:
            return None
        if name in _SAME:
            return least, greatest
        if name == "neg":
            return f"-({greatest})", f"-({least})"
        if name == "abs":
            opposite = f"tl.maximum({least}, -({greatest}))"
            return f"tl.maximum({opposite}, 0)", f"tl.maximum(-({least}), {greatest})"
        if name in ("add", "sub"):
            other = self.bounds(line.arguments[1])
            if other is None:
                return None
            if name == "add":
                return f"({least} + {other[0]})", f"({greatest} + {other[1]})"
            return f"({least} - ({other[1]}))", f"({greatest} - ({other[0]}))"
        if name in ("clamp", "clamp_min", "clamp_max"):
            return self._limited(least, greatest, limits_of(line))
        return None

    def _limited(self, least: str, greatest: str, limits: Mapping[str, Any]) -> Bounds | None:
        for function, limit in (("maximum", limits.get("min")), ("minimum", limits.get("max"))):
            if limit is not None:
                known = self.bounds(limit)
                if known is None:
                    return None
                least = f"tl.{function}({least}, {known[0]})"
                greatest = f"tl.{function}({greatest}, {known[1]})"
        return least, greatest


def limits_of(line: Line) -> dict[str, Any]:
    """The arguments ``min`` and ``max`` of a `clamp`, `clamp_min` or `clamp_max`."""
    name = line.op.partition(".")[0]
    names = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[name]
    return dict(zip(names, line.arguments[1:], strict=False)) | dict(line.options)


# The source of a score function and of its derivative


class Language(NamedTuple):
    """What differs between the sources of two languages."""

    imports: str
    tanh: str  # of a number that depends on the score
    spread: str  # a number x for every score of the tile s
    has_distance: bool  # functions get more indices: `_DISTANCE`


# The package may have been loaded under another name.
_INTRINSICS = f"from {__name__.removesuffix('score_source')}intrinsics import"
TRITON = Language(
    f"""import triton.language as tl
from triton import jit

{_INTRINSICS} load_each, tanh
""",
    "tanh",
    "tl.broadcast_to({x}, s.shape)",
    has_distance=False,
)
# In Gluon a tensor has a layout. Kernels compute j - i in fewer instructions, and in float32 too,
# because to convert a number takes as long as an exponential.
GLUON = Language(
    f"""from triton.experimental.gluon import jit
from triton.experimental.gluon import language as tl

{_INTRINSICS} load_each, tanh, tanh_of_scores
""",
    "tanh_of_scores",
    "tl.full(s.shape, {x}, {x}.dtype, s.type.layout)",
    has_distance=True,
)
_HELPERS = """
@jit
def remainder_of(a, b):
    # Of integers, with the sign of b: the languages' own has the sign of a.
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@jit
def wrapped(index, size):
    # A negative index counts from the end.
    return tl.where(index < 0, index + size, index)


@jit
"""

TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
}

# What a function is for: the score, or its gradient.
SCORE, GRADIENT = KINDS = "score", "gradient"
_INPUTS = {SCORE: (), GRADIENT: ("g",)}
# i and j less the same number, d = j - i, and this in float32.
_DISTANCE = ("i0", "j0", "d", "distance", SHIFT)


class Corners(NamedTuple):
    """First and last row and key of a tile, the last ones perhaps past the end."""

    first_row: Any
    last_row: Any
    first_key: Any
    last_key: Any


# Expressions by operation. Those of the first table compute in the dtype of their result, those of
# the second one in the dtype to which their arguments promote.
_ARITHMETIC: dict[str, str] = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "tl.exp({0}) - 1.0",
    "log": "tl.log({0})",
    "log1p": "tl.log(1.0 + {0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "1.0 / tl.sqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "tan": "tl.sin({0}) / tl.cos({0})",
    "sinh": "0.5 * (tl.exp({0}) - tl.exp(-{0}))",
    "cosh": "0.5 * (tl.exp({0}) + tl.exp(-{0}))",
    "atan": "atan({0})",
    "asin": "atan({0} / tl.sqrt(1.0 - {0} * {0}))",
    "acos": "1.5707963267948966 - atan({0} / tl.sqrt(1.0 - {0} * {0}))",
    "asinh": "tl.where({0} < 0, -1.0, 1.0) * tl.log(tl.abs({0}) + tl.sqrt({0} * {0} + 1.0))",
    "acosh": "tl.log({0} + tl.sqrt({0} - 1.0) * tl.sqrt({0} + 1.0))",
    "atanh": "0.5 * tl.log((1.0 + {0}) / (1.0 - {0}))",
    "log10": "tl.log2({0}) * 0.3010299956639812",
    "erfc": "1.0 - tl.erf({0})",
    "hypot": "tl.sqrt({0} * {0} + {1} * {1})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    "fmod": "{0} % {1}",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "relu": "tl.where({0} < 0, 0, {0})",
    "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}",
    "__lshift__": "{0} << {1}",
    "__rshift__": "{0} >> {1}",
    "bitwise_left_shift": "{0} << {1}",
    "bitwise_right_shift": "{0} >> {1}",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, {0}))",
    "sgn": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, {0}))",
    "mul": "{0} * {1}",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "fmax": "tl.where(({0} > {1}) | ({1} != {1}), {0}, {1})",
    "fmin": "tl.where(({0} < {1}) | ({1} != {1}), {0}, {1})",
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "sigmoid_backward": "{0} * ((1.0 - {1}) * {1})",
    "threshold_backward": "tl.where({1} <= {2}, 0.0, {0})",
}
_COMPARISONS: dict[str, str] = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "isnan": "{0} != {0}",
    "isposinf": '{0} == float("inf")',
    "isneginf": '{0} == float("-inf")',
}
_LOGIC: dict[str, str] = {
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) != ({1} != 0)",
    "logical_not": "{0} == 0",
}
_BITS: dict[str, str] = {
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
}
_COPIES = ("_to_copy", "detach", "alias", "clone")
_ROUNDINGS = ("floor", "ceil", "trunc", "round")  # which change no integer


class Untranslatable(Exception):
    """An operation that the kernels do not have."""


@fact
def untranslatable(text: str) -> str:
    """The operation of a program that the kernels do not have; "" if they have all."""
    try:
        source_of(text, SCORE)  # the operations are the same in every kind
    except Untranslatable as error:
        return str(error)
    return ""


@memoised(256)
def source_of(text: str, kind: str, language: Language = TRITON) -> str:
    """The source of a module with the function ``score``, whose inputs depend on its `kind`.

    Raises:
        Untranslatable: the kernels do not have an operation.
    """
    writer = Writer(parsed(text), language)
    distance = _DISTANCE if language.has_distance else ()
    inputs = ("s", *INDICES, *distance, "corners", *_INPUTS[kind])
    statements = [*writer.statements(), f"return {writer.result()}"]
    return module_of(statements, (*inputs, "values_ptr", "integers_ptr"), language)


def module_of(statements: Iterable[str], inputs: Iterable[str], language: Language = TRITON) -> str:
    """The source of a module with the function ``score``."""
    body = "\n".join(f"    {line}" for line in statements)
    # Kernels are kept by this source, which names only what it needs.
    imports = language.imports + (f"{_INTRINSICS} atan\n" if "atan(" in body else "")
    return f"{imports}\n{_HELPERS}def score({', '.join(inputs)}):\n{body}\n"


@memoised(256)
def function_of(source: str) -> Any:
    """The function of a module's source, compiled into the kernels that call it.

    Triton reads the source of a function and keeps compiled kernels on disk by that source and by
    the names of the functions in their configuration, so the name has a hash of the whole source.
    """
    name = f"score_{hashlib.sha256(source.encode()).hexdigest()[:20]}"
    source = source.replace("def score(", f"def {name}(")
    return define(name, source, {"__name__": f"flashtile.generated.{name}"})


def define(name: str, source: str, namespace: dict[str, Any]) -> Any:
    """The function `name` of a source, which Triton can read."""
    filename = f"<{namespace['__name__']}.{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


class Writer:
    """The statements of one program."""

    NARROW: tuple[torch.dtype, ...] = (torch.int32, torch.bool)  # whose sums int32 holds

    def __init__(
        self, program: Program, language: Language = TRITON, is_branching: bool = True
    ) -> None:
        """`is_branching`: tiles in which fewer numbers have to be read, or checked, have code of
        their own; needs ``corners``.
        """
        self._program, self._language, self._is_branching = program, language, is_branching
        self.addresses: dict[Name, tuple[str, str]] = {}  # of captured numbers, and their mask
        self._constants = {
            line.name: line.arguments[0] for line in program.lines if line.op == CONSTANT
        }
        self._dtypes = {Name("s"): torch.float32, Name("g"): torch.float32}
        self._dtypes |= {Name(x): torch.int32 for x in (*INDICES, "d", SHIFT)}
        self._of_scores = {Name("s")}
        for line in program.lines:
            if not self._of_scores.isdisjoint(line.names):
                self._of_scores.add(line.name)
        self._lines = [self._narrowed(line) for line in program.lines]
        self.facts = Facts(self._lines)
        self._distances: dict[Any, str] = {}  # in float32: lines with j - i, i - j or their size
        if language.has_distance:
            for line in self._lines:
                self._learn_distance(line)

    def statements(self, needed: Container[Name] | None = None) -> list[str]:
        """One statement for each line, or each of `needed`; more for those that read captured
        tensors.
        """
        found: list[str] = []
        for line in self._lines:
            if needed is not None and line.name not in needed:
                continue
            if line.op in (VALUES, INTEGERS):
                found += self._read(line)
            elif line.op != CONSTANT:
                found.append(f"{line.name} = {self._expression(line)}")
        return found

    def result(self) -> str:
        """The result for every score of the tile, whatever it depends on."""
        return self.spread(self._program.result)

    def spread(self, name: Name) -> str:
        """A number in float32 for every score of the tile, whatever it depends on."""
        found = self._as(name, torch.float32)
        if is_everywhere(self.facts.axes(name)):
            return found
        return f"tl.zeros_like(s) + {found}"

    def _narrowed(self, line: Line) -> Line:
        """The line with the dtype of its result in the kernel: int32 for what is computed from
        indices only, which takes half of the registers. Products, powers and large numbers need
        all of int64.
        """
        given = [self._dtypes[x] for x in line.names if x not in self._constants]
        is_index = bool(given) and all(x in self.NARROW for x in given)
        if line.dtype == torch.int64 and is_index and _is_small(line, self._constants):
            line = line._replace(dtype=torch.int32)
        self._dtypes[line.name] = line.dtype
        return line

    def _learn_distance(self, line: Line) -> None:
        name, arguments = line.op.partition(".")[0], line.arguments
        if line.dtype != torch.int32 or _factor(line):
            return
        if name == "sub" and arguments in (("j", "i"), ("i", "j")):
            self._distances[line.name] = "distance" if arguments == ("j", "i") else "-distance"
        elif name == "abs" and arguments[0] in self._distances:
            self._distances[line.name] = "tl.abs(distance)"

    def _as(self, x: Any, dtype: torch.dtype) -> str:
        """An argument in a dtype."""
        if isinstance(x, Name) and x in self._constants:
            x = self._constants[x]
        if not isinstance(x, Name):
            return _literal(x, dtype)
        if dtype == torch.float32 and x in self._distances:
            return self._distances[x]
        return x if self._dtypes[x] == dtype else f"{x}.to({TYPES[dtype]})"

    def _expression(self, line: Line) -> str:
        name = line.op.partition(".")[0]
        special: Callable[[Line], str] | None = getattr(self, f"_{name.strip('_')}_", None)
        if name in _ROUNDINGS and not line.dtype.is_floating_point:
            return self._as(line.arguments[0], line.dtype)
        if name in _COPIES:
            return self._cast(line.arguments[0], line.dtype)
        if special is not None:
            return special(line)
        if name in _ARITHMETIC:
            return self._in(line, _ARITHMETIC[name])
        if name in _COMPARISONS:
            if self._language.has_distance and line.arguments in (("j", "i"), ("i", "j")):
                return _COMPARISONS[name].format(*(f"{x}0" for x in line.arguments))
            promoted = self._promoted(line)
            return _COMPARISONS[name].format(*(self._as(x, promoted) for x in line.arguments))
        if name in _LOGIC:
            return _LOGIC[name].format(*map(self._plain, line.arguments))
        if name in _BITS:
            return _BITS[name].format(*(self._as(x, line.dtype) for x in line.arguments))
        raise Untranslatable(line.op)

    def _in(self, line: Line, template: str, arguments: Any = None, compute: Any = None) -> str:
        """An expression in the dtype of its result; 16-bit numbers are computed in float32."""
        dtype = line.dtype
        if compute is None:
            compute = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        given = line.arguments if arguments is None else arguments
        found = template.format(*(f"({self._as(x, compute)})" for x in given))
        return found if compute == dtype else f"({found}).to({TYPES[dtype]})"

    def _plain(self, x: Any) -> str:
        """An argument in its own dtype."""
        return self._as(x, self._dtypes[x] if isinstance(x, Name) else torch.int32)

    def _cast(self, x: Any, dtype: torch.dtype) -> str:
        if dtype == torch.bool:
            return f"{self._plain(x)} != 0"
        return self._as(x, dtype)

    def _promoted(self, line: Line) -> torch.dtype:
        """The dtype in which the arguments of a comparison are compared."""
        dtypes = [self._dtypes[x] for x in line.arguments if isinstance(x, Name)]
        found = dtypes[0]
        for dtype in dtypes[1:]:
            found = torch.promote_types(found, dtype)
        if any(isinstance(x, float) for x in line.arguments) and not found.is_floating_point:
            return torch.float32
        return torch.int32 if found == torch.bool else found

    def _tanh_(self, line: Line) -> str:
        """In float32, whatever the dtype of the result."""
        (x,) = line.arguments
        function = self._language.tanh if x in self._of_scores else "tanh"
        return f"{function}({self._as(x, torch.float32)}).to({TYPES[line.dtype]})"

    def _add_(self, line: Line) -> str:
        if line.dtype == torch.bool:  # whose sum is true if one of them is
            return self._in(line, "{0} | {1}")
        return self._in(line, f"{{0}} + {_factor(line)}{{1}}")

    def _sub_(self, line: Line) -> str:
        if line.name in self._distances:
            return "d" if line.arguments == ("j", "i") else "-d"
        return self._in(line, f"{{0}} - {_factor(line)}{{1}}")

    def _rsub_(self, line: Line) -> str:
        return self._in(line, f"{{1}} - {_factor(line)}{{0}}")

    def _div_(self, line: Line) -> str:
        rounding = dict(line.options).get("rounding_mode")
        if rounding == "floor":
            return self._floor_divide_(line)
        if rounding is None:
            return self._in(line, "{0} / {1}")
        if line.dtype.is_floating_point:
            return self._in(line, _ARITHMETIC["trunc"].replace("{0}", _quotient(line.dtype)))
        return self._in(line, "({0} - {0} % {1}) // {1}")

    def _round_(self, line: Line) -> str:
        """Half to even: to the even number below, and on by one or two."""
        half = "(0.5 * {0} - tl.floor(0.5 * {0}))"  # in [0, 1)
        steps = (f"tl.where({half} {x}, 1.0, 0.0)" for x in ("> 0.25", ">= 0.75"))
        return self._in(line, f"2.0 * tl.floor(0.5 * {{0}}) + {' + '.join(steps)}")

    def _atan2_(self, line: Line) -> str:
        y, x = "{0}", "{1}"
        angle = f"atan(tl.where(({y} == 0) & ({x} == {x}), 0.0, {y} / tl.abs({x})))"
        turn = f"tl.where({y} < 0, -{math.pi}, {math.pi})"
        return self._in(line, f"tl.where({x} < 0, {turn} - {angle}, {angle})")

    def _floor_divide_(self, line: Line) -> str:
        if line.dtype.is_floating_point:
            return self._in(line, f"tl.floor({_quotient(line.dtype)})")
        # The difference may be below the least int8.
        compute = torch.int32 if line.dtype in (torch.int8, torch.int16) else line.dtype
        return self._in(line, "({0} - remainder_of({0}, {1})) // {1}", compute=compute)

    def _remainder_(self, line: Line) -> str:
        if line.dtype.is_floating_point:
            return self._in(line, f"{{0}} - tl.floor({_quotient(line.dtype)}) * {{1}}")
        return self._in(line, "remainder_of({0}, {1})")

    def _pow_(self, line: Line) -> str:
        x, exponent = line.arguments
        is_float = line.dtype.is_floating_point
        if not isinstance(x, Name) and is_float and 0 < x < math.inf:
            return self._in(line, f"tl.exp2({{0}} * {math.log2(x)!r})", (exponent,))
        if isinstance(exponent, Name) or not (is_float or exponent > 0):
            raise Untranslatable(line.op)
        if not math.isfinite(exponent):  # no integer
            raise Untranslatable(line.op)
        if exponent != int(exponent):
            return self._in(line, f"tl.exp2(tl.log2({{0}}) * {float(exponent)!r})", (x,))
        if not 0 < abs(exponent) <= 8:
            raise Untranslatable(line.op)
        product = " * ".join(["{0}"] * abs(int(exponent)))
        return self._in(line, product if exponent > 0 else f"1.0 / ({product})", (x,))

    def _where_(self, line: Line) -> str:
        condition, *values = line.arguments
        one, other = (self._as(x, line.dtype) for x in values)
        return f"tl.where({self._plain(condition)}, {one}, {other})"

    def _masked_fill_(self, line: Line) -> str:
        x, mask, value = line.arguments
        filled, kept = self._as(value, line.dtype), self._as(x, line.dtype)
        return f"tl.where({self._plain(mask)}, {filled}, {kept})"

    def _clamp_(self, line: Line) -> str:
        found, limits = self._as(line.arguments[0], line.dtype), limits_of(line)
        for bound, sign in (("min", "<"), ("max", ">")):
            if limits.get(bound) is not None:
                limit = self._as(limits[bound], line.dtype)
                found = f"tl.where({found} {sign} {limit}, {limit}, {found})"
        return found

    _clamp_min_ = _clamp_max_ = _clamp_

    def _bitwise_not_(self, line: Line) -> str:
        x = self._plain(line.arguments[0])
        return f"{x} == 0" if line.dtype == torch.bool else f"~{x}"

    def _read(self, line: Line) -> list[str]:
        """Read captured numbers; an index outside of the tensor, as in the padding of a tile, gives
        0.

        Where every score may read another number and the bounds of the indices are known, a tile
        whose indices are all the same reads one number, and one without an index outside checks
        none.
        """
        _, sizes, *indices = line.arguments
        given = {n: x for n, x in enumerate(indices) if self._is_variable(x)}
        names = {n: f"{line.name}_{n}" for n in given}
        checks = {n: f"{names[n]} = wrapped({x}, {sizes[n]})" for n, x in given.items()}
        inside = {n: _inside(name, sizes[n]) for n, name in names.items()}
        self.addresses[line.name] = self._address(line, names), " & ".join(inside.values())
        spread = {n: x for n, x in given.items() if is_everywhere(self.facts.axes(x))}
        load = self._load(line, names, inside.values(), is_each=bool(spread))
        bounds = {n: self.facts.bounds(x) for n, x in spread.items()}
        known = {n: x for n, x in bounds.items() if x is not None}
        if not spread or len(known) < len(spread) or not self._is_branching:
            return [*checks.values(), load]
        shared = [check for n, check in checks.items() if n not in spread]
        others = [x for n, x in inside.items() if n not in spread]
        least, greatest = ({n: f"{names[n]}_{x}" for n in spread} for x in ("least", "greatest"))
        is_one = " & ".join(f"({least[n]} == {greatest[n]})" for n in spread)
        uniform = []  # checked once for the tile; in Triton's tiles every row may have its own head
        if self._language.has_distance:
            uniform = [inside[n] for n, x in given.items() if not self.facts.axes(x)]
        unlike = [x for x in others if x not in uniform]
        of_spread = (f"({least[n]} >= 0) & ({greatest[n]} < {sizes[n]})" for n in spread)
        is_inside = " & ".join([*uniform, *of_spread])
        one = {n: f"wrapped({least[n]}, {sizes[n]})" for n in spread}
        in_one = [*others, *(_inside(x, sizes[n]) for n, x in one.items())]
        return [
            *shared,
            *(f"{least[n]}, {greatest[n]} = {', '.join(x)}" for n, x in known.items()),
            f"if {is_one}:",
            f"    {self._load(line, names | one, in_one, is_each=False)}",
            f"    {line.name} = {self._language.spread.format(x=line.name)}",
            f"elif {is_inside}:",
            f"    {self._load(line, names | spread, unlike, is_each=True)}",
            "else:",
            *(f"    {checks[n]}" for n in spread),
            f"    {load}",
        ]

    def _is_variable(self, index: Any) -> bool:
        return isinstance(index, Name) and index not in self._constants

    def _address(self, line: Line, names: Mapping[int, str]) -> str:
        """The address of a captured number in its buffer; `names` are those of its indices."""
        offset, sizes, *indices = line.arguments
        dtype = "tl.int64" if offset + math.prod(sizes) > 2**31 else "tl.int32"
        address, stride = f"{offset}", 1
        for n in range(len(sizes) - 1, -1, -1):
            if n in names:
                address += f" + {names[n]}.to({dtype}) * {stride}"
            else:
                number = self._constants.get(indices[n], indices[n])
                address += f" + {(number + sizes[n] if number < 0 else number) * stride}"
            stride *= sizes[n]
        return address

    def _load(
        self, line: Line, names: Mapping[int, str], inside: Iterable[str], is_each: bool
    ) -> str:
        """The statement that loads captured numbers, with `load_each` or as Triton does."""
        pointers, mask = f"{line.op}_ptr + {self._address(line, names)}", " & ".join(inside)
        if is_each:
            read = f"load_each({pointers}, {mask or None})"
        else:
            read = f"tl.load({pointers}{f', mask={mask}, other=0' if mask else ''})"
        is_bool = line.dtype == torch.bool
        return f"{line.name} = {read}" + (" != 0" if is_bool else f".to({TYPES[line.dtype]})")


def _inside(index: str, size: int) -> str:
    return f"({index} >= 0) & ({index} < {size})"


# Operations whose result may be large.
_LARGE = ("mul.", "pow.", "__lshift__.", "bitwise_left_shift.")


def _is_small(line: Line, constants: dict[Name, Any]) -> bool:
    """Whether the result of `line` is of the size of the indices that it reads: int32 holds it."""
    if line.op in (VALUES, INTEGERS) or line.op.startswith(_LARGE) or _factor(line):
        return False
    given = (constants.get(x, 0) if isinstance(x, Name) else x for x in line.arguments)
    return all(abs(x) < 2**30 for x in given if isinstance(x, (int, float)))


def _factor(line: Line) -> str:
    alpha = dict(line.options).get("alpha", 1)
    return "" if alpha == 1 else f"{alpha!r} * "


def _quotient(dtype: torch.dtype) -> str:
    """A quotient that is rounded to an integer next. Triton's division may be two bits off, and 41
    divided by 41 less than 1.
    """
    return "({0} / {1})" if dtype == torch.float64 else "tl.div_rn({0}, {1})"


def _literal(x: Any, dtype: torch.dtype) -> str:
    if not isinstance(x, (bool, int, float)):
        raise Untranslatable(f"an argument {x!r}")
    if dtype.is_floating_point:
        return f'float("{float(x)}")' if not math.isfinite(x) else repr(float(x))
    return repr(bool(x)) if dtype == torch.bool else repr(int(x))
