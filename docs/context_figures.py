"""Draws who holds which tokens with context parallelism, from layouts as ranks make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from figures import BLUE, GREEN, INK, ORANGE, RED, SLATE, box, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flashtile.distributed import ContextParallel
from flashtile.distributed.decode import BlockCyclic
from flashtile.distributed.partition import Piece, ShardMap
from flashtile.testing.wires import run_ranks

COLORS = (BLUE, ORANGE, GREEN, RED)
RANKS = len(COLORS)
TOKENS = 256
DOCUMENTS = (128, 20, 36, 12, 44, 16)  # TOKENS together


def owners(**layout: Any) -> ShardMap:
    """Who owns which tokens in a layout."""
    made = run_ranks(RANKS, lambda comm: ContextParallel.over(comm).layout(grain=4, **layout))
    return made[0].queries


def visible_scores(pieces: Sequence[Piece]) -> int:
    """The scores of these tokens with a causal mask: token t sees t + 1 keys."""
    return sum(t + 1 for piece in pieces for t in range(piece.start, piece.stop))


def strip(axes: Axes, ownership: ShardMap, title: str) -> None:
    """A row of tokens in the colours of their ranks, and each rank's share of the scores."""
    starts = [sum(ownership.lengths[:d]) for d in range(len(ownership.lengths))]
    for rank, pieces in enumerate(ownership.pieces):
        for piece in pieces:
            x, width = starts[piece.document] + piece.start, piece.tokens
            box(axes, x, 0, width, 1, facecolor=COLORS[rank], edgecolor="none")
    for start, length in zip(starts, ownership.lengths, strict=True):
        box(axes, start, 0, length, 1, facecolor="none", edgecolor=INK, linewidth=1.4)
    scores = [visible_scores(pieces) for pieces in ownership.pieces]
    for rank, score in enumerate(scores):
        share = score / sum(scores)
        y = rank / RANKS
        box(axes, TOKENS + 12, y, 100 * share, 0.8 / RANKS, facecolor=COLORS[rank])
        write(axes, TOKENS + 16 + 100 * share, y + 0.12, f"{share:.0%}", ha="left", fontsize=8)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set(xlim=(-1, TOKENS + 82), ylim=(1.05, -0.05))
    axes.axis("off")


def ownership() -> Figure:
    """One causal sequence and packed documents on four ranks, with each rank's share of work."""
    ends = [sum(DOCUMENTS[:d]) for d in range(len(DOCUMENTS) + 1)]
    panels = (
        ('one sequence, way="contiguous"', owners(seq_len=TOKENS, way="contiguous")),
        ('one sequence, way="zigzag"', owners(seq_len=TOKENS, way="zigzag")),
        ('packed documents, way="zigzag"', owners(cu_seqlens=ends, way="zigzag")),
        ('packed documents, way="documents"', owners(cu_seqlens=ends, way="documents")),
    )
    figure, axes = plt.subplots(len(panels), figsize=(7.6, 4.6), layout="constrained")
    for panel, (title, holders) in zip(axes, panels, strict=True):
        strip(panel, holders, title)
    write(axes[0], TOKENS + 12, -0.28, "share of scores", ha="left", fontsize=9, color=SLATE)
    _legend(figure)
    return figure


def dealt_cache() -> Figure:
    """A cache of 90 tokens in blocks of 8 on four ranks, as each rank stores it."""
    tokens, block = 90, 8
    figure, axes = plt.subplots(figsize=(7.6, 2.6), layout="constrained")
    for t in range(tokens):
        blocks = BlockCyclic(block, RANKS, rank=0)
        rank = blocks.owner(t)
        box(axes, t, 0, 1, 1, facecolor=COLORS[rank], edgecolor="white", linewidth=0.3)
        box(axes, blocks.row(t), 2 + rank, 1, 0.8, facecolor=COLORS[rank], edgecolor="white")
    write(axes, 0, -0.5, "the sequence", ha="left", fontsize=9)
    write(axes, 0, 1.6, "what each rank stores", ha="left", fontsize=9)
    for rank in range(RANKS):
        rows = BlockCyclic(block, RANKS, rank).below(tokens)
        write(axes, rows + 1, 2.4 + rank, f"{rows} tokens", ha="left", fontsize=8)
    axes.set(xlim=(-0.5, tokens + 0.5), ylim=(RANKS + 2.1, -0.9))
    axes.axis("off")
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    patches = [Patch(color=color, label=f"rank {rank}") for rank, color in enumerate(COLORS)]
    figure.legend(handles=patches, loc="outside lower center", ncols=RANKS, frameon=False)


FIGURES = (ownership, dealt_cache)
