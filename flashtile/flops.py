"""FLOP formulas of our ops for ``torch.utils.flop_counter``: those of SDPA, which ignore masks.

``torch.utils.flop_counter`` imports Triton if it is installed, so this module does not import it.
It registers the formulas once other code has imported the counter, as every process that counts
FLOPs does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from .operators import ops

_lock = threading.Lock()
_registered = False


def register_when_counting() -> None:
    """Register the formulas, once, if this process has imported PyTorch's counter."""
    global _registered
    if _registered or "torch.utils.flop_counter" not in sys.modules:
        return
    with _lock:
        if not _registered:
            _register()
            _registered = True


def _register() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import (
        flop_registry,
        register_flop_formula,
        sdpa_backward_flop_count,
        sdpa_flop_count,
    )

    def forward(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return sdpa_flop_count(*_dense_shapes(args))

    def backward(dout: Any, dlse: Any, out: Any, lse: Any, *args: Any, **kwargs: Any) -> int:
        _bias_needs_grad, *operands = args
        q, k, v = _dense_shapes(operands)
        return sdpa_backward_flop_count((*q[:-1], v[-1]), q, k, v)

    register_flop_formula([ops.attention_forward, ops.attention_forward_in_workspace])(forward)
    register_flop_formula(ops.attention_backward)(backward)
    # A counter copies the registry when it is created, so counters that already run are updated.
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "counter"):
            mode.counter.flop_registry.update(flop_registry)


def _dense_shapes(args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Shapes of q, k, v as (batch, heads, length, head_dim); the arguments arrive as shapes."""
    q, k, v = args[:3]
    if len(q) == 3:  # packed: counted as one long sequence, an upper bound
        q, k, v = ((1, *x) if len(x) == 3 else (1, x[0] * x[1], *x[2:]) for x in (q, k, v))
    heads = q[2]  # every query head multiplies, also where query heads share a key head
    return (
        (q[0], heads, q[1], q[3]),
        (q[0], heads, k[1], k[3]),
        (q[0], heads, v[1], v[3]),
    )
