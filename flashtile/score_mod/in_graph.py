"""Score functions of calls that ``torch.compile`` traces.

PyTorch's tracer runs the function on single numbers, as it does for FlexAttention. The compiled
code then checks all that the function depends on, and what the function captures is an input of the
graph. The operations that the tracer has recorded are a function, too: `traced` makes its program,
and what has to be computed from captured tensors before the call becomes a part of the graph.

PyTorch has no public interface for this; the code calls what FlexAttention's own code calls.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.overrides import TorchFunctionMode

from ..autocast import autocast_off
from .trace import ScoreFunction, indexed, traced


def recorded(function: ScoreFunction, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """The program of a function in a call that is being traced, and the tensors that it reads. The
    list is empty if the tracer cannot follow the function: the graph has ended then.
    """
    from torch._dynamo.comptime import comptime

    found: list[Any] = []
    with autocast_off(device):
        comptime(_record)  # runs while the call is traced, not with the compiled code
    return found


def _record(context: Any) -> None:
    """Fill the list of `recorded`; `context` knows the variables of that function."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.higher_order_ops import discard_graph_changes, speculate_subgraph

    tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    function, dtype, device, found = (
        context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
        for name in ("function", "dtype", "device", "found")
    )

    def number(dtype: Any) -> Any:
        zeros, shape = (VariableTracker.build(tracer, x) for x in (torch.zeros, ()))
        return zeros.call_function(tracer, [shape], {"dtype": dtype, "device": device})

    with discard_graph_changes(tracer):
        index = VariableTracker.build(tracer, torch.int64)
        numbers = [number(dtype), *(number(index) for _ in range(4))]
    with _Indexing():
        _, graph, captured = speculate_subgraph(
            tracer,
            function,
            numbers,
            {},
            description="score_mod",
            source_target=torch.ops.higher_order.flex_attention,
            set_subgraph_inputs="flatten_manual",
        )
    dtype, device = dtype.as_python_constant(), device.as_python_constant()
    try:
        sizes = _with_constants(graph)
        examples = [
            torch.zeros((), dtype=torch.int64, device=device) if x in sizes else _value(x)
            for x in graph.find_nodes(op="placeholder")[len(numbers) :]
        ]
        module = fx.GraphModule(tracer.output.nn_modules, graph)
        trace = traced(lambda *numbers: module(*numbers, *examples), dtype, device)
    except (TypeError, ValueError, NotImplementedError) as error:
        context.graph_break(str(error))  # outside of the graph, the call raises the error itself

    def added(operation: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of an operation that is added to the graph around the call."""
        proxy = tracer.output.create_proxy("call_function", operation, args, kwargs)
        return wrap_fx_proxy(tracer, proxy)

    def input_of_graph(x: Tensor) -> Any:
        proxy = next(p for p, other in zip(captured, examples, strict=True) if other is x)
        if isinstance(_value(proxy.node), Tensor):
            return proxy
        return added(torch.full, (), proxy, dtype=x.dtype, device=device).as_proxy()  # a size

    class Preparation(fx.Interpreter):
        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            x = self.fetch_attr(target)
            return added(torch.tensor, x.tolist(), dtype=x.dtype, device=x.device).as_proxy()

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return added(target, *args, **kwargs).as_proxy()

    results = Preparation(trace.preparation).run(*map(input_of_graph, trace.captured))
    tensors = [added(torch.ops.aten.alias.default, x) for x in results]
    found.items.extend([ConstantVariable.create(trace.program), *tensors])


def _value(node: fx.Node) -> Any:
    """An example of what a node of the tracer is: a tensor without data, a symbol or None."""
    return node.meta.get("example_value")


# Operations of Python that compute the same with a tensor of one integer in place of an integer,
# also of 0, which it is while the function is traced.
_ARITHMETIC = (
    operator.add, operator.sub, operator.mul, operator.neg, operator.lt, operator.le, operator.gt,
    operator.ge, operator.eq, operator.ne, operator.truediv,
)  # fmt: skip


_NUMBERS = (SymInt, SymFloat, SymBool, int)


def _with_constants(graph: fx.Graph) -> list[fx.Node]:
    """Put constants in place of Python's numbers, which the compiled code then checks. Only sizes
    of tensors with which the function does arithmetic stay inputs, so that one graph serves all
    sizes. Returns these inputs.

    Raises:
        NotImplementedError: a number has been read from a tensor, so that it is not known.
    """
    sizes: dict[Any, fx.Node] = {}  # by their symbols
    computed = set()

    def read(node: fx.Node) -> Any:
        x = _value(node)
        if not isinstance(x, _NUMBERS):
            return node
        if is_arithmetic and isinstance(x, SymInt) and x.node.expr in sizes:
            return sizes[x.node.expr]
        return node if is_arithmetic and node in computed else _constant(x)

    for node in graph.nodes:
        is_arithmetic = node.target in _ARITHMETIC and isinstance(_value(node), (Tensor, SymInt))
        if is_arithmetic:
            computed.add(node)
        if node.op != "placeholder":
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), read)
        elif isinstance(_value(node), SymInt) and _is_size(_value(node)):
            sizes[_value(node).node.expr] = node
    for node in reversed(graph.nodes):  # not other unused ones, which may write to a tensor
        is_number = node.op != "placeholder" and isinstance(_value(node), (*_NUMBERS, torch.Size))
        if is_number and not node.users:
            graph.erase_node(node)
    return list(sizes.values())


def _constant(x: Any) -> Any:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        return {SymFloat: float, SymBool: bool}.get(type(x), int)(x)
    except GuardOnDataDependentSymNode as error:
        raise NotImplementedError(
            "score_mod: uses a number that has been read from a tensor; capture the tensor instead"
        ) from error


def _is_size(x: SymInt) -> bool:
    """Whether an integer follows from sizes of tensors alone, or has been read from a tensor."""
    from torch._dynamo.source import TensorPropertySource

    sources = x.node.shape_env.var_to_sources
    return all(
        isinstance(source, TensorPropertySource)
        for symbol in x.node.expr.free_symbols
        for source in sources.get(symbol, ())
    )


class _Indexing(TorchFunctionMode):
    """An index of one number does not read that number."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__getitem__:
            return indexed(*args)
        return function(*args, **(kwargs or {}))
