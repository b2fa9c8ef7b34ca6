"""The kernel that quantises, compiled for sm_90, with the compiler's report read. No GPU is
needed."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton decides at import; these tests read what its compiler makes.
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from flashtile.gpu.launch import Launch
from flashtile.ops.quantize import kernel as quantize
from flashtile.ops.quantize.formula import keys_adjacent_like

from .compile_ahead import DEVICES, ptx, report
from .spills import ALLOWED_IN_QUANTIZING

NEWER = tuple(map(int, version("triton").split(".")[:2])) > (3, 6)


def launch_of(head_dim: int, rows: int, of_values: bool, half: int = 0) -> Launch:
    """A launch on rows of `head_dim`, scales made in the same pass."""
    x = torch.empty(2, 256, 4, head_dim, dtype=torch.bfloat16)
    out = keys_adjacent_like(x) if of_values else torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    recipe = quantize.QuantizeConfig(
        ROWS=rows,
        DIM=head_dim,
        BLOCK_D=1 << (head_dim - 1).bit_length(),
        UNIT=0.125,
        ROW_STEP=16 if of_values else 1,
        HALF=half,
        IS_INTERLEAVED=False,
        IS_MEASUREMENT=False,
        HAS_SCALES=False,
    )
    tables: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if half:
        tables = torch.empty(256, half), torch.empty(256, half)
    return quantize.quantize_launch(
        x,
        out,
        torch.empty(2, 4, 4),
        recipe,
        matrix=None if of_values else torch.empty(head_dim, head_dim, dtype=torch.bfloat16),
        mean=None,
        rotary=tables,
        cu_seqlens=None,
        longest=256,
        group=1,
        programs=528,
    )


@pytest.mark.parametrize(
    ("head_dim", "rows", "of_values", "half"),
    [(64, 64, False, 0), (128, 128, False, 0), (256, 128, False, 64), (256, 128, True, 0)],
)
def test_only_what_is_allowed_spills(head_dim: int, rows: int, of_values: bool, half: int):
    found = report(launch_of(head_dim, rows, of_values, half), "sm_90")
    allowed, _ = ALLOWED_IN_QUANTIZING.get((head_dim, half), (0, "")) if NEWER else (0, "")
    assert found.spilled <= allowed
    assert found.shared <= DEVICES["sm_90"].shared


def test_rows_that_are_adjacent_are_stored_together():
    """Not V's numbers one by one, each under a mask of its own."""
    text = ptx(launch_of(256, 128, of_values=True))
    assert "st.global.v4.b32" in text
    assert "st.global.b8" not in text
