"""What a rank passes to `ContextParallel.attention`, checked: its own rows as packed tokens.

Masks and biases have the rows of the rank's own queries, and all keys of the document by their
position in it. The other options mean what they mean in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import checks
from ..call.attn_mask import as_bias
from ..spans import Spans
from .layout import Layout
from .ownership import Ownership

OPTIONS = (
    "softmax_scale",
    "causal",
    "window_size",
    "attention_chunk",
    "softcap",
    "alibi_slopes",
    "bias",
    "attn_mask",
    "key_padding_mask",
    "mask",
    "sink",
    "seqused_q",
    "seqused_k",
    "dropout_p",
    "deterministic",
)
# Those that are added to the scores, of dense batches only.
SCORE_MASKS = ("bias", "attn_mask", "key_padding_mask")
USED = ("seqused_q", "seqused_k")


class UsedTokens(NamedTuple):
    """Who owns which tokens of those that `seqused_q` and `seqused_k` leave, and which rows of this
    rank's packed tokens they are; None for all of them."""

    queries: Ownership
    keys: Ownership
    query_rows: Tensor | None = None
    key_rows: Tensor | None = None

    def with_unused(self, out: Tensor, lse: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Results for all `tokens` of this rank: out 0 and lse -inf for those that are not used."""
        if self.query_rows is None:
            return out, lse
        rows = self.query_rows
        return (
            out.new_zeros(tokens, *out.shape[1:]).index_copy(0, rows, out),
            lse.new_full((lse.shape[0], tokens), -torch.inf).index_copy(1, rows, lse),
        )


def used_tokens(options: Mapping[str, Any], q: Tensor, layout: Layout) -> UsedTokens:
    """The tokens that take part. The host reads the lengths, from which it plans the exchanges.

    Raises:
        ValueError, TypeError: a tensor of lengths does not fit.
    """
    queries, keys, rows = layout.queries, layout.keys, {}
    for name, holders in zip(USED, (queries, keys), strict=True):
        x = options.get(name)
        checks.per_sequence(name, x, q, len(holders.lengths))
        if x is None:
            continue
        lengths = [
            min(max(used, 0), length)
            for used, length in zip(x.tolist(), holders.lengths, strict=True)
        ]
        rows[name] = torch.tensor(holders.rows_of_first(lengths, layout.rank), device=q.device)
        rows[name] = rows[name].long()
        if name == "seqused_q":
            queries = queries.first_tokens(lengths)
        else:
            keys = keys.first_tokens(lengths)
    return UsedTokens(queries, keys, rows.get("seqused_q"), rows.get("seqused_k"))


def score_bias(options: Mapping[str, Any], q: Tensor, layout: Layout) -> Tensor | None:
    """A bias (batch or 1, heads or 1, rows or 1, keys or 1) that applies the masks of
    `SCORE_MASKS`, without the rows of padding.

    Raises:
        ValueError, TypeError: a mask does not fit.
        NotImplementedError: the documents are packed, or have lengths of their own.
    """
    masks = {name: options[name] for name in SCORE_MASKS if options.get(name) is not None}
    if not masks:
        return None
    if not layout.sequences:
        raise NotImplementedError(f"{next(iter(masks))}: got packed documents, want a dense batch")
    for name in USED:
        if options.get(name) is not None:
            raise NotImplementedError(
                f"{name}: got it together with {next(iter(masks))}, which context parallelism does "
                "not combine; hide the padding in the mask"
            )
    sizes = (layout.sequences, q.shape[-2], layout.local_tokens, layout.keys.lengths[0])
    bias = as_bias(q, sizes, **masks)
    rows = layout.queries.tokens(layout.rank) // layout.sequences
    return bias[:, :, :rows] if bias.shape[2] > 1 else bias


def packed_spans(mask: Any, q: Tensor, layout: Layout) -> Spans | None:
    """The intervals of a rank's packed tokens, (1, heads or 1, tokens, intervals).

    Args:
        q: the queries as the rank passes them, with padding.

    Raises:
        ValueError, TypeError: the mask does not fit.
    """
    checks.spans(mask, q)
    if mask is None:
        return None
    rows = layout.queries.tokens(layout.rank) // max(layout.sequences, 1)
    mine = Spans(*(x[:, :, :rows] for x in mask))
    return mine.pack(layout.sequences) if layout.sequences else mine


def kind(name: str, x: Any) -> Any:
    """What decides whether two values of an argument need one agreement of the ranks or two."""
    if isinstance(x, Tensor):
        facts = tuple(x.shape), x.dtype, x.device, x.requires_grad
        return (*facts, tuple(x.tolist())) if name in USED else facts
    if isinstance(x, tuple):
        return tuple(kind(name, part) for part in x)
    return repr(x)


def shapes(options: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shapes of optional tensors, which are equal on all ranks."""
    tensors = {name: x.starts if isinstance(x, Spans) else x for name, x in options.items()}
    return {n: list(x.shape) for n, x in sorted(tensors.items()) if isinstance(x, Tensor)}
