"""One layer of a transformer: attention and MLP around a residual stream.

The parameters are those of ``flash_attn.modules.block``, but `forward` returns one tensor, the
residual stream. flash-attn returns the last branch and the stream separately, so that its kernels
can fuse the addition with the next norm; therefore `install` does not provide that module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

MakeLayer = Callable[[int], nn.Module]


class Block(nn.Module):
    """A sequential block.

    With `prenorm` (GPT-2, Llama)::

        x = x + dropout1(mixer(norm1(x)))
        x = x + dropout2(mlp(norm2(x)))

    Without it (the original transformer, BERT)::

        x = norm1(x + dropout1(mixer(x)))
        x = norm2(x + dropout2(mlp(x)))

    Args:
        dim: number of features of a token.
        mixer_cls, mlp_cls, norm_cls: functions of `dim` that return the layer.
        prenorm: whether the norms come before the branches or after the additions.
        resid_dropout1, resid_dropout2: dropout rates of the two branches.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: MakeLayer,
        mlp_cls: MakeLayer,
        norm_cls: MakeLayer = nn.LayerNorm,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.mixer = mixer_cls(dim)
        self.dropout1 = nn.Dropout(resid_dropout1)
        self.norm1 = norm_cls(dim)
        self.mlp = mlp_cls(dim)
        self.dropout2 = nn.Dropout(resid_dropout2)
        self.norm2 = norm_cls(dim)

    def forward(self, x: Tensor, mixer_kwargs: dict[str, Any] | None = None) -> Tensor:
        """x (..., dim) -> the same shape; `mixer_kwargs` go to the mixer."""
        arguments = mixer_kwargs or {}
        if self.prenorm:
            x = x + self.dropout1(self.mixer(self.norm1(x), **arguments))
            return x + self.dropout2(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.dropout1(self.mixer(x, **arguments)))
        return self.norm2(x + self.dropout2(self.mlp(x)))


class ParallelBlock(nn.Module):
    """A block whose attention and MLP read the same stream (GPT-J, GPT-NeoX, PaLM)::

        x = x + dropout1(mixer(norm1(x))) + dropout2(mlp(norm2(x)))

    Args:
        dim, mixer_cls, mlp_cls, norm_cls, resid_dropout1, resid_dropout2: as in `Block`.
        tied_norm: the MLP also reads ``norm1(x)`` (GPT-J), and there is no norm2.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: MakeLayer,
        mlp_cls: MakeLayer,
        norm_cls: MakeLayer = nn.LayerNorm,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm = tied_norm
        self.mixer = mixer_cls(dim)
        self.dropout1 = nn.Dropout(resid_dropout1)
        self.norm1 = norm_cls(dim)
        self.mlp = mlp_cls(dim)
        self.dropout2 = nn.Dropout(resid_dropout2)
        if not tied_norm:
            self.norm2 = norm_cls(dim)

    def forward(self, x: Tensor, mixer_kwargs: dict[str, Any] | None = None) -> Tensor:
        """x (..., dim) -> the same shape; `mixer_kwargs` go to the mixer."""
        normed = self.norm1(x)
        mixed = self.dropout1(self.mixer(normed, **(mixer_kwargs or {})))
        return x + mixed + self.dropout2(self.mlp(normed if self.tied_norm else self.norm2(x)))
