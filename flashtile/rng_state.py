"""The seed of dropout, which a call draws once, also in a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_rng_state(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """(seed, offset) as int64 (2,) from `generator`, or PyTorch's own for `device`, so that
    ``torch.manual_seed`` applies.
    """
    if torch.compiler.is_compiling() and generator is None:
        drawn: Tensor = torch.ops.flashtile.draw_rng_state(device)
        return drawn
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device, generator=generator)


_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define("draw_rng_state(Device device) -> Tensor")


def _draw_once(device: torch.device) -> Tensor:
    """`draw_rng_state` in a graph: its partitioner must save the result for the backward. It takes
    a random integer for cheap to compute again, but a second draw drops other probabilities.
    """
    # Both take long to import, and tracers have imported them.
    from torch._functorch import config
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.utils.checkpoint import CheckpointPolicy

    drawn = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)
    mode = get_proxy_mode()
    if mode is not None and torch.is_grad_enabled() and config.activation_memory_budget == 0:
        raise NotImplementedError(
            "dropout_p: got a graph with activation_memory_budget = 0, which saves nothing for the "
            "backward and would drop other probabilities there; want a budget above 0"
        )
    if mode is not None:
        node = next(iter(reversed(mode.tracer.graph.nodes)))
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return drawn


_library.impl("draw_rng_state", _draw_once, "CompositeImplicitAutograd")
