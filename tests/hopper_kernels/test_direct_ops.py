"""Ops next to attention are launched as attention is, without Triton's Python code: the driver gets
what Triton would pass for the same tensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if torch.cuda.is_available():
    pytest.skip("replaces the CUDA driver", allow_module_level=True)
if shutil.which("cc") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

from flashtile.call.layouts import Packed
from flashtile.gpu import launch_cache
from flashtile.ops.append import kernel as append
from flashtile.ops.gather import kernel as gather
from flashtile.ops.merge import kernel as merge
from flashtile.ops.quantize import Rotary, quantize_on_gpu
from flashtile.ops.quantize import kernel as quantize
from flashtile.ops.quantize.formula import Recipe
from flashtile.ops.rotary import kernel as rotary
from flashtile.quantize.tensors import rows_of
from flashtile.testing import cu_seqlens, generator, normal, packed_qkv, qkv, rotary_tables

from .fake_cuda import Driver, fake_driver

MODULES = (append, gather, merge, quantize, rotary)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with fake_driver(tmp_path_factory.mktemp("cuda")) as active:
        yield active


class Ops:
    """Stands between an op and `launch_cache`; compares each call with Triton's own launches."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.in_python: list[int] = []  # launches of each call through Triton's Python code

    def run_all(
        self, name: str, call: Any, given: Any, made: Any, describe: Any, *config: Any
    ) -> None:
        def run() -> Any:
            launch_cache.run_all(name, call, given, made, describe, *config)
            return made

        self.compared(run, given, describe)

    def allocate_and_run_all(
        self, name: str, call: Any, given: Any, allocators: Any, describe: Any, config: Any
    ) -> Any:
        def run() -> Any:
            return launch_cache.allocate_and_run_all(
                name, call, given, allocators, describe, config
            )

        return self.compared(run, given, describe)

    def compared(self, run: Callable[[], Any], given: Any, describe: Any) -> Any:
        thread = self.driver.thread
        before = thread.in_python
        with self.driver.launches() as got:
            made = run()
        self.in_python.append(thread.in_python - before)
        with self.driver.launches() as wanted:
            for launch in describe(given, made):
                launch.run()
        assert got == wanted
        return made


@pytest.fixture
def ops(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Ops:
    monkeypatch.setattr(launch_cache, "_prepared", {})
    monkeypatch.setattr(launch_cache, "_compiled", {})
    ops = Ops(driver)
    for module in MODULES:
        for name in ("run_all", "allocate_and_run_all"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(ops, name))
    return ops


def rotated(seed: int, batch: int = 2, where: int = 0, in_place: bool = False) -> None:
    g = generator(seed)
    whole = normal(g, batch * 4 * 2 * 32 + where, dtype=torch.bfloat16)
    x = whole[where:].view(batch, 4, 2, 32)
    out = x if in_place else torch.empty_like(x)
    rotary.rotate(x, out, *rotary_tables(17, 32, x.dtype), None, seed, None, False, False)


def rotated_by_lengths(seed: int) -> None:
    x = normal(generator(seed), 3, 1, 4, 64, dtype=torch.bfloat16)
    lengths = torch.full((3,), seed, dtype=torch.int32)
    tables = rotary_tables(17, 64, x.dtype)
    rotary.rotate(x, torch.empty_like(x), *tables, lengths, 0, None, True, False)


def merged(seed: int, parts: int = 3, dtype: torch.dtype = torch.bfloat16) -> None:
    g = generator(seed)
    shape = parts, 2, 4, 2
    merge.merge_parts(normal(g, *shape, 64), normal(g, *shape), dtype)


def gathered(seed: int, pages: int = 6) -> None:
    cache = [normal(generator(seed), pages, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    gather.gather_pages(*cache, table, torch.tensor([40, 9], dtype=torch.int32))


def quantized(seed: int, tokens: int = 70, rotates: bool = False) -> None:
    tensors = qkv(generator(seed), M=tokens, N=140, D=64, dtype=torch.bfloat16)
    tables = Rotary(*rotary_tables(140, 64, torch.bfloat16), False) if rotates else None
    rows = rows_of(*tensors[:2], None)
    quantize_on_gpu(*tensors, Recipe(), *rows, tables, multiprocessors=132)


def quantized_packed(seed: int, longest: int) -> None:
    tensors = packed_qkv(generator(seed), [70, 30], [70, 30], D=64, dtype=torch.bfloat16)
    starts = cu_seqlens([70, 30])
    rows = rows_of(*tensors[:2], Packed(starts, starts, longest, longest))
    quantize_on_gpu(*tensors, Recipe(), *rows, None, multiprocessors=132)


def appended(seed: int, tokens: int = 2) -> None:
    g = generator(seed)
    cache = [normal(g, 3, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
    new = [normal(g, 3, tokens, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
    append.append(*cache, *new, torch.full((3,), seed, dtype=torch.int32), *[None] * 5)


KINDS: list[Callable[[int], None]] = [
    rotated_by_lengths,
    lambda seed: rotated(0, in_place=seed > 99),
    lambda seed: rotated(0, in_place=True),
    lambda seed: rotated(0, batch=1),
    lambda seed: rotated(0, where=1),
    merged,
    lambda seed: merged(seed, parts=1),
    lambda seed: merged(seed, dtype=torch.float32),
    gathered,
    lambda seed: gathered(seed, pages=7),
    quantized,
    lambda seed: quantized(seed, tokens=64),
    lambda seed: quantized(seed, rotates=True),
    lambda seed: quantized_packed(seed, 70),
    lambda seed: quantized_packed(seed, 75),  # blocks and scales of the same shapes
    appended,
    lambda seed: appended(seed, tokens=1),
]


def test_ops_of_all_kinds_alternate(ops: Ops) -> None:
    for step in range(4):
        ops.in_python.clear()
        for kind in KINDS:
            kind(step)
        assert len(ops.in_python) == len(KINDS)
    assert ops.in_python == [0] * len(KINDS)


def test_a_position_of_its_own_for_each_step(ops: Ops) -> None:
    """The kernel is the same whatever the number, which 32 bits may not hold."""
    for position in (*range(5), 2**31 - 1, 2**31, 2**31, 2**31, 5):
        rotated(position)
    kinds = launch_cache.LaunchState, launch_cache.PreparedCall
    assert all(isinstance(x, kinds) for x in launch_cache._prepared.values())
    assert len(launch_cache._compiled) == 2
