"""The float8 forward's source run in PyTorch (`emulator.py`), against the roundings that the CPU
backend makes: index arithmetic, the order of keys, scales, masks and barriers, without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from configurations import one_kind_each, pairwise, sample
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

import flashtile
from flashtile.backends import hopper
from flashtile.backends.hopper.float8 import launch as float8_path
from flashtile.backends.hopper.float8.launch import config_of, float8_launch
from flashtile.backends.hopper.forward import launch as forward_path
from flashtile.backends.hopper.forward.launch import outputs, tile_list, with_list
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe, read
from flashtile.gpu import launch_cache
from flashtile.gpu.launch import Launch
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.quantize import Quantized, quantize_qkv
from flashtile.testing import (
    assert_close,
    attention_in_float8,
    attention_reference,
    attention_varlen_reference,
    generator,
    qkv,
    strided,
)

from . import emulator
from .inputs import packed_inputs
from .score_functions import FUNCTIONS
from .test_forward_emulated import PROGRAMS, inline_asm, warpgroup_mma

E4M3 = torch.float8_e4m3fn


def float8_asm(asm: str, constraints: str, args: list[Any], **more: Any) -> Any:
    """Those of `float8/kernel.py`, too; a thread's four neighbours are neighbours in the tile."""
    if "e4m3x2" in asm:
        numbers = args[0].as_subclass(Tensor).clamp(-448, 448).to(E4M3)
        words = torch.zeros(numbers.shape, dtype=torch.int32)
        words[:, ::4] = numbers.view(torch.int32)
        return words
    if asm == "mov.b32 $0, $1;":
        return args[0][:, ::4].contiguous().view(E4M3)
    if "ex2.approx" in asm:
        return torch.exp2(args[0])
    if asm.startswith("div.approx"):
        return args[0] / args[1]
    return inline_asm(asm, constraints, args, **more)


@pytest.fixture(autouse=True)
def intrinsics(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the float8 kernel says."""
    more = {
        "float8e4nv": E4M3,
        "int8": torch.int8,
        "to_tensor": emulator.tile,
        "max": torch.amax,
        "inline_asm_elementwise": float8_asm,
    }
    for name, value in more.items():
        monkeypatch.setitem(emulator.LANGUAGE, name, value)
    monkeypatch.setattr(emulator, "warpgroup_mma", warpgroup_mma)
    monkeypatch.setattr(emulator.Tile, "to", to)


def to(x: Any, dtype: Any, bitcast: bool = False) -> Any:
    """`Tensor.to`, or the same bits."""
    return x.view(dtype) if bitcast else Tensor.to(x, dtype)


def emulate(operands: Operands, options: Options, seed: int) -> tuple[Tensor, Tensor]:
    """(out, lse) that the emulated kernel writes into poisoned outputs."""
    problem = AttentionProblem.of(operands, options)._replace(device_type="cuda", capability=(9, 0))
    counter = torch.zeros(2, dtype=torch.int32)
    config = config_of(problem, operands)
    out, lse = (allocate() for allocate in outputs(operands, config))
    tiles = next((allocate() for allocate in tile_list(problem, config, operands)), None)
    launch = float8_launch(problem, config, operands, out, lse, PROGRAMS, counter, tiles)
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    emulator.run_chain(with_list(problem, config, launch._replace(grid=(PROGRAMS,))), seed)
    assert counter.tolist() == [0, 0]
    return out, lse


def descales(small: Quantized) -> dict[str, Tensor]:
    names = ("q_descale", "k_descale", "v_descale")
    return {name: getattr(small, name) for name in names}


def compare(got: Any, cpu: Any, truth: Any, plain: Any, seed: int) -> None:
    """By the rule, and nearly everywhere what the CPU makes: a weight on the edge between two
    numbers may fall on either side."""
    for name, x, y in zip(("out", "lse"), got, cpu, strict=True):
        dtype = torch.bfloat16 if name == "out" else torch.float32
        wanted, low = getattr(truth, name), getattr(plain, name)
        assert_close(name, x, wanted, low, dtype=dtype, seed=seed)
        live = y.isfinite()
        step = torch.finfo(dtype).eps * y[live].abs() + 1e-5
        assert ((x[live] - y[live]).abs() <= step).double().mean() > 0.97


def dense(
    scales: str = "head", seed: int = 0, sizes: dict[str, Any] | None = None, spread: bool = True,
    style: str = "", **given: Any,
) -> None:  # fmt: skip
    shape = {"B": 1, "M": 290, "N": 330, "Hq": 2, "Hk": 1, "D": 128} | (sizes or {})
    q, k, v = qkv(generator(seed), **shape)
    if spread:  # so that scales differ by block, head and sequence
        v[0, :, 0] *= 8
        k[:, ::3] *= 3
        v[:, 140:] *= 50
    small = quantize_qkv(q, k, v, scales=scales)
    tensors = [strided(x, style) for x in small[:3]] if style else list(small[:3])
    named = given | descales(small)
    got = emulate(*describe(*read(tuple(tensors), Dense(), named)), seed)
    cpu = flashtile.attention(*tensors, **named, return_lse=True)
    reference = partial(attention_reference, *tensors, **named)
    compare(
        got,
        cpu,
        reference(),
        reference(compute_dtype=torch.float32, attend=attention_in_float8),
        seed,
    )


@pytest.mark.parametrize(
    ("head_dim", "scales", "causal"), pairwise([64, 128, 256], ["head", "block"], [False, True])
)
def test_head_dims(head_dim: int, scales: str, causal: bool):
    dense(scales, sizes={"D": head_dim}, causal=causal)


@pytest.mark.parametrize("head_dims", sample([(48, 48), (96, 80), (192, 128), (64, 208)], 2))
def test_padded_head_dims(head_dims: tuple[int, int]):
    dense("block", sizes={"D": head_dims[0], "Dv": head_dims[1], "Hk": 2, "B": 2}, causal=True)


@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    one_kind_each([(65, 1), (128, 128), (300, 77), (77, 300), (193, 600)], [64, 256]),
)
def test_lengths(lengths: tuple[int, int], head_dim: int):
    dense("block", sizes={"M": lengths[0], "N": lengths[1], "D": head_dim}, causal=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (50, 20)},
    "left": {"window_size": (33, -1)},
    "softcap": {"softcap": 3.0, "causal": True},
    "negative scale": {"softmax_scale": -0.1, "causal": True},
    "score function": {"score_mod": FUNCTIONS["softcap"], "softmax_scale": -0.2, "causal": True},
    "score function of a softcap": {"score_mod": lambda s, b, h, i, j: s + s * s, "softcap": 2.0},
}


@pytest.mark.parametrize(("option", "head_dim"), one_kind_each(OPTIONS, [64, 128]))
def test_options(option: str, head_dim: int):
    dense("block", 1, {"D": head_dim, "M": 330, "N": 500}, **OPTIONS[option])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_a_score_function_hides(head_dim: int):
    """They are empty in the first blocks that their tile visits, or in all of them."""
    q, k, v = qkv(generator(0), B=1, M=130, N=400, Hq=2, Hk=1, D=head_dim)
    k[:, 120:], q[:, ::3] = 0.0, 0.0
    small = quantize_qkv(q, k, v, scales="head", hadamard=False)
    named = {"score_mod": lambda s, b, h, i, j: torch.where(s == 0, -torch.inf, s)}
    named |= descales(small)
    got = emulate(*describe(*read(small[:3], Dense(), named)), seed=0)
    cpu = flashtile.attention(*small[:3], **named, return_lse=True)
    reference = partial(attention_reference, *small[:3], **named)
    plain = reference(compute_dtype=torch.float32, attend=attention_in_float8)
    compare(got, cpu, reference(), plain, 0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hidden_keys_may_be_nan(head_dim: int):
    """Those before the first query's window."""
    small = quantize_qkv(*qkv(generator(0), B=1, M=130, N=400, D=head_dim), scales="head")

    def call(hidden: float) -> tuple[Tensor, Tensor]:
        k, v = (x.float() for x in small[1:3])
        k[:, :230], v[:, :230] = hidden, hidden
        tensors = small.q, k.to(E4M3), v.to(E4M3)
        given = {"window_size": (40, 0), **descales(small)}
        return emulate(*describe(tensors, Dense(), given), seed=0)

    for got, wanted in zip(call(torch.nan), call(1.0), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("style", ["contiguous", "transposed", "sliced", "offset"])
def test_strides(style: str):
    """Also batches whose keys fill no whole group, and heads that lie before rows."""
    dense(style=style, sizes={"B": 2, "Hq": 4, "Hk": 2, "M": 70, "N": 90}, causal=True)


@pytest.mark.parametrize("N", [96, 90])
def test_keys_of_whole_groups_are_read_in_place(N: int):
    from flashtile.backends.hopper.float8.launch import readable_keys

    k = torch.zeros(2, N, 2, 64).to(E4M3)
    assert (readable_keys(k, None, 64) is k) == (N % 16 == 0)


class Emulated:
    """A compiled kernel as Triton hands it out, ``compiled[grid](*arguments)``, emulated."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any) -> None:
            named = dict(zip(self.launch.kernel.arg_names, arguments, strict=True))
            emulator.run(Launch(self.launch.kernel, grid, named), 0)

        return run


@pytest.mark.parametrize(("N", "described"), [(96, 2), (90, 4)])
def test_repeated_calls(N: int, described: int, monkeypatch: pytest.MonkeyPatch):
    """Launched again as each call by itself. A call that copies K, here for lack of whole groups,
    is described each time."""
    counter = torch.zeros(2, dtype=torch.int32)
    compiled, calls = 0, 0

    def run(launch: Launch) -> Any:
        nonlocal compiled
        compiled += 1
        emulator.run(launch, 0)
        return Emulated(launch)

    def counting_launch(*arguments: Any) -> Launch:
        nonlocal calls
        calls += 1
        return float8_launch(*arguments)

    def call(seed: int) -> tuple[Tensor, Tensor]:
        tensors = qkv(generator(seed), B=1, M=70, N=N, Hq=2, Hk=1, D=64)
        small = quantize_qkv(*tensors, scales="block")
        operands, options = describe(small[:3], Dense(), {"causal": True, **descales(small)})
        problem = AttentionProblem.of(operands, options)
        problem = problem._replace(device_type="cuda", capability=(9, 0))
        return hopper.forward(problem, operands)

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(float8_path, "float8_launch", counting_launch)
    monkeypatch.setattr(forward_path, "multiprocessors", lambda device: PROGRAMS)
    monkeypatch.setattr(forward_path, "tile_counter", lambda device: counter)
    for known in (launch_cache._prepared, launch_cache._compiled):
        known.clear()
    again = [call(seed) for seed in range(4)]
    assert (compiled, calls) == (1, described)
    for seed, found in enumerate(again):
        for known in (launch_cache._prepared, launch_cache._compiled):
            known.clear()
        assert all(map(torch.equal, found, call(seed)))


@pytest.mark.parametrize(("head_dim", "used"), one_kind_each([64, 128, 256], [True, False]))
def test_packed(head_dim: int, used: bool):
    seqused = {"seqused_q": [70, 0, 0, 250], "seqused_k": [101, 3, 0, 129]} if used else {}
    lengths = [70, 0, 1, 260], [130, 40, 0, 265]
    tensors, layout, counts = packed_inputs(4, head_dim, *lengths, seqused)
    bounds = dict(zip(Packed._fields[:4], layout[:4], strict=True))
    small = quantize_qkv(*tensors, scales="head", **bounds)
    named = {"causal": True} | descales(small)
    operands, options = describe(small[:3], layout, {**named, **counts})
    got = emulate(operands, options, 4)
    cpu = flashtile.attention_varlen(*small[:3], *layout[:4], **named, **counts, return_lse=True)
    reference = partial(attention_varlen_reference, *small[:3], *layout[:4], **named, **counts)
    truth, plain = reference(), reference(compute_dtype=torch.float32, attend=attention_in_float8)
    rows = truth.out.shape[0]
    assert not got[0][rows:].any()
    assert (got[1][:, rows:] == -torch.inf).all()
    got, cpu = ((out[:rows], lse[:, :rows]) for out, lse in (got, cpu))
    compare(got, cpu, truth, plain, 4)


@pytest.mark.parametrize(("head_dim", "seed"), one_kind_each([64, 128, 256], range(3)))
def test_meetings_in_any_order(seed: int, head_dim: int):
    dense("block", seed, {"M": 400, "N": 400, "D": head_dim, "B": 2}, causal=seed % 2 == 1)
