"""Numbers of layouts, which stand for them in compiled graphs.

A graph holds a ticket as a tensor, whose value is no guard: the same graph runs with the next batch
of documents, when its shards have the same sizes.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

KEPT = 256  # layouts that stay alive until a compiled backward has run

_numbers = count()
_layouts: WeakValueDictionary[int, Any] = WeakValueDictionary()
_recent: deque[Any] = deque(maxlen=KEPT)


def ticket(layout: Any) -> Tensor:
    """A new ticket for a layout, an int64 scalar on the CPU."""
    number = next(_numbers)
    _layouts[number] = layout
    return torch.tensor(number)


def layout_of(ticket: Tensor) -> Any:
    """The layout of a ticket. From now on it stays alive while the latest `KEPT` ones are used.

    Raises:
        RuntimeError: it is gone.
    """
    layout = _layouts.get(int(ticket))
    if layout is None:
        raise RuntimeError(
            f"layout: got number {int(ticket)}, whose layout no longer exists; keep the layout "
            "until the backward has run"
        )
    if not _recent or _recent[-1] is not layout:
        _recent.append(layout)
    return layout
