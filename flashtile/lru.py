"""Bounded caches: later calls with an equal key reuse a result.

Every cache of the package is made here, so all of them are bounded, drop the least recently used
entry, may be used by several threads at once and are emptied by `clear_caches`. A cache holds only
what can be computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import Any, Generic, TypeVar, overload
from weakref import WeakSet

K = TypeVar("K")
V = TypeVar("V")
Default = TypeVar("Default")

# A cache that belongs to an object ends with it.
_caches: WeakSet[_lru_cache_wrapper[Any]] = WeakSet()
_adding = threading.Lock()


def memoised(size: int) -> Callable[[Callable[..., V]], _lru_cache_wrapper[V]]:
    """Decorate a function of hashable arguments so that it caches its last `size` results."""

    def decorate(function: Callable[..., V]) -> _lru_cache_wrapper[V]:
        cached = lru_cache(maxsize=size)(function)
        with _adding:
            _caches.add(cached)
        return cached

    return decorate


class Memo(Generic[K, V]):
    """A table of the last `size` entries, for values that cannot be computed from the key only."""

    # An lru_cache of one-element lists. It hashes the key once for each look-up, and hashing is
    # most of the cost; an OrderedDict hashes it again in `move_to_end`, and needs a lock.

    def __init__(self, size: int) -> None:
        self._cell: _lru_cache_wrapper[list[V]] = memoised(size)(lambda key: [])
        self.clear = self._cell.cache_clear

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: Default) -> V | Default: ...
    def get(self, key: K, default: Any = None) -> Any:
        """The value stored under `key`, or `default`."""
        cell = self._cell(key)
        return cell[0] if cell else default

    def __setitem__(self, key: K, value: V) -> None:
        self._cell(key)[:] = (value,)

    def forget(self, key: K) -> None:
        """Remove the value stored under `key`, if there is one."""
        self._cell(key).clear()


def clear_caches() -> None:
    """Empty every cache of this process.

    The caches hold decisions about earlier calls, plans, tiles that ``flashtile tune`` has found,
    compiled kernels ready to launch, and small tensors on the GPU. Later calls return the same
    results; only the first call of each kind takes longer. Any thread may call this at any time.

    Triton's own caches of compiled kernels stay as they are.
    """
    with _adding:
        caches = list(_caches)
    for cached in caches:
        cached.cache_clear()
