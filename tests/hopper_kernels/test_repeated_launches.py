"""A repeated call goes straight to the compiled kernels, with its own tensors at the
same indices of its arguments."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backend_interface import Gradients
from flashtile.backends import hopper
from flashtile.backends.hopper.forward import launch as forward_path
from flashtile.backends.hopper.shared.block_lists import BlockLists, lists_by_queries
from flashtile.backends.triton import launch as triton_path
from flashtile.call import prepare
from flashtile.call.layouts import Dense, Packed
from flashtile.gpu import launch_cache
from flashtile.gpu.launch import Launch
from flashtile.gpu.launch_cache import run_all
from flashtile.masks import BlockMask
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import alibi_slopes, generator, normal

from . import emulator
from .inputs import OF_LISTS, dense_inputs, packed_inputs, random_spans


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(launch_cache, "_prepared", {})
    monkeypatch.setattr(launch_cache, "_compiled", {})
    # The launches are made by stand-ins, so there is nothing to compile.
    monkeypatch.setattr(launch_cache, "compile_together", lambda launches: None)


class Pair(NamedTuple):
    x: Any
    n: int


class Described:
    """As a descriptor of Triton's: a tensor and what is known of it; counted."""

    made = 0

    def __init__(self, base: Tensor, box: int):
        Described.made += 1
        self.base, self.box = base, box


class Kernel:
    """Stands for a kernel and for what Triton compiles of it; writes down how it is called."""

    arg_names = ("x", "pair", "n", "desc", "cfg")

    def __init__(self):
        self.compiled, self.repeated = [], []

    def __getitem__(self, grid):
        def compile_and_run(*, num_warps, **arguments):
            self.compiled.append((grid, arguments, num_warps))
            return {(*grid, 1): lambda *arguments: self.repeated.append(arguments)}

        return compile_and_run


PROBLEM: Any = "a problem"


def describe(kernel: Kernel, copies: bool = False) -> Any:
    def launches(given, made):
        (x, y), (z,) = given, made
        arguments = {"n": x.shape[0], "cfg": "c", "desc": Described(y, 8), "pair": Pair(z, 3)}
        arguments["x"] = x.clone() if copies else x
        return [Launch(kernel, (5, 3), arguments, warps=8)]

    return launches


def test_the_third_call_is_not_described_again():
    kernel, described = Kernel(), Described.made
    for repeat in range(4):
        x, y, z = (torch.full((4, 2), 10.0 * repeat + i) for i in range(3))
        run_all("pass", PROBLEM, (x, y), (z,), describe(kernel), "c")
        if repeat > 0:
            got_x, pair, n, desc, config = kernel.repeated[-1]
            assert torch.equal(got_x, x) and torch.equal(desc.base, y) and torch.equal(pair.x, z)
            assert (pair.n, n, desc.box, config) == (3, 4, 8, "c")
    ((grid, _, warps),) = kernel.compiled
    assert (grid, warps, len(kernel.repeated)) == ((5, 3), 8, 3)
    assert Described.made - described == 2


def test_nothing_keeps_the_tensors_of_an_earlier_call():
    x, y, z = (torch.zeros(4, 2) for _ in range(3))
    kernel = Kernel()
    for _ in range(3):
        run_all("pass", PROBLEM, (x, y), (z,), describe(kernel), "c")
    kernel.compiled.clear()
    kernel.repeated.clear()
    storages = [weakref.ref(t.untyped_storage()) for t in (x, y, z)]
    del x, y, z
    assert launch_cache._prepared and all(storage() is None for storage in storages)


def test_one_tensor_in_two_places_may_be_two_later():
    kernel = Kernel()
    x, y, z = (torch.full((4, 2), float(i)) for i in range(3))
    for given in ((x, x), (x, x), (x, x), (x, y), (y, x)):
        run_all("pass", PROBLEM, given, (z,), describe(kernel), "c")
        if kernel.repeated:
            got_x, _, _, desc, _ = kernel.repeated[-1]
            assert torch.equal(got_x, given[0]) and torch.equal(desc.base, given[1])
    assert len(kernel.compiled) == 1 and len(kernel.repeated) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_part_of_a_tensor_is_the_same_part_of_later_ones(dtype: torch.dtype):
    kernel = Kernel()

    def launches(given: Any, made: Any) -> list[Launch]:
        (x, _), (z,) = given, made
        part = z[6:14].view(dtype).view(4, 2)
        arguments = {"n": 1, "cfg": "c", "desc": Described(part[1:], 8), "pair": Pair(part, 3)}
        return [Launch(kernel, (5, 3), {**arguments, "x": x}, warps=8)]

    for repeat in range(4):
        x, y, z = torch.zeros(4, 2), torch.zeros(4, 2), torch.arange(20.0) + repeat
        run_all("pass", PROBLEM, (x, y), (z,), launches, "c")
        if repeat > 0:
            got_x, pair, _, desc, _ = kernel.repeated[-1]
            part = z[6:14].view(dtype).view(4, 2)
            assert got_x.data_ptr() == x.data_ptr()
            for got, wanted in ((pair.x, part), (desc.base, part[1:])):
                assert torch.equal(got, wanted) and got.data_ptr() == wanted.data_ptr()
    assert isinstance(*launch_cache._prepared.values(), launch_cache.PreparedCall)


def test_a_part_of_memory_that_two_tensors_share_is_described_each_time():
    kernel, described = Kernel(), Described.made
    for _ in range(4):
        memory = torch.zeros(30)
        given = memory[:8].view(4, 2), memory[8:16].view(4, 2)
        part = memory[20:24]  # starts where neither does

        def launches(given: Any, made: Any, part: Tensor = part) -> list[Launch]:
            return describe(kernel)(given, (part,))

        run_all("pass", PROBLEM, given, (), launches, "c")
    assert Described.made - described == 4


def test_a_call_with_copies_is_described_each_time():
    kernel, described = Kernel(), Described.made
    for repeat in range(4):
        x, y, z = (torch.full((4, 2), 10.0 * repeat + i) for i in range(3))
        run_all("pass", PROBLEM, (x, y), (z,), describe(kernel, copies=True), "c")
        if repeat > 0:
            assert torch.equal(kernel.repeated[-1][0], x)
    assert len(kernel.compiled) == 1 and Described.made - described == 4


def test_packed_batches_of_other_lengths_share_the_kernels():
    kernel = Kernel()
    for length in (4, 5, 6, 4, 5, 4):
        x, y, z = torch.zeros(length, 2), torch.zeros(length, 2), torch.zeros(4)
        run_all("pass", PROBLEM, (x, y), (z,), describe(kernel), "c")
        if kernel.repeated:
            assert kernel.repeated[-1][2] == length
    assert len(kernel.compiled) == 1 and len(kernel.repeated) == 5


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"config": "d"}, {"wide": 3}, {"start": 1}, {"gap": 1}, {"missing": True}],
    ids=str,
)
def test_what_triton_looks_at_compiles_anew(change: dict[str, Any]):
    kernel = Kernel()

    def call(name="pass", config="c", wide=2, start=0, gap=0, missing=False):
        memory = torch.zeros(start + 4 * (wide + gap))[start:]
        x = memory.view(4, wide + gap)[:, :wide]
        y = None if missing else torch.zeros(4, 2)
        launch = Launch(kernel, (5, 3), dict.fromkeys(Kernel.arg_names, x))
        problem: Any = (name, config)
        run_all(name, problem, (x, y), (), lambda given, made: [launch], config)

    call()
    call(**change)
    call()
    assert len(kernel.compiled) == 2 and len(kernel.repeated) == 1


class Emulated:
    """A launch as Triton hands out compiled kernels: ``compiled[grid](*arguments)``."""

    def __init__(self, launch: Launch):
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any) -> None:
            named = dict(zip(self.launch.kernel.arg_names, arguments, strict=True))
            emulator.run(Launch(self.launch.kernel, grid, named), 0)

        return run


Call = tuple[Operands, Options]


def dense(seed: int, **given: Any) -> Call:
    tensors = dense_inputs(seed, "contiguous", {"M": 70, "N": 90, "D": 64})
    return prepare.describe(tensors, Dense(), given)


def one_tensor(seed: int, causal: bool = True) -> Call:
    q, k, v = dense_inputs(seed, "contiguous", {"M": 70, "N": 70, "D": 64, "Hq": 1})
    same = (q, q, q) if seed < 2 else (q, k, v)
    return prepare.describe(same, Dense(), {"causal": causal})


def packed(seed: int, head_dim: int = 64) -> Call:
    tensors, layout, counts = packed_inputs(seed, head_dim, [70, 0, 29], [40, 5, 65], {})
    if seed == 2:  # no longer the same for both arguments
        layout = Packed(layout.cu_seqlens_q, layout.cu_seqlens_k.clone(), *layout[2:])
    sink = normal(generator(seed), tensors[0].shape[1])
    return prepare.describe(tensors, layout, {"sink": sink, "causal": True, **counts})


CASES = {
    "causal": lambda seed: dense(seed, causal=True),
    "alibi": lambda seed: dense(seed, alibi_slopes=alibi_slopes(generator(seed), 2)),
    "deterministic": lambda seed: dense(seed, causal=True, deterministic=True),
    "spans": lambda seed: dense(seed, mask=random_spans(generator(seed), (1, 2, 70, 2), 90)),
    "one tensor for q, k and v": one_tensor,
    "packed, sink": packed,
    "dQ from registers": partial(packed, head_dim=128),
}


@pytest.mark.parametrize("name", CASES)
def test_repeated_backwards(name: str, monkeypatch: pytest.MonkeyPatch):
    """Described, launched again, repeated: each as if nothing had been before it."""
    made = 0

    def run(launch: Launch) -> Any:
        nonlocal made
        made += 1
        emulator.run(launch, 0)
        return Emulated(launch)

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # of a tensor on the CPU
    for of_language, value in OF_LISTS.items():
        monkeypatch.setitem(emulator.LANGUAGE, of_language, value)

    def gradients(seed: int) -> Gradients:
        operands, options = CASES[name](seed)
        problem = AttentionProblem.of(operands, options)
        problem = problem._replace(device_type="cuda", capability=(9, 0))
        g = generator(seed + 10)
        out, dout = (normal(g, *operands.q.shape, dtype=operands.q.dtype) for _ in range(2))
        rows = operands.q.shape[:-1]
        lse = normal(g, *(rows[::-1] if len(rows) == 2 else (rows[0], rows[2], rows[1])))
        return hopper.backward(problem, operands, out, lse + 5, dout, None)

    again = [gradients(seed) for seed in range(4)]
    assert made == (6 if name == "spans" else 3)  # kernels
    for seed, found in enumerate(again):
        launch_cache._prepared.clear()
        launch_cache._compiled.clear()
        for got, wanted in zip(found, gradients(seed), strict=True):
            assert (got is None and wanted is None) or torch.equal(got, wanted)


def test_a_mask_for_each_sequence_and_one_for_all_compile_their_own_kernels(
    monkeypatch: pytest.MonkeyPatch,
):
    """Triton compiles the step from one mask to the next, 0 for one mask, into the kernels."""
    compiled = []

    def run(launch: Launch) -> Any:
        compiled.append(launch.kernel)
        return {launch.grid_of_three: lambda *arguments: None}

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # of a tensor on the CPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(forward_path, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(forward_path, "tile_counter", lambda device: torch.zeros(2))
    sizes = {"M": 256, "N": 256, "D": 64, "B": 2}
    for seed, masks in enumerate((1, 2, 1, 2)):
        visible = torch.ones(masks, 1, 256, 256, dtype=torch.bool).tril()
        mask = BlockMask.from_dense(visible, (128, 128))
        tensors = dense_inputs(seed, "contiguous", sizes)
        operands, options = prepare.describe(tensors, Dense(), {"block_mask": mask})
        problem = AttentionProblem.of(operands, options)
        problem = problem._replace(device_type="cuda", capability=(9, 0))
        out, lse = hopper.forward(problem, operands)
        hopper.backward(problem, operands, out, lse, out, None)
    assert len(compiled) == 2 * 4  # a forward and the three kernels of a backward


@pytest.fixture
def allocated_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device that is the current one at each call of a function of `uninitialised`."""
    current, found = ["the first"], []

    @contextmanager
    def device_of(x: Tensor) -> Any:
        current.append("that of q")
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)

    def uninitialised(shape: Any, *kind: Any) -> Any:
        return lambda: found.append(current[-1]) or torch.empty(shape)

    for module in (forward_path, triton_path):
        monkeypatch.setattr(module, "uninitialised", uninitialised)
    return found


def test_results_without_rows_are_on_the_device_of_the_queries(allocated_on: list[str]):
    tensors = dense_inputs(0, "contiguous", {"M": 0, "N": 90, "D": 64})
    operands, options = prepare.describe(tensors, Dense(), {})
    problem = AttentionProblem.of(operands, options)
    hopper.forward(problem._replace(device_type="cuda", capability=(9, 0)), operands)
    assert allocated_on == ["that of q"] * 2


def test_results_are_on_the_device_of_the_queries_whose_parts_are_in_a_workspace(
    allocated_on: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(triton_path, "run_all", lambda *call: None)
    tensors = dense_inputs(0, "contiguous", {"M": 1, "N": 90, "D": 64})
    given = {"workspace": torch.empty(2**16, dtype=torch.uint8), "num_splits": 2}
    operands, options = prepare.describe(tensors, Dense(), given)
    triton_path.forward(AttentionProblem.of(operands, options), operands)
    assert allocated_on == ["that of q"] * 2


def lists_of(mask: BlockMask) -> BlockLists:
    tensors = dense_inputs(0, "contiguous", {"M": 256, "N": 256, "D": 64})
    operands, options = prepare.describe(tensors, Dense(), {"block_mask": mask})
    return lists_by_queries(AttentionProblem.of(operands, options), operands, 128, 128)


def test_masks_that_share_some_tensors_have_their_own_lists():
    mask = BlockMask.from_dense(torch.ones(256, 256, dtype=torch.bool).tril(), (128, 128))
    other = replace(mask, partial_tiles=mask.partial_tiles.flip(1))
    swapped = replace(mask, partial_index=mask.partial_index.flip(-1, -2))
    found = [lists_of(x) for x in (mask, other, swapped, mask)]
    assert found[0] is found[3]
    assert not torch.equal(found[0].bits, found[1].bits)
    assert not torch.equal(found[0].entries, found[2].entries)


def test_lists_do_not_outlive_their_mask():
    mask = BlockMask.from_dense(torch.ones(256, 256, dtype=torch.bool).tril(), (128, 128))
    assert lists_of(mask) is lists_of(mask)
    storage = weakref.ref(lists_of(mask).bits.untyped_storage())
    mask = replace(mask, partial_tiles=mask.partial_tiles.clone())
    assert storage() is None
