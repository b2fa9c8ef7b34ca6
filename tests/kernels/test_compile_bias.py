"""The kernels of calls with a bias, compiled for GPUs that are not here."""

from __future__ import annotations

import os
import re

import pytest
import torch
from configurations import one_kind_each

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from compiled_kernels import DEVICES, report

from flashtile.backends.triton import plan
from flashtile.gpu.launch import Launch

from .cases import bias, dense
from .launches import launches

HEAD_DIMS = (64, 128, 256)
# Loads of one number of 16 bits, as PTX writes them.
NARROW_LOAD = re.compile(r"ld\.global\S*\.(b|u|s)16\b")


@pytest.fixture(autouse=True)
def _as_a_large_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
    plan.plan.cache_clear()


def of_scores(device: str, head_dim: int, *shape: int) -> list[Launch]:
    """The kernels that read a bias of `shape`."""
    make = dense(B=1, M=shape[-2], N=shape[-1], Hq=2, Hk=2, D=head_dim)(bias(*shape))
    call = make(torch.Generator(), torch.bfloat16)
    return [
        launch
        for launch in launches(*call, device)
        if launch.kernel.__name__ not in ("delta_kernel", "row_sums_kernel")
    ]


@pytest.mark.parametrize(("head_dim", "keys"), [(64, 256), (128, 256), (128, 240)])
def test_a_bias_is_loaded_many_numbers_at_once(head_dim: int, keys: int):
    """16 divides the number of keys, so that the mask of a load does not split 16 bytes."""
    for launch in of_scores("sm_90", head_dim, 1, 2, 256, keys):
        assert not any(map(NARROW_LOAD.match, report(launch).accesses)), launch.kernel.__name__


def test_the_last_keys_of_an_odd_number_are_loaded_one_by_one():
    forward, *_ = of_scores("sm_90", 64, 1, 2, 256, 251)
    assert any(map(NARROW_LOAD.match, report(forward).accesses))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_wgmma_stays_asynchronous(head_dim: int):
    for launch in of_scores("sm_90", head_dim, 1, 2, 256, 256):
        assert not report(launch).is_serialised, launch.kernel.__name__


# Of Hopper, every head dim with tiles of its own.
FITTING = sorted(
    {*one_kind_each(DEVICES, HEAD_DIMS), *(("sm_90", D) for D in plan.BIASED["sm_90"])}
)


@pytest.mark.parametrize(("device", "head_dim"), FITTING)
def test_tiles_fit_shared_memory(device: str, head_dim: int):
    """With the tiles of the bias, which the compiler loads ahead."""
    for launch in of_scores(device, head_dim, 1, 2, 256, 256):
        found = report(launch, device)
        assert found.shared <= DEVICES[device].shared, found
