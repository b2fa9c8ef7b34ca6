"""The cross-entropy of each token, as ``flash_attn.ops.triton.cross_entropy`` names it.

Of logits in any dtype, with the gradient in their place where wanted, and of a vocabulary that
several processes share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_off

# Logits that are in float32 at one time: 128 MiB of them.
CHUNK = 2**25


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """(losses, z_losses) of each token; `CrossEntropyLoss` has the formula.

    Args:
        logits: (tokens, vocab) of any floating dtype.
        labels: (tokens,) int64, in [0, vocab) or ignore_index.
        precomputed_lse: (tokens,), the log-sum-exp of each row of `logits`, if it is known. Without
            gradient. Computed anew where `logit_scale` changes it.
        inplace_backward: let the backward write the gradient over `logits`, which saves their
            memory; nothing may read them afterwards.
        process_group: of torch.distributed; the vocabulary is cut into as many equal parts as it
            has processes. Each has its part's `logits` and `precomputed_lse`, and all `labels`; all
            get the losses of the whole.

    Returns:
        Two (tokens,) tensors in float32 (float64 for float64), 0 for tokens to ignore; the second
        is the z-loss in the first, without gradient.

    Raises:
        ValueError: an argument does not fit.
        IndexError: a label is out of range; on a CUDA device without a process group PyTorch's
            assertion.
    """
    _check(logits, labels, precomputed_lse)
    vocab = logits.shape[-1]
    first, classes = 0, vocab
    if process_group is not None:
        first = torch.distributed.get_rank(process_group) * vocab
        classes = torch.distributed.get_world_size(process_group) * vocab
    counts = labels != ignore_index
    if process_group is not None and labels.device.type == "cpu":
        outside = counts & ((labels < 0) | (labels >= classes))
        if bool(outside.any()):
            raise IndexError(f"labels: want [0, {classes}) or ignore_index={ignore_index}")
    index = labels - first
    is_here = counts & (index >= 0) & (index < vocab) if process_group is not None else counts
    with autocast_off(logits):
        lse, score = _Statistics.apply(
            logits,
            torch.where(is_here, index, 0),
            is_here,
            precomputed_lse if logit_scale == 1.0 else None,
            logit_scale,
            1.0 - label_smoothing,
            label_smoothing / classes,
            inplace_backward,
        )
        if process_group is not None:
            lse, score = _over_processes(lse, score, process_group)
        z_losses = (lse_square_scale * lse.square()).masked_fill(~counts, 0.0)
        losses = (lse - score).masked_fill(~counts, 0.0) + z_losses
    return losses, z_losses.detach()


def _check(logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits: got {tuple(logits.shape)} {logits.dtype}, want (tokens, vocab) and a "
            "floating dtype"
        )
    for name, x in (("labels", labels), ("precomputed_lse", precomputed_lse)):
        if x is not None and x.shape != logits.shape[:1]:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want {tuple(logits.shape[:1])}")


def _over_processes(lse: Tensor, score: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Of the whole vocabulary what each process has of its part; each differentiates its own."""
    parts = [torch.empty_like(lse) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, lse.detach(), group=group)
    parts[torch.distributed.get_rank(group)] = lse
    others = score.detach().clone()
    torch.distributed.all_reduce(others, group=group)
    return torch.stack(parts).logsumexp(0), score + (others - score.detach())


class _Statistics(torch.autograd.Function):
    """(lse, score) of each row of ``scale * logits``.

    score = weight * logit of the target, if it is here, + share * sum of the logits.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor,
        is_here: Tensor,
        known_lse: Tensor | None,
        scale: float,
        weight: float,
        share: float,
        in_place: bool,
    ) -> tuple[Tensor, Tensor]:
        lses, scores = [], []
        for rows in _chunks(logits):
            x = scaled(logits[rows], scale)
            score = weight * x.gather(-1, target[rows, None]).squeeze(-1) * is_here[rows]
            scores.append(score + share * x.sum(-1) if share else score)
            lses.append(x.logsumexp(-1) if known_lse is None else known_lse[rows].to(x.dtype))
        return torch.cat(lses), torch.cat(scores)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, target, is_here, _, *ctx.numbers = inputs
        ctx.save_for_backward(logits, target, is_here, output[0])

    @staticmethod
    def backward(ctx: Any, dlse: Tensor, dscore: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, is_here, lse = ctx.saved_tensors
        scale, weight, share, in_place = ctx.numbers
        # While the derivative is recorded its inputs must stay.
        in_place = in_place and not torch.is_grad_enabled()
        gradient = logits.detach() if in_place else torch.empty_like(logits)
        for rows in _chunks(logits):
            x = (scaled(logits[rows], scale) - lse[rows, None]).exp() * dlse[rows, None]
            of_target = (weight * dscore * is_here)[rows, None]
            x = x.scatter_add(-1, target[rows, None], of_target)
            if share:
                x = x + share * dscore[rows, None]
            gradient[rows] = (x * scale).to(logits.dtype)
        return gradient, *(None,) * 7


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Rows of `logits` to have in float32 at one time."""
    tokens, vocab = logits.shape
    step = max(1, CHUNK // max(1, vocab))
    if tokens <= step:
        yield slice(None)
        return
    for start in range(0, tokens, step):
        yield slice(start, start + step)


def scaled(logits: Tensor, scale: float) -> Tensor:
    """Logits times scale in the dtype to compute in."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1.0 else logits * scale
