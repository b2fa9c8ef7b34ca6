"""Trace a score function once, on single numbers, and write it as a `Program`.

The function runs under a `Recorder`. Tensors that it captures are replaced by stand-ins, so that
the trace does not depend on their values and cannot change them. What the function computes from
captured tensors only (``slopes.exp()``) is no part of the program: it is the `Preparation`, which
every call runs once, with gradients.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from ..autocast import autocast_off
from ..masks.block_mask import READ_NUMBERS
from .convert import Root, convert
from .program import ELEMENT, INDICES, Program
from .record import Recorder, recording

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Traced(NamedTuple):
    """A score function as a program, and what it reads."""

    program: str
    captured: tuple[Tensor, ...]  # tensors from outside of the function
    preparation: fx.GraphModule  # from `captured` to the tensors that the program reads


@contextmanager
def _without_modes() -> Iterator[None]:
    """A trace does not depend on the modes and transforms of the call."""
    with (
        compiled_functions_run_eagerly(),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


def traced(function: ScoreFunction, dtype: torch.dtype, device: torch.device) -> Traced:
    """Trace a score function for scores of `dtype`.

    Raises:
        TypeError, ValueError: the result is not one score of `dtype`.
        NotImplementedError: an operation cannot be traced or does not work on single scores; the
            message names it.
    """
    with recording, _without_modes():
        score = torch.zeros((), dtype=dtype, device=device)
        indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        graph, operations, captures = _recorded(function, (score, *indices), dtype)
    program, roots = convert(graph, ("s", *INDICES))
    return Traced(str(program), captures.captured, _preparation(roots, operations, captures))


def traced_unpack(unpack: Callable[[Tensor, Tensor], Tensor], bytes_per_row: int) -> Program:
    """Trace a function of a row of bytes and the index of an element: see `score_mod.rows`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `traced`; or it reads another tensor.
    """
    with recording, _without_modes():
        row = torch.zeros(bytes_per_row, dtype=torch.uint8, device="cpu")
        d = torch.zeros((), dtype=torch.int64, device="cpu")
        graph, _, captures = _recorded(unpack, (row, d), torch.float32)
    if captures.captured:
        raise TypeError("score_mod: captures a tensor; want a function of its arguments only")
    return convert(graph, ("row", ELEMENT))[0]


def _recorded(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> tuple[fx.Graph, _Operations, _Captures]:
    """The graph of ``function(*inputs)``, and what has recorded it."""
    operations = _Operations(inputs)
    captures = _Captures(operations)
    try:
        with autocast_off(inputs[0]), captures, operations:
            result = _checked(function(*inputs), dtype)
    except NotImplementedError:
        raise
    except (RuntimeError, IndexError) as error:
        raise NotImplementedError(
            f"score_mod: the operation {operations.caller} cannot be traced for single numbers: "
            f"{type(error).__name__}: {error}"
        ) from error
    return operations.finish([captures.stand_in(result)]), operations, captures


def _checked(result: Any, dtype: torch.dtype) -> Tensor:
    """The result of a score function, if it is one score."""
    if not isinstance(result, Tensor):
        raise TypeError(f"score_mod: got a result of type {type(result).__name__}, want a Tensor")
    if result.dim() != 0:
        raise ValueError(
            f"score_mod: got a result of shape {tuple(result.shape)} for one score, want ()"
        )
    if not result.dtype.is_floating_point:
        raise TypeError(f"score_mod: got a result of dtype {result.dtype}, want {dtype}")
    return result.to(dtype)


class _Captures(TorchFunctionMode):
    """Replace tensors from outside of the function by stand-ins of equal shape."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the captured one

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """The tensors from outside, in the order of their first use."""
        return tuple(x for x, _ in self._stand_ins.values())

    @property
    def numbers(self) -> dict[fx.Node, int]:
        """The number of each captured tensor, by the node of its stand-in."""
        stand_ins = (stand_in for _, stand_in in self._stand_ins.values())
        return {self._operations.node(x): number for number, x in enumerate(stand_ins)}

    def stand_in(self, x: Tensor) -> Tensor:
        """`x` itself if the function has made it, else its stand-in."""
        if self._operations.knows(x):
            return x
        if torch._C._are_functorch_transforms_active():
            raise self._refused("runs in a transform of torch.func inside of the function")
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
                self._operations.constant(new)
            self._stand_ins[id(x)] = (x, new)
        return self._stand_ins[id(x)][1]

    def _refused(self, reason: str) -> NotImplementedError:
        return NotImplementedError(f"score_mod: {self._operations.caller} {reason}")

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._operations not in _get_current_dispatch_mode_stack():
            return function(*args, **(kwargs or {}))  # of another trace, inside of this one
        self._operations.called = function
        if function in READ_NUMBERS:
            raise self._refused(
                "reads the value of a tensor, which is not known while the function is traced; use "
                "torch.where instead of if"
            )
        # For mypy, `Tensor.data` is a tensor; at run time it is the property.
        if function == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise self._refused("replaces the numbers of a tensor; want an operation")
        if getattr(function, "__name__", "") == "__get__" and not _makes_tensor(function):
            return function(*args, **(kwargs or {}))
        args, kwargs = torch.utils._pytree.tree_map_only(
            Tensor, self.stand_in, (args, kwargs or {})
        )
        if function is Tensor.__getitem__:
            return indexed(*args)
        return function(*args, **kwargs)


def _makes_tensor(getter: Any) -> bool:
    """Whether the getter of a property of Tensor computes with its numbers, as ``x.T`` does."""
    property_name = getattr(getattr(getter, "__self__", None), "__name__", "")
    return property_name in ("T", "mT", "H", "mH", "data", "grad", "real", "imag")


def indexed(x: Tensor, index: Any) -> Tensor:
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


class _Operations(Recorder):
    """Record the operations of a score function, but not those whose result depends on numbers."""

    called: Any = None  # the function of PyTorch that the score function has called last

    @property
    def caller(self) -> str:
        """The name of that function."""
        name = resolve_name(self.called) or getattr(self.called, "__name__", str(self.called))
        return name.removeprefix("torch.Tensor.").removeprefix("torch.")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tags = function.tags
        if function is not torch.ops.aten.index.Tensor and (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        ):
            raise self.refused(
                function,
                "reads the value of a tensor, which is not known while the function is traced; use "
                "torch.where instead of if",
            )
        if torch.Tag.nondeterministic_seeded in tags:
            raise self.refused(function, "draws random numbers; use dropout_p")
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False):
            raise self.refused(function, "runs under hooks for saved tensors, which may read them")
        return super().__torch_dispatch__(function, types, args, kwargs)

    def refused(self, function: Any, reason: str) -> NotImplementedError:
        return NotImplementedError(f"score_mod: {self.caller} ({function}) {reason}")


def _preparation(roots: list[Root], operations: _Operations, captures: _Captures) -> fx.GraphModule:
    """What has to be computed from the captured tensors before a call: from those tensors to the
    ones that the program reads.
    """
    made = fx.Graph()
    numbers = captures.numbers
    stand_ins = [made.placeholder(f"captured_{number}") for number in numbers.values()]
    nodes: dict[fx.Node, Any] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in nodes:
            if node in numbers:
                nodes[node] = stand_ins[numbers[node]]
            else:
                for x in node.all_input_nodes:
                    copied(x)
                nodes[node] = made.node_copy(node, lambda x: nodes[x])
        return nodes[node]

    made.output(tuple(copied(root.node) for root in roots))
    return fx.GraphModule(operations.constants, made)


# PyTorch has one compiler stance for all threads: the first one that needs another stance sets it,
# and the last one resets it.
_lock = threading.Lock()
_stances: list[Any] = []


@contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """A context in which compiled functions run eagerly, so that a dispatch mode sees each of their
    operations.

    It affects all threads for as long as it lasts, about a millisecond for each trace of a score
    function: compiled functions that other threads call run eagerly, too. A stance that the user
    sets meanwhile stays set, and PyTorch may then compile functions inside of this context.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        yield
        return
    with _lock:
        _stances.append(_stances[0] if _stances else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            stance = _stances.pop()
            if not _stances and _is_set(stance):
                _reset(stance)


def _is_set(stance: Any) -> bool:
    """Whether `stance` is still set. PyTorch has no public function that tells."""
    from torch._dynamo import eval_frame

    ours = getattr(stance, "stance", None)
    return getattr(eval_frame, "_stance", ours) is ours


def _reset(stance: Any) -> None:
    try:
        stance.__exit__(None, None, None)
    except RuntimeError:  # a thread that runs compiled code may not reset it; any other one may
        with ThreadPoolExecutor(1) as thread:
            thread.submit(stance.__exit__, None, None, None).result()
