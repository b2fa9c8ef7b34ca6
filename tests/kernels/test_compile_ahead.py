"""Every kernel compiled for every architecture, with the compiler's report read. No GPU is needed.

FLASHTILE_ARCHITECTURES=sm_80,... picks architectures; FLASHTILE_ALL_CONFIGURATIONS=1 takes every
head dim and dtype.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from flashtile.api import Arguments, dense_call
from flashtile.backends.triton import plan
from flashtile.testing import generator, qkv

from .cases import make_call
from .compile_ahead import CDNA_SHARED_LIMIT, SHARED_LIMIT, launches, report, target_of

CAPABILITIES = {
    "sm_80": (8, 0),
    "sm_86": (8, 6),
    "sm_89": (8, 9),
    "sm_90": (9, 0),
    "sm_100": (10, 0),
    "sm_120": (12, 0),
    "gfx942": None,
}
CHOSEN = os.environ.get("FLASHTILE_ARCHITECTURES", "sm_80,sm_86,sm_90,sm_100,gfx942").split(",")
FULL = os.environ.get("FLASHTILE_ALL_CONFIGURATIONS") == "1"
CONFIGURATIONS = [
    (torch.bfloat16, 64),
    (torch.bfloat16, 128),
    *([(torch.bfloat16, 256), (torch.bfloat16, 512)] if FULL else []),
    *([(torch.float32, 64), (torch.float32, 128)] if FULL else []),
]
# Registers that may spill, in bytes a thread: a few in the masked loop of a tile that is faster all
# the same.
SPILLS = 192


@pytest.fixture(autouse=True)
def _as_on_the_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Plan large calls (which tensor descriptors are for) and, for gfx, as ROCm does."""
    is_rocm = request.node.callspec.params.get("name") == "gfx942"
    monkeypatch.setattr(plan, "_is_rocm", lambda: is_rocm)
    monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
    plan.plan.cache_clear()


def check(operands, options, name: str, backward: bool = True, spills: int | None = SPILLS) -> None:
    capability = CAPABILITIES[name]
    target = target_of(capability)
    limit = CDNA_SHARED_LIMIT if capability is None else SHARED_LIMIT[target.arch]
    for launch in launches(operands, options, capability, backward):
        found = report(launch, target)
        assert found.shared <= limit, found
        assert spills is None or found.stack <= spills, found


@pytest.mark.parametrize(("dtype", "head_dim"), CONFIGURATIONS)
@pytest.mark.parametrize("name", CHOSEN)
def test_default_tiles_fit(name: str, dtype: torch.dtype, head_dim: int):
    q, k, v = qkv(generator(0), B=1, M=256, N=256, Hq=2, Hk=2, D=head_dim, dtype=dtype)
    check(*dense_call(q, k, v, Arguments(causal=True)), name)


@pytest.mark.parametrize(
    "option", ["window", "bias of keys", "packed dropout", "block mask", "alibi"]
)
@pytest.mark.parametrize("name", ["sm_90"])
def test_options_compile(name: str, option: str):
    check(*make_call(option, torch.bfloat16), name, spills=None)


@pytest.mark.parametrize("name", ["sm_80"])
def test_pages_compile(name: str):
    check(*make_call("pages", torch.bfloat16), name, backward=False, spills=None)


@pytest.mark.parametrize("name", ["sm_80"])
def test_a_new_length_compiles_nothing_new(name: str):
    seen = set()
    for length in (1, 15, 16, 17, 1000, 1024):
        q, k, v = qkv(generator(0), B=1, M=300, N=length, Hq=2, Hk=2, D=64, dtype=torch.bfloat16)
        operands, options = dense_call(q, k, v, Arguments())
        for launch in launches(operands, options, CAPABILITIES[name], True):
            seen.add(specialization(launch))
    assert len(seen) == 4  # forward, delta, dK and dV, dQ


def specialization(launch) -> str:
    """What Triton compiles a launch for."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target_of((8, 0)))
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    return f"{launch.kernel.__name__} {bind(**launch.arguments)[1]}"
