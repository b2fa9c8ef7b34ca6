"""Record what a function computes from tensors as a graph of operations.

PyTorch's `make_fx` does this, too, but its first run imports PyTorch's whole compiler, which takes
up to seconds. Here a dispatch mode sees each operation below autograd, runs it and appends a node.
The graph has no operations that write: the result of an in-place operation becomes the new value of
its tensor, and operations that read the tensor before keep the old value.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_aten = torch.ops.aten

# Functions that PyTorch composes of pointwise operations, which every backend prints and which have
# derivatives of their own.
_COMPOSED = frozenset(
    (_aten.silu.default, _aten.mish.default, _aten.leaky_relu.default, _aten.hardtanh.default,
     _aten.hardsigmoid.default, _aten.hardswish.default, _aten.hardshrink.default,
     _aten.softshrink.default, _aten.log_sigmoid_forward.default, _aten._prelu_kernel.default,
     _aten.addcdiv.default, _aten.addcmul.default, _aten.gelu.default, _aten.threshold.default,
     _aten.logit.default, _aten.logaddexp.default, _aten.nan_to_num.default, _aten.isinf.default,
     _aten.deg2rad.default, _aten.rad2deg.default)
)  # fmt: skip


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """PyTorch's composition overflows where it takes `x`, and its derivative is NaN there."""
    scaled = x * beta
    bent = scaled.clamp(max=threshold).exp().log1p() / beta
    return torch.where(scaled > threshold, x, bent)


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """Without PyTorch's overflow, as above."""
    bent = (x * input_scale).clamp(max=0).expm1() * (alpha * scale)
    return torch.where(x > 0, x * scale, bent)


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return _elu(x, alpha, 1.0, 1.0 / alpha)


def _lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return x + weight * (end - x)


def _frac(x: Tensor) -> Tensor:
    return x - x.trunc()


def _round(x: Tensor, *, decimals: int) -> Tensor:
    return (x * 10.0**decimals).round() / 10.0**decimals


_OWN: dict[Any, Any] = {
    _aten.softplus.default: _softplus,
    _aten.elu.default: _elu,
    _aten.celu.default: _celu,
    _aten.lerp.Scalar: _lerp,
    _aten.lerp.Tensor: _lerp,
    _aten.frac.default: _frac,
    _aten.round.decimals: _round,
}


def _composition(function: Any) -> Any:
    """The operations of which a function is composed; None for other operations."""
    if function not in _COMPOSED:
        return _OWN.get(function)
    from torch._decomp import decomposition_table  # imports much, for few score functions

    return decomposition_table[function]


def _result(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation. What a trace captures is 0, by which no integer is divided."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if "ZeroDivisionError" not in str(error) or not isinstance(args[1], Tensor):
            raise
        return function(args[0], torch.ones_like(args[1]), **kwargs)


# Hold this while a recorder is active: PyTorch's flag for active dispatch modes is global, and two
# threads that leave their modes at once could leave it set.
recording = threading.RLock()


class Recorder(TorchDispatchMode):
    """Record every operation under this mode, with all results as ``meta["val"]`` of their nodes.

    Args:
        inputs: the tensors that the graph is a function of. `constant` names others that it may
            read; an operation that reads any other tensor raises NotImplementedError.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}  # by the targets of their nodes
        # The value of each tensor; None after a write to a part of its memory. References are weak,
        # because autograd returns a copy of a tensor that something else refers to, and the
        # recorder would not know the copy.
        self._values: MutableMapping[Tensor, fx.Node | None] = WeakTensorKeyDictionary()
        for number, x in enumerate(inputs):
            self._track(x, self.graph.placeholder(f"input_{number}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because PyTorch would import its compiler only to make it skip this class."""
        return False

    def knows(self, x: Tensor) -> bool:
        """Whether `x` is an input, a constant or the result of an operation."""
        return x in self._values

    def constant(self, x: Tensor) -> None:
        """Let operations read `x`, a tensor from outside, whose numbers stay as they are."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = x
        self._track(x, self.graph.get_attr(name))

    def node(self, x: Tensor) -> fx.Node:
        """The present value of `x`, which must be known."""
        node = self._values[x]
        if node is None:
            raise NotImplementedError(
                "score_mod: reads a tensor after an operation in place on a view of it; use an "
                "operation that returns a new tensor, such as torch.where"
            )
        return node

    def finish(self, results: Iterable[Tensor]) -> fx.Graph:
        """The graph with these results, without operations that they do not need."""
        self.graph.output(tuple(map(self.node, results)))
        self.graph.eliminate_dead_code()
        return self.graph

    def refused(self, function: Any, reason: str) -> NotImplementedError:
        """The error for an operation that cannot be recorded."""
        return NotImplementedError(f"score_mod: the operation {function} {reason}")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode passes composite operations on without decomposing them
            result = function.decompose(*args, **kwargs)
            if result is NotImplemented and (composition := _composition(function)):
                result = composition(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if function is _aten.lift_fresh.default:  # of a constant that `torch.tensor` has made
            self.constant(args[0])
            function = _aten.lift_fresh_copy.default  # later writes must not change the constant
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.UntypedStorage):
                raise self.refused(function, "reads the memory of a tensor; want an operation")
            if isinstance(x, Tensor) and not self.knows(x):
                raise self.refused(
                    function,
                    "reads a tensor that has not been recorded, such as one that a hook of "
                    "autograd captures",
                )
        if function._schema.is_mutable:
            return self._run_in_place(function, args, kwargs)
        return self._run(function, args, kwargs)

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        node = self.graph.call_function(function, *tree_map_only(Tensor, self.node, (args, kwargs)))
        result = _result(function, args, kwargs)
        self._track(result, node)
        return result

    def _run_in_place(self, function: Any, args: Any, kwargs: Any) -> Any:
        pure = _out_of_place(function)
        x = args[0] if args else None
        if pure is None or not isinstance(x, Tensor):
            raise self.refused(function, "writes to one of its arguments")
        self.node(x)
        aliases = [x]
        # An `inplace_view` operation changes only the shape of `x`, not its numbers.
        if torch.Tag.inplace_view not in function.tags:
            is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]  # the stubs lack it
            aliases = [y for y in self._values if is_alias(x, y)]
        if any(y is z for y in aliases for z in self.constants.values()):
            raise self.refused(function, "changes a captured tensor")
        with self:
            value = pure(*args, **kwargs)
        if value.dtype != x.dtype:
            value = self._run(_aten._to_copy.default, (value,), {"dtype": x.dtype})
        same = [_layout(y) == _layout(x) for y in aliases]
        result = _result(function, args, kwargs)
        for y, is_same in zip(aliases, same, strict=True):
            self._values[y] = self.node(value) if is_same else None
        return result

    def _track(self, result: Any, node: fx.Node) -> None:
        """Say that `node` is the value of a result, and likewise for each part of a tuple."""
        if isinstance(result, Tensor):
            self._values[result] = node
            node.meta["val"] = result.detach()  # the shape of `result` itself may change
        elif isinstance(result, (tuple, list)):
            for number, x in enumerate(result):
                self._track(x, self.graph.call_function(operator.getitem, (node, number)))


def _out_of_place(function: Any) -> Any:
    """The operation that computes what an in-place operation writes; None if there is none."""
    namespace, name, _ = str(function).split(".")
    packet = getattr(_aten, name.removesuffix("_"), None)
    if namespace != "aten" or not name.endswith("_") or packet is None:
        return None
    # Names of overloads differ, so types decide: `pow.Tensor_Scalar` belongs to `pow_.Scalar`.
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return next((x for x in overloads if _types(x) == _types(function)), None)


def _types(function: Any) -> list[str]:
    return [str(argument.type) for argument in function._schema.arguments]


def _layout(x: Tensor) -> tuple[Any, ...]:
    """Which elements of its memory `x` has, and how it reads them."""
    return x.dtype, x.storage_offset(), x.shape, x.stride()
