"""Fold sequences that share beginnings into a tree, so that each shared token is computed once.

Reinforcement learning samples many answers to one prompt, and tree search answers that also share
first steps. As one row of tokens with a mask of spans, a model computes such a group like any other
sequence: outputs, losses and gradients are those of the separate sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from .spans import MAX_INTERVALS, Spans


class Folded(NamedTuple):
    """Rollouts as one row of tokens, made by `fold`.

    Attributes:
        tokens: (total,), the tokens of the tree in depth-first order, each shared one once.
        positions: (total,) int64, the index of each token in its rollouts: the rotary position.
        parents: (total,) int64, the row of the token before, which predicts it; -1 for the first
            token of a rollout.
        rows: (rollouts, longest) int64, the row of each token of each rollout; -1 after its end.
        paths: `Spans` in which each token sees itself and the tokens before it in its rollouts.
    """

    tokens: Tensor
    positions: Tensor
    parents: Tensor
    rows: Tensor
    paths: Spans

    def spans(self, window_size: tuple[int, int] = (-1, -1)) -> Spans:
        """The mask of the row, for ``mask=`` of a call without `causal` and `window_size`.

        Args:
            window_size: (left, right), counted along each rollout; -1 is unbounded. A token sees
                nothing after itself, whatever the right side.

        Raises:
            ValueError: a side is no int from -1 on.
        """
        for side in window_size:
            if type(side) is not int or side < -1:
                raise ValueError(f"window_size: got {window_size!r}, want two ints from -1 on")
        left, _ = window_size
        if left < 0:
            return self.paths
        starts, stops = self.paths
        # Positions rise by 1 along an interval.
        first = self.positions[starts.long().clamp(max=max(len(self.tokens) - 1, 0))]
        hidden = (self.positions[:, None] - left - first).clamp(min=0)
        return Spans((starts + hidden).int(), stops)

    def unfold(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Values of the row's tokens as values of each rollout's; the gradient of a shared token is
        the sum over its rollouts.

        Args:
            values: (total, ...).
            fill: what to write after the end of a rollout.

        Returns:
            (rollouts, longest, ...).

        Raises:
            ValueError: there is no value for each token of the row.
        """
        self._check_rows("values", values)
        is_padding = (self.rows < 0).view(*self.rows.shape, *[1] * (values.dim() - 1))
        return values[self.rows.clamp(min=0)].masked_fill(is_padding, fill)

    def log_probs(self, logits: Tensor) -> Tensor:
        """The log-probability of each token after the tokens before it.

        Args:
            logits: (total, vocabulary), the model's outputs at the tokens of the row.

        Returns:
            (total,) in float32 or the logits' dtype, if that has more bits; 0 for tokens that
            nothing predicts: those without a parent, and negative ones.

        Raises:
            ValueError: there are no logits for each token of the row.
        """
        self._check_rows("logits", logits)
        parents, tokens = self.parents.clamp(min=0), self.tokens.long()
        wide = torch.promote_types(logits.dtype, torch.float32)
        normaliser = logits.to(wide).logsumexp(-1)
        log_probs = logits[parents, tokens.clamp(min=0)].to(wide) - normaliser[parents]
        return log_probs.masked_fill((self.parents < 0) | (tokens < 0), 0.0)

    def _check_rows(self, name: str, x: Tensor) -> None:
        total = len(self.tokens)
        if x.shape[:1] != (total,):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want ({total}, ...)")


def fold(rollouts: Sequence[Tensor | Sequence[int]]) -> Folded:
    """Fold rollouts into a tree of tokens: what several of them begin with is there once.

    The tree is made on the host. A path that leaves another one more than seven times shares only
    what comes before its eighth branch, because `Spans` has eight intervals.

    Args:
        rollouts: token numbers of each rollout, (length,) integers or a list, of any prompts.

    Returns:
        The tree, on the device of the first rollout.

    Raises:
        TypeError: a rollout holds other numbers than integers.
        ValueError: there is no rollout, or one has more than one dimension.
    """
    sequences = [_token_list(rollout) for rollout in rollouts]
    if not sequences:
        raise ValueError("rollouts: got none, want at least one")
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    paths: list[list[tuple[int, int]]] = []  # intervals of rows of each token of a branch
    lengths: list[int] = []  # new tokens of each branch
    rows: dict[int, list[int]] = {}
    # Sorted rollouts are the tree in depth-first order: each shares with the one before it what it
    # shares with any earlier one.
    previous: list[int] = []
    path: list[tuple[int, int]] = []
    for i in sorted(range(len(sequences)), key=sequences.__getitem__):
        sequence = sequences[i]
        pairs = zip(previous, sequence, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        path = _beginning(path, common)
        shared = sum(stop - start for start, stop in path)
        branch = len(tokens)
        new = len(sequence) - shared
        if new:
            parents += [path[-1][1] - 1 if path else -1, *range(branch, branch + new - 1)]
            tokens += sequence[shared:]
            positions += range(shared, len(sequence))
            if path and path[-1][1] == branch:
                path[-1] = path[-1][0], branch + new
            else:
                path.append((branch, branch + new))
            paths.append(list(path))
            lengths.append(new)
        rows[i] = [row for start, stop in path for row in range(start, stop)]
        previous = sequence
    first = rollouts[0]
    device = first.device if isinstance(first, Tensor) else None
    longest = max(map(len, sequences))
    padded = [rows[i] + [-1] * (longest - len(rows[i])) for i in range(len(sequences))]

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Folded(
        integers(tokens),
        integers(positions),
        integers(parents),
        integers([row for one in padded for row in one]).view(len(sequences), longest),
        _spans(paths, lengths, device),
    )


def _beginning(path: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The intervals of the first tokens of a path, at most as many as leave one for a branch."""
    beginning: list[tuple[int, int]] = []
    for start, stop in path[: MAX_INTERVALS - 1]:
        if tokens > 0:
            beginning.append((start, min(stop, start + tokens)))
            tokens -= stop - start
    return beginning


def _spans(
    paths: list[list[tuple[int, int]]], lengths: list[int], device: torch.device | None
) -> Spans:
    """The intervals of each branch for each of its tokens, the last one up to the token."""
    most = max(map(len, paths), default=1)
    filled = [[(0, 0)] * (most - len(path)) + path for path in paths]
    bounds = torch.tensor(filled, dtype=torch.int32, device=device).view(-1, most, 2)
    bounds = bounds.repeat_interleave(torch.tensor(lengths, device=device, dtype=torch.int64), 0)
    bounds[:, -1, 1] = torch.arange(1, len(bounds) + 1, device=device)
    starts, stops = bounds[None, None].unbind(-1)
    return Spans(starts.contiguous(), stops.contiguous())


def _token_list(rollout: Tensor | Sequence[int]) -> list[int]:
    if not isinstance(rollout, Tensor):
        try:
            return [index(token) for token in rollout]
        except TypeError as error:
            raise TypeError(f"rollouts: want integers ({error})") from None
    if rollout.is_floating_point() or rollout.is_complex() or rollout.dtype == torch.bool:
        raise TypeError(f"rollouts: got dtype {rollout.dtype}, want integers, such as torch.int64")
    if rollout.dim() != 1:
        raise ValueError(f"rollouts: got shape {tuple(rollout.shape)}, want (length,)")
    return rollout.tolist()
