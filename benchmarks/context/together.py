"""Steps that all ranks make together, so that a failure on one of them is known to all.

Ranks talk about failures over gloo, which works while a GPU waits for a rank that has failed.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

DEADLINE = 100.0  # seconds that a GPU may take for a step, compilation on another rank included


class Unsupported(Exception):
    """Why a peer cannot run a case."""


class Stuck(Exception):
    """A GPU waits for ever, so nothing else can run on it."""


def connected() -> str:
    """Connect the processes that ``torchrun`` started, on "cuda" or "cpu", which it returns."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return "cpu"
    bound = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(bound)
    dist.init_process_group("nccl", device_id=bound)
    return "cuda"


class Team(NamedTuple):
    """The ranks, what they compute on, and how they talk about it."""

    device: str  # "cpu" or "cuda"
    control: Any  # a gloo group of all ranks

    @classmethod
    def of(cls, device: str) -> Team:
        """The ranks of the default group."""
        return cls(device, dist.new_group(backend="gloo", timeout=timedelta(minutes=5)))

    def tell(self, mine: Any) -> list[Any]:
        """What every rank says."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self.control)
        return everyone

    def problem(self, step: Callable[[], object]) -> str:
        """Make a step on all ranks and wait for their GPUs. The same text on all of them says why
        it failed; "" if it did not.

        Raises:
            Stuck: some rank waits for ever, perhaps for one that failed.
        """
        mine, is_stuck = "", False
        try:
            step()
            self.finish()
        except Stuck as stuck:
            mine, is_stuck = str(stuck), True
        except Exception as failure:  # whatever it is, the other ranks wait to be told
            mine = _text(failure)
        said = self.tell((is_stuck, mine))
        failed = [(stuck, rank, text) for rank, (stuck, text) in enumerate(said) if text]
        if not failed:
            return ""
        # What failed comes before what waits for it.
        _, rank, text = min(failed)
        if any(stuck for stuck, _ in said):
            raise Stuck(f"rank {rank}: {text}")
        return text if len({text for _, text in said}) == 1 else f"rank {rank}: {text}"

    def finish(self) -> None:
        """Wait for this rank's GPU.

        Raises:
            Stuck: it takes longer than `DEADLINE`.
        """
        if self.device == "cpu":
            return
        event = torch.cuda.Event()
        event.record()
        limit = time.monotonic() + DEADLINE
        while not event.query():
            if time.monotonic() > limit:
                raise Stuck(f"the GPU is not done after {DEADLINE:.0f} s")
            time.sleep(1e-4)

    def meet(self) -> None:
        """Start together: GPUs wait for each other, and the hosts go on."""
        if self.device == "cpu":
            dist.barrier()
        else:
            dist.all_reduce(torch.zeros(1, device=self.device))


def _text(failure: Exception) -> str:
    """The type, the first line and the source line of an error."""
    if isinstance(failure, Unsupported):
        return str(failure)
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    lines = str(failure).strip().splitlines() or [""]
    file = frame.filename.rsplit("/", 1)[-1]
    return f"{type(failure).__name__}: {lines[0]} ({file}:{frame.lineno})"
