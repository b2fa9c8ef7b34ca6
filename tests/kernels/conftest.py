"""Triton's interpreter without work that it repeats, which takes most of its time."""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function from a kernel, whose launch has patched the language already.

        Triton would look at every member of the language again.
        """
        return function.rewrite()(*args, **kwargs)

    def reduce(operation: Any, tiles: tuple[Any, ...]) -> list[Any]:
        """Combine one half of a tile with the other one, again and again.

        Triton would combine element by element.
        """
        assert not operation.keep_dims
        (tile,), axis = operation.unravel(tiles, operation.axis)
        x = tile.handle.data
        while x.shape[axis] > 1:
            halves = (operation.to_tensor(half, tile.dtype) for half in np.split(x, 2, axis))
            x = operation.combine_fn.fn(*halves).handle.data
        return [operation.to_tensor(x.squeeze(axis), tile.dtype)]

    interpreter.InterpretedFunction.__call__ = call
    interpreter.ReduceOps.generic_reduce = reduce
    # Triton's own functions see another module of the language, which no launch patches.
    interpreter._patch_lang(tl.zeros.fn)
    # Whether integers overflow is worked out for assertions, which only a debugger turns on.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
