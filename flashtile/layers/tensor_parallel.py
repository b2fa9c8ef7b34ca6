"""Linear layers that several processes share, with the names of ``flash_attn.utils.distributed``
and ``flash_attn.ops.fused_dense``.

A column-parallel layer holds some output features, a row-parallel layer some input features, so
between the two nothing is exchanged (Shoeybi et al. 2019, "Megatron-LM",
https://arxiv.org/abs/1909.08053). With sequence parallelism each process holds some rows of the
first dimension outside such a pair (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

# Newer releases of PyTorch have other names.
_GATHER = ("all_gather_single", "all_gather_into_tensor")
_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")

Group = Any  # torch.distributed.ProcessGroup, which is missing where PyTorch is built without it


def _collected(
    names: tuple[str, ...], x: Tensor, rows: int, group: Group, async_op: bool
) -> tuple[Tensor, Any]:
    """The result, which has so many rows, of the first function that PyTorch has."""
    function = next(getattr(distributed, name) for name in names if hasattr(distributed, name))
    output = x.new_empty(rows, *x.shape[1:])
    return output, function(output, x.detach().contiguous(), group=group, async_op=async_op)


def all_gather_raw(
    input_: Tensor, process_group: Group, async_op: bool = False
) -> tuple[Tensor, Any]:
    """(the processes' rows one after the other, a handle to wait for), without gradient."""
    rows = input_.shape[0] * distributed.get_world_size(process_group)
    return _collected(_GATHER, input_, rows, process_group, async_op)


def reduce_scatter_raw(
    input_: Tensor, process_group: Group, async_op: bool = False
) -> tuple[Tensor, Any]:
    """(this process's rows of the processes' sum, a handle to wait for), without gradient.
    ValueError if the rows cannot be divided equally.
    """
    rows, world = input_.shape[0], distributed.get_world_size(process_group)
    if rows % world:
        raise ValueError(f"input_: got {rows} rows, want a multiple of the {world} processes")
    return _collected(_SCATTER, input_, rows // world, process_group, async_op)


def all_reduce_raw(
    input_: Tensor, process_group: Group, async_op: bool = False
) -> tuple[Tensor, Any]:
    """(the processes' sum, a handle to wait for), without gradient."""
    output = input_.detach().clone(memory_format=torch.contiguous_format)
    return output, distributed.all_reduce(output, group=process_group, async_op=async_op)


def _unchanged(x: Tensor, group: Group) -> tuple[Tensor, None]:
    return x.view_as(x), None


class _Collective(torch.autograd.Function):
    """One collective, whose gradient is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Any, back: Any) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group)[0], None, None, None


def all_gather(input_: Tensor, process_group: Group) -> Tensor:
    """The processes' rows one after the other."""
    return _Collective.apply(input_, process_group, all_gather_raw, reduce_scatter_raw)


def reduce_scatter(input_: Tensor, process_group: Group) -> Tensor:
    """This process's rows of the processes' sum."""
    return _Collective.apply(input_, process_group, reduce_scatter_raw, all_gather_raw)


def all_reduce(input_: Tensor, process_group: Group) -> Tensor:
    """The processes' sum, of which all processes go on with the same function."""
    return _Collective.apply(input_, process_group, all_reduce_raw, _unchanged)


def shared(x: Tensor, process_group: Group, sequence_parallel: bool) -> Tensor:
    """The rows of all processes, or x itself if all have the same rows; the gradients of the
    processes add up."""
    if sequence_parallel:
        return all_gather(x, process_group)
    return _Collective.apply(x, process_group, _unchanged, all_reduce_raw)


def summed(x: Tensor, process_group: Group, sequence_parallel: bool) -> Tensor:
    """The processes' sum, or this process's rows of it."""
    return (reduce_scatter if sequence_parallel else all_reduce)(x, process_group)


def sync_shared_params(model: nn.Module, process_group: Group) -> None:
    """Copy the first process's values of the parameters that are marked ``_shared_params``."""
    first = distributed.get_global_rank(process_group, 0)
    for parameter in _marked(model, "_shared_params"):
        distributed.broadcast(parameter.detach(), src=first, group=process_group)


def allreduce_sequence_parallel_grad(model: nn.Module, process_group: Group) -> None:
    """Add up the processes' gradients of the parameters that are marked ``_sequence_parallel``."""
    for parameter in _marked(model, "_sequence_parallel"):
        distributed.all_reduce(parameter.grad, group=process_group)


def _marked(model: nn.Module, mark: str) -> list[nn.Parameter]:
    """In the order of their names, because processes may have different parameters."""
    named = sorted(model.named_parameters())
    return [parameter for _, parameter in named if getattr(parameter, mark, False)]


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """The part of `dim` that process `local_rank` of `world_size` holds, a multiple of
    `multiple_of`; the first processes hold more if it cannot be divided equally."""
    multiple = dim // multiple_of
    return (multiple // world_size + int(local_rank < multiple % world_size)) * multiple_of


def local_size(dim: int, process_group: Group | None, multiple_of: int = 1) -> int:
    """`get_dim_for_local_rank` of this process; `dim` without a group."""
    if process_group is None:
        return dim
    rank, world = distributed.get_rank(process_group), distributed.get_world_size(process_group)
    return get_dim_for_local_rank(dim, world, rank, multiple_of)


class _ParallelLinear(nn.Linear):
    """A linear layer of which each process has a part; `_divided` names the features that are."""

    _divided: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Group,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"in_features": in_features, "out_features": out_features}
        whole = sizes[self._divided]
        if whole % multiple_of:
            raise ValueError(
                f"{self._divided}: got {whole}, want a multiple of multiple_of={multiple_of}"
            )
        sizes[self._divided] = local_size(whole, process_group, multiple_of)
        if self._divided == "in_features":  # the results are added up, the bias once
            bias = bias and distributed.get_rank(process_group) == 0
        super().__init__(**sizes, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each process has some output features.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``, over all
            processes.
        process_group: of torch.distributed.
        sequence_parallel: the input is this process's part of the rows.
        multiple_of: each process's output features are a multiple of this; ValueError if
            out_features is not.
    """

    _divided = "out_features"

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., this process's output features), of all rows."""
        return super().forward(shared(x, self.process_group, self.sequence_parallel))


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each process has some input features; the first has the bias.

    The arguments are those of `ColumnParallelLinear`; here sequence_parallel says what the result
    is, and multiple_of, and the ValueError, are of the input features.
    """

    _divided = "in_features"

    def forward(self, x: Tensor) -> Tensor:
        """(..., this process's input features) -> (..., out_features)."""
        return summed(super().forward(x), self.process_group, self.sequence_parallel)


MakeLinear = Callable[..., nn.Linear]


def linears(process_group: Group | None, sequence_parallel: bool) -> tuple[MakeLinear, MakeLinear]:
    """What makes the two layers of a pair: column- and row-parallel ones if there is a group."""
    if process_group is None:
        return _linear, _linear
    options = {"process_group": process_group, "sequence_parallel": sequence_parallel}
    return partial(ColumnParallelLinear, **options), partial(RowParallelLinear, **options)


def _linear(in_features: int, out_features: int, multiple_of: int = 1, **options: Any) -> nn.Linear:
    return nn.Linear(in_features, out_features, **options)
