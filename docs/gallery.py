"""Draws the pictures of docs/masks-and-scores.md, each from the call beside it.

A row of the page's tables has a picture, the arguments of a call, and words. The page's own code
defines the names in the arguments, and the picture shows the probabilities that the call returns.
sphinx-gallery and Matplotlib's plot directive draw one picture for each script, without such rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
from figures import blank, box
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

import flashtile

PAGE = Path(__file__).with_name("masks-and-scores.md")
ROW = re.compile(r"^\| !\[\]\(figures/(\w+)\.png\) \| `(.+?)` \|", re.MULTILINE)


def weights() -> Iterator[tuple[str, Tensor]]:
    """Each picture's name, and the probabilities of the first head, (queries, keys)."""
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Tensor] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    for name, arguments in ROW.findall(text):
        call = {x: names[x] for x in "qkv"} | eval(f"dict({arguments})", names)
        _, _, probs = flashtile.attention(**call, return_attn_probs=True)
        yield name, probs[0, 0]


def picture(name: str, probs: Tensor) -> Callable[[], Figure]:
    """The function of that name that draws the probabilities."""

    def draw() -> Figure:
        rows, keys = probs.shape
        figure, axes = plt.subplots(figsize=(1.5, 1.5 * rows / keys))
        blank(axes, keys, rows)
        shades = probs / probs.amax(-1, keepdim=True).clamp(min=1e-9)
        for i in range(rows):
            for j in range(keys):
                color = (
                    colormaps["Blues"](0.1 + 0.5 * shades[i, j].item()) if probs[i, j] else "white"
                )
                box(axes, j, i, 1, 1, facecolor=color, linewidth=0.3)
        return figure

    draw.__name__ = name
    return draw


FIGURES = tuple(picture(*row) for row in weights())
