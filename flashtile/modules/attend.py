"""The function that the modules call for self-attention; users can replace it."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor

from .. import current_layout
from ..api import attention, attention_varlen

WindowSize = tuple[int, int]


class Attend(Protocol):
    """Self-attention of dense or packed sequences; every option is given, by keyword.

    Dense: q (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim), cu_seqlens and
    max_seqlen None. Packed: q (total, heads, head_dim), k and v (total, kv_heads, head_dim). The
    options mean what they mean in `flashtile.attention`; the result has the shape of q. A layer
    that is called with a `key_padding_mask` passes it on as a further keyword.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        softmax_scale: float | None,
        dropout_p: float,
        alibi_slopes: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Tensor: ...


def flash_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> Tensor:
    """`Attend` with flashtile; inside `with layout:` of `flashtile.distributed` over all ranks. The
    result has the shape of q with the head dim of v.

    Args:
        q, k, v: dense or packed, as in `flashtile.attention` and `flashtile.attention_varlen`.
        cu_seqlens, max_seqlen: cumulative lengths, (batch + 1,) int32, and longest length of packed
            queries; None if dense.
        cu_seqlens_k, max_seqlen_k: the same for the keys; those of the queries by default.
        options: options of `flashtile.attention`.

    Raises:
        ValueError: only one of cu_seqlens and max_seqlen is given, or any of them inside `with
            layout:`; also what attention raises.
    """
    layout = current_layout.get()
    if cu_seqlens_k is None and max_seqlen_k is None:
        cu_seqlens_k, max_seqlen_k = cu_seqlens, max_seqlen
    lengths: tuple[Any, ...] = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
    given = [length is not None for length in lengths]
    if layout is not None:
        if any(given):
            raise ValueError("cu_seqlens: want None inside `with layout:`, which has documents")
        return layout.attend(q, k, v, **options)
    if not any(given):
        return cast(Tensor, attention(q, k, v, **options))
    if not all(given):
        names = ("cu_seqlens", "cu_seqlens_k", "max_seqlen", "max_seqlen_k")
        raise ValueError(f"{names[given.index(False)]}: needed for packed sequences, got None")
    return cast(Tensor, attention_varlen(q, k, v, *lengths, **options))
