"""The kernels of a call compile at the same time, with Triton's own compiler and no GPU."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, Thread, get_ident
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if torch.cuda.is_available():
    pytest.skip("replaces the CUDA driver", allow_module_level=True)

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.cache import triton_key

from flashtile import attention, attention_varlen, clear_caches
from flashtile.distributed import ContextParallel
from flashtile.gpu import described, launch, launch_cache
from flashtile.gpu.launch import Launch
from flashtile.gpu.launch_cache import run_all

from .fake_cuda import Driver, as_if_on_a_gpu, fake_driver
from .silent_communicator import SilentCommunicator

pytestmark = pytest.mark.skipif(knobs.runtime.interpret, reason="needs the compiler")


_kept: list[Any] = []  # Triton 3.9 unloads what nobody holds, which needs the driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with fake_driver(tmp_path_factory.mktemp("cuda")) as active:
        yield active


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


def kernels(fails: bool = False) -> tuple[Any, Any]:
    """Two kernels that nobody has compiled; the second one may not compile."""

    @triton.jit
    def first(x_ptr, n, C: tl.constexpr):
        tl.store(x_ptr + n, C)

    @triton.jit
    def second(x_ptr, n, C: tl.constexpr):
        tl.static_assert(C > 10, "the second kernel is wrong")
        tl.store(x_ptr + n, C + 1)

    @triton.jit
    def third(x_ptr, n, C: tl.constexpr):
        tl.store(x_ptr + n, C + 2)

    both = first, second if fails else third
    _kept.append(both)
    return both


class Watch:
    """Called before each compilation: waits for others, and writes down kernels and threads."""

    def __init__(self, patch: pytest.MonkeyPatch, together: int = 1):
        self.names: list[str] = []
        self.threads: set[int] = set()
        self.barrier = Barrier(together)
        patch.setattr(knobs.runtime, "jit_cache_hook", self)

    def __call__(self, *, fn: Any, **_: Any) -> None:
        self.names.append(fn.name.rpartition(".")[2])
        self.threads.add(get_ident())
        self.barrier.wait(timeout=60)


def call(both: tuple[Any, Any], x: torch.Tensor, n: int = 5) -> None:
    """A call with a launch of each kernel, of 2 and of 3 programs."""

    def describe(given: Any, made: Any) -> list[Launch]:
        arguments = {"x_ptr": given[0], "n": n, "C": 7}
        return [
            Launch(kernel, (size,), arguments) for kernel, size in zip(both, (2, 3), strict=True)
        ]

    run_all("pass", n, (x,), (), describe)


def sizes(made: Any) -> list[int]:
    return [launch.grid[0] for launch in made]


def test_kernels_compile_at_the_same_time_and_start_in_order(driver, monkeypatch):
    watch = Watch(monkeypatch, together=2)  # one after the other, the first would wait in vain
    both, x = kernels(), torch.zeros(16)
    for repeat in range(3):
        with driver.launches() as made:
            call(both, x)
        assert sizes(made) == [2, 3], repeat
    assert sorted(watch.names) == ["first", "third"]
    assert len(watch.threads) == 2 and get_ident() not in watch.threads


def test_launchers_are_made_at_the_same_time(driver, monkeypatch):
    """Triton 3.6 makes each with a C compiler."""
    together, make = Barrier(2), driver.launcher_cls

    def launcher(*args: Any) -> Any:
        together.wait(timeout=60)
        return make(*args)

    monkeypatch.setattr(driver, "launcher_cls", launcher)
    both, x = kernels(), torch.zeros(16)
    with driver.launches() as made:
        call(both, x)
    assert sizes(made) == [2, 3]


def test_threads_that_compile_share_the_hash_of_triton(driver):
    triton_key.cache_clear()
    call(kernels(), torch.zeros(16))
    assert triton_key.cache_info().misses == 1


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_kernels_compile(driver, monkeypatch, fails):
    enabled: list[bool] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **_: enabled.append(gc.isenabled()))
    with suppress(triton.CompilationError):
        call(kernels(fails), torch.zeros(16))
    assert enabled[:2] == [False, False] and gc.isenabled()


def test_what_both_consumers_call_is_parsed_once(driver, monkeypatch):
    parsed: dict[str, str] = {}

    def keep(*, src: Any, metadata_group: dict[str, str], **_: Any) -> None:
        parsed[src.name] = Path(metadata_group[f"{src.name}.source"]).read_text()

    monkeypatch.setattr(knobs.compilation, "listener", keep)
    x = torch.randn(1, 256, 2, 128, dtype=torch.float16, requires_grad=True)
    with as_if_on_a_gpu():
        attention(x, x, x, causal=True, backend="hopper")
    for function, kernel in (
        ("next_block", "forward_kernel"),
        ("probabilities", "backward_kernel"),
    ):
        found = re.findall(rf"func private @\S+\.{function}__", parsed[kernel])
        assert len(found) == 2, function  # with a mask, and without one


def test_a_parser_that_fails_in_a_thread_is_asked_again(driver, monkeypatch):
    """As Python's own may: see `launch._compile`."""
    compile_, failures = Launch.compile, []

    def fails_once(launch: Launch) -> Any:
        if not failures:
            failures.append(launch)
            raise SystemError("AST constructor recursion depth mismatch")
        return compile_(launch)

    monkeypatch.setattr(Launch, "compile", fails_once)
    both, x = kernels(), torch.zeros(16)
    with driver.launches() as made:
        call(both, x)
    assert failures and sizes(made) == [2, 3]


def test_an_error_has_its_own_message_and_leaves_no_trace(driver, monkeypatch):
    watch = Watch(monkeypatch)
    both, x = kernels(fails=True), torch.zeros(16)
    for _ in range(2):
        with (
            driver.launches() as made,
            pytest.raises(triton.CompilationError, match="the second kernel is wrong"),
        ):
            call(both, x)
        assert sizes(made) == []
    assert sorted(watch.names) == ["first", "second", "second"]  # what compiled is not lost
    assert launch_cache._prepared.get(launch_cache._key("pass", 5, (x,))) is None


def test_known_kernels_start_no_thread(driver, monkeypatch):
    both, x = kernels(), torch.zeros(16)
    call(both, x)
    monkeypatch.setattr(launch, "ThreadPoolExecutor", None)
    watch = Watch(monkeypatch)
    with driver.launches() as made:
        call(both, x, n=7)
        call(both, x, n=16)  # a multiple of 16 is another variant of Triton's
    assert sizes(made) == [2, 3, 2, 3]
    assert watch.names == ["first", "third"] and watch.threads == {get_ident()}


def test_two_threads_make_first_calls(driver):
    both, x, got = kernels(), torch.zeros(16), []
    start = Barrier(2)

    def work() -> None:
        start.wait(timeout=60)
        with driver.launches() as made:
            call(both, x)
            got.append(sizes(made))

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[2, 3], [2, 3]]


def test_threads_compile_for_the_current_device(driver, monkeypatch):
    entered: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda i: entered.append((i, get_ident())))
    watch = Watch(monkeypatch, together=2)
    call(kernels(), torch.zeros(16))
    assert {index for index, _ in entered} == {3}
    assert {thread for _, thread in entered} == watch.threads


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_the_backward_compiles_with_the_forward(driver, monkeypatch, backend, is_packed):
    made: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: made.append(src.name))
    x = torch.randn(1, 256, 2, 64, dtype=torch.float16, requires_grad=True)
    starts = torch.tensor([0, 100, 256], dtype=torch.int32)
    with as_if_on_a_gpu():
        if is_packed:
            x = x[0].detach().requires_grad_()
            out = attention_varlen(x, x, x, starts, starts, 156, 156, backend=backend)
        else:
            out = attention(x, x, x, causal=True, backend=backend)
        forward, made[:] = made[:], []
        out.backward(torch.randn_like(out))
    assert "forward_kernel" in forward and len(forward) > 2
    assert made == []


def test_the_backward_of_listed_keys_is_described_not_run(driver, monkeypatch):
    """Its launches are not kept for later calls."""
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name)
    )
    x = torch.randn(1, 64, 2, 64, dtype=torch.float16, requires_grad=True)
    index = torch.arange(5, dtype=torch.int32).expand(1, 64, 1, 5)
    with as_if_on_a_gpu():
        with driver.launches() as forward:
            out = attention(x, x, x, key_index=index, deterministic=True, backend="triton")
        assert len(forward) == 1 and len(compiled) == 4
        with driver.launches() as backward:
            out.backward(torch.randn_like(out))
    assert len(backward) == 3 and len(compiled) == 4


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_all_kernels_of_a_call_over_ranks_compile_together(driver, monkeypatch, backend):
    """Those of both stages of the second of two ranks, its own keys and those of the first one, and
    those of the backward."""
    made: list[str] = []
    together: list[int] = []

    def pool(count: int, *rest: Any) -> Any:
        together.append(count)
        return ThreadPoolExecutor(count, *rest)

    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: made.append(src.name))
    monkeypatch.setattr(launch, "ThreadPoolExecutor", pool)
    x = torch.randn(1, 256, 2, 96, dtype=torch.float16, requires_grad=True)
    with as_if_on_a_gpu():
        parallel = ContextParallel.over(SilentCommunicator(1, 2), stages=2)
        layout = parallel.layout(seq_len=512, way="contiguous")
        out = parallel.attention(x, x, x, layout=layout, causal=True, backend=backend)
        out.backward(torch.randn_like(out))
    assert together == [1, len(made)]  # the first one hashes Triton
    assert made.count("forward_kernel") == 2


def test_the_backward_of_a_known_forward_is_not_described(driver, monkeypatch):
    monkeypatch.setattr(launch, "launches_of_next_pass", None)
    both, x = kernels(), torch.zeros(16)
    monkeypatch.setattr(launch._known, "get", lambda variant: True)
    call(both, x)


def test_after_an_interrupt_passes_are_launched_again():
    def next_pass() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), described.followed_by(next_pass):
        described.launches_of_next_pass()
    assert described.described_launches() is None


def test_an_error_of_the_next_pass_is_its_own(driver, monkeypatch):
    both, x = kernels(), torch.zeros(16)
    failing, _ = kernels(fails=True)[::-1]

    def next_pass() -> None:
        call((failing, failing), x, n=7)
        raise ValueError("cannot be described further")

    with driver.launches() as made, described.followed_by(next_pass):
        call(both, x)
    assert sizes(made) == [2, 3]
    with pytest.raises(triton.CompilationError, match="the second kernel is wrong"):
        call((failing, failing), x, n=7)
