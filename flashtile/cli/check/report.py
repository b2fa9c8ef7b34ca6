"""The report of a check, in Markdown or JSON: enough to repeat a failure elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from .judge import Outcome


@dataclass
class Results:
    """All results of a check."""

    machine: dict[str, Any]  # the result of `info.collect`
    device: str
    seed: int
    quick: bool
    outcomes: list[Outcome] = field(default_factory=list)
    times: list[list[str]] = field(default_factory=list)  # headings, then lines
    stopped: bool = False  # by the user

    @property
    def failures(self) -> list[Outcome]:
        return [x for x in self.outcomes if x.failures]

    @property
    def refused(self) -> list[Outcome]:
        return [x for x in self.outcomes if x.unsupported]

    @property
    def passed(self) -> bool:
        """Whether all cases ran, no call failed, and at least one is right."""
        some_right = len(self.refused) < len(self.outcomes)
        return some_right and not self.failures and not self.stopped


def verdict(results: Results) -> str:
    """The numbers of right, failed and unsupported calls in one line."""
    failed, refused = len(results.failures), len(results.refused)
    right = len(results.outcomes) - failed - refused
    text = f"{right} calls are right, {failed} FAILED, {refused} are not supported here"
    return f"stopped early: {text}" if results.stopped else text


def write(results: Results, path: Path) -> None:
    """Write the report: JSON if the file's name ends in .json, else Markdown."""
    as_text = as_json if path.suffix == ".json" else as_markdown
    path.write_text(as_text(results), encoding="utf-8")


def as_json(results: Results) -> str:
    """The report as JSON, for programs."""
    outcomes = [
        {
            "backend": x.case.backend,
            "dtype": x.case.dtype,
            "name": x.case.name,
            "call": x.call,
            "failures": list(x.failures),
            "unsupported": x.unsupported,
        }
        for x in results.outcomes
    ]
    content = {
        **_facts(results),
        "passed": results.passed,
        "machine": _machine(results),
        "outcomes": outcomes,
        "times": results.times,
    }
    return json.dumps(content, indent=1) + "\n"


def as_markdown(results: Results) -> str:
    """The report as Markdown, for people and bug reports."""
    facts = {**_facts(results), **_machine(results)["versions"]}
    lines = ["# flashtile check", "", f"**{verdict(results)}**", ""]
    lines += _table(["", ""], [[name, str(value)] for name, value in facts.items()])
    cpu, gpus = results.machine["cpu"], results.machine["gpus"]
    lines += ["", f"- {cpu['model']}, {cpu['threads']} threads, {cpu['vectors']}"]
    lines += [f"- {x['device']}: {x['name']}, capability {x['capability']}" for x in gpus]
    if results.failures:
        lines += ["", "## Failures"]
    for outcome in results.failures:
        lines += ["", f"### {outcome.case}", "", "```", outcome.call, *outcome.failures, "```"]
    lines += ["", "## Results", "", *_by_backend(results.outcomes)]
    if results.times:
        lines += ["", "## Speed", "", *_table(results.times[0], results.times[1:])]
    if results.refused:
        reasons = Counter((x.case.backend, x.unsupported) for x in results.refused)
        lines += ["", "## Not supported", ""]
        lines += [f"- {backend}: {reason} ({n})" for (backend, reason), n in reasons.items()]
    return "\n".join(lines) + "\n"


def _facts(results: Results) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "device": results.device,
        "seed": results.seed,
        "quick": results.quick,
    }


def _machine(results: Results) -> dict[str, Any]:
    """The result of `info` without folders, which contain the user's name."""
    return {name: results.machine[name] for name in ("versions", "cpu", "gpus", "backends")}


def _by_backend(outcomes: Sequence[Outcome]) -> list[str]:
    """The numbers of right, failed and refused calls of each backend and dtype."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for x in outcomes:
        what = "failed" if x.failures else "refused" if x.unsupported else "right"
        counts.setdefault((x.case.backend, x.case.dtype), Counter())[what] += 1
    columns = ("right", "failed", "refused")
    lines = [[*key, *(str(count[column]) for column in columns)] for key, count in counts.items()]
    return _table(["backend", "dtype", "right", "failed", "not supported"], lines)


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    cells = [headings, ["---"] * len(headings), *lines]
    return [f"| {' | '.join(line)} |" for line in cells]
