"""How far the demo is: a bar on a terminal, elsewhere, as in a pipe, a line now and then."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

EVERY = 10.0  # seconds between two lines


class Progress:
    """One task after the other; use it in a ``with`` block."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Bar(
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.start = time.monotonic()

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.bar.stop()

    def begin(self, description: str, total: int) -> None:
        """Begin a task of `total` parts."""
        self.description, self.done, self.total = description, 0, total
        self.task = self.bar.add_task(description, total=total)
        self._print()

    def advance(self) -> None:
        """Another part is done."""
        self.done += 1
        self.bar.advance(self.task)
        if time.monotonic() - self.printed > EVERY:
            self._print()

    def _print(self) -> None:
        self.printed = time.monotonic()
        if not self.console.is_terminal:
            seconds = self.printed - self.start
            self.console.print(
                f"  {self.description}: {self.done} of {self.total}, {seconds:.0f} s"
            )
