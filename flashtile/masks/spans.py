"""Masks as spans: every query sees the keys of a few intervals.

The two tensors of a `Spans` grow with the number of queries, not with queries times keys. They stay
on the device, so that a mask may change in every call without making the host wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_INTERVALS = 8  # of a query
FAR_LEFT = -(2**30)  # before every key, wherever `Spans.shifted` moves it


class Spans(NamedTuple):
    """A mask for ``mask=``: query ``i`` sees key ``j`` when ``starts[..., i, r] <= j < stops[...,
    i, r]`` for some ``r``.

    It is combined (AND) with every other mask option of the call. Intervals may overlap: a key is
    never counted twice. Parts outside of the sequence are ignored, and ``start >= stop`` is an
    empty interval. A size of 1 for batch or heads is shared over that dimension; heads are query
    heads.

    The functions below make masks of self-attention, of batches of which all sequences have the
    same number of tokens, and without a sync with the host unless they say so. Those masks contain
    the causal mask where they mention it.

    Attributes:
        starts, stops: int32, both of the shape (batch or 1, heads or 1, seq_q, 1 to 8); for packed
            queries (1, heads or 1, total_q, 1 to 8). Row ``i`` belongs to row ``i`` of the call's
            queries, new tokens in the case of a cache. Keys are counted from the first key of the
            query's own sequence, as for `bias`: in a cache from the first key after the left pad,
            wherever its pages are. Nothing shifts when lengths differ.
    """

    starts: Tensor
    stops: Tensor

    def pack(self, batch: int) -> Spans:
        """The mask of a padded batch, for the same queries packed back to back: (1, heads or 1,
        batch * seq_q, 1 to 8).
        """
        starts, stops = (
            x.expand(batch, *x.shape[1:]).transpose(0, 1).flatten(1, 2)[None] for x in self
        )
        return Spans(starts, stops)

    def shifted(self, by: Tensor | int) -> Spans:
        """The same mask with all keys further to the right, by a number or by (batch,) integers:
        for new tokens that follow the `cache_seqlens` tokens of a cache.
        """
        if isinstance(by, Tensor):
            by = by.view(-1, 1, 1, 1)
        return Spans(*(_saturated(x.long() + by) for x in self))

    @staticmethod
    def prefix_lm(prefix_lengths: Tensor, seq_len: int) -> Spans:
        """Causal, except that all tokens see all of the prefix (prefix language models: Raffel et
        al. 2020, T5).

        Args:
            prefix_lengths: (batch,) integers, the lengths of the prefixes.
            seq_len: the number of tokens of a sequence.
        """
        _check_integers("prefix_lengths", prefix_lengths, "batch")
        row = _rows(seq_len, prefix_lengths.device)
        stops = torch.maximum(row + 1, prefix_lengths[:, None])
        return _made(torch.zeros_like(stops), stops)

    @staticmethod
    def documents(ids: Tensor, causal: bool = True) -> Spans:
        """Every token sees its own document: adjacent tokens with the same number.

        Args:
            ids: (batch, seq_len) integers; tokens with negative numbers are padding, which sees
                nothing.
            causal: a token sees no later token of its document.
        """
        _check_integers("ids", ids, "batch, seq_len")
        starts, stops = _runs(ids)
        stops = _rows(ids.shape[1], ids.device) + 1 if causal else stops
        return _made(starts, stops.expand_as(starts).masked_fill(ids < 0, 0))

    @staticmethod
    def documents_of_lengths(lengths: Tensor, seq_len: int, causal: bool = True) -> Spans:
        """`documents` that follow one another in a sequence.

        Args:
            lengths: (batch, documents) integers, the number of tokens of each document, which may
                be 0; what follows the last document is padding.
            seq_len: the number of tokens of a sequence.
            causal: a token sees no later token of its document.
        """
        _check_integers("lengths", lengths, "batch, documents")
        return Spans.documents(_numbers_of(lengths, seq_len), causal)

    @staticmethod
    def shared_prefix(prefix_lengths: Tensor, answer_lengths: Tensor, seq_len: int) -> Spans:
        """Several answers to one prompt, which is computed once: the prompt, then answer after
        answer. Each answer sees the prompt and itself; all is causal.

        The rotary positions of each answer continue those of the prompt.

        Args:
            prefix_lengths: (batch,) integers, the number of tokens of each prompt.
            answer_lengths: (batch, answers) integers, which may be 0; what follows the last answer
                is padding, which sees nothing.
            seq_len: the number of tokens of a sequence.
        """
        _check_integers("prefix_lengths", prefix_lengths, "batch")
        _check_integers("answer_lengths", answer_lengths, "batch, answers")
        prefix = prefix_lengths[:, None]
        own = Spans.documents_of_lengths(torch.cat((prefix, answer_lengths), dim=1), seq_len)
        is_token = own.stops > 0
        stops = torch.where(is_token[:, 0, :, 0], prefix, 0)
        # The prompt's own tokens see it causally, which their own interval says.
        stops = stops.masked_fill(_rows(seq_len, prefix.device) < prefix, 0)
        return Spans(
            torch.cat((torch.zeros_like(own.starts), own.starts), dim=-1),
            torch.cat((_saturated(stops)[:, None, :, None], own.stops), dim=-1),
        )

    @staticmethod
    def image_blocks(ids: Tensor) -> Spans:
        """Causal, except that the tokens of an image see all of that image (PaliGemma, Gemma 3).

        Args:
            ids: (batch, seq_len) integers: the number of the image of each token of an image,
                negative for text. Adjacent tokens with the same number are one image.
        """
        _check_integers("ids", ids, "batch, seq_len")
        row = _rows(ids.shape[1], ids.device) + 1
        stops = torch.where(ids >= 0, _runs(ids)[1], row)
        return _made(torch.zeros_like(stops), stops)

    @staticmethod
    def block_diffusion(
        seq_len: int, block_size: int, device: torch.device | str | None = None
    ) -> Spans:
        """The mask to train block diffusion (BD3-LM: Arriola et al. 2025, figure 3), for `seq_len`
        noisy tokens followed by the same `seq_len` tokens without noise.

        A noisy block sees itself and the clean blocks before it. A clean block sees itself and the
        clean blocks before it.

        Args:
            seq_len: the number of tokens of the text; the mask has twice as many rows.
            block_size: the number of tokens of a block; the last one may have fewer.
        """
        if seq_len < 0 or block_size < 1:
            raise ValueError(
                f"seq_len, block_size: got {(seq_len, block_size)}, want at least 0 and 1"
            )
        block = _rows(seq_len, device) // block_size * block_size
        block_stop = (block + block_size).clamp(max=seq_len)
        nothing = torch.zeros_like(block)
        own = torch.cat((block, nothing)), torch.cat((block_stop, nothing))
        clean_stop = torch.cat((block, block_stop)) + seq_len
        clean = torch.full_like(clean_stop, seq_len), clean_stop
        return Spans(*(torch.stack(x, -1).int()[None, None] for x in zip(own, clean, strict=True)))

    @staticmethod
    def tree(parents: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Spans:
        """Trees of tokens for speculative decoding (SpecInfer: Miao et al. 2024): a token sees
        itself, its ancestors and all that comes before the tree.

        The key of the tree's first token is key 0. ``Spans.tree(parents).shifted(cache_seqlens)``
        moves it after the tokens of a cache, on the device; the tree itself is read on the host.

        The ancestors of a token are not adjacent in general. The mask has as many intervals as the
        worst token needs: one more than the times that its path leaves a token for another one
        than the next. Trees in depth-first order need the fewest.

        Args:
            parents: (nodes,) or (batch, nodes), the number of each token's parent, which comes
                before the token; -1 for a root.

        Raises:
            ValueError: a parent does not come before its child, or a token needs more than eight
                intervals.
        """
        device = parents.device if isinstance(parents, Tensor) else None
        numbers = torch.as_tensor(parents)
        if numbers.numel() == 0:  # without a number to tell, PyTorch assumes floating point
            numbers = numbers.long()
        _check_integers("parents", numbers, "batch, nodes" if numbers.dim() == 2 else "nodes")
        trees = numbers.tolist() if numbers.dim() == 2 else [numbers.tolist()]
        paths = [_path_intervals(tree) for tree in trees]
        most = max((len(node) for tree in paths for node in tree), default=1)
        if most > MAX_INTERVALS:
            raise ValueError(
                f"parents: got a tree with a path of {most} intervals, want at most "
                f"{MAX_INTERVALS}; number the tokens in depth-first order"
            )
        filled = [[node + [(0, 0)] * (most - len(node)) for node in tree] for tree in paths]
        bounds = torch.tensor(filled, dtype=torch.int32, device=device)
        starts, stops = bounds.view(len(trees), 1, numbers.shape[-1], most, 2).unbind(-1)
        return Spans(starts, stops)


def _path_intervals(parents: list[int]) -> list[list[tuple[int, int]]]:
    """For each token of a tree, the intervals that hold what is before the tree and the path from
    the root to the token.
    """
    found: list[list[tuple[int, int]]] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"parents: got {parent} for token {node}, want -1 or a token before {node}"
            )
        before = [(FAR_LEFT, 0)] if parent < 0 else found[parent]
        first, last = before[-1]
        if last == node:
            found.append([*before[:-1], (first, node + 1)])
        else:
            found.append([*before, (node, node + 1)])
    return found


def _rows(seq_len: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(seq_len, device=device)


def _numbers_of(lengths: Tensor, seq_len: int) -> Tensor:
    """(batch, seq_len): the document of each token, -1 after the last one."""
    ends = lengths.long().cumsum(1)
    rows = _rows(seq_len, lengths.device).expand(lengths.shape[0], seq_len).contiguous()
    document = torch.searchsorted(ends, rows, right=True)
    return document.masked_fill(document >= lengths.shape[1], -1)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where the run of equal adjacent numbers around each token starts and stops, (batch, seq)."""
    row = _rows(ids.shape[1], ids.device)
    if ids.shape[1] == 0:
        return row.expand_as(ids), row.expand_as(ids)
    edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
    differs = ids[:, 1:] != ids[:, :-1]
    is_first, is_last = torch.cat((edge, differs), 1), torch.cat((differs, edge), 1)
    starts = torch.where(is_first, row, 0).cummax(1).values
    stops = torch.where(is_last, row + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return starts, stops


def _made(starts: Tensor, stops: Tensor) -> Spans:
    """A mask of one interval for each token, shared by all heads, from two (batch, seq)."""
    return Spans(*(_saturated(x)[:, None, :, None].contiguous() for x in (starts, stops)))


def _saturated(x: Tensor) -> Tensor:
    """Integers as int32; those beyond its range, which are beyond every sequence, as its ends."""
    limits = torch.iinfo(torch.int32)
    return x.long().clamp(limits.min, limits.max).int()


def _check_integers(name: str, x: Any, meaning: str) -> None:
    """Raise unless `x` is a tensor of integers with the dimensions that `meaning` names."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, want a torch.Tensor ({meaning})")
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {x.dtype}, want integers, such as torch.int32")
    if x.dim() != meaning.count(",") + 1:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want ({meaning})")
