"""Draws the pictures of lessons 1, 3, 4, 5 and 9; numbers come from the code of the lessons."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from figures import (
    BLUE,
    DONE,
    GREEN,
    GREY,
    INK,
    MINT,
    ORANGE,
    PAPER,
    SAND,
    SKY,
    SLATE,
    arrow,
    blank,
    box,
    write,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from torch import Tensor

from examples.learn import traffic
from flashtile.ops.quantize.formula import rotation


def memories() -> Figure:
    """Sizes and speeds of an H100's memories."""
    figure, axes = plt.subplots(figsize=(3.9, 3.4), layout="constrained")
    blank(axes, 10, 8)
    levels = (
        ("registers", "33 MB", GREEN),
        ("shared memory (SRAM)", "30 MB, 33 TB/s", MINT),
        ("L2 cache", "50 MB, 5.5 TB/s", SAND),
        ("HBM", "80 GB, 3.35 TB/s", ORANGE),
    )
    for n, (name, size, color) in enumerate(levels):
        top, bottom = 0.2 + 1.9 * n, 2.0 + 1.9 * n
        half = [1.9 + 0.36 * y for y in (top, bottom)]
        corners = [(5 - half[0], top), (5 + half[0], top), (5 + half[1], bottom)]
        corners.append((5 - half[1], bottom))
        axes.add_patch(Polygon(corners, facecolor=color, edgecolor="white", clip_on=False))
        write(axes, 5, top + 0.6, name, fontsize=9)
        write(axes, 5, top + 1.25, size, fontsize=9)
    axes.set_title("memories of an H100", fontsize=10)
    return figure


def moved_numbers() -> Figure:
    """What attention reads from and writes to slow memory."""
    N, d = 16384, 64
    bars = (
        ("standard", traffic.standard_traffic(N, d), ORANGE),
        ("FlashAttention-1", traffic.flash_attention_1_traffic(N, d, 32 * 1024), BLUE),
        ("FlashAttention-2", traffic.flash_attention_2_traffic(N, d, 128), BLUE),
        ("inputs and output", 4 * N * d, GREY),
    )
    figure, axes = plt.subplots(figsize=(3.9, 3.4), layout="constrained")
    for n, (name, moved, color) in enumerate(bars):
        axes.barh(n, moved / 1e6, height=0.42, color=color)
        axes.text(moved / 1e6 + 12, n, f"{moved / 1e6:,.0f} M", va="center", fontsize=9)
        axes.text(10, n - 0.27, name, va="bottom", fontsize=9)
    axes.set(ylim=(3.4, -0.7), xlim=(0, 1350), yticks=[], xlabel="millions of numbers")
    axes.set_title("moved for one head, 16,384 tokens, d = 64", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _loops(axes: Axes, title: str, *, keys_outside: bool, now: tuple[int, int]) -> None:
    """A grid of score tiles, numbered in the order in which a loop computes them."""
    rows, columns = 4, 3
    left, top, size = 2.6, 2.6, 1.3
    blank(axes, 9.4, 9.0)
    order = [(i, j) for j in range(columns) for i in range(rows)]
    if not keys_outside:
        order.sort()
    done = order.index(now)
    for step, (i, j) in enumerate(order):
        color = ORANGE if step == done else DONE if step < done else "white"
        box(axes, left + j * size, top + i * size, size, size, facecolor=color)
        ink = "white" if step == done else INK
        x, y = left + (j + 0.5) * size, top + (i + 0.5) * size
        write(axes, x, y, f"{step + 1}", color=ink)
    for i in range(rows):
        y, strong = top + i * size, i == now[0]
        box(axes, left - 1.5, y, 1.1, size, facecolor=BLUE if strong else SKY)
        box(axes, left + columns * size + 0.4, y, 1.1, size, facecolor=GREEN if strong else MINT)
        label = {"color": "white" if strong else SLATE, "fontsize": 10}
        write(axes, left - 0.95, y + size / 2, f"$Q_{i + 1}$", **label)
        write(axes, left + columns * size + 0.95, y + size / 2, f"$O_{i + 1}$", **label)
    for j in range(columns):
        strong = j == now[1]
        label = {"color": "white" if strong else SLATE, "fontsize": 10}
        for y, name in ((top - 2.2, "K"), (top - 1.2, "V")):
            box(axes, left + j * size, y, size, 0.85, facecolor=BLUE if strong else SKY)
            write(axes, left + (j + 0.5) * size, y + 0.42, f"${name}_{j + 1}$", **label)
    write(axes, left + columns * size / 2, top + rows * size + 0.6, title, fontsize=9.5)


def first_loop() -> Figure:
    """The sixth step of FlashAttention-1: what stays in fast memory, and what comes and goes."""
    figure, axes = plt.subplots(figsize=(7.4, 4.3))
    _loops(axes, "outer loop: columns; inner loop: rows", keys_outside=True, now=(1, 1))
    axes.set_xlim(0, 16.6)
    note = {"ha": "left", "linespacing": 1.5, "fontsize": 9.5}
    write(axes, 9.1, 1.2, "$K_2$, $V_2$: loaded once for the column\n(line 6)", color=BLUE, **note)
    write(axes, 9.1, 3.3, "$Q_2$, $O_2$, $\\ell_2$, $m_2$: loaded for this\nstep (line 8)", **note)
    text = "$O_2$, $\\ell_2$, $m_2$: written back after it\n(lines 12 and 13)"
    write(axes, 9.1, 4.9, text, color=GREEN, **note)
    text = "the tile of scores, 6th of 12: computed,\nused and forgotten (lines 9 to 11)"
    write(axes, 9.1, 6.5, text, color=ORANGE, **note)
    return figure


def loop_of_version_1() -> Figure:
    """The sixth of twelve steps with the keys outside."""
    figure, axes = plt.subplots(figsize=(3.7, 4.0), layout="constrained")
    axes.set_title("FlashAttention-1", fontsize=10.5)
    text = "$K_2$, $V_2$ stay; each step loads\n$Q_i$ and $O_i$, and stores $O_i$"
    _loops(axes, text, keys_outside=True, now=(1, 1))
    return figure


def loop_of_version_2() -> Figure:
    """The sixth of twelve steps with the queries outside."""
    figure, axes = plt.subplots(figsize=(3.7, 4.0), layout="constrained")
    axes.set_title("FlashAttention-2", fontsize=10.5)
    text = "$Q_2$, $O_2$ stay; each step loads\n$K_j$ and $V_j$; $O_2$ is stored once"
    _loops(axes, text, keys_outside=False, now=(1, 2))
    return figure


def _warps(title: str, note: str, *, by_keys: bool) -> Figure:
    """A tile of scores that four warps share."""
    figure, axes = plt.subplots(figsize=(3.7, 4.1), layout="constrained")
    colors = ((BLUE, SKY), (ORANGE, SAND), (GREEN, MINT), (SLATE, DONE))
    left, top, size = 2.4, 2.4, 1.0
    blank(axes, 9.6, 9.4)
    for n, (strong, soft) in enumerate(colors):
        x, y = left + n * size, top + n * size
        box(axes, x, 0.6, size, 1.3, facecolor=soft if by_keys else PAPER)
        box(axes, 0.6, y, 1.3, size, facecolor=PAPER if by_keys else soft)
        if by_keys:
            box(axes, x, top, size, 4 * size, facecolor=soft)
            write(axes, x + 0.5, top + 2, f"warp {n}", rotation=90, color=strong)
            box(axes, left + 4.7 + 0.22 * n, top + 0.22 * n, 1.3, 4 * size, facecolor=soft)
        else:
            box(axes, left, y, 4 * size, size, facecolor=soft)
            write(axes, left + 2, y + 0.5, f"warp {n}", color=strong)
            box(axes, left + 4.7, y, 1.3, size, facecolor=soft)
    write(axes, left + 2, 0.2, "$K_j$, $V_j$", fontsize=9.5)
    write(axes, 1.25, top - 0.3, "$Q_i$", fontsize=9.5)
    write(axes, left + 5.5, top - 0.4, "$O_i$", fontsize=9.5)
    axes.set_title(title, fontsize=10)
    write(axes, 4.8, 8.3, note, fontsize=9.5, linespacing=1.5)
    return figure


def warps_by_keys() -> Figure:
    """Split-K: each warp has a quarter of the keys."""
    note = "four sums of the size of $O_i$ go through\nshared memory and are added"
    return _warps("divided by keys (FlashAttention-1)", note, by_keys=True)


def warps_by_queries() -> Figure:
    """Split-Q: each warp has a quarter of the queries."""
    note = "each warp ends with its rows of $O_i$:\nno exchange"
    return _warps("divided by queries (FlashAttention-2)", note, by_keys=False)


def gradients() -> Figure:
    """The steps of attention from left to right, and its gradients from right to left."""
    figure, axes = plt.subplots(figsize=(7.6, 2.9))
    blank(axes, 15.2, 5.8)
    nodes = {
        "Q": (0.2, 0.3, BLUE),
        "K": (0.2, 2.0, BLUE),
        "V": (0.2, 4.1, BLUE),
        "S": (4.3, 1.1, ORANGE),
        "P": (8.4, 1.1, ORANGE),
        "O": (12.9, 2.6, GREEN),
    }
    for name, (x, y, color) in nodes.items():
        box(axes, x, y, 1.6, 1.2, facecolor=color)
        write(axes, x + 0.8, y + 0.6, f"${name}$", color="white", fontsize=13)

    def step(start: str, end: str, above: str, below: str, drop: float = 0.0) -> None:
        (x0, y0, _), (x1, y1, _) = nodes[start], nodes[end]
        x0, x1, y0, y1 = x0 + 1.7, x1 - 0.1, y0 + 0.6, y1 + 0.6 + drop
        arrow(axes, x0, y0 - 0.12, x1, y1 - 0.12)
        style = {"color": BLUE, "linewidth": 1.1, "arrowstyle": "-|>", "linestyle": "--"}
        axes.annotate("", (x0, y0 + 0.16), (x1, y1 + 0.16), arrowprops=style)
        middle, height = (x0 + x1) / 2, (y0 + y1) / 2
        write(axes, middle, height - 0.55, above, fontsize=8.5)
        write(axes, middle, height + 0.62, below, fontsize=8.5, color=BLUE)

    step("Q", "S", "$QK^T$", "", -0.2)
    step("K", "S", "", "$dQ$, $dK$", 0.2)
    step("S", "P", "softmax", "$dS$")
    step("P", "O", "$PV$", "$dP$", -0.2)
    step("V", "O", "", "$dV$", 0.25)
    write(axes, 13.7, 4.6, "$dO$ arrives here", fontsize=8.5, color=BLUE)
    return figure


def _matrix(matrix: Tensor, title: str, x: str, y: str) -> Figure:
    """A matrix as coloured squares: red is positive, blue negative, white zero."""
    figure, axes = plt.subplots(figsize=(3.9, 3.5), layout="constrained")
    most = float(matrix.abs().max())
    axes.imshow(matrix, cmap="RdBu_r", vmin=-most, vmax=most)
    rows, columns = matrix.shape
    axes.set_xticks(torch.arange(columns + 1) - 0.5, [])
    axes.set_yticks(torch.arange(rows + 1) - 0.5, [])
    axes.grid(color="white", linewidth=0.8)
    axes.tick_params(length=0)
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10)
    return figure


def jacobian_of_product() -> Figure:
    """Of Y = X W by X, from PyTorch."""
    W = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    jacobian = torch.func.jacrev(lambda x: x @ W)(torch.zeros(3, 4)).reshape(9, 12)
    title = "a product: blocks $W^T$, else zeros"
    return _matrix(jacobian, title, "elements of X, row by row", "elements of Y = X W")


def jacobian_of_softmax() -> Figure:
    """Of p = softmax(s), from PyTorch."""
    scores = torch.tensor([0.4, 1.6, 0.2, 1.1, 0.7, 0.9])
    jacobian = torch.func.jacrev(lambda s: s.softmax(0))(scores)
    title = "a softmax: diag(p) − p $p^T$"
    return _matrix(jacobian, title, "elements of s", "elements of p")


def rounding_to_8_bits() -> Figure:
    """How far e4m3 rounds a number of each size."""
    figure, axes = plt.subplots(figsize=(3.9, 3.4), layout="constrained")
    x = torch.logspace(-11, 10, 4000, base=2, dtype=torch.float64)
    rounded = x.clamp(max=448).to(torch.float8_e4m3fn).double()
    axes.plot(x, (rounded - x).abs() / x, color=BLUE, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="a number (without a scale)", ylabel="relative error", ylim=(0, 1.05))
    axes.set_title("rounding to e4m3", fontsize=10)
    axes.annotate("at most 6 %", (2**0, 0.07), (2**-2.5, 0.35), arrowprops={"arrowstyle": "-"})
    axes.annotate("too small:\nlost", (2**-9.8, 0.98), (2**-8.4, 0.82))
    axes.annotate("above 448:\ncut", (2**9.6, 0.4), (2**4.5, 0.62), arrowprops={"arrowstyle": "-"})
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def rotated_outlier() -> Figure:
    """A row with an outlier, before and after the rotation that flashtile uses."""
    figure, axes = plt.subplots(figsize=(3.9, 3.4), layout="constrained")
    row = torch.randn(64, generator=torch.Generator().manual_seed(3))
    row[20] = 14.0
    axes.bar(range(64), row, color=ORANGE, width=1.0, label="a row of Q with an outlier")
    axes.bar(range(64), row @ rotation(64), color=BLUE, width=0.55, label="the same row, rotated")
    axes.set(xlabel="column", ylim=(-5, 19))
    axes.set_title("what a rotation does to an outlier", fontsize=10)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


FIGURES = (
    memories,
    moved_numbers,
    first_loop,
    loop_of_version_1,
    loop_of_version_2,
    warps_by_keys,
    warps_by_queries,
    gradients,
    jacobian_of_product,
    jacobian_of_softmax,
    rounding_to_8_bits,
    rotated_outlier,
)
