"""Write a traced graph as a `Program`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .program import CONSTANT, ELEMENT, INTEGERS, VALUES, Line, Name, Program

_aten = torch.ops.aten

# Operations on single numbers that PyTorch does not mark as pointwise.
_POINTWISE = frozenset(
    (_aten._to_copy.default, _aten.detach.default, _aten.floor_divide.default,
     _aten.floor_divide.Scalar, _aten.alias.default)
)  # fmt: skip
# Views and copies of one number, which are that number.
_SAME = frozenset(
    (_aten.view.default, _aten.reshape.default, _aten.expand.default, _aten._unsafe_view.default,
     _aten.squeeze.default, _aten.lift_fresh_copy.default)
)  # fmt: skip
# What `copy_` and `fill_` write: a number of the dtype of the first argument.
_COPIES = frozenset((_aten.copy.default, _aten.fill.Tensor))
_FULL = frozenset(
    (_aten.full.default, _aten.full_like.default, _aten.new_full.default, _aten.fill.Scalar)
)
# An uninitialised number is written by an operation in place before anything reads it.
_ZEROS = frozenset(
    (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.zero.default,
     _aten.empty_like.default)
)  # fmt: skip
_ONES = frozenset((_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default))
# Options that say where a tensor lies, which numbers do not have.
_OF_MEMORY = ("device", "layout", "memory_format", "non_blocking", "pin_memory")


class Root(NamedTuple):
    """A tensor that the program reads and that does not depend on the score or its indices."""

    node: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # of its first number in the buffer of all captured values, or of all integers


class _Reading(NamedTuple):
    """An indexed captured tensor with some of its indices: the others are still to come."""

    root: Root
    indices: tuple[Any, ...]


class Conversion:
    """The lines of a program while they are written, one for each node of a graph.

    Args:
        has_preparation: what depends on no input is computed before, unless it is a constant.
    """

    def __init__(
        self,
        graph: fx.Graph,
        inputs: tuple[str, ...],
        prefix: str = "t",
        has_preparation: bool = True,
    ) -> None:
        self.lines: list[Line] = []
        self.roots: list[Root] = []
        self._graph = graph
        self._prefix, self._has_preparation = prefix, has_preparation
        self._has_row = ELEMENT in inputs
        self._sizes = {VALUES: 0, INTEGERS: 0}
        self._known: dict[fx.Node, Any] = {}  # a Name or a _Reading
        self._depends: set[fx.Node] = set()  # on the score or its indices
        placeholders = (node for node in graph.nodes if node.op == "placeholder")
        for node, name in zip(placeholders, inputs, strict=True):
            self._known[node] = Name(name)
            self._depends.add(node)
            shape = tuple(_value(node).shape)
            if shape:  # a row of bytes, of which the function reads elements
                self._known[node] = _Reading(Root(node, shape, _value(node).dtype, 0), ())

    def run(self) -> list[Name]:
        """Write all lines; the names of the results."""
        for node in self._graph.nodes:
            if node.op == "output":
                results = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
                return [self.name(x) for x in results]
            sources = node.all_input_nodes
            if any(not self._has_preparation or x in self._depends for x in sources):
                self._depends.add(node)
                self._known[node] = self._converted(node)
        raise AssertionError("a graph without an output")

    def name(self, node: Any) -> Name:
        """The name of the one number that `node` is."""
        if node not in self._known:
            self._known[node] = self._outside(node)
        known = self._known[node]
        if isinstance(known, _Reading):
            if len(known.indices) < len(known.root.shape):
                raise ValueError(
                    f"score_mod: got {len(known.indices)} indices for a captured tensor of shape "
                    f"{known.root.shape}, want {len(known.root.shape)}: one number for one score"
                )
            known = self._known[node] = self._read(known)
        name: Name = known
        return name

    def _write(self, dtype: torch.dtype, op: str, arguments: Any, options: Any = ()) -> Name:
        name = Name(f"{self._prefix}{len(self.lines)}")
        self.lines.append(Line(name, dtype, op, tuple(arguments), tuple(options)))
        return name

    def _outside(self, node: fx.Node) -> Any:
        """A node that does not depend on the score: a constant or a captured tensor."""
        value = _constant(node)
        if value is not None:
            return self._write(_value(node).dtype, CONSTANT, (value,))
        return _Reading(self._root(node), ())

    def _root(self, node: fx.Node) -> Root:
        x = _value(node)
        for root in self.roots:
            if root.node is node:
                return root
        if x.dtype.is_complex:
            raise TypeError(f"score_mod: captures a tensor of dtype {x.dtype}, want real numbers")
        space = VALUES if x.dtype.is_floating_point else INTEGERS
        root = Root(node, tuple(x.shape), x.dtype, self._sizes[space])
        self._sizes[space] += x.numel()
        self.roots.append(root)
        return root

    def _read(self, reading: _Reading) -> Name:
        root = reading.root
        space = VALUES if root.dtype.is_floating_point else INTEGERS
        return self._write(root.dtype, space, (root.offset, root.shape, *reading.indices))

    def _converted(self, node: fx.Node) -> Any:
        """A node that depends on the score or its indices."""
        function: Any = node.target
        if function in (_aten.index.Tensor, _aten.select.int):
            return self._indexed(node)
        if function in _SAME:
            _one_number(node)
            return self.name(node.args[0])
        if function in _COPIES:
            return self._copied(node)
        if not isinstance(function, torch._ops.OpOverload) or "val" not in node.meta:  # a tuple
            raise _refused(node)
        value = _constant(node)  # zeros_like of a score
        if value is not None:
            return self._write(_value(node).dtype, CONSTANT, (value,))
        is_pointwise = function in _POINTWISE or torch.Tag.pointwise in function.tags
        # The bits of bytes as another dtype; of a score they would have no derivative.
        if not is_pointwise and not (function is _aten.view.dtype and self._has_row):
            raise _refused(node)
        _one_number(node)
        arguments = [self.name(x) if isinstance(x, fx.Node) else x for x in node.args]
        if any(isinstance(x, (list, tuple)) for x in arguments):
            raise _refused(node)
        options = [
            (name, self.name(x) if isinstance(x, fx.Node) else x)
            for name, x in node.kwargs.items()
            if name not in _OF_MEMORY
        ]
        op = str(function).removeprefix("aten.")
        return self._write(_value(node).dtype, op, arguments, options)

    def _copied(self, node: fx.Node) -> Name:
        """The second argument of `node`, in the dtype of the first one."""
        source: Any = node.args[1]
        name, dtype = self.name(source), _value(node).dtype
        if _value(source).dtype == dtype:
            return name
        return self._write(dtype, "_to_copy.default", (name,), (("dtype", dtype),))

    def _indexed(self, node: fx.Node) -> Any:
        """An element, or a part, of a captured tensor."""
        x: Any = node.args[0]
        if x not in self._known and _constant(x) is None:
            self._known[x] = _Reading(self._root(x), ())
        known = self._known.get(x)
        if not isinstance(known, _Reading):
            raise _refused(node)
        if node.target is _aten.select.int:
            dim, index = node.args[1:3]
            if dim != 0:
                raise _refused(node)
            return known._replace(indices=(*known.indices, index))
        given: Any = node.args[1]
        if any(n is None for n in given) or any(_value(n).dim() > 0 for n in given):
            raise _refused(node)
        if not all(_value(n).dtype in (torch.int32, torch.int64) for n in given):
            raise _refused(node)
        indices = (_constant(n) if _constant(n) is not None else self.name(n) for n in given)
        return known._replace(indices=(*known.indices, *indices))


def convert(graph: fx.Graph, inputs: tuple[str, ...]) -> tuple[Program, list[Root]]:
    """The program of a function of these inputs, from its graph.

    Raises:
        NotImplementedError: an operation does not work on single numbers.
    """
    conversion = Conversion(graph, inputs)
    (result,) = conversion.run()
    return Program(tuple(conversion.lines), result).without_unused(), conversion.roots


def _value(node: fx.Node) -> Tensor:
    """A tensor of the shape and the dtype of a node."""
    value: Tensor = node.meta["val"]
    return value


def _one_number(node: fx.Node) -> None:
    shape = tuple(_value(node).shape)
    if shape != ():
        raise ValueError(
            f"score_mod: the operation {node.target} gives a result of shape {shape}, want (): one "
            "number for one score"
        )


def _refused(node: fx.Node) -> NotImplementedError:
    return NotImplementedError(
        f"score_mod: the operation {node.target} does not work on single scores; want pointwise "
        "operations, and captured tensors with an index for each dimension"
    )


def _constant(node: fx.Node) -> float | int | bool | None:
    """The number that a node is, whatever the call; None if it is none."""
    if node.op != "call_function" or "val" not in node.meta or _value(node).dim() > 0:
        return None
    target = node.target
    number: Any = None
    if target is _aten.scalar_tensor.default:
        number = node.args[0]
    elif target in _FULL:
        number = node.args[2 if target is _aten.new_full.default else 1]
    if isinstance(number, (bool, int, float)):
        dtype = _value(node).dtype
        if dtype == torch.bool:
            return bool(number)
        return number if dtype.is_floating_point else int(number)
    if target in _ZEROS:
        return 0
    return 1 if target in _ONES else None
