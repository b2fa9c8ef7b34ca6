"""MLP layers, with the names of ``flash_attn.modules.mlp``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    ) -> None:
        super().__init__()
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden, bias1, device=device, dtype=dtype)
        self.activation = activation
        self.return_residual = return_residual
        self.fc2 = nn.Linear(hidden, out, bias2, device=device, dtype=dtype)

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
        return_residual, device, dtype: as in `Mlp`.
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
    ) -> None:
        super().__init__()
        hidden = 8 * in_features // 3 if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        out = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias1, device=device, dtype=dtype)
        self.activation = activation
        self.return_residual = return_residual
        self.fc2 = nn.Linear(hidden, out, bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., in_features) -> (..., out_features); with return_residual (result, x)."""
        y, gate = self.fc1(x).chunk(2, dim=-1)
        result = self.fc2(y * self.activation(gate))
        return (result, x) if self.return_residual else result
