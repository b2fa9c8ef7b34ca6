"""The kinds of calls: equal on all ranks, and what they compare once.

A kind has what decides which messages a call has and whether it is refused, and nothing in which
ranks may differ. Otherwise one of them would compare a call that the others have compared before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..autocast import autocast_dtype, is_autocasting
from ..autograd import is_transformed
from ..call import checks
from ..call.dispatch import BackendName
from ..masks import BlockMask
from .arguments import USED
from .machine import Machine
from .tile_map import TileMap

Qkv = tuple[Tensor, Tensor, Tensor]


def call_facts(
    qkv: Qkv,
    options: Mapping[str, Any],
    return_lse: bool,
    backend: BackendName | None,
    machine: Machine | None,
) -> tuple[tuple[str, Any], ...]:
    """What a call is, by names that a user understands. Which of q, k and v require gradients is up
    to each rank, if some tensor does: a backward follows on all ranks or on none."""
    return (
        ("return_lse", return_lse),
        ("backend", backend),
        ("transforms", (is_transformed(), forward_ad._current_level >= 0)),
        ("gradients", needs_gradients(qkv)),
        ("autocast", autocast_dtype(qkv[0])),
        ("machine", machine),
        *[(name, (x.shape, x.dtype, x.device.type)) for name, x in zip("qkv", qkv, strict=True)],
        *[(name, kind(name, x)) for name, x in sorted(options.items())],
    )


def repeat_key(facts: Any, qkv: Qkv, options: Mapping[str, Any], reserved_processors: int) -> Any:
    """A key that has all that decides how a rank runs a call, besides the contents of q, k and v;
    None if that is not known: other tensors take part, or autocast changes their dtypes."""
    if not are_numbers(options) or is_autocasting(qkv[0]):
        return None
    deterministic = torch.are_deterministic_algorithms_enabled()
    return facts, *[x.device for x in qkv], reserved_processors, deterministic


def kind(name: str, x: Any) -> Any:
    """What decides whether two values of an argument need one agreement of the ranks or two. It is
    equal on all ranks, whose GPUs have numbers of their own."""
    if isinstance(x, Tensor):
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        facts = tuple(x.shape), x.dtype, x.device.type, needs_grad
        is_read = name in USED and checks.is_readable(x)
        return (*facts, tuple(x.tolist())) if is_read else facts
    if isinstance(x, BlockMask):
        digest = TileMap.of(x).digest if checks.is_readable(x.kinds) else None
        return x.lengths, x.tile_size, digest
    if isinstance(x, tuple):
        return tuple(kind(name, part) for part in x)
    return repr(x)


def needs_gradients(qkv: Qkv) -> bool:
    """Whether a backward may follow for some of the tensors."""
    q, k, v = qkv
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def are_numbers(options: Mapping[str, Any]) -> bool:
    """Whether the options have neither tensors nor masks nor functions."""
    parts = (x if type(x) is tuple else (x,) for x in options.values())
    return all(x is None or type(x) in (int, float, bool, str) for part in parts for x in part)
