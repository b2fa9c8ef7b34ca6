"""Run FlashAttention's own tests, unmodified, with flashtile instead of flash_attn.

    git clone https://github.com/Dao-AILab/flash-attention
    pip install einops
    python -m benchmarks.peer_tests flash-attention tests/test_flash_attn.py --cases 500

FlashAttention-3's `hopper/test_flash_attn.py` and FlashAttention-4's
`tests/cute/test_flash_attn.py` work in the same way. A random sample of the file's cases runs
under pytest; `--seed` repeats it, and `--piece` divides it among processes. Where there is no CUDA
device, the device "cuda" in the file becomes "cpu", and `torch.cuda` reports the properties of an
A100. A case that takes longer than `--case-seconds` is stopped, and after `--seconds` no new one
begins; neither counts as passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import random
import re
import signal
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile
from flashtile.cli import integer
from flashtile.integrations import flash_attn


class TookTooLong(BaseException):
    """Raised inside a case; no `except Exception` of a test may catch it."""


class Sample:
    """The pytest plugin that draws the cases, enforces the time limits and counts."""

    def __init__(
        self, cases: int, seed: int, piece: str, case_seconds: int, seconds: float
    ) -> None:
        self.cases, self.seed, self.case_seconds = cases, seed, case_seconds
        self.piece, self.pieces = map(int, piece.split("/"))
        self.seconds, self.end = seconds, float("inf")
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)  # of what `-k` has left
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        print(f"{len(items)} cases collected")
        if self.cases < len(items):
            items[:] = random.Random(self.seed).sample(items, self.cases)
        items[:] = items[self.piece - 1 :: self.pieces]
        self.end = time.monotonic() + self.seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        signal.signal(signal.SIGALRM, self._stop)
        signal.alarm(self.case_seconds)
        try:
            return (yield)
        except TookTooLong:
            self.counts["stopped"] += 1
            pytest.skip(f"stopped after {self.case_seconds} s")
        finally:
            signal.alarm(0)

    def _stop(self, *_: Any) -> None:
        raise TookTooLong

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "skipped":
            reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else "")
            self.reasons[reason.removeprefix("Skipped: ") or "the test gives no reason"] += 1
            self.counts["skipped"] += not reason.startswith("Skipped: stopped")
        elif report.when == "call" or report.outcome == "failed":
            self.counts[report.outcome] += 1
        if report.outcome == "failed":  # at once, since the run may be stopped before its end
            print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)
        if report.when == "teardown" and sum(self.counts.values()) % 10 == 0:
            print(f"\n{self.summary()}", flush=True)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        if time.monotonic() > self.end:
            pytest.exit("out of time", returncode=0)

    def summary(self) -> str:
        """The counts of the cases so far."""
        return ", ".join(
            f"{self.counts[outcome]} {outcome}"
            for outcome in ("passed", "failed", "skipped", "stopped")
        )


def on_cpu(source: str) -> str:
    """A test file whose device "cuda" is "cpu"."""
    source = re.sub(r"""(['"])cuda(:\d+)?\1""", r"\1cpu\1", source)
    return source.replace(".cuda()", ".cpu()")


@contextlib.contextmanager
def cuda_answers() -> Iterator[None]:
    """`torch.cuda` with the answers of an A100 to what tests ask it."""
    answers: dict[str, Any] = {
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            total_memory=80 * 2**30, multi_processor_count=108
        ),
        "synchronize": lambda device=None: None,
        "is_bf16_supported": lambda: True,
        "empty_cache": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        yield


def lend_cute_modules(checkout: Path, is_on_cpu: bool) -> None:
    """Other imports of FlashAttention-4's tests: its reference, from the checkout, and two names
    that tests of its own kernels use."""
    source = (checkout / "flash_attn/cute/testing.py").read_text()
    testing = types.ModuleType("flash_attn.cute.testing")
    exec(on_cpu(source) if is_on_cpu else source, vars(testing))
    cache_utils = types.ModuleType("flash_attn.cute.cache_utils")
    vars(cache_utils)["JITCache"] = dict
    interface = importlib.import_module("flash_attn.cute.interface")
    vars(interface)["_flash_attn_bwd_sparse_mla"] = None
    for module in (testing, cache_utils):
        sys.modules[module.__name__] = module
        setattr(sys.modules["flash_attn.cute"], module.__name__.rpartition(".")[2], module)


def main() -> int:
    """Run the sample; the exit code is pytest's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of flash-attention")
    parser.add_argument("file", help="a test file, from the checkout's root; ::test for one test")
    integer(parser, "--cases", 500, "cases in the sample")
    integer(parser, "--seed", 0, "seed that draws the sample")
    integer(parser, "--case-seconds", 60, "seconds after which a case is stopped")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="seconds after which no new case begins (default: no limit)",
    )
    parser.add_argument(
        "--piece", default="1/1", help="i/n: the i-th of n parts of the sample (default: 1/1)"
    )
    parser.add_argument("-k", default="", help="only these tests, as in pytest (default: all)")
    arguments = parser.parse_args()

    sample = Sample(
        arguments.cases,
        arguments.seed,
        arguments.piece,
        arguments.case_seconds,
        arguments.seconds,
    )
    name, _, test = arguments.file.partition("::")
    source = (arguments.checkout / name).read_text()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not torch.cuda.is_available():
            source = on_cpu(source)
            stack.enter_context(cuda_answers())
        file = folder / Path(name).name
        file.write_text(source)
        stack.enter_context(flash_attn.install(force=True))
        beside = (arguments.checkout / name).parent  # where the file has its own modules
        sys.path.append(str(beside))
        if beside.name == "cute":
            lend_cute_modules(arguments.checkout, not torch.cuda.is_available())
        options = ["-q", "-s", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider"]
        options += [f"--rootdir={folder}", f"{file}::{test}" if test else str(file)]
        if arguments.k:
            options += ["-k", arguments.k]
        code = pytest.main(options, plugins=[sample])
    for reason, count in sample.reasons.most_common():
        print(f"{count} not run: {reason}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{arguments.file}, flashtile {flashtile.__version__}, torch {torch.__version__}, {device}"
    )
    print(sample.summary())
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
