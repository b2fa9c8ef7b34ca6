"""The deterministic Hopper backward with tiles in two phases, in the emulator."""

from __future__ import annotations

import pytest
from configurations import one_kind_each

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.backward import plan

from . import test_backward_emulated
from .test_backward_emulated import dense


@pytest.mark.parametrize(
    ("head_dim", "lengths", "parts"),
    [
        (*tile, parts)
        for tile, parts in one_kind_each(
            [
                (64, (386, 386)),
                (128, (258, 258)),
                (128, (130, 300)),
                (192, (194, 150)),
                (256, (251, 251)),
            ],
            [1, 2],
        )
    ],
)
def test_deterministic_phases(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, lengths: tuple[int, int], parts: int
):
    """More key heads, or parts of them, than run together: tiles of two phases alternate."""
    monkeypatch.setattr(test_backward_emulated, "swizzles", lambda *_: [3])
    monkeypatch.setattr(plan, "FEWEST_IN_PHASES", 2)
    M, N = lengths
    sizes = {"M": M, "N": N, "D": head_dim, "Hq": 4, "Hk": 2}
    dense(head_dim, sizes=sizes, parts=parts, deterministic=True, causal=True)
