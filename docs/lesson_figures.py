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

from examples.learn import traffic
from flashtile.ops.quantize.hadamard import rotation


def memory_levels() -> Figure:
    """Sizes and speeds of an H100's memories, and what attention sends through the slowest."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.2, 3.6), width_ratios=(1, 1.05), layout="constrained"
    )
    blank(left, 10, 8)
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
        left.add_patch(Polygon(corners, facecolor=color, edgecolor="white", clip_on=False))
        write(left, 5, top + 0.6, name, fontsize=9)
        write(left, 5, top + 1.25, size, fontsize=9)
    left.set_title("memories of an H100", fontsize=10)

    N, d = 16384, 64
    bars = (
        ("standard", traffic.standard_traffic(N, d), ORANGE),
        ("FlashAttention-1", traffic.flash_attention_1_traffic(N, d, 32 * 1024), BLUE),
        ("FlashAttention-2", traffic.flash_attention_2_traffic(N, d, 128), BLUE),
        ("inputs and output", 4 * N * d, GREY),
    )
    for n, (name, moved, color) in enumerate(bars):
        right.barh(n, moved / 1e6, height=0.42, color=color)
        right.text(moved / 1e6 + 12, n, f"{moved / 1e6:,.0f} M", va="center", fontsize=9)
        right.text(10, n - 0.27, name, va="bottom", fontsize=9)
    right.set(ylim=(3.4, -0.7), xlim=(0, 1350), yticks=[], xlabel="millions of numbers")
    right.set_title("moved for one head, 16,384 tokens, d = 64", fontsize=10)
    right.spines[["top", "right"]].set_visible(False)
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


def both_loops() -> Figure:
    """The order of the tiles in both versions, at the sixth of twelve steps."""
    figure, (first, second) = plt.subplots(1, 2, figsize=(7.6, 4.1), layout="constrained")
    first.set_title("FlashAttention-1", fontsize=10.5)
    text = "$K_2$, $V_2$ stay; each step loads\n$Q_i$ and $O_i$, and stores $O_i$"
    _loops(first, text, keys_outside=True, now=(1, 1))
    second.set_title("FlashAttention-2", fontsize=10.5)
    text = "$Q_2$, $O_2$ stay; each step loads\n$K_j$ and $V_j$; $O_2$ is stored once"
    _loops(second, text, keys_outside=False, now=(1, 2))
    return figure


def warps() -> Figure:
    """One step of a program with four warps, divided by keys and by queries."""
    figure, panels = plt.subplots(1, 2, figsize=(7.6, 4.3), layout="constrained")
    colors = ((BLUE, SKY), (ORANGE, SAND), (GREEN, MINT), (SLATE, DONE))
    left, top, size = 2.4, 2.4, 1.0
    for axes, by_keys in zip(panels, (True, False), strict=True):
        blank(axes, 9.6, 9.8)
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
    panels[0].set_title("divided by keys (FlashAttention-1)", fontsize=10)
    text = "four sums of the size of $O_i$ go through\nshared memory and are added"
    write(panels[0], 4.8, 8.3, text, fontsize=9.5, linespacing=1.5)
    panels[1].set_title("divided by queries (FlashAttention-2)", fontsize=10)
    text = "each warp ends with its rows of $O_i$:\nno exchange"
    write(panels[1], 4.8, 8.3, text, fontsize=9.5, linespacing=1.5)
    return figure


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


def jacobians() -> Figure:
    """The Jacobian of a product of matrices, and that of a softmax."""
    X, W = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).unbind()
    W = W.T  # (4, 3)
    product = torch.func.jacrev(lambda x: x.view(3, 4) @ W)(X.flatten()).reshape(9, 12)
    scores = torch.tensor([0.4, 1.6, 0.2, 1.1, 0.7, 0.9])
    softmax = torch.func.jacrev(lambda s: s.softmax(0))(scores)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7.6, 3.5), width_ratios=(1.35, 1), layout="constrained"
    )
    for axes, matrix in ((left, product), (right, softmax)):
        most = float(matrix.abs().max())
        axes.imshow(matrix, cmap="RdBu_r", vmin=-most, vmax=most)
        axes.set_xticks(torch.arange(matrix.shape[1] + 1) - 0.5, [], minor=False)
        axes.set_yticks(torch.arange(matrix.shape[0] + 1) - 0.5, [])
        axes.grid(color="white", linewidth=0.8)
        axes.tick_params(length=0)
    left.set(xlabel="elements of X, row by row", ylabel="elements of Y = X W")
    left.set_title("a product: blocks $W^T$, else zeros", fontsize=10)
    right.set(xlabel="elements of s", ylabel="elements of p")
    right.set_title("a softmax: diag(p) − p $p^T$", fontsize=10)
    return figure


def eight_bits() -> Figure:
    """How far e4m3 rounds a number of each size, and what a rotation does to an outlier."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.4), layout="constrained")
    x = torch.logspace(-11, 10, 4000, base=2, dtype=torch.float64)
    rounded = x.clamp(max=448).to(torch.float8_e4m3fn).double()
    left.plot(x, (rounded - x).abs() / x, color=BLUE, linewidth=0.8)
    left.set_xscale("log", base=2)
    left.set(xlabel="a number (without a scale)", ylabel="relative error", ylim=(0, 1.05))
    left.set_title("rounding to e4m3", fontsize=10)
    left.annotate("at most 6 %", (2**0, 0.07), (2**-2.5, 0.35), arrowprops={"arrowstyle": "-"})
    left.annotate("too small:\nlost", (2**-9.8, 0.98), (2**-8.6, 0.82))
    left.annotate("above 448:\ncut", (2**9.6, 0.4), (2**6.0, 0.62), arrowprops={"arrowstyle": "-"})

    g = torch.Generator().manual_seed(3)
    row = torch.randn(64, generator=g, dtype=torch.float64)
    row[20] = 14.0
    rotated = row @ rotation(64).double()
    right.bar(range(64), row, color=ORANGE, width=1.0, label="a row of Q with an outlier")
    right.bar(range(64), rotated, color=BLUE, width=0.55, label="the same row, rotated")
    right.set(xlabel="column", ylim=(-5, 17))
    right.set_title("what a rotation does to an outlier", fontsize=10)
    right.legend(frameon=False, loc="upper right", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


FIGURES = (memory_levels, first_loop, both_loops, warps, gradients, jacobians, eight_bits)
