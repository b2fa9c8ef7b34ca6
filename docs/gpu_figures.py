"""Draws the pictures of the lessons on GPU programming and Triton; strides come from PyTorch."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from figures import (
    BLUE,
    GREEN,
    GREY,
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


def gpu_levels() -> Figure:
    """What is inside what, and which memory belongs to it."""
    figure, axes = plt.subplots(figsize=(8.2, 4.3))
    blank(axes, 16.4, 8.6)
    side = {"ha": "left", "linespacing": 1.4, "fontsize": 9.5}
    box(axes, 0, 0, 10.4, 8.4, facecolor=PAPER)
    write(axes, 0.3, 0.5, "GPU: 132 multiprocessors", ha="left")
    for n, x in enumerate((9.75, 9.95, 10.15)):  # the others, behind the first
        box(axes, x - 0.3, 1.4 + 0.15 * n, 0.2, 6.4, facecolor=SKY)
    box(axes, 0.4, 1.0, 8.8, 7.0, facecolor=SKY)
    write(axes, 0.7, 1.5, "multiprocessor: up to 64 warps", ha="left")
    for p, (strong, soft) in enumerate(((ORANGE, SAND), (GREEN, MINT))):
        y = 2.1 + 2.95 * p
        box(axes, 0.8, y, 8.0, 2.65, facecolor=soft)
        write(axes, 1.1, y + 0.4, f"program {p}: 4 warps", ha="left", color=strong)
        for warp in range(4):
            top = y + 0.75 + 0.45 * warp
            write(axes, 1.1, top + 0.17, f"warp {warp}", ha="left", fontsize=8)
            for thread in range(32):
                box(axes, 2.2 + 0.2 * thread, top, 0.17, 0.34, facecolor=strong, linewidth=0)
    notes = (
        (2.4, GREEN, "a thread: up to 255 registers of 4 bytes"),
        (3.7, ORANGE, "a program: shared memory (SRAM),\nup to 227 KB, about 30 cycles away"),
        (5.4, BLUE, "a multiprocessor: 256 KB of registers,\n256 KB of shared memory and L1 cache"),
        (
            7.3,
            SLATE,
            "the GPU: 50 MB of L2 cache, 80 GB of HBM,\nseveral hundred cycles away",
        ),
    )
    write(axes, 10.9, 1.2, "memory that belongs to", color=SLATE, **side)
    for y, color, text in notes:
        write(axes, 10.9, y, text, color=color, **side)
    return figure


def cells(axes: Axes, x: float, y: float, numbers: list[int], colors: list[str]) -> None:
    """Numbers side by side, a square each."""
    for n, (number, color) in enumerate(zip(numbers, colors, strict=True)):
        box(axes, x + n, y, 1, 1, facecolor=color)
        write(axes, x + n + 0.5, y + 0.5, f"{number}")


def vector_add() -> Figure:
    """Offsets of three programs over ten numbers."""
    size, block = 10, 4
    figure, axes = plt.subplots(figsize=(7.0, 2.5))
    blank(axes, 14, 5)
    programs = -(-size // block)
    colors = (SKY, SAND, MINT)
    in_memory = [colors[n // block] for n in range(size)]
    cells(axes, 1, 0.6, list(range(size)), in_memory)
    write(axes, 0.6, 1.1, "x", ha="right")
    for program in range(programs):
        offsets = program * block + torch.arange(block)
        shown = [colors[program] if n < size else "white" for n in offsets.tolist()]
        cells(axes, 1 + program * (block + 0.4), 2.9, offsets.tolist(), shown)
        middle = 1 + program * (block + 0.4) + block / 2
        write(axes, middle, 4.4, f"program {program}: offsets", fontsize=9, color=SLATE)
        arrow(axes, 1 + program * block + (block if program < 2 else 2) / 2, 1.7, middle, 2.8)
    write(axes, 12.8, 2.5, "masked", fontsize=9, color=GREY)
    return figure


def strides() -> Figure:
    """A matrix, its transpose, and the memory of both."""
    x = torch.arange(12).reshape(3, 4)
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    blank(axes, 15.2, 6.4)
    colors = (SKY, SAND, MINT)
    owner = {n: colors[n // 4] for n in range(12)}
    for left, name, view in ((0.6, "x", x), (7.0, "x.T", x.T)):
        title = f"{name}: strides {view.stride()}"
        write(axes, left, 0.3, title, ha="left")
        for row, numbers in enumerate(view.tolist()):
            cells(axes, left, 0.8 + row, numbers, [owner[n] for n in numbers])
    memory = list(range(12))
    cells(axes, 0.6, 5.2, memory, [owner[n] for n in memory])
    write(axes, 12.9, 5.7, "memory of both", ha="left", color=SLATE)
    return figure


def matmul_tiles() -> Figure:
    """What one program of the matrix product reads and writes."""
    figure, axes = plt.subplots(figsize=(7.0, 4.6))
    blank(axes, 14, 9.2)
    row, column, step, tiles = 1, 2, 1, 4

    def matrix(left: float, top: float, name: str) -> None:
        for m in range(tiles):
            for n in range(tiles):
                is_read = {"A": m == row, "B": n == column, "C": (m, n) == (row, column)}[name]
                now = {"A": n == step, "B": m == step, "C": True}[name]
                color = (ORANGE if name == "C" else BLUE) if is_read and now else SKY
                color = color if is_read else "white"
                box(axes, left + n, top + m, 1, 1, facecolor=color)
        write(axes, left - 0.4, top + tiles / 2, f"${name}$", fontsize=13)

    matrix(1, 4.9, "A")
    matrix(6.2, 0.2, "B")
    matrix(6.2, 4.9, "C")
    note = {"ha": "left", "color": SLATE, "linespacing": 1.5, "fontsize": 9.5}
    write(axes, 10.6, 2.2, "the loop goes down\na column of tiles of $B$", **note)
    write(axes, 10.6, 6.4, f"program ({row}, {column}):\none tile of $C$", **note)
    write(axes, 1, 4.4, "and along a row of tiles of $A$", **note)
    box(axes, 1, 0.8, 0.5, 0.5, facecolor=BLUE)
    write(axes, 1.7, 1.05, f"loaded in step {step}", **note)
    box(axes, 1, 1.6, 0.5, 0.5, facecolor=SKY)
    write(axes, 1.7, 1.85, "loaded in other steps", **note)
    box(axes, 1, 2.4, 0.5, 0.5, facecolor=ORANGE)
    write(axes, 1.7, 2.65, "the sum, in registers", **note)
    return figure


def schedule(stages: int, tiles: int, latency: int, work: int) -> list[tuple[int, int]]:
    """When the load and the computation of each tile start, with buffers for `stages` tiles."""
    starts: list[tuple[int, int]] = []
    for tile in range(tiles):
        buffer_is_free = starts[tile - stages][1] + work if tile >= stages else 0
        load = max(buffer_is_free, starts[-1][0] + 1 if starts else 0)
        earlier = starts[-1][1] + work if starts else 0
        starts.append((load, max(load + latency, earlier)))
    return starts


def pipelining() -> Figure:
    """Six steps of a loop with one, two and four stages."""
    latency, work, tiles = 6, 2, 6
    colors = ((BLUE, SKY), (ORANGE, SAND), (GREEN, MINT))
    figure, axes = plt.subplots(figsize=(8.2, 3.3))
    blank(axes, 58, 23.6)
    for panel, stages in enumerate((1, 2, 4)):
        top = 0.5 + 7.6 * panel
        write(axes, 0, top + 1.9, f"num_stages={stages}", ha="left", fontsize=9)
        for tile, (load, compute) in enumerate(schedule(stages, tiles, latency, work)):
            strong, soft = colors[tile % 3]
            lane = top + 1.2 * (tile % stages)
            box(axes, 9 + load, lane, latency, 1.1, facecolor=soft)
            write(axes, 9 + load + latency / 2, lane + 0.55, f"load {tile}", fontsize=6)
            box(axes, 9 + compute, top + 4.9, work, 1.2, facecolor=strong)
            write(axes, 9 + compute + work / 2, top + 5.6, f"{tile}", color="white", fontsize=7)
        write(axes, 8.5, top + 5.6, "compute", ha="right", fontsize=7, color=SLATE)
    arrow(axes, 9, 23.2, 58, 23.2)
    write(axes, 8.5, 23.2, "time", ha="right", fontsize=8, color=SLATE)
    return figure


FIGURES = (gpu_levels, vector_add, strides, matmul_tiles, pipelining)
