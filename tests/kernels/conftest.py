"""Triton's interpreter without work that it repeats, which takes most of its time, and with checks
of what kernels read and write."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from .bounds import watch

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

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        """Triton would work out and name a type for every operation."""
        vars(self).update(fields_of_block(element_ty, tuple(shape)))

    @cache
    def fields_of_block(element_ty: Any, shape: tuple[Any, ...]) -> dict[str, Any]:
        new = object.__new__(tl.block_type)
        init_block(new, element_ty, list(shape))
        return vars(new)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        """So it would with the sizes of every tensor."""
        sizes = tuple(type.shape) if type.is_block() else ()
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_numel(sizes)

    @cache
    def shape_and_numel(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        new = object.__new__(tl.tensor)
        init_tensor(new, None, tl.block_type(tl.int32, sizes) if sizes else tl.int32)
        return new.shape, new.numel

    init_block, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    tl.pointer_type.__hash__ = tl.dtype.__hash__
    np_dtype = cache(interpreter._get_np_dtype)
    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    interpreter._get_np_dtype = lambda type: np_dtype(type.scalar)
    interpreter.InterpretedFunction.__call__ = call
    interpreter.ReduceOps.generic_reduce = reduce
    # Triton's own functions see another module of the language, which no launch patches.
    interpreter._patch_lang(tl.zeros.fn)
    # Whether integers overflow is worked out for assertions, which only a debugger turns on.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    watch()
