"""Which float8 caches and caches of packed rows come two or four columns at a time. No GPU is
needed.
"""

from __future__ import annotations

import pytest
import torch

from flashtile import CacheFormat, cache_formats
from flashtile.backends.triton.plan import plan
from flashtile.problem import AttentionProblem, Operands, Options

E4M3 = torch.float8_e4m3fn


def pair_of(
    head_dims: tuple[int, int],
    dtype: torch.dtype = E4M3,
    *,
    seq_q: int = 1,
    aligned: bool = True,
    capability: tuple[int, int] = (9, 0),
) -> tuple[int, int]:
    """For the whole KV loop and for the split one, with 32 query heads and 8 key heads."""
    D, Dv = head_dims
    q = torch.empty(1, seq_q, 32, D, dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(1, 4096, 8, d, dtype=dtype, device="meta") for d in (D, Dv))
    described = AttentionProblem.of(Operands(q, k, v), Options(seq_q, 4096, 0.125))
    planned = plan(described._replace(device_type="cuda", capability=capability), aligned)
    return planned.forward.config.PAIR, planned.split.config.PAIR


@pytest.mark.parametrize("head_dims", [(128, 128), (64, 32), (48, 80), (256, 256)], ids=str)
def test_few_queries_take_pairs(head_dims: tuple[int, int]):
    assert pair_of(head_dims) == (2, 2)


def test_odd_head_dims_and_rows_that_start_anywhere_do_not():
    assert pair_of((33, 47)) == (1, 1)
    assert pair_of((64, 47)) == (1, 1)
    assert pair_of((64, 64), aligned=False) == (1, 1)


def test_columns_narrower_than_two_fragments_do_not():
    assert pair_of((64, 16), capability=(8, 9)) == (1, 1)
    assert pair_of((64, 32), capability=(8, 9)) == (2, 2)


def test_many_queries_and_caches_of_16_bits_do_not():
    assert pair_of((128, 128), seq_q=512)[0] == 1
    assert pair_of((128, 128), torch.bfloat16) == (1, 1)


def pair_of_rows(
    formats: tuple[CacheFormat, CacheFormat],
    *,
    seq_q: int = 1,
    capability: tuple[int, int] = (9, 0),
) -> int:
    """Of packed rows, for the split KV loop."""
    head_dim = formats[0].head_dim or 0
    q = torch.empty(1, seq_q, 32, head_dim, dtype=torch.bfloat16, device="meta")
    k, v = (
        torch.empty(1, 4096, 8, x.bytes_per_row, dtype=torch.uint8, device="meta") for x in formats
    )
    options = Options(seq_q, 4096, 0.125, value_head_dim=head_dim)
    unpack = {"k_unpack": formats[0].program, "v_unpack": formats[1].program}
    described = AttentionProblem.of(Operands(q, k, v), options._replace(**unpack))
    described = described._replace(device_type="cuda", capability=capability)
    return plan(described, aligned=True).split.config.PAIR


def test_elements_of_a_word_of_packed_rows_take_tiles_of_their_own():
    int8, int4 = cache_formats.int8(64), cache_formats.int4(64)
    assert pair_of_rows((int4, int4)) == 4
    assert pair_of_rows((int8, int8)) == pair_of_rows((int8, int4)) == 2
    assert pair_of_rows((cache_formats.int4(32),) * 2, capability=(8, 9)) == 2
    assert pair_of_rows((cache_formats.e5m2(33),) * 2) == 1
    assert pair_of_rows((int4, int4), seq_q=512) == 1
