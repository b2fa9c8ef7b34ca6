"""Let `flashtile.attention` take and return DTensors.

::

    from flashtile.integrations import dtensor

    dtensor.register()
    out = flashtile.attention(q, k, v, causal=True)  # DTensors, sharded over batch or heads

Each process computes attention for its own sequences or heads, without communication. Inputs with
any other sharding are redistributed. If all processes share an input, such as a sink with sharded
sequences, its gradients are partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from ..operators import ops
from ..problem import DIFFERENTIABLE, Operands, Options

_INPUTS = len(Operands._fields)
_Sharding = tuple[list[Placement | None], list[Placement | None]]

# The batch dimension and the head dimension of each operand of a dense call. A call with an operand
# that is not listed cannot be sharded; a dimension of size 1 is replicated.
_BATCH = {"q": 0, "k": 0, "v": 0, "bias": 0, "seqused_q": 0, "seqused_k": 0}
_HEADS = {"q": 2, "k": 2, "v": 2, "bias": 1, "sink": 0, "relative_bias": 0}


def register() -> None:
    """Tell DTensor how to shard flashtile's operators; a second call does nothing more.

    Dropout needs plain tensors, because its mask depends on the position in the whole tensor.
    """
    register_sharding(ops.attention_forward.default)(_forward)
    register_sharding(ops.attention_backward.default)(_backward)


def _forward(*args: Any) -> list[_Sharding]:
    """Placements of (out, lse), and of the arguments."""
    operands, numbers = args[:_INPUTS], args[_INPUTS:]
    shardings = [_replicated(2, args)]
    for dim, lse_dim, inputs in _placements(Operands(*operands), numbers):
        shardings.append(([Shard(dim), Shard(lse_dim)], [*inputs, *[None] * len(numbers)]))
    return shardings


def _backward(*args: Any) -> list[_Sharding]:
    """Placements of the gradients, and of (dout, dlse, out, lse, bias_needs_grad, operands...)."""
    dlse, bias_needs_grad = args[1], args[4]
    operands, numbers = Operands(*args[5 : 5 + _INPUTS]), args[5 + _INPUTS :]
    shardings = [_replicated(DIFFERENTIABLE, args)]
    options = Options(*numbers)
    needed = {
        "bias": bias_needs_grad,
        "alibi_slopes": options.alibi_needs_grad,
        "relative_bias": options.relative_bias_needs_grad,
    }
    for dim, lse_dim, inputs in _placements(operands, numbers):
        gradients: list[Placement | None] = []
        for name, x, placement in zip(Operands._fields, operands, inputs, strict=True):
            if name in Operands._fields[:DIFFERENTIABLE]:
                absent = x is None or not needed.get(name, True)
                shared = placement == Replicate() and not absent
                gradients.append(Replicate() if absent else Partial() if shared else placement)
        leading: list[Placement | None] = [Shard(dim), None, Shard(dim), Shard(lse_dim), None]
        leading[1] = None if dlse is None else Shard(lse_dim)
        shardings.append((gradients, [*leading, *inputs, *[None] * len(numbers)]))
    return shardings


def _replicated(outputs: int, args: tuple[Any, ...]) -> _Sharding:
    """The placement in which every process holds all tensors completely."""
    inputs: list[Placement | None] = [
        Replicate() if hasattr(x, "placements") else None for x in args
    ]
    results: list[Placement | None] = [Replicate() for _ in range(outputs)]
    return results, inputs


def _placements(
    operands: Operands, numbers: tuple[Any, ...]
) -> list[tuple[int, int, list[Placement | None]]]:
    """(sharded dimension of out, of lse, placements of the operands) for each possible sharding."""
    found: list[tuple[int, int, list[Placement | None]]] = []
    if Options(*numbers).score_mod:  # it counts the sequences and heads of the whole call
        return found
    for dim, lse_dim, dims in ((0, 0, _batch_dims(operands)), (2, 1, _head_dims(operands))):
        if dims is not None:
            placements = [
                None if x is None else _placement(x, dims[name])
                for name, x in zip(Operands._fields, operands, strict=True)
            ]
            found.append((dim, lse_dim, placements))
    return found


def _placement(x: Any, dim: int | None) -> Placement:
    return Replicate() if dim is None or x.shape[dim] == 1 else Shard(dim)


def _batch_dims(operands: Operands) -> dict[str, int | None] | None:
    """The batch dimension of each operand, or None if the call cannot be sharded over it."""
    slopes = operands.alibi_slopes
    per_sequence = slopes is not None and len(slopes.shape) == 2
    shared = {"sink": None, "relative_bias": None}
    dims = {**_BATCH, **shared, "alibi_slopes": 0 if per_sequence else None}
    return dims if _is_dense(operands) and operands.q.shape[0] > 1 else None


def _head_dims(operands: Operands) -> dict[str, int | None] | None:
    """The head dimension of each operand, or None if the call cannot be sharded over it."""
    slopes = operands.alibi_slopes
    slopes_dim = None if slopes is None else len(slopes.shape) - 1
    dims = {**_HEADS, "seqused_q": None, "seqused_k": None, "alibi_slopes": slopes_dim}
    if not _is_dense(operands):
        return None
    # Shards of unequal size would separate query heads from the key heads that they read.
    heads = operands.k.shape[2]
    return dims if heads > 1 and heads % _processes_over_heads(operands) == 0 else None


def _processes_over_heads(operands: Operands) -> int:
    """The number of processes over which heads are already sharded, or of the mesh if none are."""
    specs: list[Any] = [operands.q, operands.k, operands.v]
    mesh = specs[0].mesh
    spread = {
        i
        for spec in specs
        for i, placement in enumerate(spec.placements)
        if isinstance(placement, Shard) and placement.dim == 2
    }
    sizes = [mesh.size(i) for i in (spread or range(mesh.ndim))]
    return int(torch.tensor(sizes).prod())


def _is_dense(operands: Operands) -> bool:
    """Whether a sharding is known for every given operand."""
    known = {*_BATCH, *_HEADS, "alibi_slopes"}
    return all(
        x is None or name in known for name, x in zip(Operands._fields, operands, strict=True)
    )
