"""Context parallelism whose ranks run the Hopper kernels in PyTorch (`emulator.py`): what the
executor passes to the backend, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import hopper
from flashtile.backends.hopper.backward import launch as backward_path
from flashtile.backends.hopper.forward import launch as forward_path
from flashtile.distributed import ContextParallel
from flashtile.gpu.hardware import H100
from flashtile.problem import AttentionProblem
from flashtile.testing import (
    assert_close,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
    packed_qkv,
)
from flashtile.testing.wires import run_ranks

from . import emulator
from .fake_cuda import as_if_on_a_gpu
from .pieces import part_call
from .test_forward_emulated import intrinsics  # noqa: F401 -- for every test here

LENGTHS = [520, 0, 70, 1, 290]
PROGRAMS = 2
NAMES = ("out", "dq", "dk", "dv")

grids: dict[str, tuple[int, ...]] = {}  # of the last launch of each kernel


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches run in the emulator, one call at a time; the passes that were called."""
    lock, passes = Lock(), []
    grids.clear()

    def run(
        name: str, call: Any, given: Any, allocators: Callable[[], Any], describe: Any, config: Any
    ) -> Any:
        with lock:
            passes.append(name)
            made = tuple(allocate() for allocate in allocators())
            given = tuple(None if x is None else x.detach() for x in given)
            for launch in describe(given, made):
                emulator.run_chain([launch], seed=0)
                grids[launch.kernel.__name__] = launch.grid
            return made

    def patch(module: ModuleType, **values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    def counter(device: torch.device) -> Tensor:
        return torch.zeros(2, dtype=torch.int32)

    patch(forward_path, allocate_and_run_all=run, tile_counter=counter)
    patch(backward_path, allocate_and_run_all=run, prepared_call=lambda *_: None)
    patch(forward_path, multiprocessors=lambda device: PROGRAMS)
    patch(backward_path, gpu_of=lambda device: H100._replace(multiprocessors=PROGRAMS))
    with as_if_on_a_gpu():
        yield passes


@pytest.mark.parametrize(
    ("way", "ranks", "stages", "groups", "given"),
    [
        ("zigzag", 2, 1, 1, {"causal": True}),
        ("zigzag", 3, 1, 2, {"causal": True, "sink": normal(generator(0), 4)}),
        ("documents", 2, 1, 2, {"causal": True}),
        ("contiguous", 3, 1, 1, {"window_size": (100, 30)}),
        ("zigzag", 2, 2, 1, {"causal": True}),
        ("contiguous", 2, 1, 1, {}),
    ],
)
def test_ranks_compute_what_one_process_does(
    emulated: list[str], way: str, ranks: int, stages: int, groups: int, given: dict[str, Any]
):
    dtype = torch.bfloat16
    q, k, v = packed_qkv(generator(ranks), LENGTHS, LENGTHS, D=64, dtype=dtype)
    dout = normal(generator(1), *q.shape, dtype=dtype)

    def one_rank(comm: Any) -> dict[str, Tensor]:
        parallel = ContextParallel.over(comm, ulysses=1, stages=stages, head_groups=groups)
        layout = parallel.layout(cu_seqlens(LENGTHS), way=way, grain=64)
        leaves = [layout.shard(x).requires_grad_() for x in (q, k, v)]
        out = parallel.attention(*leaves, layout, backend="hopper", **given)
        found = (out, *torch.autograd.grad(out, leaves, layout.shard(dout)))
        return dict(zip(NAMES, map(layout.unshard, found), strict=True))

    found = run_ranks(ranks, one_rank, timeout=300.0)[0]
    truth, plain = (whole((q, k, v), dout, given, x) for x in (torch.float64, dtype))
    for name in NAMES:
        assert_close(name, found[name], truth[name], plain[name], dtype=dtype, seed=ranks)
    # The outputs of stages are float32 and merged.
    forward = "hopper forward into given tensors" if stages == 1 else "hopper forward"
    assert {forward, "hopper backward"} == set(emulated)


@pytest.mark.parametrize("stages", [1, 3])
def test_one_sequence_in_one_piece_is_a_dense_batch(emulated: list[str], stages: int):
    """Of keys that end where the queries end."""
    dtype, given = torch.bfloat16, {"causal": True, "window_size": (70, 0)}
    q, k, v = packed_qkv(generator(7), [600], [600], D=64, dtype=dtype)
    dout = normal(generator(1), *q.shape, dtype=dtype)
    layouts: list[str] = []

    def one_rank(comm: Any) -> dict[str, Tensor]:
        parallel = ContextParallel.over(comm, ulysses=1, stages=stages)
        layout = parallel.layout(seq_len=600, way="contiguous", grain=8)
        leaves = [layout.shard(x[None]).requires_grad_() for x in (q, k, v)]
        out = parallel.attention(*leaves, layout, backend="hopper", **given)
        found = (out, *torch.autograd.grad(out, leaves, layout.shard(dout[None])))
        return {name: layout.unshard(x)[0] for name, x in zip(NAMES, found, strict=True)}

    of_call = hopper.forward

    def forward(problem: AttentionProblem, *operands: Any) -> Any:
        layouts.append(problem.layout)
        return of_call(problem, *operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "forward", forward)
        found = run_ranks(3, one_rank, timeout=300.0)[0]
    truth, plain = (whole((q, k, v), dout, given, x, [600]) for x in (torch.float64, dtype))
    for name in NAMES:
        assert_close(name, found[name], truth[name], plain[name], dtype=dtype, seed=7)
    assert layouts.count("dense") == 3


@pytest.mark.parametrize(("reserved", "programs"), [(0, 2), (1, 1), (5, 1)])
def test_persistent_kernels_leave_multiprocessors_to_exchanges(reserved: int, programs: int):
    q, k, v = packed_qkv(generator(4), [300], [300], D=64, dtype=torch.bfloat16)

    def one_rank(comm: Any) -> None:
        parallel = ContextParallel.over(comm)
        parallel.reserved_processors = reserved
        layout = parallel.layout([0, 300])
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        parallel.attention(*leaves, layout, backend="hopper").sum().backward()

    run_ranks(1, one_rank)
    assert grids["forward_kernel"] == grids["backward_kernel"] == (programs,)


@pytest.mark.parametrize("is_aligned", [True, False])
def test_rows_of_no_sequence_keep_what_they_have(is_aligned: bool):
    """Where the kernels write to the given tensors, and where they write to others first."""
    call = part_call("ragged", "causal", 64, seed=2)
    q, rows = call.operands.q, len(call.operands.q)
    spare = q.new_zeros(3, *q.shape[1:])
    operands = call.operands._replace(q=torch.cat([q, spare]))
    problem = AttentionProblem.of(operands, call.options)
    width = 64 if is_aligned else 65
    all_heads = torch.ones(rows + 3, 4, width, dtype=torch.bfloat16)
    out = all_heads[:, 1:3, :64]
    out[rows:], lse = 0, torch.full((2, rows + 3), -torch.inf)
    assert hopper.forward(problem, operands, (out, lse)) == (out, lse)
    assert not out[rows:].any()
    assert all_heads[:, ::3].eq(1).all()
    assert (lse[:, rows:] == -torch.inf).all()
    add_to = torch.ones(rows + 3, 4, width)[:, 1:3, :64]
    dout = normal(generator(3), *out.shape, dtype=torch.bfloat16)
    problem = problem._replace(is_partial=True)
    found = hopper.backward(problem, operands, out, lse, dout, None, add_to)
    assert found.dq is add_to
    assert add_to[rows:].eq(1).all()
    nothing = torch.zeros(2, rows)
    truth, plain = (call.reference(x, dout[:rows], nothing) for x in (torch.float64, q.dtype))
    got = {"out": out[:rows], "dq": add_to[:rows] - 1, "dk": found.dk, "dv": found.dv}
    for name, x in got.items():
        assert_close(name, x, truth[name], plain[name], dtype=q.dtype, seed=2)


def test_whole_queries_have_a_rounded_dq_and_sums_for_the_keys():
    call = part_call("ragged", "causal", 64, seed=2)
    q, rows = call.operands.q, len(call.operands.q)
    operands = call.operands._replace(q=torch.cat([q, q.new_zeros(3, *q.shape[1:])]))
    problem = AttentionProblem.of(operands, call.options)
    out, lse = hopper.forward(problem, operands)
    dout = normal(generator(3), *out.shape, dtype=q.dtype)
    problem = problem._replace(is_partial=True, has_whole_queries=True)
    found = hopper.backward(problem, operands, out, lse, dout, None)
    assert [x.dtype for x in found[:3]] == [q.dtype, torch.float32, torch.float32]
    assert not found.dq[rows:].any()  # of no sequence
    nothing = torch.zeros(2, rows)
    truth, plain = (call.reference(x, dout[:rows], nothing) for x in (torch.float64, q.dtype))
    for name, x in {"dq": found.dq[:rows], "dk": found.dk, "dv": found.dv}.items():
        assert_close(name, x, truth[name], plain[name], dtype=q.dtype, seed=2)


def whole(
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    given: dict[str, Any],
    dtype: torch.dtype,
    lengths: list[int] = LENGTHS,
) -> dict[str, Tensor]:
    """What one process computes in `dtype`."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    cu = cu_seqlens(lengths)
    bounds = (cu, cu, max(lengths), max(lengths))
    out = attention_varlen_reference(*leaves, *bounds, compute_dtype=dtype, **given).out
    gradients = torch.autograd.grad((out * dout.to(dtype)).sum(), leaves)
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))
