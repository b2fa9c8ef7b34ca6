"""Which scores of a tile the Triton backend keeps, against `keep_mask`, for every size of tile."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    # Triton decides at import whether to interpret.
    pytest.skip("interprets kernels (TRITON_INTERPRET=1)", allow_module_level=True)

import triton
import triton.language as tl

from flashtile.backends.triton.arguments import Dropout, Lengths, Sequence, Sequences
from flashtile.backends.triton.tiles import kept
from flashtile.dropout import draw_rng_state, first_kept, keep_mask, random_bits
from flashtile.gpu.dropout import dropout_key
from flashtile.testing import generator


class Config(NamedTuple):
    """What `kept` reads of a `KernelConfig`."""

    BLOCK_M: int
    BLOCK_N: int
    DROPOUT_BITS: int
    HAS_LONE_KEYS: bool
    RUNS: int = 0


@triton.jit
def kept_kernel(kept_ptr, rng_ptr, at, first, b, h, m0, cfg: tl.constexpr):
    """Program n writes (BLOCK_M, BLOCK_N) of the rows from m0 and the n-th tile of keys."""
    rows = tl.arange(0, cfg.BLOCK_M)[:, None]
    columns = tl.arange(0, cfg.BLOCK_N)[None, :]
    n0 = tl.program_id(0) * cfg.BLOCK_N
    sequence = Sequence(b, 0, 0, 0, 0, Lengths(at, 0, 0, 0, 0, 0, 0, 0))
    dropout = Dropout(dropout_key(rng_ptr), first)
    found = kept(dropout, m0 + rows, n0, sequence, h, cfg)
    width = tl.num_programs(0) * cfg.BLOCK_N
    tl.store(kept_ptr + rows * width + n0 + columns, found)


@pytest.mark.parametrize("dropout_p", [0.3, 0.03])
@pytest.mark.parametrize("has_lone_keys", [False, True])
@pytest.mark.parametrize("keys", [16, 32, 64, 128])
def test_tiles_of_keys(keys: int, has_lone_keys: bool, dropout_p: float, seed: int):
    N, b, h, m0, rows = 256, 3, 5, 70, 16
    state = draw_rng_state(torch.device("cpu"), generator(seed))
    found = torch.zeros(rows, N, dtype=torch.bool)
    at = Sequences(*[None] * len(Sequences._fields))
    cfg = Config(rows, keys, random_bits(dropout_p), has_lone_keys)
    kept_kernel[(N // keys,)](found, state, at, first_kept(dropout_p), b, h, m0, cfg)
    coordinates = torch.tensor([b]), torch.tensor([h]), m0 + torch.arange(rows), torch.arange(N)
    assert torch.equal(found, keep_mask(state, dropout_p, *coordinates)[0, 0])
