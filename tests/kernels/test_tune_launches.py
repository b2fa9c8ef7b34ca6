"""What `flashtile tune` launches for a candidate. Nothing runs, so no GPU is needed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.triton import launch, plan
from flashtile.cli import tune
from flashtile.gpu.described import TARGETS, current_target


@pytest.mark.parametrize("name", ["sm_86", "sm_90"])
@pytest.mark.parametrize("call", tune.CALLS)
@pytest.mark.parametrize("head_dim", tune.HEAD_DIMS)
def test_a_candidate_is_one_launch_of_its_kernel_and_tile(
    monkeypatch: pytest.MonkeyPatch, name: str, call: str, head_dim: int
):
    monkeypatch.setattr(launch, "run", lambda *_: None)
    monkeypatch.setattr(current_target, "gpu", TARGETS[name])
    monkeypatch.setattr(tune, "TOKENS", 256)
    monkeypatch.setattr(tune, "HIDDEN", 256)
    for now in tune.in_use(name, head_dim, call):
        candidate = next(tune.grid(*now[:3]))
        describe = partial(tune.launches_of, candidate, 500, torch.bfloat16)
        for is_second in (False, True):
            (made,) = describe(is_second)
            config = made.arguments["cfg"]
            assert made.kernel.__name__ == tune.MARKS[now.kernel][0]
            assert candidate.tile[:2] == (config.BLOCK_M, config.BLOCK_N)
            assert (call == "split-decoding") == config.IS_SPLIT
            assert (now.kind if now.kind in plan.PRODUCTS else "ieee") == config.PRECISION
            assert (call == "bias") == config.HAS_LARGE_SCORES
            assert (config.PAGE_SIZE > 0) == ("decoding" in call and is_second)
