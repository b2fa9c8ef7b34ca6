"""The float8 kernel compiled for sm_90a, with the compiler's report read. No GPU is needed.

FLASHTILE_ALL_CONFIGURATIONS=1 takes every head dim and option.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from configurations import FULL

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton decides at import; these tests read what its compiler makes.
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from flashtile.backends.hopper.forward.plan import OLDEST_TRITON, TRITON_VERSION

if TRITON_VERSION is None or TRITON_VERSION < OLDEST_TRITON:
    # The backend refuses it too, with this reason.
    pytest.skip("Triton is too old for Gluon on Hopper", allow_module_level=True)

from compiled_kernels import key, report

from flashtile.backends.hopper.float8.launch import config_of, float8_launch
from flashtile.backends.hopper.forward.launch import outputs, tile_list
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.gpu.launch import Launch
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.quantize import Quantized, quantize_qkv
from flashtile.testing import cu_seqlens, generator, packed_qkv, qkv

from .launches import CAPABILITY, MULTIPROCESSORS, SHARED_LIMIT

# Instructions of a block of keys in a consumer, a few more than counted, by head dim.
INSTRUCTIONS = {64: 440, 128: 500, 256: 530}


def launch_of(call: tuple[Operands, Options]) -> Launch:
    """The launch that the call would make on the device."""
    problem = AttentionProblem.of(*call)._replace(capability=CAPABILITY, device_type="cuda")
    config = config_of(problem, call[0])
    counter = torch.zeros(2, dtype=torch.int32)
    out, lse = (allocate() for allocate in outputs(call[0], config))
    tiles = next((allocate() for allocate in tile_list(problem, config, call[0])), None)
    return float8_launch(problem, config, call[0], out, lse, MULTIPROCESSORS, counter, tiles)


def scales_of(small: Quantized) -> dict[str, Any]:
    return {name: getattr(small, name) for name in ("q_descale", "k_descale", "v_descale")}


def dense(
    head_dim: int = 128, scales: str = "head", M: int = 300, N: int = 400, **options: Any
) -> tuple[Operands, Options]:
    small = quantize_qkv(*qkv(generator(0), M=M, N=N, D=head_dim), scales=scales)
    return describe(small[:3], Dense(), {**scales_of(small), **options})


def packed() -> tuple[Operands, Options]:
    lengths = [130, 5, 0, 70]
    q, k, v = packed_qkv(generator(0), lengths, lengths, D=128)
    layout = Packed(cu_seqlens(lengths), cu_seqlens(lengths), 130, 130)
    small = quantize_qkv(q, k, v, **dict(zip(Packed._fields[:4], layout[:4], strict=True)))
    return describe(small[:3], layout, {"causal": True, **scales_of(small)})


OPTIONS: dict[str, Any] = {
    "window": lambda: dense(window_size=(50, 20)),
    "softcap": lambda: dense(softcap=3.0),
    "packed": packed,
    **{
        f"{head_dim} {scales} {mask}": lambda d=head_dim, s=scales, m=mask: dense(
            d, s, causal=m == "causal"
        )
        for head_dim in (64, 128, 256)
        for scales in ("head", "block")
        for mask in ("full", "causal")
    },
}


@pytest.mark.parametrize(
    "option", OPTIONS if FULL else ["64 block causal", "128 block causal", "256 head full"]
)
def test_options_compile(option: str):
    found = report(launch_of(OPTIONS[option]()))
    assert found.shared <= SHARED_LIMIT
    assert not found.warnings  # among them those of products that wait for each other
    assert not found.unused_barriers
    assert found.spilled == 0


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
@pytest.mark.parametrize("head_dim", INSTRUCTIONS)
def test_blocks_stay_lean(head_dim: int):
    blocks = report(launch_of(dense(head_dim))).blocks
    assert len(blocks) == (3 if head_dim == 64 else 2)  # one a consumer
    for block in blocks:
        assert block.length <= INSTRUCTIONS[head_dim]
        assert block.count("STL") + block.count("LDL") == 0


def test_new_lengths_compile_nothing_new():
    lengths = ((65, 16), (128, 48), (300, 80), (1024, 1024))
    assert len({key(launch_of(dense(M=M, N=N))) for M, N in lengths}) == 1
