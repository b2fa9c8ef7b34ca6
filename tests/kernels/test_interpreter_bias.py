"""Biases of unusual strides, and of sequences shorter than the bias, in Triton's interpreter.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_bias.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.testing import generator, normal, qkv

from .cases import SMALL, lengths
from .compare import Run, everything

SHAPE = (2, 4, 37, 45)


def run(bias: Tensor, seed: int, **options: Tensor) -> Run:
    g = generator(seed)
    operands, described = describe(qkv(g, dtype=torch.float16, **SMALL), Dense(), options)
    dout, dlse = normal(g, 2, 37, 4, 16, dtype=torch.float16), normal(g, 2, 4, 37)
    return everything(backend, operands._replace(bias=bias), described, dout, dlse)


def assert_same(found: Run, wanted: Run) -> None:
    for name, x in wanted.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("far", [0, 1, 2, 3], ids=["sequences", "heads", "rows", "keys"])
def test_elements_farther_apart_than_32_bits_count(far: int, seed: int):
    """The memory between them is never touched, so that the system does not provide it."""
    bias = normal(generator(seed + 1), *SHAPE, dtype=torch.float16)
    steps = list(bias.stride())
    steps[far] = 2**31 // (SHAPE[far] - 1) + 8
    extent = 1 + sum(step * (size - 1) for step, size in zip(steps, SHAPE, strict=True))
    spread = torch.empty(extent, dtype=torch.float16).as_strided(SHAPE, steps)
    spread.copy_(bias)
    assert_same(run(spread, seed), run(bias, seed))


@pytest.mark.parametrize("layout", ["transposed", "a part", "heads last"])
def test_strides(layout: str, seed: int):
    g = generator(seed + 1)
    bias = {
        "transposed": lambda: normal(g, 2, 4, 45, 37, dtype=torch.float16).mT,
        "a part": lambda: normal(g, 2, 4, 40, 93, dtype=torch.float16)[:, :, 3:, 1:91:2],
        "heads last": lambda: normal(g, 2, 37, 45, 4, dtype=torch.float16).permute(0, 3, 1, 2),
    }[layout]()
    assert_same(run(bias, seed), run(bias.contiguous(), seed))


def test_numbers_past_the_used_keys_are_ignored(seed: int):
    used = lengths(45, 20)
    bias = normal(generator(seed + 1), *SHAPE, dtype=torch.float16)
    bias[1, :, :, 20:] = 0.0
    poisoned = bias.clone()
    poisoned[1, :, :, 20:] = torch.nan
    assert_same(run(poisoned, seed, seqused_k=used), run(bias, seed, seqused_k=used))
