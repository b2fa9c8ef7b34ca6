"""Interpreted kernels are launched again as compiled ones are."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.gpu import launch_cache
from flashtile.gpu.launch import Launch


class AsCompiled:
    """An interpreted kernel with the interface of compiled ones: ``compiled[grid](*args)``."""

    def __init__(self, launch: Launch):
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch.kernel[grid]


def repeat_interpreted(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every new launch from here on; later calls like it repeat the launch."""
    made: list[Launch] = []
    interpret = Launch._run

    def run(launch: Launch) -> AsCompiled:
        made.append(launch)
        interpret(launch)
        return AsCompiled(launch)

    monkeypatch.setattr(Launch, "_run", run)
    monkeypatch.setattr(launch_cache, "_prepared", {})
    monkeypatch.setattr(launch_cache, "_compiled", {})
    return made
