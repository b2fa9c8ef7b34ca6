"""The kernel that quantises, compiled for sm_90, with the compiler's report read. No GPU is
needed."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton decides at import; these tests read what its compiler makes.
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from compiled_kernels import DEVICES, report

from flashtile.gpu.launch import Launch
from flashtile.ops.quantize import Given, Rotary, config_of, tensors_of
from flashtile.ops.quantize import kernel as quantize
from flashtile.ops.quantize.formula import Recipe, Rows, keys_adjacent_like

from .spills import ALLOWED_IN_QUANTIZING


def launch_of(head_dim: int, rotary_dim: int = 0) -> Launch:
    """The launch that quantises 256 rows of `head_dim` and their scales."""
    x = torch.empty(2, 256, 4, head_dim, dtype=torch.bfloat16)
    rows = Rows.of(x, None, 256)
    small = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    tables = torch.empty(2, 256, rotary_dim // 2)
    rotary = Rotary(*tables, False) if rotary_dim else None
    given = (
        Given(x, small, rows, 64, True, rotary),
        Given(x, small, rows, 128, True, rotary),
        Given(x, keys_adjacent_like(x), rows, 128, False),
    )
    return quantize.quantize_launch(
        [quantize.Job.of(*tensors_of(one, torch.empty(2, 4, 4), Recipe())) for one in given],
        [config_of(one, 4, Recipe()) for one in given],
        B=2,
        M=256,
        N=256,
        total_q=2,
        total_k=2,
        multiprocessors=132,
    )


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 0), (128, 0), (256, 0), (256, 128)])
def test_only_what_is_allowed_spills(head_dim: int, rotary_dim: int):
    found = report(launch_of(head_dim, rotary_dim))
    allowed, _ = ALLOWED_IN_QUANTIZING.get((head_dim, rotary_dim), (0, ""))
    assert found.spilled <= allowed
    assert found.shared <= DEVICES["sm_90"].shared


def test_rows_that_are_adjacent_are_stored_together():
    """Not V's numbers one by one, each under a mask of its own."""
    accesses = report(launch_of(256)).accesses
    assert "st.global.v4.b32" in accesses
    assert "st.global.b8" not in accesses
