"""Kernels whose parameters are named tuples."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import triton
import triton.language as tl

from .score_source import define


def kernel(*unspecialised: str) -> Callable[[Any], Any]:
    """Make a kernel of a function some of whose parameters are annotated as named tuples.

    Triton specialises all numbers in a tuple, whatever `do_not_specialize` says, so other strides
    or lengths would need another kernel. This one takes the fields of a tuple `x` one by one, as
    ``x_field`` (see `rows.fields_of`), without specialising them, and calls the function, which the
    compiler inlines.

    Args:
        unspecialised: the other parameters that Triton must not specialise.
    """

    def make(function: Any) -> Any:
        types, inner = get_type_hints(function), triton.jit(function)
        namespace = {"__name__": function.__module__, "tl": tl, "inner": inner}
        parameters, arguments, fields = list[str](), list[str](), list[str]()
        for name in inspect.signature(function).parameters:
            of = types.get(name)
            if of in (None, tl.constexpr):
                parameters.append(f"{name}: tl.constexpr" if of else name)
                arguments.append(name)
            else:
                own = [f"{name}_{field}" for field in of._fields]
                parameters += own
                fields += own
                arguments.append(f"{of.__name__}({', '.join(own)})")
                namespace[of.__name__] = of
        name = function.__name__
        source = f"def {name}({', '.join(parameters)}):\n    inner({', '.join(arguments)})\n"
        made = define(name, source, namespace)
        made.__doc__ = function.__doc__
        return triton.jit(made, do_not_specialize=[*fields, *unspecialised])

    return make
