"""The decoding kernel over latents compiled for sm_90a, with the compiler's report read, and the
calls that it runs. No GPU is needed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from kernels.decoding import LATENT_CASES, make_decoding

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton decides at import; these tests read what its compiler makes.
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from flashtile.backends.hopper.forward.plan import OLDEST_TRITON, TRITON_VERSION

if TRITON_VERSION is None or TRITON_VERSION < OLDEST_TRITON:
    # The backend refuses it too, with this reason.
    pytest.skip("Triton is too old for Gluon on Hopper", allow_module_level=True)

from compiled_kernels import key, report

from flashtile.backends import hopper
from flashtile.backends.hopper.latent.launch import latent_launches, scratch_of
from flashtile.call import dispatch
from flashtile.gpu.launch import Launch
from flashtile.problem import AttentionProblem, lse_shape

from .launches import CAPABILITY, SHARED_LIMIT


def launch_of(name: str, parts: int, **changes: Any) -> Launch:
    """The launch that a decoding step would make on the device."""
    operands, options = make_decoding(name, torch.bfloat16, **changes)
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(capability=CAPABILITY, device_type="cuda")
    assert not hopper.unsupported_reasons(problem)
    made = [operands.q[..., :512].contiguous(), torch.empty(lse_shape(operands))]
    made += [scratch_of(operands, parts).allocate()] * (parts > 1)
    return latent_launches(problem, operands, parts, made)[0]


@pytest.mark.parametrize(("name", "parts"), zip(LATENT_CASES, (1, 2, 3), strict=True))
def test_it_compiles(name: str, parts: int):
    """No spills, and no product that waits for another one."""
    found = report(launch_of(name, parts, Hq=128))
    assert found.shared <= SHARED_LIMIT
    assert not found.warnings
    assert found.spilled == 0
    assert not found.unused_barriers
    # P of a warpgroup's own tile stays in registers.
    assert found.value_products == ["gdesc", "register"]
    assert len(found.blocks) == 2
    for block in found.blocks:
        # S reads 576 columns in steps of 16, O += P V 64 keys of each tile; a wait for each. Triton
        # 3.6 has another wait where the second warpgroup rescales its output.
        assert block.count("HGMMA") == 576 // 16 + 2 * 64 // 16
        assert 3 <= block.count("WARPGROUP.DEPBAR") <= 4
        # A thread has 32 scores in two rows. Both products are waited for after the softmax.
        assert block.exponentials[-3] == 32 + 2


def test_queries_at_an_odd_address_are_copied():
    """They are loaded 16 bytes at a time."""
    operands, options = make_decoding(LATENT_CASES[0], torch.bfloat16)
    moved = torch.empty(operands.q.numel() + 1, dtype=torch.bfloat16)[1:].view(operands.q.shape)
    operands = operands._replace(q=moved)
    problem = AttentionProblem.of(operands, options)
    made = [moved[..., :512].contiguous(), torch.empty(lse_shape(operands))]
    (launch,) = latent_launches(problem, operands, 1, made)
    assert launch.arguments["q_ptr"].data_ptr() % 16 == 0


def test_new_lengths_compile_nothing_new():
    pages, calls = LATENT_CASES[-1], ((2, 8, 1), (3, 128, 2), (5, 20, 4))
    assert len({key(launch_of(pages, n, Hq=Hq, M=M)) for n, Hq, M in calls}) == 1


@pytest.mark.parametrize(
    ("change", "backend"),
    [({"Hq": 128}, "hopper"), ({"Hq": 16, "M": 2}, "hopper"), ({"Hq": 16}, "triton")],
    ids=str,
)
def test_the_faster_kernel_runs(change: dict[str, Any], backend: str):
    """Measured: few rows are faster in Triton's tile of 16."""
    operands, options = make_decoding("latent keys", torch.bfloat16)
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(capability=CAPABILITY, device_type="cuda", **change)
    assert dispatch.select(problem) == backend


CHANGES: dict[str, Any] = {
    "5 queries of latent keys (this kernel: 1 to 4)": {"M": 5},
    "pages of 16 latent keys (multiples of 64)": {"page_size": 16},
    "packed queries with latent keys (not in this kernel)": {"layout": "packed_queries"},
    "gradients with latent keys (not in this kernel)": {"needs_grad": True},
    "a sink with latent keys (not in this kernel)": {"has_sink": True},
    "2 heads of latent keys (this kernel: 1)": {"Hk": 2},
    "value_head_dim=256 of latent keys (this kernel: 512)": {"Dv": 256},
    "left pads or rows of a cache with latent keys (not in this kernel)": {"has_cache_rows": True},
    "float8 keys and values with latent keys (not in this kernel)": {"has_float8_keys": True},
}


@pytest.mark.parametrize("reason", CHANGES)
def test_it_says_what_it_lacks(reason: str):
    operands, options = make_decoding("latent keys", torch.bfloat16)
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(capability=CAPABILITY, device_type="cuda")
    assert hopper.unsupported_reasons(problem._replace(**CHANGES[reason])) == [reason]
