"""Lesson 8: what each overlap is worth, and a timeline of one program, on a Hopper GPU.

    python -m examples.learn.hopper_ablation --output benchmarks/results/h200/lesson

checks every schedule against float64, times all of them next to flashtile's own kernel and cuDNN,
and writes `ablation.csv` and `timeline.json`. It takes about a minute; most of that is compiling.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.cli.machine import provenance
from flashtile.cli.timing import Timing, interleave, timer_for
from flashtile.testing import assert_close, attention_reference, floor_of, rounding_variance

from .hopper_attention import (
    CONSUMER_EVENTS,
    EVENTS,
    PRODUCER_EVENTS,
    ROLES,
    SIZE,
    Schedule,
    attention,
)

SCHEDULES = {
    "everything": Schedule(),
    "no ping-pong": Schedule(HAS_PING_PONG=False),
    "no overlap in a warpgroup": Schedule(HAS_OVERLAP=False),
    "neither": Schedule(HAS_PING_PONG=False, HAS_OVERLAP=False),
    "no roles": Schedule(HAS_ROLES=False, HAS_PING_PONG=False),
    "nothing": Schedule(HAS_ROLES=False, HAS_PING_PONG=False, HAS_OVERLAP=False),
}
ROLE_NAMES = ("producer", "consumer 1", "consumer 2")

# The size of the FlashAttention-3 paper's table 2.
BATCH, HEADS, TOKENS = 4, 16, 8448

# The picture begins with the third step that has events.
FEWEST_TOKENS = 1024

# Blocks of the timeline: some from the middle of a program from the middle of the launch.
SHOWN = 16


class Expected(NamedTuple):
    """What the rule of `flashtile.testing` needs to judge a result."""

    truth: Tensor  # in float64
    plain: Tensor  # of plain PyTorch, in the inputs' dtype
    floor: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, Q: Tensor, K: Tensor, V: Tensor) -> Expected:
        """From inputs (heads, tokens, d) on the CPU."""

        def reference(*qkv: Tensor, **how: Any) -> Tensor:  # the lesson's heads are its batch
            return attention_reference(*(x[:, :, None] for x in qkv), **how).out[:, :, 0]

        wide = [x.double() for x in (Q, K, V)]
        variance = reference(*wide, attend=rounding_variance(Q.dtype))
        plain = reference(Q, K, V, compute_dtype=Q.dtype)
        return cls(reference(*wide), plain, floor_of(variance), Q.dtype)

    def check(self, O: Tensor, seed: int | None = None) -> None:
        """Raise AssertionError unless O, on any device, is within the allowed error."""
        floor, dtype = self.floor, self.dtype
        assert_close("O", O.cpu(), self.truth, self.plain, floor=floor, dtype=dtype, seed=seed)


def check(dtype: torch.dtype, seed: int) -> None:
    """Every schedule on the GPU, traced and not: with one block of keys, an even and an odd number.

    Raises:
        AssertionError: a result differs from float64 by more than the rule allows.
    """
    torch.manual_seed(seed)
    for N in (128, 512, 1152):
        Q, K, V = (torch.randn(3, tokens, 128).to(dtype) for tokens in (384, N, N))
        expected = Expected.of(Q, K, V)
        Q, K, V = Q.cuda(), K.cuda(), V.cuda()
        for schedule in SCHEDULES.values():
            expected.check(attention(Q, K, V, schedule), seed)
            traced = replace(schedule, IS_TRACED=True)
            expected.check(attention(Q, K, V, traced, empty_trace(Q, K)), seed)


def check_last_rows(Q: Tensor, K: Tensor, V: Tensor) -> None:
    """Every schedule at full size: the last 128 rows of the first head and of the last one."""
    results = [attention(Q, K, V, schedule) for schedule in SCHEDULES.values()]
    for head in (0, len(Q) - 1):
        here = slice(head, head + 1)
        expected = Expected.of(Q[here, -128:].cpu(), K[here].cpu(), V[here].cpu())
        for O in results:
            expected.check(O[here, -128:])


def calls(Q: Tensor, K: Tensor, V: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Everything that is timed, on the same tensors (heads, tokens, 128)."""
    heads_first = [x.unflatten(0, (-1, HEADS)) for x in (Q, K, V)]
    tokens_first = [x.transpose(1, 2) for x in heads_first]

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*heads_first)

    found: dict[str, Callable[[], Tensor]] = {
        name: partial(attention, Q, K, V, schedule) for name, schedule in SCHEDULES.items()
    }
    found["flashtile"] = partial(flashtile.attention, *tokens_first, backend="hopper")
    found["cuDNN"] = cudnn
    return found


def times(Q: Tensor, K: Tensor, V: Tensor, budget_ms: float) -> list[dict[str, Any]]:
    """A line for each schedule and library: median and spread, in random order."""
    samples = interleave(calls(Q, K, V), timer_for("cuda"), budget_ms=budget_ms)
    operations = 4 * Q.shape[0] * Q.shape[1] * K.shape[1] * Q.shape[2]
    lines = []
    for name, milliseconds in samples.items():
        timing = Timing.of(milliseconds)
        lines.append(
            {
                "schedule": name,
                **{key: f"{value:.4f}" for key, value in timing._asdict().items()},
                "tflops": f"{operations / timing.median_ms / 1e9:.1f}",
                "samples": len(milliseconds),
                "dtype": str(Q.dtype).removeprefix("torch."),
                "batch": Q.shape[0] // HEADS,
                "heads": HEADS,
                "tokens": Q.shape[1],
                "head_dim": Q.shape[2],
            }
        )
    return lines


def empty_trace(Q: Tensor, K: Tensor) -> Tensor:
    """Room for every event: int32 (programs, ROLES, blocks, EVENTS)."""
    programs, blocks = Q.shape[0] * Q.shape[1] // SIZE.value, K.shape[1] // SIZE.value
    shape = (programs, ROLES.value, blocks, EVENTS.value)
    return torch.zeros(shape, dtype=torch.int32, device=Q.device)


def trace_of(Q: Tensor, K: Tensor, V: Tensor, schedule: Schedule) -> Tensor:
    """The clock at every event of a launch, see `since_first`."""
    trace = empty_trace(Q, K)
    for _ in range(3):  # the last launch counts: by then the GPU is warm
        attention(Q, K, V, replace(schedule, IS_TRACED=True), trace)
    return since_first(trace.cpu(), schedule)


def since_first(trace: Tensor, schedule: Schedule) -> Tensor:
    """Cycles since the first event of each program, int64 (programs, ROLES, blocks, EVENTS); -1
    where a schedule has no such event. The clock has 32 bits and wraps.
    """
    happened = torch.zeros_like(trace, dtype=torch.bool)
    happened[:, 1:, 1:, : len(CONSUMER_EVENTS)] = True
    happened[:, 0, :, : len(PRODUCER_EVENTS)] = True
    if not schedule.HAS_ROLES:
        happened[:, 0], happened[:, 2] = False, False
    role, block = (0, 0) if schedule.HAS_ROLES else (1, 1)
    cycles = (trace.long() - trace[:, role, block, 0].long()[:, None, None, None]) % 2**32
    return cycles.masked_fill(~happened, -1)


def timeline(trace: Tensor) -> dict[str, list[list[int]]]:
    """Some blocks of a program from the middle: the times of each block, by role."""
    program = trace[len(trace) // 2]
    first = max(1, (program.shape[1] - SHOWN) // 2)
    start = program[1, first, 0].item()
    return {
        name: [
            [time - start for time in times if time >= 0]
            for times in program[role, first : first + SHOWN].tolist()
        ]
        for role, name in enumerate(ROLE_NAMES)
        if (program[role, first] >= 0).any()
    }


def stages(trace: Tensor) -> dict[str, float]:
    """Median cycles of a consumer between an event and the one before it, and of a whole step."""
    found = {}
    steps = trace[:, 1:, 1:, : len(CONSUMER_EVENTS)]
    steps = steps[(steps >= 0).all(-1)]
    for number, event in enumerate(CONSUMER_EVENTS[1:], 1):
        found[event] = (steps[:, number] - steps[:, number - 1]).double().median().item()
    begins = trace[:, 1:, 1:, 0].flatten(0, 1)
    begins = begins[(begins >= 0).all(-1)]
    found["step"] = begins.diff().double().median().item() if begins.shape[1] > 1 else 0.0
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, measure, trace, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m examples.learn.hopper_ablation")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seq-len", type=int, default=TOKENS)
    parser.add_argument("--batch-size", type=int, default=BATCH)
    parser.add_argument("--budget-ms", type=float, default=4000.0, help="GPU time to measure")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.seq_len < FEWEST_TOKENS or given.seq_len % SIZE.value:
        parser.error(
            f"--seq-len: got {given.seq_len}, want a multiple of 128 from {FEWEST_TOKENS} on"
        )
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("This machine has no Hopper GPU: nothing is measured.")
        return
    check(torch.float16, given.seed)
    shape = (given.batch_size * HEADS, given.seq_len, 128)
    Q, K, V = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
    check_last_rows(Q, K, V)
    print("All results are right: their errors are within the rule of flashtile.testing.")
    lines = times(Q, K, V, given.budget_ms)
    command = (
        f"python -m examples.learn.hopper_ablation --output {given.output} --seed {given.seed}"
    )
    origin = provenance("cuda", command)
    given.output.mkdir(parents=True, exist_ok=True)
    write_csv(given.output / "ablation.csv", [line | origin for line in lines])
    traces = {name: trace_of(Q, K, V, schedule) for name, schedule in SCHEDULES.items()}
    write_json(given.output / "timeline.json", traces, origin | {"tokens": given.seq_len})
    for line in lines:
        print(f"{line['schedule']:26} {line['median_ms']:>8} ms {line['tflops']:>6} TFLOP/s")
    for name, trace in traces.items():
        shown = ", ".join(f"{event} {cycles:.0f}" for event, cycles in stages(trace).items())
        print(f"{name:26} cycles: {shown}")


def write_csv(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """The measured times."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def write_json(path: Path, traces: dict[str, Tensor], origin: dict[str, Any]) -> None:
    """The timelines and the medians."""
    events = {"producer": PRODUCER_EVENTS, "consumer": CONSUMER_EVENTS}
    schedules = {
        name: {"timeline": timeline(trace), "stages": stages(trace)}
        for name, trace in traces.items()
    }
    content = json.dumps({**origin, "events": events, "schedules": schedules})
    path.write_text(content.replace('"timeline"', '\n"timeline"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
