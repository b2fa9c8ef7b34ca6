"""Convert `score_mod` to a program and the tensors that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..problem import lse_dtype
from ..score_mod import described

CAPTURED = ("captured", "captured_integers")  # operands that the caller does not name


def outside_of_graphs(function: Callable[..., Any]) -> Any:
    """`function` without the tracer of torch.compile, whose graph ends before the call; with
    ``fullgraph=True`` this raises an error.
    """
    torch._dynamo.graph_break(msg="flashtile: a call with score_mod runs outside of the graph")
    return torch.compiler.disable(function)


def with_score_mod(q: Any, k: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a call, with the program of its score function and the operands in `CAPTURED`.

    Raises:
        TypeError, ValueError: it is no function, or its result is not one score.
        NotImplementedError: it cannot be traced; the message names the operation.
    """
    options = dict(keywords)
    function = options.pop("score_mod")
    if function is None:
        return options
    if not callable(function):
        raise TypeError(
            f"score_mod: got {type(function).__name__}, want a function (score, b, h, i, j) -> "
            "score"
        )
    if not isinstance(q, Tensor) or not isinstance(k, Tensor):  # which are refused later
        return options
    if q.numel() == 0 or k.numel() == 0:  # there are no scores
        return options
    program, *tensors = described(function, lse_dtype(q.dtype), q.device)
    return {**options, "score_mod": program, **dict(zip(CAPTURED, tensors, strict=True))}
