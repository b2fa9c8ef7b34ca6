"""Lesson 8's kernel run in PyTorch, roles as threads (`emulator.py`): its results, what overlaps,
and what becomes of a trace."""

from __future__ import annotations

import importlib
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from configurations import one_kind_each
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from examples.learn.hopper_ablation import (
    ROLE_NAMES,
    SCHEDULES,
    Expected,
    main,
    since_first,
    stages,
    write_json,
)
from examples.learn.hopper_attention import (
    CONSUMER_EVENTS,
    EVENTS,
    PRODUCER_EVENTS,
    ROLES,
    Schedule,
    attention,
    describe,
)

from . import emulator
from .test_forward_emulated import inline_asm, warpgroup_mma

UNWRITTEN = -1


class Clock:
    """Counts its readings, and knows how many products the reader had in flight at each."""

    def __init__(self) -> None:
        self.ticks = count()
        self.in_flight: list[int] = []

    def inline_asm(self, asm: str, constraints: str, args: list[Any], **more: Any) -> Any:
        if asm == "mov.u32 $0, %clock;":
            self.in_flight.append(len(emulator.context.products))
            return next(self.ticks)
        return inline_asm(asm, constraints, args, **more)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the lesson says and other kernels do not."""
    clock = Clock()
    monkeypatch.setitem(emulator.LANGUAGE, "max", torch.amax)
    monkeypatch.setitem(emulator.LANGUAGE, "inline_asm_elementwise", clock.inline_asm)
    monkeypatch.setattr(emulator, "warpgroup_mma", warpgroup_mma)
    return clock


def inputs(M: int, N: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(2, tokens, 128).to(dtype) for tokens in (M, N, N)]


def emulate(
    qkv: list[Tensor], schedule: Schedule, seed: int, trace: Tensor | None = None
) -> Tensor:
    O = torch.full_like(qkv[0], torch.nan)
    emulator.run(describe(*qkv, O, schedule, trace), seed)
    return O


@pytest.mark.parametrize(("schedule", "blocks"), one_kind_each(SCHEDULES.values(), [1, 2, 3, 6]))
def test_results(schedule: Schedule, blocks: int, seed: int):
    for round, dtype in enumerate((torch.bfloat16, torch.float16)):
        qkv = inputs(256, 128 * blocks, dtype)
        Expected.of(*qkv).check(emulate(qkv, schedule, seed + round), seed)


def traced(schedule: Schedule, blocks: int, seed: int) -> Tensor:
    """(programs, ROLES, blocks, EVENTS)"""
    trace = torch.full((4, ROLES.value, blocks, EVENTS.value), UNWRITTEN, dtype=torch.int32)
    how = Schedule(schedule.HAS_ROLES, schedule.HAS_PING_PONG, schedule.HAS_OVERLAP, IS_TRACED=True)
    qkv = inputs(256, 128 * blocks)
    Expected.of(*qkv).check(emulate(qkv, how, seed, trace), seed)
    return trace


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_role_records_its_events_in_order(schedule: Schedule, seed: int):
    trace = traced(schedule, 5, seed)
    wanted = torch.zeros_like(trace, dtype=torch.bool)
    wanted[:, 0, :, : len(PRODUCER_EVENTS)] = schedule.HAS_ROLES
    wanted[:, 1, 1:, : len(CONSUMER_EVENTS)] = True
    wanted[:, 2, 1:, : len(CONSUMER_EVENTS)] = schedule.HAS_ROLES
    assert torch.equal(trace != UNWRITTEN, wanted)
    for program, kept in zip(trace, wanted, strict=True):
        for role in range(ROLES.value):
            times = program[role][kept[role]]
            assert torch.equal(times, times.sort().values)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_only_with_overlap_is_a_product_in_flight_during_the_softmax(
    schedule: Schedule, clock: Clock, seed: int
):
    trace = traced(schedule, 4, seed)
    after = trace[:, 1:, 1:, CONSUMER_EVENTS.index("softmax")]
    times = after[after != UNWRITTEN].tolist()
    assert {clock.in_flight[time] for time in times} == {int(schedule.HAS_OVERLAP)}


def takers_of_turns(trace: Tensor) -> list[list[int]]:
    """For each program, whose turn it was, in order."""
    turns = trace[:, 1:, 1:, CONSUMER_EVENTS.index("turn")]
    consumer = torch.arange(2)[:, None].expand_as(turns[0]).flatten()
    return [consumer[times.flatten().argsort()].tolist() for times in turns]


def test_consumers_take_turns_only_with_ping_pong(seed: int):
    for drawn in range(seed, seed + 5):
        for takers in takers_of_turns(traced(Schedule(), 7, drawn)):
            assert takers == [0, 1] * 6
    freely = [
        takers_of_turns(traced(Schedule(HAS_PING_PONG=False), 7, drawn)) for drawn in range(5)
    ]
    assert any(takers != [0, 1] * 6 for programs in freely for takers in programs)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_trace_becomes_cycles_and_a_timeline(schedule: Schedule, seed: int, tmp_path: Path):
    trace = traced(schedule, 5, seed)
    cycles = since_first(trace, schedule)
    assert torch.equal(cycles == -1, trace == UNWRITTEN)
    for before, after in zip(trace, cycles, strict=True):
        happened = before != UNWRITTEN
        first = before[happened].min()
        assert torch.equal(after[happened], (before[happened] - first).long())
    wrapped = (trace.long() + 2**31 - 20).to(torch.int32)  # the clock passes its end
    assert torch.equal(since_first(wrapped, schedule), cycles)

    write_json(tmp_path / "timeline.json", {"a": cycles}, {"device": "none"})
    found = json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8"))["schedules"]["a"]
    roles = ROLE_NAMES if schedule.HAS_ROLES else ["consumer 1"]
    assert list(found["timeline"]) == list(roles)
    program = cycles[2]
    begin = program[1, 1, 0]
    for role, steps in found["timeline"].items():
        events = len(PRODUCER_EVENTS if role == "producer" else CONSUMER_EVENTS)
        wanted = program[ROLE_NAMES.index(role), 1:, :events] - begin
        assert steps == wanted.tolist()


def test_stages_are_differences_of_events():
    events = torch.tensor([0, 5, 15, 45, 145, 645, 700])  # 55 more until the next step begins
    cycles = torch.full((2, ROLES.value, 9, EVENTS.value), UNWRITTEN, dtype=torch.int64)
    cycles[:, 1, 1:] = 755 * torch.arange(8)[:, None] + events
    cycles[:, 2, 1:] = cycles[:, 1, 1:] + 300
    found = stages(cycles)
    assert list(found) == [*CONSUMER_EVENTS[1:], "step"]
    assert list(found.values()) == [5, 10, 30, 100, 500, 55, 755]


def test_the_page_names_every_schedule_and_event(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    tables, drawing = map(importlib.import_module, ("lesson_tables", "timeline_figures"))
    assert list(tables.LINES) == [*SCHEDULES, "flashtile", "cuDNN"]
    assert set(tables.PAPER) | set(drawing.SHOWN) <= set(SCHEDULES)
    assert tuple(drawing.PRODUCER) == PRODUCER_EVENTS[1:]
    assert tuple(drawing.CONSUMER) == CONSUMER_EVENTS[1:]


@pytest.mark.parametrize("tokens", ["896", "1100"])
def test_the_ablation_refuses(tokens: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--output", "nowhere", "--seq-len", tokens])
    wanted = f"--seq-len: got {tokens}, want a multiple of 128 from 1024 on"
    assert wanted in capsys.readouterr().err


def test_what_it_refuses():
    x, y = torch.zeros(2, 2, 128, 128, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"K: got shape \(2, 100, 128\), want \(2, a multiple of"):
        attention(x, y[:, :100], y[:, :100])
    with pytest.raises(ValueError, match=r"V: got shape \(1, 128, 128\), want \(2, "):
        attention(x, y, y[:1])
    with pytest.raises(ValueError, match=r"Q: got shape \(2, 128, 64\)"):
        attention(x[..., :64], y, y)
    with pytest.raises(ValueError, match=r"Q: got torch\.float32, want float16 or bfloat16"):
        attention(x.float(), y, y)
    with pytest.raises(ValueError, match=r"K: got torch\.bfloat16, want float16 or bfloat16, as Q"):
        attention(x, y.bfloat16(), y)
    with pytest.raises(ValueError, match="HAS_PING_PONG: got True, want False without HAS_ROLES"):
        Schedule(HAS_ROLES=False)
