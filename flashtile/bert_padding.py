"""Convert padded batches to packed sequences and back, with the names of
``flash_attn.bert_padding``.

A padded batch is (batch, seq, ...) with a mask. Packed, its valid tokens follow each other in
(total, ...), and cu_seqlens (batch + 1,) holds the start of each sequence and the total. All
functions are differentiable, in every dtype and on every device.

The number of valid tokens is a size of the result, so the host waits for the GPU in the two unpad
functions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocast import autocast_off


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Take rows: input (rows, ...), indices (n,) int -> (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Scatter rows into zeros: values (n, ...), distinct indices (n,) int -> (first_axis_dim, ...).

    Raises:
        ValueError: the number of indices is not the number of rows of values.
    """
    if indices.shape != values.shape[:1]:
        raise ValueError(
            f"indices: expected one for each row of values {tuple(values.shape)}, "
            f"got shape {tuple(indices.shape)}"
        )
    rows = values.new_zeros((first_axis_dim, *values.shape[1:]))
    with autocast_off(values):  # autocast on a CPU refuses 16-bit dtypes other than its own
        return rows.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis` and the input itself, for a residual connection; the input's gradient is
    the sum of both.
    """
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding.

    Args:
        hidden_states: (batch, seq, ...).
        attention_mask: (batch, seq), nonzero where a token is valid.
        unused_mask: (batch, seq), nonzero where a token is kept but not counted in seqused.

    Returns:
        hidden_states: (total, ...), the kept tokens.
        indices: (total,) int64, their rows in the flattened (batch * seq, ...).
        cu_seqlens: (batch + 1,) int32, cumulative numbers of kept tokens.
        max_seqlen_in_batch: int, the longest sequence.
        seqused: (batch,) int32, number of valid tokens.

    Raises:
        ValueError: a mask is not (batch, seq).
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    kept = valid = attention_mask != 0
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = valid | (unused_mask != 0)
    lengths = kept.sum(dim=1, dtype=torch.int32)
    seqused = valid.sum(dim=1, dtype=torch.int32)
    return (*_pack(hidden_states, kept, lengths), seqused)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Drop the padding of rows that hold several short sequences each.

    Args:
        hidden_states: (batch, seq, ...).
        attention_mask_in_length: (batch, seq) int. The nonzero numbers of a row are the lengths of
            its sequences, in order: [2, 3, 0, 0, 0, 0] means 2 tokens, then 3 tokens, then 1 token
            of padding.

    Returns:
        hidden_states: (total, ...), the tokens without the padding.
        indices: (total,) int64, their rows in the flattened (batch * seq, ...).
        cu_seqlens: (sequences + 1,) int32.
        max_seqlen_in_batch: int, the longest sequence.

    Raises:
        ValueError: the mask is not (batch, seq), a length is negative, or the lengths of a row add
            up to more than seq (a compiled graph does not check the last two).
        TypeError: the lengths are not integers.
    """
    lengths = attention_mask_in_length
    _check_mask("attention_mask_in_length", lengths, hidden_states)
    if lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
        raise TypeError(f"attention_mask_in_length: expected integers, got {lengths.dtype}")
    used, seqlen = lengths.sum(dim=1, keepdim=True), lengths.shape[1]
    if not torch.compiler.is_compiling() and bool((lengths < 0).any() | (used > seqlen).any()):
        raise ValueError(
            f"attention_mask_in_length: expected lengths of at least 0 that add up to at most "
            f"{seqlen} in a row, got a smallest length of {lengths.min()} and a largest sum of "
            f"{used.max()}"
        )
    kept = torch.arange(seqlen, device=lengths.device) < used
    return _pack(hidden_states, kept, lengths[lengths != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo `unpad_input`: put packed tokens back at their positions in the batch; padding is zero.

    Args:
        hidden_states: (total, ...).
        indices: (total,) int, from `unpad_input`.
        batch, seqlen: sizes of the padded batch.

    Returns:
        (batch, seqlen, ...).

    Raises:
        ValueError: the number of indices is not the number of tokens.
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def _pack(
    hidden_states: Tensor, kept: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack the kept tokens; `lengths` are the lengths of the packed sequences."""
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    # The leading zero makes the maximum 0 when there are no lengths.
    max_seqlen = int(F.pad(lengths, (1, 0)).max().item())
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name}: expected (batch, seq) of hidden_states {tuple(hidden_states.shape)}, "
            f"got {tuple(mask.shape)}"
        )
