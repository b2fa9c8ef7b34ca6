"""Masks: the one rule of visible keys (`rules`), block masks, masks as spans, folded rollouts."""

from .block_mask import EMPTY, FULL, PARTIAL, BlockMask
from .rollouts import Folded, fold
from .rules import (
    WIDEST,
    Chunk,
    Positions,
    Run,
    Span,
    Visibility,
    Window,
    as_kernel_number,
    structure,
)
from .spans import FAR_LEFT, MAX_INTERVALS, Spans

__all__ = [
    "EMPTY",
    "FAR_LEFT",
    "FULL",
    "MAX_INTERVALS",
    "PARTIAL",
    "WIDEST",
    "BlockMask",
    "Chunk",
    "Folded",
    "Positions",
    "Run",
    "Span",
    "Spans",
    "Visibility",
    "Window",
    "as_kernel_number",
    "fold",
    "structure",
]
