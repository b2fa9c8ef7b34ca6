"""The cross-entropy of each token, with the names of ``flash_attn.ops.triton.cross_entropy``.

Logits may have any floating dtype, the gradient may overwrite them, and several processes may share
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_off
from ..call import checks

# Number of logits that are converted to float32 at one time: 128 MiB.
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
    """(losses, z_losses) of each token, by the formula of `CrossEntropyLoss`.

    Args:
        logits: (tokens, vocab) of any floating dtype.
        labels: (tokens,) int64, in [0, vocab) or ignore_index.
        precomputed_lse: (tokens,), the log-sum-exp of each row of `logits`, if it is known. It gets
            no gradient, and is ignored if `logit_scale` is not 1.
        label_smoothing, logit_scale, lse_square_scale, ignore_index: as in `CrossEntropyLoss`.
        inplace_backward: let the backward write the gradient over `logits`, which saves as much
            memory as `logits` takes; nothing may read the logits afterwards.
        process_group: group of torch.distributed whose processes share the vocabulary in equal
            parts. Each process passes the `logits` and `precomputed_lse` of its part and all
            `labels`, and gets the losses over the whole vocabulary.

    Returns:
        Two (tokens,) tensors in float32 (float64 for float64), 0 for ignored tokens. The first
        includes the z-loss; the second is only the z-loss, without gradient.

    Raises:
        ValueError: an argument does not fit.
        IndexError: a label is out of range. On a CUDA device this check needs
            ``FLASHTILE_CHECK=1``; without it an assertion of PyTorch fails or, with a process
            group, the loss is NaN.
    """
    _check(logits, labels, precomputed_lse)
    vocab = logits.shape[-1]
    first, classes = 0, vocab
    if process_group is not None:
        first = torch.distributed.get_rank(process_group) * vocab
        classes = torch.distributed.get_world_size(process_group) * vocab
    check_labels("labels", labels, classes, ignore_index)
    counts = labels != ignore_index
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
            score = score.masked_fill(_outside(labels, classes, ignore_index), torch.nan)
        z_losses = (lse_square_scale * lse.square()).masked_fill(~counts, 0.0)
        losses = (lse - score).masked_fill(~counts, 0.0) + z_losses
    return losses, z_losses.detach()


def check_labels(name: str, labels: Tensor, classes: int, ignore_index: int) -> None:
    """Raise an IndexError if a label is out of range, unless values are not checked."""
    if not checks.checking_values((labels,)):
        return
    outside = _outside(labels, classes, ignore_index)
    if bool(outside.any()):
        raise IndexError(
            f"{name}: got {int(labels[outside][0])}, want [0, {classes}) or "
            f"ignore_index={ignore_index}"
        )


def _outside(labels: Tensor, classes: int, ignore_index: int) -> Tensor:
    return (labels != ignore_index) & ((labels < 0) | (labels >= classes))


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
    """Combine the parts of all processes into the lse and score of the whole vocabulary; each
    process differentiates only its own part.
    """
    parts = [torch.empty_like(lse) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, lse.detach(), group=group)
    parts[torch.distributed.get_rank(group)] = lse
    others = score.detach().clone()
    torch.distributed.all_reduce(others, group=group)
    return torch.stack(parts).logsumexp(0), score + (others - score.detach())


class _Statistics(torch.autograd.Function):
    """(lse, score) of each row of ``scale * logits``.

    score = weight * logit of the target, if this process has it, + share * sum of the logits.
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
            score = weight * x.gather(-1, target[rows, None]).squeeze(-1)
            score = score.where(is_here[rows], 0.0)  # not times 0: a logit may be -inf
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
        # A second derivative needs the logits.
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
    """Slices of the rows of `logits` that are converted to float32 together."""
    tokens, vocab = logits.shape
    step = max(1, CHUNK // max(1, vocab))
    if tokens <= step:
        yield slice(None)
        return
    for start in range(0, tokens, step):
        yield slice(start, start + step)


def scaled(logits: Tensor, scale: float) -> Tensor:
    """Logits times scale, in the dtype of the computation."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1.0 else logits * scale
