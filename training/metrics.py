"""The speed of a run, and the files that record its metrics."""

from __future__ import annotations

import csv
import math
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

# Dense bfloat16 matrix products of one device in TFLOP/s, from the makers' data sheets; the first
# name found in the device's own name counts.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0}
NAN = float("nan")


@dataclass
class Row:
    """One line of metrics.csv; NaN where a number was not measured in that step."""

    step: int  # steps done
    tokens: int  # trained on so far, over all devices
    loss: float  # nats a token, mean of the step's batch
    validation_loss: float = NAN  # nats a token
    validation_bits_per_byte: float = NAN
    learning_rate: float = NAN
    gradient_norm: float = NAN  # before clipping
    tokens_per_second: float = NAN  # over all devices, since the row before
    mfu: float = NAN  # model FLOPs over the devices' peak
    peak_memory_mib: float = NAN  # of this device; of the process on a CPU

    def __str__(self) -> str:
        """The most important numbers as text, without those that were not measured."""
        numbers = {
            "loss {:.3f}": self.loss,
            "validation perplexity {:.1f}": math.exp(min(self.validation_loss, 700.0)),
            "{:.3f} bits per byte": self.validation_bits_per_byte,
            "{:,.0f} tokens/s": self.tokens_per_second,
            "MFU {:.1%}": self.mfu,
            "{:,.0f} MiB": self.peak_memory_mib,
        }
        return ", ".join(text.format(x) for text, x in numbers.items() if x == x)


class MetricsFile:
    """metrics.csv: a row is on the disk as soon as it is written."""

    def __init__(self, path: Path, after_step: int) -> None:
        """Keep the rows up to `after_step`: a resumed run writes the later ones again."""
        kept = [row for row in read_metrics(path) if row.step <= after_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(Row)])
        self._writer.writeheader()
        for row in kept:
            self.write(row)

    def write(self, row: Row) -> None:
        """Append one row."""
        self._writer.writerow(_measured(row))
        self._file.flush()


class TensorBoardFile:
    """The same rows as event files for TensorBoard, a curve for each column."""

    def __init__(self, folder: Path, after_step: int) -> None:
        """Hide the rows of later steps in TensorBoard, because a resumed run writes them again."""
        # Only trainer.tensorboard needs the package tensorboard.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1)

    def write(self, row: Row) -> None:
        """Append one row."""
        for name, value in _measured(row).items():
            if name != "step":
                self._writer.add_scalar(name, value, row.step)
        self._writer.flush()


class WandbFile:
    """The same rows as a run of Weights & Biases, a curve for each column.

    It sends nothing unless the environment says so: WANDB_MODE=online.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Begin a run, or with WANDB_RUN_ID and WANDB_RESUME continue one."""
        # Only trainer.wandb needs the package wandb.
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(project="flashtile", dir=folder, config=settings, mode=mode)

    def write(self, row: Row) -> None:
        """Append one row."""
        self._run.log(_measured(row), step=row.step)


def _measured(row: Row) -> dict[str, float]:
    """The columns of `row` that are not NaN."""
    return {name: value for name, value in asdict(row).items() if value == value}


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.csv; none when there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                step=int(line["step"]),
                tokens=int(line["tokens"]),
                **{key: float(line[key] or NAN) for key in list(line)[2:]},
            )
            for line in csv.DictReader(file)
        ]


class Meter:
    """Tokens a second and MFU; only the time spent in training steps counts."""

    def __init__(self, device: torch.device, devices: int, peak_tflops: float | None) -> None:
        self._device = device
        peak = known_peak_tflops(device) if peak_tflops is None else peak_tflops
        self._peak_flops = NAN if peak is None else peak * 1e12 * devices
        self._tokens, self._flops, self._seconds, self._began = 0, 0.0, 0.0, 0.0

    def start(self) -> None:
        """Start the clock, also again after validation or a checkpoint."""
        self._wait()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock, for example during validation or a checkpoint."""
        self._wait()
        self._seconds += time.perf_counter() - self._began

    def count(self, tokens: int, flops: float) -> None:
        """Count one training step of `tokens` tokens over all devices."""
        self._tokens += tokens
        self._flops += flops

    def read(self) -> tuple[float, float]:
        """(tokens a second, MFU) since the last reading; call it while the clock is stopped."""
        speed = self._tokens / self._seconds
        mfu = self._flops / self._seconds / self._peak_flops
        self._tokens, self._flops, self._seconds = 0, 0.0, 0.0
        return speed, mfu

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak, because a process may run several trainings. No effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mib(device: torch.device) -> float:
    """The most memory in use so far: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def known_peak_tflops(device: torch.device) -> float | None:
    """The peak of `device`, if PEAK_TFLOPS has it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
