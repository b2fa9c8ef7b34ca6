"""The seed of dropout, which a call draws once, also in a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor

from .operators import library, ops, register_fake


def draw_rng_state(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """(seed, offset) as int64 (2,) from `generator`, or PyTorch's own for `device`, so that
    ``torch.manual_seed`` applies.
    """
    if torch.compiler.is_compiling() and generator is None:
        drawn: Tensor = ops.draw_rng_state(device)
        return drawn
    return _draw(device=device, generator=generator)


def _draw(*, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device, generator=generator)


library.define("draw_rng_state(Device device) -> Tensor")
library.define(
    "draw_rng_state_again(*, Device device) -> Tensor", tags=[torch.Tag.nondeterministic_seeded]
)


def _draw_once(device: torch.device) -> Tensor:
    """`draw_rng_state` in a graph: both passes must have the same result. A partitioner takes a
    random integer for cheap to compute again, but a second draw drops other probabilities, so it
    must save the first one. With a memory budget of 0 it saves nothing but the inputs. It then
    draws again from the state that the generator had, provided that the draw is an op of its own:
    inductor makes the random integers of PyTorch's ops itself, from another state.
    """
    # Both take long to import, and tracers have imported them.
    from torch._functorch import config
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.utils.checkpoint import CheckpointPolicy

    mode = get_proxy_mode()
    if mode is None:
        return _draw(device=device)
    graph = mode.tracer.graph
    has_backward = any("tangents" in node.name for node in graph.find_nodes(op="placeholder"))
    if has_backward and config.activation_memory_budget == 0:
        drawn: Tensor = ops.draw_rng_state_again(device=device)
        policy = CheckpointPolicy.MUST_RECOMPUTE
    else:
        drawn = _draw(device=device)
        policy = CheckpointPolicy.MUST_SAVE
    next(iter(reversed(graph.nodes))).meta["recompute"] = policy
    return drawn


def _drawn_shape(*, device: torch.device) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


library.impl("draw_rng_state", _draw_once, "CompositeImplicitAutograd")
library.impl("draw_rng_state_again", _draw, "BackendSelect")
register_fake("draw_rng_state_again", _drawn_shape)
