"""The process of one tree: measures a job at a time, with the flashtile of the folder it starts in.

`benchmarks` is that of the parent process for every tree, and so are the inputs, so only flashtile
differs. Its results do not travel: a `Trace` of each does, small enough to compare in the parent.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import flashtile
from flashtile.cli.machine import provenance
from flashtile.cli.timing import Timer, timer_for

from ..measure import HostTimer
from ..peers import failures_of
from ..prepared import DIFFERENTIATED, Skip
from ..run import Settings, Task, prepare
from ..shapes import make_inputs
from .jobs import GRAPH, HOST, Job

# The folder of the tree is the current one, which comes first on Python's path; flashtile is
# imported from there before the folder that `benchmarks` comes from is put in front of it.
START = (
    "import sys, flashtile; sys.path.insert(0, sys.argv[1]); "
    "from benchmarks.compare_trees.worker import main; main(*sys.argv[2:])"
)
SIGNS = 4  # random combinations of a row that its trace keeps
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # a large odd number, as 64 bits with a sign


@dataclass(frozen=True)
class Request:
    """A job to run once, and then `calls` times by its clock."""

    job: Job
    calls: int = 0
    traced: bool = False  # whether to answer with traces of the results, too


class Trace(NamedTuple):
    """What stands for a tensor of results: equal digests mean equal bits; see `trace`."""

    digest: int
    rows: Tensor  # float32 (rows, SIGNS)


@dataclass(frozen=True)
class Answer:
    """Milliseconds of each timed call, traces of the results; or why there are none."""

    times: list[float] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    backend: str = ""
    skipped: str = ""


def main(descriptor: str, device: str) -> None:
    """Say where this flashtile comes from, then answer requests until the parent hangs up."""
    here = Path.cwd()
    if not Path(flashtile.__file__).resolve().is_relative_to(here.resolve()):
        sys.exit(f"{here} has no flashtile; {flashtile.__file__} was imported")
    parent = Connection(int(descriptor))
    timers: dict[str, Timer] = {}
    send(parent, provenance(device, ""))
    while True:
        try:
            request = receive(parent)
        except EOFError:
            return
        assert isinstance(request, Request)
        if request.job.clock not in timers:
            host = request.job.clock == HOST
            timers[request.job.clock] = HostTimer(device) if host else timer_for(device)
        send(parent, answer(request, device, timers[request.job.clock]))
        _check_device(device, keeps_memory=request.calls > 0)


def send(connection: Connection, message: object) -> None:
    """Send anything that `torch.save` can write; tensors go as bytes, not as shared memory."""
    stream = io.BytesIO()
    torch.save(message, stream)
    connection.send_bytes(stream.getvalue())


def receive(connection: Connection) -> object:
    """What `send` sent at the other end.

    Raises:
        EOFError: the other end hung up.
    """
    return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)


def answer(request: Request, device: str, timer: Timer) -> Answer:
    """Run the job, and time it if asked to; a failure becomes the answer's reason."""
    job = request.job
    settings = Settings(device=device, cuda_graph=job.clock == GRAPH)
    try:
        with failures_of(job.peer), torch.set_grad_enabled(job.direction in DIFFERENTIATED):
            inputs = make_inputs(job.case, device)
            task = Task(job.case, job.direction, inputs, settings, timer, {})
            prepared, call = prepare(job.peer, task)
            traces = []
            if request.traced:
                results = pytree.tree_leaves(prepared.call(job.direction)())
                traces = [trace(x) for x in results if isinstance(x, Tensor)]
            times = [timer(call) for _ in range(request.calls)]
    except Skip as reason:
        return Answer(skipped=str(reason))
    return Answer(times, traces, prepared.backend or "")


@torch.no_grad()
def trace(x: Tensor) -> Trace:
    """A digest of the bits of `x` (..., n), and `SIGNS` sums of each row with random signs.

    The mean square of the sums of a row estimates the square of its norm, without bias. The
    traces of two tensors therefore tell how far the tensors, and any of their rows, are apart.
    """
    words = x.contiguous().view(WORDS[x.element_size()])
    weights = torch.arange(1, x.numel() + 1, device=x.device) * ODD | 1
    digest = int((weights * words.flatten()).sum())
    random = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(0, 2, (x.shape[-1], SIGNS), generator=random) - 1
    return Trace(digest, (x.float().reshape(-1, x.shape[-1]) @ signs.to(x.device)).cpu())


def _check_device(device: str, keeps_memory: bool) -> None:
    """End this process after an error that leaves the device unusable; the parent starts another.

    A process that only compiles gives its memory back, because others compile beside it.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        if not keeps_memory:
            torch.cuda.empty_cache()
