"""Prepared calls launch without Triton's Python code, and the driver gets what Triton would pass.

Calls of many kinds alternate. After each one, its launches are described and made again by Triton
itself, with the same tensors, so nothing in a prepared call may come from an earlier call.
"""

from __future__ import annotations

import shutil
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if torch.cuda.is_available():
    pytest.skip("replaces the CUDA driver", allow_module_level=True)
if shutil.which("cc") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

from kernels.decoding import LATENT_CASES, make_decoding
from triton import knobs

import flashtile
from flashtile.backends import hopper
from flashtile.backends.hopper.backward import launch as backward_path
from flashtile.backends.hopper.forward import launch as forward_path
from flashtile.backends.hopper.forward.plan import plan
from flashtile.backends.hopper.latent import launch as latent_path
from flashtile.backends.hopper.shared import launch as shared_path
from flashtile.backends.triton import launch as triton_path
from flashtile.call import prepare
from flashtile.call.layouts import Dense
from flashtile.gpu import launch_cache
from flashtile.gpu.hardware import multiprocessors
from flashtile.problem import AttentionProblem, Operands
from flashtile.testing import generator, normal

from .fake_cuda import Driver, as_if_on_a_gpu, fake_driver
from .inputs import dense_inputs, packed_inputs, random_spans


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with fake_driver(tmp_path_factory.mktemp("cuda")) as active:
        yield active


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "_prepared", {})
    monkeypatch.setattr(launch_cache, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # of a tensor on the CPU
    shared_path._counters.clear()


class Passes:
    """Stands between a pass and `launch_cache`; compares each pass with Triton's own launches."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.made = 0
        self.in_python = 0  # launches of passes through Triton's Python code
        self.compares = True
        self.negated = False  # whether a pass got a tensor whose memory has the opposite signs
        self.counter: Any = None  # of the last forward
        self.describe: dict[Any, Any] = {}

    def allocate_and_run_all(
        self, name: str, call: Any, given: Any, allocator: Any, describe: Any, config: Any
    ) -> Any:
        self.describe[name, call] = describe
        run = partial(launch_cache.allocate_and_run_all, name, call)
        return self.compared(
            lambda given: run(given, allocator, describe, config), name, call, given
        )

    def prepared_call(self, name: str, call: Any, given: Any) -> Any:
        known = launch_cache.prepared_call(name, call, given)
        if known is None:
            return None
        return SimpleNamespace(run=lambda given: self.compared(known.run, name, call, given))

    def compared(self, run: Any, name: str, call: Any, given: Any) -> Any:
        thread = self.driver.thread
        before = thread.in_python
        self.negated |= any(x is not None and x.is_neg() for x in given)
        with self.driver.launches() as got:
            made = run(given)
        self.in_python += thread.in_python - before
        assert all(launch.stream == thread.stream for launch in got)
        if self.compares:
            with self.driver.launches() as wanted:
                for launch in self.describe[name, call](given, made):
                    launch.run()
            assert got == wanted
        self.made += 1
        if name == forward_path.PASS:
            self.counter = made[2]
        return made


@pytest.fixture
def passes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Passes:
    passes = Passes(driver)
    for module in (forward_path, backward_path, latent_path, triton_path):
        monkeypatch.setattr(module, "allocate_and_run_all", passes.allocate_and_run_all)
        monkeypatch.setattr(module, "prepared_call", passes.prepared_call)
    return passes


def run(call: tuple[Operands, Any], seed: int = 0, backward: bool = True) -> None:
    """A forward and a backward, without the choice of a backend."""
    operands, options = call
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(device_type="cuda", capability=(9, 0))
    out, lse = forward_path.forward(problem, operands)
    if backward:
        dout = normal(generator(seed), *out.shape, dtype=out.dtype)
        backward_path.backward(problem, operands, out, lse, dout, None)


SIZES = {"M": 70, "N": 90, "D": 64}


def dense(seed: int, style: str = "contiguous", **given: Any) -> Any:
    sizes = {
        name: given.pop(name, size) for name, size in (SIZES | {"dtype": torch.bfloat16}).items()
    }
    tensors = tuple(dense_inputs(seed, style, sizes))
    return prepare.describe(tensors, Dense(), {"causal": True} | given)


def packed(seed: int) -> Any:
    tensors, layout, _ = packed_inputs(seed, 64, [70, 0, 29], [40, 5, 65], {})
    return prepare.describe(tuple(tensors), layout, {"causal": True})


KINDS = {
    "causal": dense,
    "other strides": lambda seed: dense(seed, "transposed"),
    "longer": lambda seed: dense(seed, M=80),
    "deterministic": lambda seed: dense(seed, deterministic=True),
    "spans": lambda seed: dense(seed, mask=random_spans(generator(seed), (1, 1, 70, 1), 90)),
    "float16": lambda seed: dense(seed, dtype=torch.float16),
    "packed": packed,
}
FORWARD_ONLY = ("float16", "packed")  # their kernels take long to compile


def test_calls_of_all_kinds_alternate(passes: Passes, driver: Driver):
    for seed in range(6):
        for number, (name, kind) in enumerate(KINDS.items()):
            driver.thread.stream = 16 * ((seed + number) % 3)
            run(kind(seed), seed, backward=name not in FORWARD_ONLY)
        if seed == 2:
            passes.in_python = 0
    assert passes.made == 6 * (2 * len(KINDS) - len(FORWARD_ONLY))
    assert passes.in_python == 0  # in the last three rounds


@pytest.mark.parametrize("parts", [1, 3])
def test_decoding_over_latents(passes: Passes, parts: int):
    for seed in range(6):
        operands, options = make_decoding(LATENT_CASES[-1], torch.bfloat16, seed)
        problem = AttentionProblem.of(operands, options._replace(num_splits=parts))
        problem = problem._replace(device_type="cuda", capability=(9, 0))
        hopper.forward(problem, operands)
        if seed == 2:
            passes.in_python = 0
    assert passes.made == 6
    assert passes.in_python == 0  # in the last three rounds


DECODING = {
    "attention": (False, False),
    "append": (True, False),
    "append and rotary": (True, True),
}


@pytest.fixture
def on_a_gpu() -> Iterator[None]:
    with as_if_on_a_gpu():
        yield


@pytest.mark.usefixtures("on_a_gpu")
def test_decoding_steps_of_all_kinds_alternate(passes: Passes, driver: Driver):
    """Whatever is appended, a step launches without Triton's Python code."""
    cache = torch.zeros(2, 3, 1024, 2, 64, dtype=torch.bfloat16)
    cos, sin = torch.zeros(2, 1024, 16, dtype=torch.bfloat16)
    rounds = 6
    for step in range(rounds):
        for number, (appends, rotates) in enumerate(DECODING.values()):
            driver.thread.stream = 16 * ((step + number) % 3)
            q, k, v = (torch.zeros(3, 1, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
            lengths = torch.full((3,), 700 + step, dtype=torch.int32)
            given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
            given |= {"k": k, "v": v} if appends else {}
            given |= {"rotary_cos": cos, "rotary_sin": sin} if rotates else {}
            flashtile.attention_with_kvcache(q, *cache, **given)
        if step == rounds - 2:
            passes.in_python = 0
    assert passes.made == rounds * len(DECODING)
    assert passes.in_python == 0  # in the last round
    for _ in range(2):
        negated = torch._neg_view(k)  # of which an op gets a copy
        flashtile.attention_with_kvcache(q, *cache, **given | {"k": negated})
    assert passes.made == rounds * len(DECODING) + 2 and not passes.negated


SHAPE = (1, 70, 2, 64)
GRADIENTS = {
    "contiguous": lambda: torch.zeros(SHAPE, dtype=torch.bfloat16),
    "heads first": lambda: torch.zeros(1, 2, 70, 64, dtype=torch.bfloat16).transpose(1, 2),
    "part of a wider one": lambda: torch.zeros(1, 70, 2, 128, dtype=torch.bfloat16)[..., 64:],
}
COPIED = {
    "of a sum": lambda: torch.zeros((), dtype=torch.bfloat16).expand(SHAPE),
    "not aligned": lambda: torch.zeros(4 + 70 * 2 * 64, dtype=torch.bfloat16)[4:].view(SHAPE),
}


def leaves() -> list[torch.Tensor]:
    return [x.requires_grad_() for x in dense_inputs(0, "contiguous", SIZES | {"Hk": 2})]


def differentiate(dout: torch.Tensor, with_lse: bool = False, backend: Any = None) -> None:
    """A forward and backward of the public function."""
    q, k, v = leaves()
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    if with_lse:
        torch.autograd.grad((out, lse), (q, k, v), (dout, torch.zeros_like(lse)))
    else:
        torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("backend", [None, "triton"])
def test_gradients_of_all_kinds_alternate(backend: Any, passes: Passes, driver: Driver):
    # Triton's launches copy inside, each time to another address, which cannot be compared.
    kinds, rounds = GRADIENTS if backend else GRADIENTS | COPIED, 6
    for number in range(rounds):
        driver.thread.stream = 16 * (number % 3)
        for make in kinds.values():
            for with_lse in (False, True):
                for _ in range(1 + number % 2):  # one kind after another, and twice the same
                    differentiate(make(), with_lse, backend)
    assert passes.made == rounds // 2 * 3 * 4 * len(kinds)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_one_lookup_leads_to_the_launches_of_a_backward(
    kind: str, backend: Any, passes: Passes, monkeypatch: pytest.MonkeyPatch
):
    """A training step that repeats: neither checks nor a description of the problem."""
    for _ in range(4):
        differentiate(GRADIENTS[kind](), backend=backend)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("looked up again")

    passes.in_python = passes.made = 0
    monkeypatch.setattr(launch_cache, "_key", refuse)
    for _ in range(3):
        differentiate(GRADIENTS[kind](), backend=backend)
    assert (passes.made, passes.in_python) == (6, 0)


@pytest.mark.usefixtures("on_a_gpu")
def test_hooks_may_change_the_strides_of_saved_tensors(passes: Passes):
    """As `save_on_cpu` does, which brings contiguous tensors back."""

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x

    for _ in range(3):
        for _ in range(4):
            differentiate(GRADIENTS["contiguous"]())
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, heads_first):
            for _ in range(4):
                differentiate(GRADIENTS["contiguous"]())
    assert passes.made == 2 * 3 * 2 * 4


NEGATED = ("nothing", "q", "k", "v", "dout", "dlse")


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("backend", [None, "triton"])
def test_launches_read_numbers_with_their_own_signs(backend: Any, passes: Passes):
    """The imaginary part of a conjugate is a view of memory with the opposite signs."""
    for name in NEGATED * 5:

        def given(this: str, x: torch.Tensor, name: str = name) -> torch.Tensor:
            return torch._neg_view(x.detach()) if this == name else x

        q, k, v = (given(*x).requires_grad_() for x in zip("qkv", leaves(), strict=True))
        out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        cotangents = given("dout", torch.ones_like(out)), given("dlse", torch.ones_like(lse))
        torch.autograd.grad((out, lse), (q, k, v), cotangents)
    assert passes.made == 2 * 5 * len(NEGATED) and not passes.negated


@pytest.fixture
def compared(
    driver: Driver, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> list[AttentionProblem]:
    """The problems of all prepared forwards, each of which is compared with Triton's own launch of
    it.
    """
    prepared = hopper.prepared_forward
    seen = []

    def prepared_forward(problem: AttentionProblem, operands: Operands) -> Any:
        run_prepared = prepared(problem, operands)
        if run_prepared is None:
            return None

        def run(operands: Operands) -> Any:
            with driver.launches() as got:
                out, lse, *_ = run_prepared(operands)
            counter = shared_path.tile_counter(out.device)
            config = plan(problem)
            launch = forward_path.forward_launch(
                problem, config, operands, out, lse, multiprocessors(out.device), counter, None
            )
            with driver.launches() as wanted:
                launch.run()
            assert got == wanted
            assert all(launch.stream == driver.thread.stream for launch in got)
            seen.append(problem)
            return out, lse

        return run

    monkeypatch.setattr(hopper, "prepared_forward", prepared_forward)
    return seen


def test_one_lookup_leads_to_the_launches(compared: list[AttentionProblem], driver: Driver):
    """Calls of `attention` that differ in what decides a launch, or in who calls, alternate."""
    memory = torch.zeros(3, 2**15, dtype=torch.bfloat16)
    size = 70 * 2 * 64
    views = (
        lambda x: x[:size].view(1, 70, 2, 64),
        lambda x: x[:size].view(torch.float16).view(1, 70, 2, 64),
        lambda x: x[:size].view(1, 2, 70, 64).transpose(1, 2),
        lambda x: x[: 80 * 2 * 64].view(1, 80, 2, 64),
        lambda x: x[: 2 * size].view(1, 70, 2, 128)[..., :64],
        lambda x: x[64 : 64 + size].view(1, 70, 2, 64),
    )
    settings = (
        {},
        {"softmax_scale": 0.5},
        {"deterministic": True},
    )
    rounds = 7
    for number in range(rounds):
        driver.thread.stream = 16 * (number % 2)
        for view in views:
            for options in settings:
                q, k, v = (view(x) for x in memory)
                flashtile.attention(q, k, v, causal=True, **options)
                with torch.inference_mode():
                    flashtile.attention(q, k, v, causal=True, **options)
                q = q.detach().requires_grad_()
                out = flashtile.attention(q, k, v, causal=True, **options)
                assert out.requires_grad
    # The first call describes the problem and the next ones prepare.
    kinds = 2 * len(views) * len(settings)
    assert len(compared) > kinds * (rounds - 4)
    # A tensor that is not aligned is copied each time.
    before = len(compared)
    q, k, v = (x[4 : 4 + size].view(1, 70, 2, 64) for x in memory)
    for _ in range(rounds):
        flashtile.attention(q, k, v, causal=True)
    assert len(compared) == before


def test_memory_is_reused_by_other_tensors(passes: Passes):
    """The same addresses in turn hold tensors of other shapes, strides and dtypes."""
    memory = torch.zeros(3, 2**15, dtype=torch.bfloat16)
    size = 70 * 2 * 64
    views = {
        "bfloat16": lambda x: x[:size].view(1, 70, 2, 64),
        "float16": lambda x: x[:size].view(torch.float16).view(1, 70, 2, 64),
        "heads first": lambda x: x[:size].view(1, 2, 70, 64).transpose(1, 2),
        "other lengths": lambda x: x[: 80 * 2 * 64].view(1, 80, 2, 64),
        "other strides": lambda x: x[: 2 * size].view(1, 70, 2, 128)[..., :64],
        "starts later": lambda x: x[64 : 64 + size].view(1, 70, 2, 64),
    }
    for _ in range(4):
        for name, view in views.items():
            q, k, v = (view(x) for x in memory)
            call = prepare.describe((q, k, v), Dense(), {"causal": True})
            run(call, backward=name not in FORWARD_ONLY)
    assert passes.made == 4 * (2 * len(views) - 1)


def test_a_tensor_that_is_not_aligned_is_copied_each_time(passes: Passes):
    for _ in range(3):
        run(dense(0))
    passes.compares, passes.in_python = False, 0
    q, k, v = dense_inputs(0, "contiguous", SIZES)
    moved = torch.zeros(q.numel() + 4, dtype=q.dtype)[4:].view(q.shape)  # by 8 bytes
    for _ in range(3):
        run(prepare.describe((moved, k, v), Dense(), {"causal": True}))
    assert passes.in_python >= 3 * 4


def test_threads_launch_on_their_own_streams(passes: Passes, driver: Driver):
    for _ in range(3):
        run(dense(0))
    passes.in_python = 0
    failures = []

    def work(number: int) -> None:
        driver.thread.stream = 16 * number
        try:
            for seed in range(10):
                run(dense(seed))
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert passes.in_python == 0


def test_hooks_are_called(passes: Passes):
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    for _ in range(4):
        run(dense(0))
    passes.in_python, passes.compares = 0, False
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(dense(0))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    names = ["forward_kernel", "delta_kernel", "backward_kernel", "round_kernel"]
    assert seen == names
    assert passes.in_python == 4
    run(dense(0))
    assert seen == names
    assert passes.in_python == 4


def test_a_release_that_is_not_tested_launches_through_triton(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch_cache, "IS_TESTED", False)
    for seed in range(4):
        run(dense(seed))
    assert passes.in_python == 4 * 4


def test_rocm_lacks_the_module_of_nvidia(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia", None)
    spec = spec_from_file_location("flashtile.gpu.on_rocm", launch_cache.__file__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.IS_TESTED
    nothing: Any = None
    assert module.direct_launches([nothing], [nothing], nothing) is None


def test_a_captured_call_has_its_own_counter(
    passes: Passes, driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    """A graph may run beside the stream on which it was captured."""
    counters = []
    driver.thread.stream = 16
    for is_capturing in (False, False, False, True, True, False):
        capturing = partial(bool, is_capturing)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
        run(dense(0))
        counters.append(passes.counter)
    driver.thread.stream = 0
    alive = shared_path._counters.get((None, 16))
    assert [x is alive for x in counters] == [True, True, True, False, False, True]


def test_nothing_keeps_the_tensors_of_an_earlier_call(passes: Passes):
    for seed in range(4):
        operands, options = dense(seed)
        storage = weakref.ref(operands.q.untyped_storage())
        run((operands, options))
        del operands
        assert storage() is None


def test_packed_rows_beyond_the_indices_of_their_boxes_are_refused():
    x = torch.empty(2**30, 1, 8, dtype=torch.bfloat16, device="meta")
    with pytest.raises(NotImplementedError, match=r"got 1073741824 tokens, want fewer than"):
        shared_path.descriptor_of_sequences(x, 64, 64)
