"""Pictures of training: loss against tokens."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")
from matplotlib import pyplot as plt

from .metrics import Row


def column(rows: list[Row], name: str) -> np.ndarray:
    """One column of the metrics, (rows,)."""
    return np.array([getattr(row, name) for row in rows], dtype=float)


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """The mean over up to `width` values around each one."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    here = np.arange(len(values))
    first = np.maximum(0, here - (width - 1) // 2)
    last = np.minimum(len(values), here + width // 2 + 1)
    return (sums[last] - sums[first]) / (last - first)


def draw_loss(rows: list[Row], path: Path, title: str) -> None:
    """Training loss and validation bits per byte against tokens, as a PNG at `path`."""
    tokens, loss = column(rows, "tokens") / 1e6, column(rows, "loss")
    bits = column(rows, "validation_bits_per_byte")
    measured = ~np.isnan(bits)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    left.plot(tokens, loss, color="tab:blue", alpha=0.25, linewidth=0.8)
    left.plot(tokens, smoothed(loss, max(1, len(rows) // 40)), color="tab:blue", label="training")
    left.plot(
        tokens[measured],
        column(rows, "validation_loss")[measured],
        *("o-",),
        color="tab:orange",
        markersize=3,
        label="validation",
    )
    left.set(xlabel="million tokens", ylabel="loss (nats a token)")
    left.legend()
    right.plot(tokens[measured], bits[measured], "o-", color="tab:orange", markersize=3)
    for x, y in list(zip(tokens[measured], bits[measured], strict=True))[-1:]:
        right.annotate(f"{y:.3f}", (x, y), xytext=(0, 8), textcoords="offset points", ha="right")
    right.set(xlabel="million tokens", ylabel="validation bits per byte")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
