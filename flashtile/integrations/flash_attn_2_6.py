"""What ``flash_attn.bert_padding`` 2.6 had in another form, and some programs still expect."""

from __future__ import annotations

from torch import Tensor

from .. import bert_padding


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The first four results of `flashtile.bert_padding.unpad_input`."""
    return bert_padding.unpad_input(hidden_states, attention_mask)[:4]
