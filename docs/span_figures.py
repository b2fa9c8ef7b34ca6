"""Draws the pictures of docs/spans.md, each from the mask that the call beside it makes."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from figures import cells
from matplotlib.figure import Figure

from flashtile import Spans
from flashtile.testing import dense_spans


def one(mask: Spans, keys: int, title: str) -> Figure:
    """A mask of a single sequence."""
    figure, axes = plt.subplots(figsize=(3.4, 3.4 * mask.starts.shape[2] / keys + 0.4))
    cells(axes, dense_spans(mask, keys)[0, 0], title)
    return figure


def spans_prefix_lm() -> Figure:
    """Three tokens of prefix."""
    return one(Spans.prefix_lm(torch.tensor([4]), 12), 12, "prefix of 4 tokens")


def spans_documents() -> Figure:
    """Three documents, causal or not, and two tokens of padding."""
    lengths = torch.tensor([[3, 5, 2]])
    figure, axes = plt.subplots(1, 2, figsize=(6.8, 3.8), layout="constrained")
    for panel, causal in zip(axes, (True, False), strict=True):
        mask = Spans.documents_of_lengths(lengths, 12, causal=causal)
        cells(panel, dense_spans(mask, 12)[0, 0], f"causal={causal}")
    return figure


def spans_shared_prefix() -> Figure:
    """A prompt and three answers."""
    mask = Spans.shared_prefix(torch.tensor([4]), torch.tensor([[3, 2, 3]]), 12)
    return one(mask, 12, "prompt of 4, answers of 3, 2 and 3")


def spans_tree() -> Figure:
    """Six tokens of a tree after a cache of five tokens."""
    mask = Spans.tree([-1, 0, 1, 1, 0, 4]).shifted(5)
    return one(mask, 11, "6 tokens of a tree after 5 in the cache")


def spans_image_blocks() -> Figure:
    """Text with two images."""
    ids = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1]])
    return one(Spans.image_blocks(ids), 12, "images of 3 and of 4 tokens")


def spans_block_diffusion() -> Figure:
    """Six tokens in blocks of two, noisy and clean."""
    return one(Spans.block_diffusion(6, 2), 12, "6 noisy tokens, then 6 clean, blocks of 2")


FIGURES = (
    spans_prefix_lm,
    spans_documents,
    spans_shared_prefix,
    spans_tree,
    spans_image_blocks,
    spans_block_diffusion,
)
