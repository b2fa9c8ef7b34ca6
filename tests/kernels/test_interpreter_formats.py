"""Caches of packed rows in Triton's interpreter, against the reference over the unpacked ones.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_formats.py
"""

from __future__ import annotations

import os

import pytest
import torch

from flashtile import CacheFormat, cache_formats
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import assert_close, floor_of, generator, normal, rounding_variance

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend

from .decoding import FORMAT_CASES, make_packed
from .reference import reference

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

KINDS = [(torch.float16, 3), (torch.float32, 2), (torch.float16, 1)]
# Every case once, with one kind each, and all kinds of one case.
CALLS = [(name, *KINDS[n % 3]) for n, name in enumerate(FORMAT_CASES)]
CALLS += [("int4", *kind) for kind in KINDS if ("int4", *kind) not in CALLS]


@pytest.mark.parametrize(("name", "dtype", "splits"), CALLS, ids=str)
def test_packed_rows(name: str, dtype: torch.dtype, splits: int, seed: int):
    packed, unpacked, options = make_packed(name, dtype, seed)
    problem = AttentionProblem.of(packed, options._replace(num_splits=splits))
    plain = options._replace(k_unpack="", v_unpack="", value_head_dim=0)
    truth, low = reference(unpacked, plain), reference(unpacked, plain, compute_dtype=dtype)
    variance = reference(unpacked, plain, attend=rounding_variance(dtype))
    got = backend.forward(problem, packed)
    for field, x in zip(("out", "lse"), got, strict=True):
        wanted, plainly = getattr(truth, field), getattr(low, field)
        floor = floor_of(getattr(variance, field))
        assert_close(field, x, wanted, plainly, floor=floor, dtype=dtype, seed=seed)


# By name, the bytes of a row of 64 elements and the function of one of them.
OF_USERS = {
    "integers beyond float16, scaled": (
        128,
        lambda row, d: cache_formats.number_at(row, 2 * d, torch.int16).int() * 16 * 2e-6,
    ),
    "tiny numbers, scaled": (
        65,
        lambda row, d: torch.exp2(row[d] / 16 - 36) * torch.exp2(row[64] / 128 + 20),
    ),
    "rounded down": (64, lambda row, d: (row[d].view(torch.int8) // 3).float() / 42),
}


@pytest.mark.parametrize("name", OF_USERS)
def test_a_function_of_a_user(name: str, seed: int):
    g, (size, unpack) = generator(seed), OF_USERS[name]
    rows = torch.randint(0, 256, (2, 1, 40, 1, size), generator=g, dtype=torch.uint8)
    own, dtype = CacheFormat(size, unpack), torch.float16
    q, options = normal(g, 1, 3, 2, 64, dtype=dtype), Options(3, 40, 0.125)
    unpacked = Operands(q, *own.unpacked(rows, 64).to(dtype))
    truth = reference(unpacked, options).out
    low = reference(unpacked, options, compute_dtype=dtype).out
    programs = {"k_unpack": own.program, "v_unpack": own.program, "value_head_dim": 64}
    packed = Operands(q, *rows)
    problem = AttentionProblem.of(packed, options._replace(**programs))
    assert_close("out", backend.forward(problem, packed)[0], truth, low, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_row_outside_of_the_window_may_hold_anything(dtype: torch.dtype, seed: int):
    """Scales of NaN, too."""
    g, int8 = generator(seed), cache_formats.int8(64)
    q, (k, v) = normal(g, 1, 1, 2, 64, dtype=dtype), normal(g, 2, 1, 40, 1, 64)
    unpack = {"k_unpack": int8.program, "v_unpack": int8.program, "value_head_dim": 64}
    options = Options(1, 40, 0.125, window_left=5, window_right=0, **unpack)
    results = []
    for hidden in (0, 255):
        rows = [int8.packed(x).index_fill_(1, torch.arange(34), hidden) for x in (k, v)]
        operands = Operands(q, *rows, seqused_k=torch.tensor([40], dtype=torch.int32))
        results.append(backend.forward(AttentionProblem.of(operands, options), operands)[0])
    assert torch.equal(*results) and results[0].isfinite().all()
