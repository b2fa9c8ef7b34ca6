"""MLP layers, with the names of ``flash_attn.modules.mlp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call.checks import ignored
from ..layers.activations import squared_relu
from ..layers.dense import MLP_ACTIVATIONS
from ..layers.tensor_parallel import Group, linears, reduce_scatter, shared

Activation = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """``fc2(activation(fc1(x)))``.

    Args:
        in_features: number of features of x.
        hidden_features: number of features between the layers; ``4 * in_features`` by default.
        out_features: number of features of the result; `in_features` by default.
        activation: elementwise function.
        bias1, bias2: whether fc1 and fc2 have a bias.
        return_residual: return (result, x).
        device, dtype: of the parameters.
        process_group, sequence_parallel: as in `ParallelMLP`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        process_group: Group | None = None,
        sequence_parallel: bool = True,
    ) -> None:
        super().__init__()
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        column, row = linears(process_group, sequence_parallel)
        self.fc1 = column(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.return_residual = return_residual
        self.fc2 = row(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., in_features) -> (..., out_features); with return_residual (result, x)."""
        result = self.fc2(self.activation(self.fc1(x)))
        return (result, x) if self.return_residual else result


class GatedMlp(nn.Module):
    """``fc2(y * activation(gate))``, where ``y`` and ``gate`` are the halves of ``fc1(x)``.

    With `F.silu` this is SwiGLU, with `F.gelu` GEGLU (Shazeer 2020, "GLU Variants Improve
    Transformer", https://arxiv.org/abs/2002.05202).

    Args:
        in_features: number of features of x.
        hidden_features: number of features of y; ``8 / 3 * in_features`` by default, so that there
            are as many weights as in `Mlp`.
        out_features: number of features of the result; `in_features` by default.
        activation: elementwise function of the gate.
        bias1, bias2: whether fc1 and fc2 have a bias.
        multiple_of: hidden_features is rounded up to a multiple of this.
        return_residual, device, dtype, process_group, sequence_parallel: as in `Mlp`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        process_group: Group | None = None,
        sequence_parallel: bool = True,
    ) -> None:
        super().__init__()
        hidden = 8 * in_features // 3 if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        out = in_features if out_features is None else out_features
        column, row = linears(process_group, sequence_parallel)
        # Each process has both halves of its features.
        self.fc1 = column(
            in_features, 2 * hidden, bias=bias1, multiple_of=2, device=device, dtype=dtype
        )
        self.activation = activation
        self.return_residual = return_residual
        self.fc2 = row(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., in_features) -> (..., out_features); with return_residual (result, x)."""
        y, gate = self.fc1(x).chunk(2, dim=-1)
        result = self.fc2(y * self.activation(gate))
        return (result, x) if self.return_residual else result


class ParallelMLP(Mlp):
    """`Mlp` of which each process of a group computes some of the features between the layers.

    Args:
        process_group: of torch.distributed.
        sequence_parallel: x and the result are this process's part of the rows; if not, all
            processes have all of them.

    The other arguments are those of `Mlp`, over all processes.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.gelu,
        process_group: Group | None = None,
        sequence_parallel: bool = True,
        bias1: bool = True,
        bias2: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (in_features, hidden_features, out_features)
        where: Any = {"device": device, "dtype": dtype}
        where |= {"process_group": process_group, "sequence_parallel": sequence_parallel}
        super().__init__(*sizes, activation, bias1, bias2, **where)


class ParallelGatedMlp(GatedMlp):
    """`GatedMlp` of which each process of a group computes some of the features between the layers;
    the arguments are those of `ParallelMLP` and `GatedMlp`.
    """

    def __init__(
        self,
        in_features: int,
        process_group: Group,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (in_features, hidden_features, out_features)
        where: Any = {"device": device, "dtype": dtype}
        where |= {"process_group": process_group, "sequence_parallel": sequence_parallel}
        super().__init__(*sizes, activation, bias1, bias2, multiple_of, **where)


class FusedMLP(Mlp):
    """`Mlp` with the activation "gelu_approx", "relu" or "sqrelu".

    Args:
        checkpoint_lvl, heuristic: what flash_attn keeps for the backward, and which kernels it
            takes; they change nothing here.

    The other arguments are those of `Mlp`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ignored("FusedMLP", checkpoint_lvl=checkpoint_lvl, heuristic=heuristic != "auto")
        sizes = (in_features, hidden_features, out_features)
        function = MLP_ACTIVATIONS[activation]
        super().__init__(*sizes, function, bias1, bias2, return_residual, device, dtype)

    def forward(self, x: Tensor, process_group: Group | None = None) -> Any:
        """`Mlp.forward`. With a group the layer holds this process's part of the features, and x
        and the result are its part of the rows.
        """
        if process_group is None:
            return super().forward(x)
        hidden = self.activation(self.fc1(shared(x, process_group, True)))
        result = reduce_scatter(self.fc2(hidden), process_group)
        return (result, x) if self.return_residual else result


class ParallelFusedMLP(ParallelMLP):
    """`ParallelMLP` with the arguments of `FusedMLP`."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: str = "gelu_approx",
        process_group: Group | None = None,
        bias1: bool = True,
        bias2: bool = True,
        sequence_parallel: bool = True,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ignored("ParallelFusedMLP", checkpoint_lvl=checkpoint_lvl, heuristic=heuristic != "auto")
        sizes = (in_features, hidden_features, out_features)
        shares = (process_group, sequence_parallel)
        super().__init__(*sizes, MLP_ACTIVATIONS[activation], *shares, bias1, bias2, device, dtype)


class FusedDenseSqreluDense(Mlp):
    """`Mlp` with the activation ``relu(x) ** 2`` and both biases; the arguments of `FusedMLP`."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        checkpoint_lvl: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not (bias1 and bias2):
            raise ValueError(f"bias1, bias2: got {bias1} and {bias2}, want True")
        ignored("FusedDenseSqreluDense", checkpoint_lvl=checkpoint_lvl)
        sizes = (in_features, hidden_features, out_features)
        super().__init__(*sizes, squared_relu, device=device, dtype=dtype)
