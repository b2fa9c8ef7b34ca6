"""One layer of a transformer: attention and MLP around a residual stream, with the names, arguments
and results of ``flash_attn.modules.block``.

A block with prenorm begins with the addition of the previous layer's branch to the stream, and ends
with a branch that is not added yet. It therefore takes and returns branch and stream apart::

    h, residual = block1(x)
    h, residual = block2(h, residual)
    x = h + residual
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..call.checks import ignored
from .mha import MHA
from .mlp import Mlp

MakeLayer = Callable[[int], nn.Module]
MakeDropout = Callable[[float], nn.Module]

__all__ = ["Block", "ParallelBlock", "StochasticDepth"]


class StochasticDepth(nn.Module):
    """Drop a whole branch of each sequence with probability p in training mode, and divide what is
    kept by 1 - p (Huang et al. 2016, https://arxiv.org/abs/1603.09382); x (batch, ...).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p: got {p}, want 0 <= p <= 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """The shape of x."""
        if not self.training or self.p == 0.0:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1.0 - self.p)
        return x * (kept / (1.0 - self.p) if self.p < 1.0 else kept)


class _Layers(nn.Module):
    """The layers that both blocks have."""

    def __init__(
        self,
        dim: int,
        mixer_cls: MakeLayer | None,
        mlp_cls: MakeLayer | None,
        norm_cls: MakeLayer,
        dropouts: tuple[nn.Module, nn.Module],
        residual_in_fp32: bool,
        marks: dict[str, bool],
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.mixer: Any = (mixer_cls or partial(MHA, num_heads=dim // 64))(dim)
        self.dropout1 = dropouts[0]
        self.norm1 = norm_cls(dim)
        self.mlp = (mlp_cls or partial(Mlp, hidden_features=4 * dim))(dim)
        self.dropout2 = dropouts[1]
        self.norm2 = norm_cls(dim)
        for parameter in (*self.norm1.parameters(), *self.norm2.parameters()):
            vars(parameter).update({mark: True for mark, asked in marks.items() if asked})

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Tensor:
        """The mixer's; see `MHA.allocate_inference_cache`."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def _kept(self, stream: Tensor) -> Tensor:
        """The stream in the dtype in which it goes on; float64 stays float64."""
        exact = torch.promote_types(stream.dtype, torch.float32)
        return stream.to(exact) if self.residual_in_fp32 else stream


class Block(_Layers):
    """A sequential block.

    With `prenorm` (GPT-2, Llama)::

        residual = residual + dropout1(hidden_states)
        residual = residual + dropout2(mixer(norm1(residual)))
        return mlp(norm2(residual)), residual

    Without it (the original transformer, BERT)::

        x = norm1(x + dropout1(mixer(x)))
        return norm2(x + dropout2(mlp(x)))

    Args:
        dim: number of features of a token.
        mixer_cls, mlp_cls, norm_cls: functions of `dim` that return the layer; `MHA` with heads of
            64 features and `Mlp` by default. If the MLP is `nn.Identity`, it is left out, with its
            dropout and norm.
        dropout_cls: function of a rate that returns a layer of dropout.
        prenorm: whether the norms come before the branches or after the additions.
        resid_dropout1, resid_dropout2: dropout rates of the branches; with `prenorm` the first is
            of `hidden_states`, which is the previous layer's branch.
        drop_path1, drop_path2: the same for `StochasticDepth`.
        fused_dropout_add_ln: which kernels `flash_attn` takes; it changes no result here.
        return_residual: mixer and MLP return (branch, their input); only without `prenorm`.
        residual_in_fp32: keep the residual stream in float32; ValueError without `prenorm`.
        sequence_parallel, mark_shared_params: set the attributes `_sequence_parallel` and
            `_shared_params` of the norms' parameters, which tensor parallelism reads.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: MakeLayer | None = None,
        mlp_cls: MakeLayer | None = None,
        norm_cls: MakeLayer = nn.LayerNorm,
        dropout_cls: MakeDropout = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        if residual_in_fp32 and not prenorm:
            raise ValueError("residual_in_fp32: want False with prenorm=False, got True")
        dropouts = (dropout_cls(resid_dropout1), dropout_cls(resid_dropout2))
        marks = {"_sequence_parallel": sequence_parallel, "_shared_params": mark_shared_params}
        super().__init__(dim, mixer_cls, mlp_cls, norm_cls, dropouts, residual_in_fp32, marks)
        ignored("Block", fused_dropout_add_ln=fused_dropout_add_ln)
        self.prenorm = prenorm
        self.return_residual = return_residual
        self.drop_path1 = StochasticDepth(drop_path1)
        self.drop_path2 = StochasticDepth(drop_path2)
        if isinstance(self.mlp, nn.Identity):
            del self.dropout2, self.drop_path2, self.norm2

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: Any = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """With prenorm (hidden_states, residual), the branch and the stream to which it is to be
        added; otherwise hidden_states. All (..., dim).

        Args:
            hidden_states: (..., dim), the previous layer's branch, or the embeddings.
            residual: (..., dim), the stream that the previous layer returned; None in the first
                layer. ValueError without prenorm.
            mixer_subset: index of the tokens of `hidden_states` (batch, seq, dim) that go on; see
                `MHA.forward`. ValueError without prenorm.
            mixer_kwargs: keyword arguments of the mixer.
        """
        arguments = dict(mixer_kwargs or {})
        has_mlp = not isinstance(self.mlp, nn.Identity)
        if not self.prenorm:
            for name, value in (("residual", residual), ("mixer_subset", mixer_subset)):
                if value is not None:
                    raise ValueError(f"{name}: want None with prenorm=False")
            branch, x = self._branch(self.mixer, hidden_states, **arguments)
            x = norm_of(self.norm1, self._drop1(branch) + x)
            if has_mlp:
                branch, x = self._branch(self.mlp, x)
                x = norm_of(self.norm2, self._drop2(branch) + x)
            return x
        stream = self._drop1(hidden_states)
        stream = stream if residual is None else stream + residual
        normed, stream = norm_of(self.norm1, stream), self._kept(stream)
        if mixer_subset is not None:
            arguments["mixer_subset"] = mixer_subset
            stream = stream[:, mixer_subset]
        branch = self.mixer(normed, **arguments)
        if not has_mlp:
            return branch, stream
        stream = self._drop2(branch) + stream
        return self.mlp(norm_of(self.norm2, stream)), stream

    def _drop1(self, branch: Tensor) -> Tensor:
        return self.drop_path1(self.dropout1(branch))

    def _drop2(self, branch: Tensor) -> Tensor:
        return self.drop_path2(self.dropout2(branch))

    def _branch(self, layer: Any, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """A layer's result, and its input."""
        result = layer(x, **arguments)
        return result if self.return_residual else (result, x)


class ParallelBlock(_Layers):
    """A block whose attention and MLP read the same stream (GPT-J, GPT-NeoX, PaLM)::

        residual = residual + dropout1(hidden_states1) + dropout2(hidden_states2)
        return mixer(norm1(residual)), mlp(norm2(residual)), residual

    The other arguments are those of `Block`.

    Args:
        resid_dropout1, resid_dropout2: dropout rates of the previous layer's two branches.
        tied_norm: the MLP also reads ``norm1(residual)`` (GPT-J), and there is no norm2.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: MakeLayer | None = None,
        mlp_cls: MakeLayer | None = None,
        norm_cls: MakeLayer = nn.LayerNorm,
        dropout_cls: MakeDropout = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        dropouts = (dropout_cls(resid_dropout1), dropout_cls(resid_dropout2))
        marks = {"_sequence_parallel": sequence_parallel, "_shared_params": mark_shared_params}
        super().__init__(dim, mixer_cls, mlp_cls, norm_cls, dropouts, residual_in_fp32, marks)
        ignored("ParallelBlock", fused_dropout_add_ln=fused_dropout_add_ln)
        self.tied_norm = tied_norm
        if tied_norm:
            del self.norm2

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor | None = None,
        residual: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden_states1, hidden_states2, residual), the branches of mixer and MLP and the stream
        to which they are to be added, (..., dim) each.

        Args:
            hidden_states1, hidden_states2: (..., dim), the branches of the previous layer's mixer
                and MLP; in the first layer the embeddings and None.
            residual: (..., dim), the stream that the previous layer returned; None in the first.
            mixer_kwargs: keyword arguments of the mixer.
        """
        stream = self.dropout1(hidden_states1)
        stream = stream if residual is None else residual + stream
        if hidden_states2 is not None:
            stream = stream + self.dropout2(hidden_states2)
        normed = norm_of(self.norm1, stream)
        normed2 = normed if self.tied_norm else norm_of(self.norm2, stream)
        return self.mixer(normed, **(mixer_kwargs or {})), self.mlp(normed2), self._kept(stream)


def norm_of(norm: Any, stream: Tensor) -> Tensor:
    """``norm(stream)`` in the dtype of the norm's weight; the stream may be in float32."""
    return norm(stream.to(norm.weight.dtype))
