"""Draws the timeline of lesson 8 from the trace that was recorded on a GPU, for both themes.

Before there is a trace there is no picture, and the page says so (`performance.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from figures import BLUE, GREEN, GREY, MINT, ORANGE, RED, RESULTS, SKY
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from plots import THEMES

TRACE = RESULTS / "h200" / "lesson" / "timeline.json"
SHOWN = ("everything", "no ping-pong", "no overlap in a warpgroup", "no roles")
FIRST = 2  # the step with which a panel begins: by then all roles have events
STEPS = 4  # of the first schedule; all panels show as many cycles

# Between an event and the one before it a role does this.
PRODUCER = {
    "K slot empty": ("waits for an empty slot", GREY),
    "K copy issued": ("starts a copy", GREEN),
    "V slot empty": ("waits for an empty slot", GREY),
    "V copy issued": ("starts a copy", GREEN),
}
CONSUMER = {
    "K full": ("waits for K", RED),
    "turn": ("waits for its turn", GREY),
    "products issued": ("issues two products", BLUE),
    "S": ("waits for S", SKY),
    "softmax": ("softmax", ORANGE),
    "O": ("waits for O", MINT),
}


def legend() -> list[Patch]:
    """What the colours mean."""
    named: dict[str, dict[str, None]] = {}
    for name, colour in (*CONSUMER.values(), *PRODUCER.values()):
        named.setdefault(colour, {})[name] = None
    return [Patch(color=colour, label=", ".join(names)) for colour, names in named.items()]


def draw(trace: dict[str, Any]) -> Figure:
    """A panel for each schedule, with a row for each role; time is in cycles."""
    schedules = {name: trace["schedules"][name] for name in SHOWN}
    window = STEPS * schedules[SHOWN[0]]["stages"]["step"]
    heights = [1 + len(found["timeline"]) for found in schedules.values()]
    figure, grid = plt.subplots(
        len(SHOWN), 1, figsize=(9.2, 0.42 * sum(heights)), sharex=True, layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axes, (name, found) in zip(grid, schedules.items(), strict=True):
        panel(axes, name, found, trace["events"], window)
    grid[-1].set_xlabel("cycles of the multiprocessor")
    figure.legend(handles=legend(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def panel(
    axes: Axes, name: str, found: dict[str, Any], events: dict[str, list[str]], window: float
) -> None:
    """The roles of one schedule, from the beginning of a step of the first consumer."""
    roles = found["timeline"]
    begin = roles["consumer 1"][FIRST][0]
    for row, (role, steps) in enumerate(roles.items()):
        kind = role.split()[0]
        meaning = {"producer": PRODUCER, "consumer": CONSUMER}[kind]
        for step in steps:
            for event, start, stop in zip(events[kind][1:], step, step[1:], strict=False):
                left, right = max(start - begin, 0), min(stop - begin, window)
                if right > left:
                    axes.barh(row, right - left, 0.72, left, color=meaning[event][1], linewidth=0)
    titles = list(roles) if len(roles) > 1 else ["both warpgroups"]
    axes.set_yticks(range(len(roles)), titles)
    axes.set_ylim(len(roles) - 0.5, -0.5)
    axes.set_xlim(0, window)
    axes.set_title(f"{name}: {found['stages']['step']:,.0f} cycles a step", fontsize=10, loc="left")
    axes.tick_params(axis="y", length=0)


def write_all(folder: Path, source: Path = TRACE) -> None:
    """Write hopper_timeline_{light,dark}.png, if there is a trace."""
    if not source.exists():
        return
    folder.mkdir(exist_ok=True)
    trace = json.loads(source.read_text(encoding="utf-8"))
    for theme, ink in THEMES.items():
        inked = ("text.color", "xtick.color", "ytick.color", "axes.labelcolor", "axes.edgecolor")
        style = dict.fromkeys((*inked, "axes.titlecolor"), ink)
        with plt.rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
            figure = draw(trace)
            path = folder / f"hopper_timeline_{theme}.png"
            figure.savefig(path, dpi=160, transparent=True)
            plt.close(figure)
