"""Fixtures of all tests: the backends under test, seeds that can be repeated, poisoned buffers."""

from __future__ import annotations

import gc
import os
import random
import zlib
from collections.abc import Iterator

import pytest
import torch
from conformance.devices import carry_calls, device_of
from poison import poisoned_makers

import flashtile
from flashtile.backends.cpu import plan

# One line adds a backend to the conformance suite. Calls that it refuses are skipped with the
# reasons that it gives.
BACKENDS = [
    "cpu",
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param("hopper", marks=pytest.mark.gpu),
]


# Modules and tests stay until the end. Looking through 800,000 objects again and again took a third
# of the time in which tests are collected.
gc.disable()

# For each kind of device that it does not find, the public function writes down its caller's stack.
if not torch.cuda.is_available():
    torch.manual_seed = torch.default_generator.manual_seed


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # Worker processes inherit the environment, so one number repeats a whole run.
    os.environ.setdefault("FLASHTILE_SEED", str(random.SystemRandom().randrange(2**31)))


def pytest_report_header(config: pytest.Config) -> str:
    gpu = "" if torch.cuda.is_available() else "; no CUDA device: tests marked gpu are left out"
    seed = f"FLASHTILE_SEED={os.environ['FLASHTILE_SEED']} repeats this run's inputs"
    return f"flashtile: {seed}{gpu}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    # Deselected, not skipped: a thousand lines of "no CUDA device" would hide real skips.
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend under test; calls are copied to its device."""
    name = str(request.param)
    device = device_of(name)
    if device.type != "cpu":
        carry_calls(monkeypatch, device)
    return name


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed for each test and run, printed when the test fails.

    Every test starts from it, so that its inputs do not depend on the tests that ran before it in
    the same process.
    """
    base = os.environ["FLASHTILE_SEED"]
    number = zlib.crc32(f"{base} {request.node.nodeid}".encode())
    print(f"inputs of this test: seed {number}; FLASHTILE_SEED={base} repeats the run")
    random.seed(number)
    torch.manual_seed(number)
    return number


@pytest.fixture
def small_cpu_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the CPU whose borders short sequences cross."""
    for name in ("PLAIN_BLOCK_M", "PLAIN_BLOCK_N"):
        monkeypatch.setattr(plan, name, 16)
    for name in ("NATIVE_WINDOW_BLOCK_M", "NATIVE_SPANS_BLOCK_M", "NATIVE_BIAS_BLOCK_M"):
        monkeypatch.setattr(plan, name, 24)
    flashtile.clear_caches()


@pytest.fixture
def poisoned_buffers() -> Iterator[None]:
    """Fill uninitialised buffers of flashtile with NaN, so that unwritten elements are found.

    Calls that were prepared before have allocators of their own, so they are forgotten.
    """
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, replacement in poisoned_makers():
            patch.setattr(owner, name, replacement)
        flashtile.clear_caches()
        yield
    flashtile.clear_caches()
