"""The derivative of a program, as a program."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor, fx

from .convert import Conversion
from .evaluate import evaluate
from .program import INDICES, INTEGERS, VALUES, Program, fact, parsed
from .record import Recorder, recording

UNCHANGED = "return g"  # the derivative of a function that adds something to scores


@fact
def derivative(text: str, dtype: torch.dtype, of_captured: bool) -> str:
    """The program from the gradient ``g`` of a program's result to the gradient of the score ``s``
    and, on request, those of the captured values.

    Args:
        text: of the program, for scores of `dtype`.

    Raises:
        NotImplementedError: an operation has no derivative, or that needs an operation which does
            not work on single scores.
    """
    program = parsed(text)
    reads = [line for line in program.lines if line.op in (VALUES, INTEGERS)]
    wanted = [line.name for line in reads if line.op == VALUES] if of_captured else []

    dtypes = {"s": dtype, **dict.fromkeys(INDICES, torch.int64), "g": dtype}
    dtypes |= {line.name: line.dtype for line in reads}
    # A new thread has no modes, transforms, autocast or hooks for saved tensors, such as those of
    # checkpointing.
    with recording, ThreadPoolExecutor(1) as thread:
        try:
            graph = thread.submit(_recorded, program, dtypes, ["s", *wanted]).result()
        except RuntimeError as error:
            raise NotImplementedError(f"score_mod: has no derivative: {error}") from error
    conversion = Conversion(graph, tuple(dtypes), prefix="d", has_preparation=False)
    try:
        gradient, *others = conversion.run()
    except NotImplementedError as error:
        raise NotImplementedError(f"{error}; it is part of the derivative") from error
    assert not conversion.roots, "the derivative reads a tensor that the function does not read"
    found = Program(
        (*program.lines, *conversion.lines), gradient, tuple(zip(wanted, others, strict=True))
    )
    return str(found.without_unused())


@fact
def by_score(text: str) -> str:
    """The program of a derivative without the gradients of captured values."""
    return str(replace(parsed(text), captured=()).without_unused()) if text else ""


def _recorded(program: Program, dtypes: dict[str, torch.dtype], wanted: list[str]) -> fx.Graph:
    """The graph from the numbers with these dtypes to the gradients of the wanted ones."""
    given = {name: torch.ones((), dtype=dtype) for name, dtype in dtypes.items()}
    inputs = [given[name].requires_grad_() for name in wanted]
    recorder = Recorder(given.values())
    with recorder:
        result = evaluate(program, given, shape=())[program.result]
        gradients = _gradients(result, inputs, given["g"])
    graph = recorder.finish(gradients)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])  # a derivative is not differentiated
        graph.erase_node(node)
    return graph


def _gradients(result: Tensor, inputs: list[Tensor], gradient: Tensor) -> Sequence[Tensor]:
    """The gradients of the inputs, by that of the result."""
    if not result.requires_grad:
        return list(map(torch.zeros_like, inputs))
    # As an argument of `grad`, the gradient would make PyTorch import sympy, which takes seconds.
    result.register_hook(lambda _: gradient)
    # With `create_graph`, they consist of operations that have derivatives themselves, instead of
    # special ones (`silu_backward`), which backends would have to know.
    return torch.autograd.grad(
        result, inputs, create_graph=True, allow_unused=True, materialize_grads=True
    )
