"""Draws what the cost model of context parallelism predicts for many GPUs, from the committed
predictions of `benchmarks.context.simulate`."""

from __future__ import annotations

import csv
from typing import Any

import matplotlib.pyplot as plt
from figures import BLUE, GREEN, GREY, ORANGE, RESULTS
from matplotlib.figure import Figure

from flashtile.distributed.strategy import MACHINES, Link

STYLES = {
    "chosen by the model": {"color": BLUE, "marker": "o"},
    "gather": {"color": GREEN, "marker": "^"},
    "ring": {"color": ORANGE, "marker": "s"},
}
PASSES = {"both": "-", "forward": ":"}


def plan_model() -> Figure:
    """Efficiency against the number of GPUs: a prediction, and what has been measured."""
    with (RESULTS / "model" / "context.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if int(row["ranks"]) > 1]
    sizes = sorted({int(row["tokens"]) for row in rows})
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(3.6 * len(sizes), 4.0), sharey=True, layout="constrained"
    )
    for axes, tokens in zip(panels, sizes, strict=True):
        here = [row for row in rows if int(row["tokens"]) == tokens]
        for strategy, style in STYLES.items():
            for column, line in PASSES.items():
                points = [row for row in here if row["strategy"] == strategy]
                axes.plot(
                    [int(row["ranks"]) for row in points],
                    [float(row[column]) for row in points],
                    linestyle=line,
                    markersize=3.5 if line == "-" else 0,
                    label=strategy if line == "-" else None,
                    **style,
                )
        for column, face in (("both", BLUE), ("forward", "none")):
            points = [row for row in _measured(rows[0], tokens) if row["direction"] == column]
            axes.plot(
                [int(row["ranks"]) for row in points],
                [float(row["efficiency"]) for row in points],
                linestyle="",
                marker="*",
                markersize=10,
                color=BLUE,
                markerfacecolor=face,
            )
        axes.axvline(MACHINES["H200"].node, color=GREY, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks([2, 8, 64, 512, 4096], ["2", "8", "64", "512", "4096"])
        axes.set(xlabel="GPUs", ylim=(0, 1.03))
        axes.set_title(f"{tokens:,} tokens a GPU", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("predicted efficiency")
    panels[0].annotate(
        "one node", (MACHINES["H200"].node, 0.05), (4, 0), textcoords="offset points", fontsize=8
    )
    handles, labels = panels[0].get_legend_handles_labels()
    handles.append(plt.Line2D([], [], color=GREY, linestyle=PASSES["forward"]))
    labels.append("forward alone (dotted)")
    if any(_measured(rows[0], tokens) for tokens in sizes):
        handles.append(plt.Line2D([], [], color=BLUE, linestyle="", marker="*", markersize=10))
        labels.append("measured (hollow: forward alone)")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.suptitle(f"Lines are a model: {_assumptions(rows[0])}", fontsize=9)
    return figure


def _measured(predicted: dict[str, str], tokens: int) -> list[dict[str, str]]:
    """What flashtile reached over NCCL in calls in a row of the predicted kind."""
    found: list[dict[str, str]] = []
    for path in sorted(RESULTS.glob("*/context.csv")):
        with path.open(encoding="utf-8") as file:
            found += csv.DictReader(file)
    wanted = {
        "peer": "flashtile",
        "process_group": "nccl",
        "variant": "dense",
        "head_dim": predicted["head_dim"],
        "tokens": str(tokens),
    }
    return [
        row
        for row in found
        if all(row.get(name) == value for name, value in wanted.items())
        and f"{row['heads_q']}:{row['heads_kv']}" == predicted["heads"]
        and row["efficiency"]
    ]


def _assumptions(row: dict[str, str]) -> str:
    """What the predictions take for granted."""
    machine = MACHINES[row["machine"]]
    return (
        f"one causal sequence, {row['heads']} heads of {row['head_dim']}, bfloat16, forward + "
        f"backward\n{machine.name} with kernels of {machine.forward / 1e12:g} / "
        f"{machine.backward / 1e12:g} TFLOP/s; {_link(machine.inside)} inside nodes of "
        f"{machine.node}, {_link(machine.across)} between them; no stragglers, no congestion"
    )


def _link(link: Link) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} µs"


FIGURES: tuple[Any, ...] = (plan_model,)
