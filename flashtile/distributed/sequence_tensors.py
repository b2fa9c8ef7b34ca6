"""The small tensors that tell a backend which sequences a call of a stage has.

They depend only on the schedule, so the calls of all layers and steps share them, and a GPU never
waits for the host to copy them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..lru import memoised
from ..positions import Positions
from ..problem import NO_RUN
from .schedule import starts


class SequenceTensors(NamedTuple):
    """Fields of `Operands`, int32."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    q_runs: Tensor | None
    k_runs: Tensor | None
    sequences: Tensor | None


def sequence_tensors(
    queries: tuple[Positions, ...],
    keys: tuple[Positions, ...],
    with_positions: bool,
    numbers: tuple[tuple[int, int], ...] | None,
    device: torch.device,
) -> SequenceTensors:
    """The tensors of a call with these rows in its sequences.

    Args:
        with_positions: whether the backend needs to know where the rows stand.
        numbers: `Operands.sequences`; None if nothing counts by them.
    """
    return _made(queries, keys, with_positions, numbers, device, stream_of(device))


def indices(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 (numbers,)."""
    return _indices(numbers, device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """The current stream. What was made on it may still be read there when a cache drops it, so
    another stream gets tensors of its own."""
    if device.type != "cuda":
        return 0
    number = torch.cuda.current_device() if device.index is None else device.index
    raw: int = torch._C._cuda_getCurrentRawStream(number)  # without an object for each call
    return raw


@memoised(256)
def _indices(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)


@memoised(256)
def _made(
    queries: tuple[Positions, ...],
    keys: tuple[Positions, ...],
    with_positions: bool,
    numbers: tuple[tuple[int, int], ...] | None,
    device: torch.device,
    stream: int,
) -> SequenceTensors:
    def int32(values: Sequence[object], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device).view(shape)

    with torch.inference_mode(False):  # later calls may need gradients
        q_runs = k_runs = None
        if with_positions:
            width = _width(queries, keys)
            q_runs, k_runs = (int32(_runs(x, width), -1, width, 2) for x in (queries, keys))
        return SequenceTensors(
            int32(starts(queries), -1),
            int32(starts(keys), -1),
            q_runs,
            k_runs,
            None if numbers is None else int32(numbers, -1, 2),
        )


def _width(*sides: Sequence[Positions]) -> int:
    """The number of runs of every sequence: a power of two, so that GPUs need few kernels."""
    most = max((len(positions.runs) for side in sides for positions in side), default=0)
    return max(2, 1 << (most - 1).bit_length())


def _runs(sequences: Sequence[Positions], width: int) -> list[list[tuple[int, int]]]:
    """`Operands.q_runs` as lists."""
    used = [[(run.row, run.position) for run in positions.runs] for positions in sequences]
    return [runs + [(NO_RUN, 0)] * (width - len(runs)) for runs in used]
