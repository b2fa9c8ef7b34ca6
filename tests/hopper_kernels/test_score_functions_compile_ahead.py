"""The Hopper kernels with score functions, compiled for sm_90a: registers and spills of each.

FLASHTILE_ALL_CONFIGURATIONS=1 takes every function with both head dims.
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

from compiled_kernels import Report, report

from flashtile.backends.hopper.forward.plan import OLDEST_TRITON, TRITON_VERSION
from flashtile.backends.hopper.relative_bias import with_program, with_table
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import generator, normal, qkv

if TRITON_VERSION is None or TRITON_VERSION < OLDEST_TRITON:
    # The backend refuses it too, with this reason.
    pytest.skip("Triton is too old for Gluon on Hopper", allow_module_level=True)

from .launches import SHARED_LIMIT, launch_of
from .score_functions import FUNCTIONS, SLOPES, described
from .test_backward_compile_ahead import launches_of

NEWER = TRITON_VERSION > (3, 6)
# Bytes a thread that may spill in the forward and in the backward, and how many loads and stores of
# such bytes a step of the backward may have in the loop over blocks without masks.
OLDEST_LIMITS: dict[tuple[str, int], tuple[int, int, int]] = {
    ("alibi", 64): (0, 120, 0),  # 128 queries, as without it: `SPILLS[64]`
    ("table", 64): (0, 8, 0),
    ("causal", 128): (0, 160, 0),
    ("softcap", 128): (0, 80, 0),
    ("documents", 128): (120, 352, 9),
    ("table", 128): (28, 456, 12),
    ("softcap", 64): (12, 8, 0),
    ("infinite slope", 64): (0, 76, 0),
    ("whole table", 128): (0, 144, 0),
    ("relative bias", 64): (0, 8, 0),
    ("relative bias", 128): (36, 424, 9),
}
NEWEST_LIMITS = {  # as far as they differ
    ("alibi", 64): (0, 76, 2),
    ("table", 64): (0, 0, 1),
    ("causal", 128): (8, 280, 1),
    ("softcap", 128): (300, 124, 0),
    ("relative bias", 128): (48, 616, 20),
}
CALLS: dict[str, dict[str, Any]] = {name: {"score_mod": x} for name, x in FUNCTIONS.items()}
CALLS["relative bias"] = {"relative_bias": normal(generator(1), 4, 257)}
LIMITS = OLDEST_LIMITS | (NEWEST_LIMITS if NEWER else {})
RARE = [*LIMITS][4:-2]  # with FULL only


def call(head_dim: int, **options: Any) -> tuple[Operands, Options]:
    # More keys than queries: otherwise a function that is a causal mask becomes one.
    sizes = {"B": 2, "M": 600, "N": 700, "Hq": 4, "Hk": 2, "D": head_dim, "Dv": head_dim}
    tensors = qkv(generator(0), **sizes, dtype=torch.bfloat16)
    make = described if "score_mod" in options else describe
    operands, described_options = make(tensors, Dense(), options)
    problem = with_program(AttentionProblem.of(operands, described_options))
    return Operands(*with_table(operands)), problem.options


def checked(found: Report, spills: int) -> Report:
    assert found.shared <= SHARED_LIMIT
    assert not found.warnings
    assert not found.unused_barriers
    assert found.spilled <= spills
    return found


@pytest.mark.parametrize(
    ("name", "head_dim"), LIMITS if FULL else [x for x in LIMITS if x not in RARE]
)
def test_functions_compile(name: str, head_dim: int):
    forward, backward, reloads = LIMITS[name, head_dim]
    given = call(head_dim, **CALLS[name])
    checked(report(launch_of(*given)), forward)
    found = checked(report(launches_of(given)[1]), backward)
    shortest = min(found.blocks, key=lambda block: block.length)  # without a mask
    assert shortest.count("LDL") + shortest.count("STL") <= reloads


@pytest.mark.skipif(NEWER, reason="newer assemblers move registers about")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_functions_take_few_instructions(head_dim: int):
    """ALiBi computes distances once a diagonal, and the tanh of a softcap is one instruction."""
    for name, option in (("alibi", {"alibi_slopes": SLOPES}), ("softcap", {"softcap": 3.0})):
        as_function, as_option = (
            max(block.length for block in report(launch_of(*call(head_dim, **given))).blocks)
            for given in ({"score_mod": FUNCTIONS[name]}, option)
        )
        assert as_option <= 620
        assert as_function < 1.3 * as_option
