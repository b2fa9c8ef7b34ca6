"""The derivative of a program, as a program."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ..lru import memoised
from .convert import Conversion
from .evaluate import operation
from .program import CONSTANT, INDICES, INTEGERS, VALUES, Name, Program, parsed
from .trace import tracing


@memoised(256)
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

    def pullback(*numbers: Tensor) -> tuple[Tensor, ...]:
        s, *indices, g = numbers[: 2 + len(INDICES)]
        given = dict(zip(INDICES, indices, strict=True))
        given |= zip((line.name for line in reads), numbers[2 + len(INDICES) :], strict=True)

        def result(s: Tensor, *captured: Tensor) -> Tensor:
            return _result(program, given | {"s": s} | dict(zip(wanted, captured, strict=True)))

        gradients = torch.func.vjp(result, s, *(given[name] for name in wanted))[1]
        found: tuple[Tensor, ...] = gradients(g)
        return found

    def traced() -> torch.fx.GraphModule:
        with tracing(), torch.autocast("cpu", enabled=False), torch.enable_grad():
            score = torch.ones((), dtype=dtype)
            indices = [torch.ones((), dtype=torch.int64) for _ in INDICES]
            captured = [torch.ones((), dtype=line.dtype) for line in reads]
            return make_fx(pullback)(score, *indices, score.clone(), *captured)

    # `torch.func` refuses to work under hooks for saved tensors, such as those of checkpointing. A
    # new thread has none.
    with ThreadPoolExecutor(1) as thread:
        try:
            graph = thread.submit(traced).result()
        except RuntimeError as error:
            raise NotImplementedError(f"score_mod: has no derivative: {error}") from error
    inputs = ("s", *INDICES, "g", *(line.name for line in reads))
    conversion = Conversion(graph, inputs, prefix="d")
    try:
        gradient, *others = conversion.run()
    except NotImplementedError as error:
        raise NotImplementedError(f"{error}; it is part of the derivative") from error
    found = Program(
        (*program.lines, *conversion.lines), gradient, tuple(zip(wanted, others, strict=True))
    )
    return str(found.without_unused())


def _result(program: Program, given: dict[str, Tensor]) -> Tensor:
    """The result of a program on single numbers, of which the captured ones are given."""
    found = dict(given)
    for line in program.lines:
        if line.name in found:
            continue
        if line.op == CONSTANT:
            found[line.name] = torch.full((), line.arguments[0], dtype=line.dtype)
            continue
        arguments: Any = (found[x] if isinstance(x, Name) else x for x in line.arguments)
        options = {n: found[x] if isinstance(x, Name) else x for n, x in line.options}
        found[line.name] = operation(line.op)(*arguments, **options)
    return found[program.result]
