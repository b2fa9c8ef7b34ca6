"""Draws the pictures of the documentation: `python docs/figures.py` writes docs/figures/*.png.

Masks and tiles are drawn from the package's own answers, so a picture cannot say what the code does
not do.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from torch import Tensor

import flashtile
from flashtile.masks import EMPTY, FULL, PARTIAL, BlockMask, Visibility, structure
from flashtile.testing import allowed_error, attention_reference, generator, normal, qkv

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

INK, SLATE, GREY, DONE, PAPER = "#1f2933", "#55606e", "#9aa5b1", "#dfe3e8", "#f3f5f7"
BLUE, ORANGE, GREEN, RED = "#2f6fb0", "#e0823d", "#3a9b72", "#c8453b"
SKY, SAND, MINT = "#cfe0f1", "#fae0cb", "#cdeadd"
KIND_COLOR = {EMPTY: "white", FULL: "#5b9bd1", PARTIAL: "#f2b880"}
SEQUENCE_COLORS = ((BLUE, SKY), (ORANGE, SAND), (GREEN, MINT))

plt.rcParams.update(
    {
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "axes.titlesize": 11,
        "xtick.color": INK,
        "ytick.color": INK,
        "mathtext.fontset": "cm",
    }
)


def box(axes: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    """A rectangle with a thin edge, y growing downwards."""
    style = {"facecolor": "white", "edgecolor": GREY, "linewidth": 0.8, "clip_on": False} | style
    axes.add_patch(Rectangle((x, y), width, height, **style))


def write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text centred on a point."""
    axes.text(x, y, text, **({"ha": "center", "va": "center"} | style))


def arrow(axes: Axes, x0: float, y0: float, x1: float, y1: float) -> None:
    """An arrow between two points."""
    style = {"color": INK, "linewidth": 1.3, "mutation_scale": 12, "arrowstyle": "-|>"}
    axes.add_patch(FancyArrowPatch((x0, y0), (x1, y1), **style))


def blank(axes: Axes, width: float, height: float) -> None:
    """Bare axes, one unit square on screen, y growing downwards."""
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")


def tiles() -> Figure:
    """One step of the forward pass: a grid of tiles, of which one is in fast memory."""
    figure, axes = plt.subplots(figsize=(7.6, 4.5))
    blank(axes, 15.2, 9.4)
    rows, columns, row, column = 4, 5, 1, 2
    left, top, size = 2.6, 2.8, 1.3
    right, bottom = left + columns * size, top + rows * size

    for m in range(rows):
        y, here = top + m * size, m == row
        box(axes, left - 1.5, y, 1.1, size, facecolor=BLUE if here else SKY)
        color = GREEN if here else MINT if m < row else "white"
        box(axes, right + 0.4, y, 1.1, size, facecolor=color)
        for n in range(columns):
            done = m < row or (here and n < column)
            color = ORANGE if here and n == column else DONE if done else "white"
            box(axes, left + n * size, y, size, size, facecolor=color)
    for n in range(columns):
        for y in (top - 2.4, top - 1.3):
            box(axes, left + n * size, y, size, 0.9, facecolor=BLUE if n == column else SKY)

    x, y = left + (column + 0.5) * size, top + (row + 0.5) * size
    light = {"color": "white", "fontsize": 13}
    write(axes, x, y, "$S_{ij}$", **light)
    write(axes, x, top - 1.95, "$K_j$", **light)
    write(axes, x, top - 0.85, "$V_j$", **light)
    write(axes, left - 0.95, y, "$Q_i$", **light)
    write(axes, right + 0.95, y, "$O_i$", **light)

    arrow(axes, left, bottom + 0.4, right, bottom + 0.4)
    write(axes, (left + right) / 2, bottom + 0.95, "inner loop: tiles of keys, $j$")
    arrow(axes, left - 1.9, top, left - 1.9, bottom)
    write(axes, left - 2.3, (top + bottom) / 2, "outer loop: tiles of queries, $i$", rotation=90)

    note, side = right + 1.9, {"ha": "left", "linespacing": 1.5}
    write(axes, note, y, "with $m_i$ and $\\ell_i$,\nupdated at every tile", color=GREEN, **side)
    write(axes, note, top - 1.4, "strong colour:\nin fast memory now", color=SLATE, **side)
    write(axes, note, bottom - size, "grey: computed,\nused and forgotten", color=SLATE, **side)
    return figure


def online_softmax() -> Figure:
    """Real numbers through the recurrence: the maximum, the sum and the output after every tile."""
    generator = torch.Generator().manual_seed(7)
    tile, count = 6, 4
    scores = torch.randn(tile * count, generator=generator, dtype=torch.float64)
    scores += torch.linspace(0.0, 2.5, tile * count, dtype=torch.float64)
    values = torch.randn(tile * count, generator=generator, dtype=torch.float64)
    m, total, acc = -torch.inf, 0.0, 0.0
    maxima, kept, sums, outputs = [], [], [], []
    for s, v in zip(scores.split(tile), values.split(tile), strict=True):
        m_new = max(m, float(s.max()))
        rescale = float(torch.tensor(m - m_new).exp())
        p = (s - m_new).exp()
        kept.append(rescale * total)
        total = rescale * total + float(p.sum())
        acc = rescale * acc + float(p @ v)
        m = m_new
        maxima.append(m)
        sums.append(total)
        outputs.append(acc / total)
    exact = float(scores.softmax(0) @ values)

    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(7.6, 6.6), sharex=True, height_ratios=(1.5, 1, 1), layout="constrained"
    )
    keys = torch.arange(tile * count)
    centres = [(t + 0.5) * tile - 0.5 for t in range(count)]
    top.bar(keys, scores, color=SKY, edgecolor=BLUE, linewidth=0.7, label="score $s_j$")
    steps = [x for m in maxima for x in (m, m)]
    edges = [x - 0.5 for t in range(count) for x in (t * tile, (t + 1) * tile)]
    top.plot(edges, steps, color=RED, linewidth=2, label="running maximum $m$")
    top.set_title("the scores of one query arrive a tile at a time", loc="left")
    style = {"width": 4, "edgecolor": GREEN, "linewidth": 0.7}
    rescaled = r"what was there, rescaled: $e^{m_{\rm old}-m_{\rm new}}\,\ell_{\rm old}$"
    middle.bar(centres, kept, color=MINT, label=rescaled, **style)
    fresh = [total - old for total, old in zip(sums, kept, strict=True)]
    added = r"this tile: $\Sigma_j\, e^{s_j-m_{\rm new}}$"
    middle.bar(centres, fresh, bottom=kept, color=GREEN, label=added, **style)
    middle.set_title(r"running sum $\ell$", loc="left")
    bottom.axhline(exact, color=GREY, linewidth=1.2, linestyle="--", label="softmax of all scores")
    bottom.plot(centres, outputs, "o-", color=BLUE, label=r"output so far, $\tilde{o}/\ell$")
    bottom.set_title("output: exact after the last tile", loc="left")
    bottom.set_xticks(centres, [f"tile {t + 1}" for t in range(count)])
    bottom.tick_params(axis="x", length=0)
    bottom.margins(y=0.35)
    middle.margins(y=0.25)
    for axes in (top, middle, bottom):
        axes.legend(frameon=False, loc="best", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        for edge in range(1, count):
            axes.axvline(edge * tile - 0.5, color=GREY, linewidth=0.6, linestyle=":")
    return figure


def cells(axes: Axes, visible: Tensor, title: str) -> None:
    """A mask, one square a score."""
    M, N = visible.shape
    blank(axes, N, M)
    for i in range(M):
        for j in range(N):
            color = KIND_COLOR[FULL] if visible[i, j] else "white"
            box(axes, j, i, 1, 1, facecolor=color, linewidth=0.5)
    axes.set_title(title)


def mask(
    M: int, N: int, left: int | None = None, right: int | None = None, chunk: int = 0
) -> Tensor:
    """The dense mask of the structural options, as the package has it."""
    return Visibility(structure(left, right, chunk), M, N).dense()


def causal() -> Figure:
    """Causal masks for equal and unequal lengths."""
    sizes = ((6, 6), (3, 8), (8, 5))
    figure, axes = plt.subplots(
        1, 3, figsize=(7.6, 3.7), width_ratios=[N for _, N in sizes], layout="constrained"
    )
    for panel, (M, N) in zip(axes, sizes, strict=True):
        cells(panel, mask(M, N, right=0), f"{M} queries, {N} keys")
        panel.set_anchor("S")
    return figure


def shapes() -> Figure:
    """What the structural options look like."""
    figure, axes = plt.subplots(1, 4, figsize=(8.4, 2.6), layout="constrained")
    for panel, (title, options) in zip(
        axes,
        (
            ("causal=True", {"right": 0}),
            ("window_size=(2, 1)", {"left": 2, "right": 1}),
            ("causal=True,\nwindow_size=(3, 0)", {"left": 3, "right": 0}),
            ("causal=True,\nattention_chunk=4", {"right": 0, "chunk": 4}),
        ),
        strict=True,
    ):
        cells(panel, mask(9, 9, **options), title)
    return figure


def kinds(axes: Axes, kind: Tensor, tile: int) -> None:
    """Tiles in the colour of their kind."""
    for m, row in enumerate(kind.tolist()):
        for n, value in enumerate(row):
            box(axes, n * tile, m * tile, tile, tile, facecolor=KIND_COLOR[value])


def kind_legend(figure: Figure) -> None:
    """Names of the three kinds of tile, below the panels."""
    names = ((FULL, "full: no mask"), (PARTIAL, "partial: masked"), (EMPTY, "empty: not touched"))
    patches = [Patch(facecolor=KIND_COLOR[k], edgecolor=GREY, label=name) for k, name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)


def classified() -> Figure:
    """Tiles of three masks, in the kinds that `Visibility.classify` gives them."""
    figure, axes = plt.subplots(1, 3, figsize=(8.0, 3.3), layout="constrained")
    length, tile = 96, 8
    count = length // tile
    for panel, (title, options) in zip(
        axes,
        (
            ("causal", (None, 0, 0)),
            ("causal, window (20, 0)", (20, 0, 0)),
            ("causal, chunk 32", (None, 0, 32)),
        ),
        strict=True,
    ):
        visibility = Visibility(structure(*options), length, length)
        starts = [t * tile for t in range(count)]
        kind = torch.tensor(
            [[visibility.classify(m, m + tile, n, n + tile) for n in starts] for m in starts]
        )
        blank(panel, length, length)
        kinds(panel, kind, tile)
        panel.set_title(f"{title}\n{int((kind != EMPTY).sum())} of {count * count} tiles touched")
    kind_legend(figure)
    return figure


def block_mask() -> Figure:
    """A dense mask and the tiles that `BlockMask.from_dense` cuts it into."""
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.9), layout="constrained")
    length, tile = 48, 8
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    document = torch.bucketize(torch.arange(length), torch.tensor([12, 32]), right=True)
    dense = (document[:, None] == document[None, :]) & (j <= i) | (j < 4)
    blocks = BlockMask.from_dense(dense, (tile, tile))
    blank(axes[0], length, length)
    colors = ListedColormap(["white", KIND_COLOR[FULL]])
    axes[0].imshow(dense, extent=(0, length, length, 0), cmap=colors, interpolation="nearest")
    for m in range(0, length, tile):
        for n in range(0, length, tile):
            box(axes[0], n, m, tile, tile, facecolor="none")
    axes[0].set_title("the mask: three documents, causal,\nfirst four keys seen by all")
    blank(axes[1], length, length)
    kinds(axes[1], blocks.kinds[0, 0], tile)
    axes[1].set_title(f"BlockMask: {blocks.partial_tiles.shape[0]} partial tiles\nhold elements")
    kind_legend(figure)
    return figure


def varlen() -> Figure:
    """A padded batch against the same sentences packed."""
    lengths, longest, left = (3, 7, 4), 7, 2.0
    starts = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    figure, axes = plt.subplots(figsize=(7.6, 3.1))
    blank(axes, 16.2, 6.4)
    for b, (length, (strong, soft)) in enumerate(zip(lengths, SEQUENCE_COLORS, strict=True)):
        for t in range(longest):
            x, used = left + t, t < length
            box(axes, x, b, 1, 1, facecolor=soft if used else PAPER)
            text, color, size = (f"{t}", strong, 9) if used else ("pad", GREY, 7)
            write(axes, x + 0.5, b + 0.5, text, color=color, fontsize=size)
        for t in range(length):
            x = left + starts[b] + t
            box(axes, x, 4.3, 1, 1, facecolor=soft)
            write(axes, x + 0.5, 4.8, f"{t}", color=strong, fontsize=9)
    for edge in starts:
        axes.plot([left + edge, left + edge], [4.1, 5.5], color=INK, linewidth=1.6)
        write(axes, left + edge, 5.9, f"{edge}")
    note = "padded, (batch, seq, ...):\n21 positions, 7 of them padding"
    write(axes, left + longest + 0.5, 1.5, note, ha="left", linespacing=1.5)
    write(axes, left, 3.7, "packed, (total, ...): 14 positions", ha="left")
    write(axes, left - 0.5, 5.9, "cu_seqlens", ha="right", family="monospace", fontsize=9)
    return figure


def paged() -> Figure:
    """Two sequences whose keys lie in pages of one pool."""
    table: tuple[tuple[int | None, ...], ...] = ((4, 1, 2), (0, 5, None))
    seqlens, page_size = (10, 6), 4
    owner = {page: (b, n) for b, row in enumerate(table) for n, page in enumerate(row)}
    figure, axes = plt.subplots(figsize=(7.6, 3.6))
    blank(axes, 17.0, 7.8)
    code = {"family": "monospace", "fontsize": 9}
    for x, name in ((4.1, "page_table"), (7.8, "cache_seqlens"), (14.2, "k_cache, v_cache")):
        write(axes, x, 0.4, name, **code)
    for b, (row, length) in enumerate(zip(table, seqlens, strict=True)):
        strong, soft = SEQUENCE_COLORS[b]
        y = 1.0 + 1.3 * b
        write(axes, 0.0, y + 0.5, f"sequence {b}", ha="left", color=strong)
        write(axes, 7.8, y + 0.5, f"{length}", color=strong)
        for n, page in enumerate(row):
            box(axes, 2.6 + n, y, 1, 1, facecolor=PAPER if page is None else soft)
            write(axes, 3.1 + n, y + 0.5, "-" if page is None else f"{page}", color=strong)
    for page in range(7):
        y = 1.0 + 0.95 * page
        write(axes, 11.7, y + 0.4, f"page {page}", ha="right", fontsize=9)
        for slot in range(page_size):
            x = 12.0 + 1.1 * slot
            box(axes, x, y, 1.1, 0.8)
            b, n = owner.get(page, (0, page_size))
            position = n * page_size + slot
            if position < seqlens[b]:
                strong, soft = SEQUENCE_COLORS[b]
                box(axes, x, y, 1.1, 0.8, facecolor=soft)
                write(axes, x + 0.55, y + 0.4, f"{position}", color=strong, fontsize=9)
    rule = (
        "Position t of sequence b is\nslot  t % page_size  of page\npage_table[b, t // page_size]."
    )
    write(axes, 0.0, 5.3, rule, ha="left", color=SLATE, linespacing=1.6)
    return figure


def measured_results(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Result name -> (truth in float64, plain PyTorch in `dtype`, flashtile in `dtype`)."""
    g = generator(0)
    inputs = qkv(g, B=1, M=384, N=384, Hq=4, Hk=4, D=64, dtype=dtype)
    dout = normal(g, 1, 384, 4, 64, dtype=dtype)

    def results(
        call: Callable[..., tuple[Tensor, Tensor]], leaf_dtype: torch.dtype
    ) -> list[Tensor]:
        leaves = [x.to(leaf_dtype).requires_grad_() for x in inputs]
        out, lse = call(*leaves)
        gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
        return [x.detach() for x in (out, lse, *gradients)]

    def reference(compute_dtype: torch.dtype) -> list[Tensor]:
        def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            result = attention_reference(*leaves, causal=True, compute_dtype=compute_dtype)
            return result.out, result.lse

        return results(call, compute_dtype)

    ours = results(partial(flashtile.attention, causal=True, return_lse=True), dtype)
    names = ("out", "lse", "dq", "dk", "dv")
    return dict(
        zip(names, zip(reference(torch.float64), reference(dtype), ours, strict=True), strict=True)
    )


def errors() -> Figure:
    """The largest error of every result as a fraction of what the rule of correctness allows."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    figure, panels = plt.subplots(1, 3, figsize=(8.0, 3.0), sharey=True, layout="constrained")
    for panel, dtype in zip(panels, dtypes, strict=True):
        measured = measured_results(dtype)
        for name, (truth, plain, ours) in measured.items():
            allowed = allowed_error(ours.dtype, truth, plain)
            for x, color, label in ((plain, ORANGE, "plain PyTorch"), (ours, BLUE, "flashtile")):
                error = float((x.double() - truth).abs().max()) / allowed
                panel.plot(name, error, "o", color=color, label=label)
        panel.axhline(1.0, color=RED, linewidth=1.5)
        panel.set_title(str(dtype).removeprefix("torch."))
        panel.set_ylim(0, 1.1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color=PAPER)
        panel.set_axisbelow(True)
    panels[0].set_ylabel("error / allowed error")
    panels[0].text(0, 1.02, "the rule", color=RED, va="bottom", fontsize=9)
    handles = panels[0].get_legend_handles_labels()[0][:2]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def float8_errors() -> Figure:
    """What float8 costs, and what each ingredient wins back: the committed measurement."""
    with (RESULTS / "cpu" / "fp8-accuracy.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    for head_dim, color in (("64", ORANGE), ("128", BLUE), ("256", GREEN)):
        found = [row for row in rows if row["head_dim"] == head_dim]
        x, spread = ([float(row[name]) for row in found] for name in ("rmse", "spread"))
        y = [schemes.index(row["scheme"]) for row in found]
        style = {"fmt": "o", "color": color, "capsize": 2, "elinewidth": 0.8}
        axes.errorbar(x, y, xerr=spread, label=f"head dim {head_dim}", **style)
    axes.set_yticks(range(len(schemes)), schemes)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="root mean square error against float64")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color=DONE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="center left")
    return figure


def float8_gradients() -> Figure:
    """What a backward in float8 would cost: errors, and the loss of a small GPT."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    with (RESULTS / "cpu" / "fp8-backward.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["head_dim"] == "128"]
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    for gradient, color in (("dq", ORANGE), ("dk", BLUE), ("dv", GREEN)):
        for inputs, marker in (("normal", "o"), ("outliers", "x")):
            found = [row for row in rows if (row["gradient"], row["inputs"]) == (gradient, inputs)]
            x, y = zip(
                *((float(row["rmse"]), schemes.index(row["scheme"])) for row in found), strict=True
            )
            left.scatter(x, y, color=color, marker=marker, label=f"{gradient}, {inputs}")
    left.set_yticks(range(len(schemes)), schemes)
    left.invert_yaxis()
    left.set(xscale="log", xlabel="relative root mean square error, head dim 128")
    left.legend(frameon=False, loc="center left")
    with (RESULTS / "cpu" / "fp8-backward-training.csv").open(encoding="utf-8") as file:
        steps = [row for row in csv.DictReader(file) if row["held_out"]]
    colors = (INK, GREY, BLUE, GREEN, RED)
    names = dict.fromkeys(row["scheme"] for row in steps)
    for index, (name, color) in enumerate(zip(names, colors, strict=True)):
        held_out: dict[int, list[float]] = {}  # of every seed, by step
        for row in steps:
            if row["scheme"] == name:
                held_out.setdefault(int(row["step"]), []).append(float(row["held_out"]))
        mean = [sum(losses) / len(losses) for losses in held_out.values()]
        below = [m - min(losses) for m, losses in zip(mean, held_out.values(), strict=True)]
        above = [max(losses) - m for m, losses in zip(mean, held_out.values(), strict=True)]
        style = {"color": color, "fmt": "o-", "markersize": 3, "linewidth": 1, "capsize": 2}
        x = [step + 3 * (index - 2) for step in held_out]
        right.errorbar(x, mean, yerr=(below, above), label=name, **style)
    right.set(xlabel="step", ylabel="held-out loss, nats a byte", ylim=(2.28, 3.1))
    right.set_title("mean and range of four seeds, points set apart", fontsize=9)
    right.legend(frameon=False, loc="upper right", fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=DONE, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


FIGURES = (
    tiles,
    online_softmax,
    causal,
    shapes,
    classified,
    block_mask,
    varlen,
    paged,
    errors,
    float8_errors,
    float8_gradients,
)


def draw_all(folder: Path, drawings: Sequence[Callable[[], Figure]] = FIGURES) -> None:
    """Write every picture into `folder`, named after its function."""
    folder.mkdir(exist_ok=True)
    for draw in drawings:
        figure = draw()
        path = folder / f"{draw.__name__}.png"
        figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.15)
        plt.close(figure)


if __name__ == "__main__":
    draw_all(Path(__file__).parent / "figures")
