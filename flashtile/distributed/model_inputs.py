"""The inputs of a language model on one rank, with the names of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..current_layout import Layout

IGNORED = -100  # the label of a token without a next one
_MADE_HERE = ("position_ids", "shift_labels", "num_items_in_batch")


def local_inputs(
    layout: Layout, cu_seqlens: Sequence[int] | None, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """See `Layout.batch`; `cu_seqlens` are those of all packed documents, None if dense."""
    for name in _MADE_HERE:
        if tensors.get(name) is not None:
            raise ValueError(f"{name}: the layout makes it, pass none")
    given = {name: x for name, x in tensors.items() if x is not None}
    _check(layout, given)
    mask = given.pop("attention_mask", None)
    if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
        raise NotImplementedError(
            "attention_mask: got padding, which a layout does not have; pack the sequences as "
            "documents"
        )
    labels = given.pop("labels", None)
    inputs: dict[str, Any] = {name: layout.shard(x, 1) for name, x in given.items()}
    device = next((x.device for x in (*inputs.values(), labels) if x is not None), None)
    known = layout.positions if device is None else layout.positions_on(device)
    positions = known.repeat(max(layout.sequences, 1), 1)
    # The attention that gets this object knows that it belongs to a layout.
    positions.flashtile_layout = layout  # type: ignore[attr-defined]  # an attribute of our own
    inputs["position_ids"] = positions
    if labels is not None:
        shifted = shift_labels(labels, cu_seqlens, IGNORED)
        inputs["shift_labels"] = layout.shard(shifted, 1, IGNORED)
        inputs["num_items_in_batch"] = (shifted != IGNORED).sum().clamp(min=1)
        inputs["labels"] = labels[:, :0]
    return inputs


def _check(layout: Layout, given: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` for a tensor of another shape."""
    rows, tokens = layout.shape
    for name, x in given.items():
        if x.dim() < 2 or tuple(x.shape[:2]) != (rows, tokens):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want ({rows}, {tokens}, ...)")


def shift_labels(
    labels: Tensor, cu_seqlens: Tensor | Sequence[int] | None = None, ignore_index: int = IGNORED
) -> Tensor:
    """Each token's label becomes that of the next token: what a causal language model predicts.

    Do this to whole sequences, before they are sharded: the next token may be on another rank.

    Args:
        labels: (batch, seq), or (tokens,) or (1, tokens) with `cu_seqlens`.
        cu_seqlens: where packed documents begin; the last token of each is ignored.
        ignore_index: the label of tokens without a next one.
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    if cu_seqlens is not None:
        ends = torch.as_tensor(cu_seqlens, device=labels.device).long()[1:] - 1
        shifted[..., ends[ends >= 0]] = ignore_index
    return shifted
