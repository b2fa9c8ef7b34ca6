"""Cache keys of kernels that do not depend on what a process compiled earlier.

Triton 3.6 hashes a kernel together with the constants of the functions it calls, but only of
functions that are already hashed (`DependenciesFinder._update_hash` reads a function's constants
before it computes its hash; later releases do not). A process that starts with another kernel would
therefore compute other keys and compile again. `precompute_key` hashes functions before their
callers.
"""

from __future__ import annotations

from typing import Any


def precompute_key(kernel: Any) -> None:
    """Compute the cache key of `kernel`, after those of the functions that it calls.

    Interpreted kernels have no key.
    """
    if getattr(kernel, "hash", "") is None:
        for name in _names(kernel.fn.__code__):
            for function in _functions(kernel.fn.__globals__.get(name)):
                precompute_key(function)
        _ = kernel.cache_key


def _names(code: Any) -> set[str]:
    """All names in a function, including those in nested functions."""
    inner = (constant for constant in code.co_consts if hasattr(constant, "co_names"))
    return set(code.co_names).union(*map(_names, inner))


def _functions(x: Any) -> list[Any]:
    """`x` itself, or the methods of an aggregate."""
    return list(vars(x).values()) if getattr(x, "__triton_aggregate__", False) else [x]
