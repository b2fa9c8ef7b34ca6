"""Cross-entropy of next tokens, with the names of ``flash_attn.losses.cross_entropy``, and a
version that never holds the logits of all tokens in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autocast import autocast_off, cast_inputs
from .token_losses import check_labels, cross_entropy_loss, scaled

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyLoss(nn.Module):
    """PyTorch's cross-entropy with a scale on the logits and a z-loss, computed in float32.

    With logits x, target t and ``lse = log(sum(exp(x)))``::

        loss = (1 - label_smoothing) * (lse - x[t]) + label_smoothing * (lse - mean(x))
               + lse_square_scale * lse ** 2

    The last term, the z-loss, keeps the logits from drifting (Chowdhery et al. 2022, "PaLM",
    https://arxiv.org/abs/2204.02311, section 5).

    Args:
        ignore_index: value of the targets to ignore.
        reduction: "mean" over the targets that are not ignored (NaN if all are, as in PyTorch),
            "sum", or "none".
        label_smoothing: in [0, 1).
        logit_scale: the logits are first multiplied by this number.
        lse_square_scale: weight of the z-loss.
        inplace_backward: let the backward write the gradient over the logits.
        process_group: of torch.distributed; each process has the logits of its part of the
            vocabulary, as in `cross_entropy_loss`.
        return_z_loss: return (loss, z_loss): the part of the loss that is z-loss, reduced in the
            same way and without gradient.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction: got {reduction!r}, want one of {', '.join(REDUCTIONS)}")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing: got {label_smoothing}, want 0 <= x < 1")
        if lse_square_scale < 0.0:
            raise ValueError(f"lse_square_scale: must not be negative, got {lse_square_scale}")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss.

        Args:
            input: (..., vocab) logits of any floating dtype.
            target: (...) int64, in [0, vocab) or ignore_index.
            precomputed_lse: (...), the log-sum-exp of `input` if it is known, as in
                `cross_entropy_loss`.

        Returns:
            A scalar, or the shape of target with reduction "none", in float32 (float64 for
            float64); with return_z_loss also the z-loss.
        """
        counts = target.flatten() != self.ignore_index
        losses, z_losses = cross_entropy_loss(
            input.flatten(0, -2),
            target.flatten(),
            None if precomputed_lse is None else precomputed_lse.flatten(),
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        loss, z_loss = (self._reduced(x, counts, target.shape) for x in (losses, z_losses))
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduced(self, losses: Tensor, counts: Tensor, shape: torch.Size) -> Tensor:
        if self.reduction == "none":
            return losses.view(shape)
        return losses.sum() / counts.sum() if self.reduction == "mean" else losses.sum()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss: CrossEntropyLoss | None = None,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 4096,
) -> Tensor:
    """Compute ``loss(hidden @ weight.T + bias, target)``, one chunk of tokens at a time.

    It needs memory for the logits of one chunk and for the gradients of `hidden` and `weight`. The
    forward computes these gradients while the chunk's logits exist, so nothing is computed twice.

    Args:
        hidden: (..., features).
        weight: (vocab, features).
        target: (...) int64, in [0, vocab) or ignore_index.
        loss: a loss with reduction "mean" or "sum", without return_z_loss and process_group;
            ``CrossEntropyLoss()`` by default.
        bias: (vocab,).
        chunk_tokens: number of tokens whose logits are in memory at one time.

    Returns:
        A scalar in float32 (float64 for float64). It has no second derivative.

    Raises:
        ValueError: an argument does not fit.
        IndexError: a target is out of range, as in `cross_entropy_loss`.
    """
    loss = CrossEntropyLoss() if loss is None else loss
    if loss.reduction == "none" or loss.return_z_loss:
        raise ValueError(
            f"loss: got reduction={loss.reduction!r}, return_z_loss={loss.return_z_loss}; want a "
            "loss that returns one number"
        )
    if loss.process_group is not None:
        raise ValueError("loss: got a process_group, want a loss of the whole vocabulary")
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"target: expected shape {tuple(hidden.shape[:-1])}, got {tuple(target.shape)}"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: must be positive, got {chunk_tokens}")
    check_labels("target", target, weight.shape[0], loss.ignore_index)
    hidden, weight, bias = cast_inputs(hidden, weight, bias)
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    tokens = hidden.flatten(0, -2)
    with autocast_off(hidden):
        return _LinearCrossEntropy.apply(
            tokens, weight, bias, target.flatten(), loss, chunk_tokens, with_gradient
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients computed in the forward pass, as Liger Kernel does (Hsu et al. 2024,
    https://arxiv.org/abs/2410.10989, section 3.2)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        loss: CrossEntropyLoss,
        chunk_tokens: int,
        with_gradient: bool,
    ) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=exact)
        share = torch.ones_like(total)
        if loss.reduction == "mean":
            share = 1.0 / (target != loss.ignore_index).sum().to(exact)
        dhidden, dweight, dbias = [], torch.zeros_like(weight, dtype=exact), None
        if bias is not None:
            dbias = torch.zeros_like(bias, dtype=exact)
        for h, t in zip(hidden.split(chunk_tokens), target.split(chunk_tokens), strict=True):
            logits = scaled(F.linear(h, weight, bias), loss.logit_scale)
            chunk_loss, dlogits = _sum_and_gradient(logits, t, loss)
            total += share * chunk_loss
            if not with_gradient:
                continue
            dlogits = dlogits.mul_(share * loss.logit_scale).to(h.dtype)
            dhidden.append(dlogits @ weight)
            dweight += dlogits.t() @ h
            if dbias is not None:
                dbias += dlogits.sum(dim=0, dtype=exact)
        if with_gradient:
            dbias = None if bias is None or dbias is None else dbias.to(bias.dtype)
            ctx.save_for_backward(torch.cat(dhidden), dweight.to(weight.dtype), dbias)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if x is None else x * dloss.to(x.dtype) for x in ctx.saved_tensors)
        return (*gradients, None, None, None, None)


def _sum_and_gradient(
    logits: Tensor, target: Tensor, loss: CrossEntropyLoss
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of scaled logits (tokens, vocab), and its gradient by the logits."""
    smoothing, z_scale = loss.label_smoothing, loss.lse_square_scale
    counts = (target != loss.ignore_index).unsqueeze(-1)
    target = target.unsqueeze(-1).where(counts, 0)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    losses = lse - (1 - smoothing) * logits.gather(-1, target)
    gradient = (logits - lse).exp_()
    if z_scale > 0.0:
        losses += z_scale * lse.square()
        gradient *= 1 + 2 * z_scale * lse
    if smoothing > 0.0:
        losses -= smoothing * logits.mean(dim=-1, keepdim=True)
        gradient -= smoothing / logits.shape[-1]
    gradient.scatter_add_(-1, target, (smoothing - 1) * torch.ones_like(lse))
    return losses.where(counts, 0).sum(), gradient.masked_fill_(~counts, 0)
