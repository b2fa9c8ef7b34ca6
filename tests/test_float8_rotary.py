"""Rotary embedding of float8 queries and keys on their way into a float8 cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.layers.rotary import apply_rotary_emb
from flashtile.testing import rotary_tables
from flashtile.testing.inputs import generator, normal

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


def float8(seed: int, *shape: int) -> Tensor:
    """Values up to the largest float8 number, which the rotation may exceed."""
    x = normal(generator(seed), *shape, scale=400)
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def rotated(x: Tensor, *tables: Tensor, interleaved: bool, offsets: Tensor) -> Tensor:
    wide = apply_rotary_emb(x.float(), *tables, interleaved, seqlen_offsets=offsets)
    assert wide.abs().max() > LARGEST
    return wide.clamp(-LARGEST, LARGEST).to(E4M3)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_as_rotated_before(interleaved: bool, scaled: bool, seed: int) -> None:
    q, k, v = (float8(seed + i, 2, 3, heads, 16) for i, heads in enumerate((4, 2, 2)))
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    tables = rotary_tables(16, 12)
    how = {"interleaved": interleaved, "offsets": lengths}
    options: dict[str, Any] = {"causal": True, "softmax_scale": 2.0**-14, "return_lse": True}
    if scaled:
        options |= {f"{name}_descale": torch.full((2, 2), 0.5) for name in "qkv"}

    def call(q: Tensor, k: Tensor, **more: Any) -> list[Tensor]:
        caches = [float8(seed + 5 + i, 2, 16, 2, 16) for i in range(2)]
        out = flashtile.attention_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, **options, **more
        )
        return [x.float() for x in (*out, *caches)]

    wanted = call(rotated(q, *tables, **how), rotated(k, *tables, **how))
    got = call(*(q, k), rotary_cos=tables[0], rotary_sin=tables[1], rotary_interleaved=interleaved)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
