"""Trace a score function once, on single numbers, and write it as a `Program`.

The function runs under `make_fx`. Tensors that it captures are replaced by stand-ins, so that the
trace does not depend on their values and cannot change them. What the function computes from
captured tensors only (``slopes.exp()``) is no part of the program: it is the `Preparation`, which
every call runs once, with gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..autocast import autocast_off
from .convert import Root, convert

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Traced(NamedTuple):
    """A score function as a program, and what it reads."""

    program: str
    captured: tuple[Tensor, ...]  # tensors from outside of the function
    preparation: fx.GraphModule  # from `captured` to the tensors that the program reads


_lock = threading.RLock()


@contextmanager
def tracing() -> Iterator[None]:
    """A trace without the modes and transforms of the call. PyTorch patches its modules while it
    traces, so threads wait for each other.
    """
    with _lock, _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def traced(function: ScoreFunction, dtype: torch.dtype, device: torch.device) -> Traced:
    """Trace a score function for scores of `dtype`.

    Raises:
        TypeError, ValueError: the result is not one score of `dtype`.
        NotImplementedError: an operation cannot be traced or does not work on single scores; the
            message names it.
    """
    captures = _Captures()
    operations = _Operations(captures)

    def on_stand_ins(*scores: Tensor) -> Tensor:
        captures.inputs(scores)
        with captures, operations:
            result = function(*scores)
        return captures.stand_in(_checked(result, dtype))

    with tracing(), torch.no_grad():
        score = torch.zeros((), dtype=dtype, device=device)
        indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        try:
            with autocast_off(score):
                graph = make_fx(on_stand_ins)(score, *indices)
        except NotImplementedError:
            raise
        except (RuntimeError, IndexError) as error:
            raise NotImplementedError(
                f"score_mod: the operation {captures.last} cannot be traced for single scores: "
                f"{type(error).__name__}: {error}"
            ) from error
    program, roots = convert(graph, dtype)
    return Traced(str(program), captures.captured, _preparation(graph, roots, captures))


def _checked(result: Any, dtype: torch.dtype) -> Tensor:
    """The result of a score function, if it is one score."""
    if not isinstance(result, Tensor):
        raise TypeError(f"score_mod: got a result of type {type(result).__name__}, want a Tensor")
    if result.dim() != 0:
        raise ValueError(
            f"score_mod: got a result of shape {tuple(result.shape)} for one score, want ()"
        )
    if result.dtype != dtype:
        raise TypeError(f"score_mod: got a result of dtype {result.dtype}, want {dtype}")
    return result


class _Captures(TorchFunctionMode):
    """Replace tensors from outside of the function by stand-ins of equal shape."""

    # Functions that would read the numbers of a tensor without PyTorch's dispatcher.
    _READ_NUMBERS = frozenset(
        getattr(Tensor, name)
        for name in (
            "item", "tolist", "numpy", "data_ptr", "__array__", "__bool__", "__int__", "__float__",
            "__index__", "__complex__", "untyped_storage",
        )
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.last = "none"  # the last operation of the function, for messages
        self._known: dict[int, Tensor] = {}  # results of operations and stand-ins, by id
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the captured one

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """The tensors from outside, in the order of their first use."""
        return tuple(x for x, _ in self._stand_ins.values())

    @property
    def numbers(self) -> dict[int, int]:
        """The number of each captured tensor, by the id of its stand-in."""
        pairs = enumerate(self._stand_ins.values())
        return {id(stand_in): number for number, (_, stand_in) in pairs}

    def stand_in(self, x: Tensor) -> Tensor:
        """`x` itself if the function has made it, else its stand-in."""
        if id(x) in self._known:
            return x
        if id(x) not in self._stand_ins:
            if x.is_nested or x.is_quantized or x.layout is not torch.strided:
                kind = "nested" if x.is_nested else "quantized" if x.is_quantized else x.layout
                raise TypeError(f"score_mod: captures a tensor that is {kind}, want a dense one")
            # 16-bit numbers are read as float32: else their gradients would be rounded to 16 bits
            # before they are added up.
            dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
            with _disable_current_modes():  # it is no operation of the function
                zero = torch.zeros((), dtype=dtype, device=x.device)
                new = zero.expand([int(n) for n in x.shape])
            self._stand_ins[id(x)] = (x, new)
            self._known[id(new)] = new
        return self._stand_ins[id(x)][1]

    def inputs(self, scores: tuple[Tensor, ...]) -> None:
        """Say which tensors are no captured ones."""
        self._known |= {id(x): x for x in scores}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = resolve_name(function) or getattr(function, "__name__", str(function))
        self.last = name.removeprefix("torch.Tensor.").removeprefix("torch.")
        if function in self._READ_NUMBERS:
            raise NotImplementedError(
                f"score_mod: {self.last} reads the value of a tensor, which is not known in "
                "advance; use torch.where instead of if"
            )
        if getattr(function, "__name__", "") == "__get__" and not _makes_tensor(function):
            return function(*args, **(kwargs or {}))
        args, kwargs = torch.utils._pytree.tree_map_only(
            Tensor, self.stand_in, (args, kwargs or {})
        )
        if function is Tensor.__getitem__:
            result = _indexed(*args)
        else:
            result = function(*args, **kwargs)
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self._known[id(x)] = x
        return result


def _makes_tensor(getter: Any) -> bool:
    """Whether the getter of a property of Tensor computes with its numbers, as ``x.T`` does."""
    property_name = getattr(getattr(getter, "__self__", None), "__name__", "")
    return property_name in ("T", "mT", "H", "mH", "data", "grad", "real", "imag")


def _indexed(x: Tensor, index: Any) -> Tensor:
    """``x[index]``; an index of one number does not read that number."""
    indices = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(n, Tensor) for n in indices):
        return x[index]
    if not all(isinstance(n, Tensor) or type(n) is int for n in indices):
        shown = ", ".join("a score's index" if isinstance(n, Tensor) else str(n) for n in indices)
        raise NotImplementedError(
            f"score_mod: got the index [{shown}], want only numbers and indices of the score"
        )
    device = x.device
    numbers = [
        n if isinstance(n, Tensor) else torch.full((), n, dtype=torch.int64, device=device)
        for n in indices
    ]
    return torch.ops.aten.index(x, numbers)


class _Operations(TorchDispatchMode):
    """Refuse operations whose result a trace cannot stand for."""

    def __init__(self, captures: _Captures) -> None:
        super().__init__()
        self._captures = captures

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tags = function.tags
        if function is not torch.ops.aten.index.Tensor and (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        ):
            raise NotImplementedError(
                f"score_mod: {self._captures.last} ({function}) reads the value of a tensor, which "
                "is not known in advance; use torch.where instead of if"
            )
        if torch.Tag.nondeterministic_seeded in tags:
            raise NotImplementedError(
                f"score_mod: {self._captures.last} ({function}) draws random numbers; use dropout_p"
            )
        if function._schema.is_mutable and id(args[0]) in self._captures.numbers:
            raise NotImplementedError(
                f"score_mod: {self._captures.last} ({function}) changes a captured tensor"
            )
        return function(*args, **(kwargs or {}))


def _preparation(graph: fx.GraphModule, roots: list[Root], captures: _Captures) -> fx.GraphModule:
    """What has to be computed from the captured tensors before a call: from those tensors to the
    ones that the program reads.
    """
    made = fx.Graph()
    stand_ins, numbers = [], captures.numbers
    for number in range(len(captures.captured)):
        stand_ins.append(made.placeholder(f"captured_{number}"))
    nodes: dict[fx.Node, Any] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in nodes:
            number = None
            if node.op == "get_attr":
                number = numbers.get(id(getattr(graph, str(node.target))))
            if number is not None:
                nodes[node] = stand_ins[number]
            else:
                for x in node.all_input_nodes:
                    copied(x)
                nodes[node] = made.node_copy(node, lambda x: nodes[x])
        return nodes[node]

    made.output(tuple(copied(root.node) for root in roots))
    return fx.GraphModule(graph, made)
