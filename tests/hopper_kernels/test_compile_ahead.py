"""The Hopper kernel compiled for sm_90a, with the compiler's report read. No GPU is needed.

FLASHTILE_ALL_CONFIGURATIONS=1 takes every head dim, dtype and option.
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

from compiled_kernels import Block, key, report

from flashtile.backends.hopper.forward.launch import with_lists
from flashtile.backends.hopper.forward.plan import OLDEST_TRITON, TRITON_VERSION, plan
from flashtile.backends.hopper.shared.schedule import tile_list_kernel
from flashtile.backends.hopper.shared.span_lists import span_lists_kernel, unseen_keys_kernel
from flashtile.call.layouts import Cached, Dense, Packed
from flashtile.call.prepare import describe
from flashtile.dropout import ROUNDS
from flashtile.masks import BlockMask, Spans
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import alibi_slopes, cu_seqlens, generator, normal, packed_qkv, qkv

if TRITON_VERSION is None or TRITON_VERSION < OLDEST_TRITON:
    # The backend refuses it too, with this reason.
    pytest.skip("Triton is too old for Gluon on Hopper", allow_module_level=True)

from .inputs import drawn
from .launches import SHARED_LIMIT, launch_of
from .pieces import part_call

HEAD_DIMS = [(64, 64), (128, 128), (256, 256)]
MIXED_HEAD_DIMS = [
    (80, 80), (96, 96), (144, 144), (160, 160), (192, 192), (192, 128), (192, 256), (256, 192),
    (64, 256),
]  # fmt: skip
NEWER = TRITON_VERSION > (3, 6)
# Bytes a thread that may spill: with lengths, numbers that are loaded once a tile, so at head dim
# 256 with softcap, and with dropout. Triton 3.9 copies registers of Q at head dim 144, and spills
# with softcap where a consumer has 128 registers.
SPILLS = {
    "lengths": 12,
    "pages of 16, 64": 16,  # in the producer
    "pages of 48": 4,
    "span": 4,  # in the producer, once a tile
    "parts": 64,
    "softcap 64": 416 if NEWER else 0,
    "softcap 256": 24,
    "last 192": 16 if NEWER else 0,
    "dropout 64": 0,
    "dropout 128": 0,
    "dropout 160": 140,
    "dropout 256": 124 if NEWER else 56,
    "statistics 192": 8,  # once a tile
    144: 112 if NEWER else 0,
}
# What newer compilers may spill besides: Triton 3.9 copies registers of Q at head dim 128 too.
SPILLS_OF_NEWER = 16 if NEWER else 0

# Instructions of a block of keys in a consumer, a few more than counted, by head dim; most blocks
# jump over those that rescale the output. The card is power-capped: whatever is added here is paid
# for in clock speed.
INSTRUCTIONS = {64: 430, 128: 470, 256: 425}
# Waits of warps for each other, by whether consumers take semaphores: one before the wait for keys,
# which Triton puts there, and two of the ping-pong.
BARRIERS = {64: 3, 128: 3, 256: 1}


def dense(
    head_dim: int = 128,
    value_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    M: int = 300,
    N: int = 2000,
    **options: Any,
) -> tuple[Operands, Options]:
    sizes = {"B": 2, "M": M, "N": N, "Hq": 4, "Hk": 2, "D": head_dim, "Dv": value_dim}
    return describe(qkv(generator(0), **sizes, dtype=dtype), Dense(), options)


def packed(longest: int = 130, head_dim: int = 128, **options: Any) -> tuple[Operands, Options]:
    lengths = [130, 5, 0, 70]
    q, k, v = packed_qkv(generator(0), lengths, lengths, D=head_dim, dtype=torch.bfloat16)
    layout = Packed(cu_seqlens(lengths), cu_seqlens(lengths), longest, longest)
    return describe((q, k, v), layout, options)


def pages(size: int, head_dim: int = 128, **options: Any) -> tuple[Operands, Options]:
    """A chunk of 300 queries after a cache of two sequences."""
    q = normal(generator(0), 2, 300, 4, head_dim, dtype=torch.bfloat16)
    cache = normal(generator(0), 2 * (2304 // size), size, 2, head_dim, dtype=torch.bfloat16)
    table = torch.arange(cache.shape[0], dtype=torch.int32).view(2, -1)
    return describe((q, cache, cache), Cached(2000, page_table=table), options)


def half_visible(M: int, N: int) -> BlockMask:
    return BlockMask.from_dense(torch.rand(M, N, generator=generator(0)) < 0.5)


def spans(rows: int, intervals: int) -> Spans:
    return Spans(*torch.zeros(2, 1, 1, rows, intervals, dtype=torch.int32))


OPTIONS: dict[str, Any] = {
    "window": lambda: dense(window_size=(50, 20)),
    "wide window": lambda: dense(window_size=(500, 20)),
    "few keys": lambda: dense(N=400, causal=True),
    "few keys 64": lambda: dense(64, 64, N=400, causal=True),
    "chunk": lambda: dense(attention_chunk=100, causal=True),
    "softcap 64": lambda: dense(64, 64, softcap=3.0),
    "softcap": lambda: dense(softcap=3.0),
    "softcap 256": lambda: dense(256, 256, softcap=3.0),
    "alibi": lambda: dense(alibi_slopes=alibi_slopes(generator(0), 4), causal=True),
    "sink": lambda: dense(sink=normal(generator(0), 4), causal=True),
    "block_mask": lambda: dense(block_mask=half_visible(300, 2000)),
    "causal block_mask": lambda: dense(64, 64, block_mask=half_visible(300, 2000), causal=True),
    "span": lambda: dense(64, 64, mask=spans(300, 1)),
    "spans": lambda: dense(mask=spans(300, 2)),
    "packed": lambda: packed(causal=True),
    "packed 64": lambda: packed(head_dim=64, causal=True),
    "long packed": lambda: packed(2000, causal=True),
    "packed span": lambda: packed(mask=spans(205, 1), causal=True),
    "pages of 16": lambda: pages(16, causal=True),
    "pages of 16, 64": lambda: pages(16, 64, causal=True),
    "pages of 16, 256": lambda: pages(16, 256, causal=True),
    "pages of 48": lambda: pages(48),
    "pages of 256": lambda: pages(256, causal=True),
    "lengths": lambda: dense(seqused_k=torch.tensor([2000, 7], dtype=torch.int32), causal=True),
}


def spills_nothing(block: Block) -> bool:
    return block.count("STL") + block.count("LDL") == 0


def check(call: tuple[Operands, Options], spills: int, **facts: object) -> None:
    found = report(launch_of(*call, **facts))
    assert found.shared <= SHARED_LIMIT
    assert not found.warnings  # among them those of products that wait for each other
    assert not found.unused_barriers
    assert found.spilled <= spills + SPILLS_OF_NEWER
    assert found.value_products == ["register"]  # P stays put


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dims", HEAD_DIMS + (MIXED_HEAD_DIMS if FULL else []))
def test_head_dims_compile(head_dims: tuple[int, int], mask: str):
    check(dense(*head_dims, causal=mask == "causal"), SPILLS.get(head_dims[0], 0))


@pytest.mark.parametrize(
    "option",
    OPTIONS
    if FULL
    else ["window", "few keys", "packed", "long packed", "block_mask", "pages of 16"],
)
def test_options_compile(option: str):
    check(OPTIONS[option](), SPILLS.get(option, 0))


# (head dim, queries, keys) of dense batches whose last block has 16, 32, 64 or 80 keys.
LAST_BLOCKS = [
    (64, 300, 1029), (64, 577, 577), (128, 300, 1050), (192, 300, 1029),
    (64, 300, 1050), (64, 300, 1088), (64, 300, 1100), (80, 577, 577), (96, 577, 577),
    (96, 300, 700), (128, 300, 1029), (144, 300, 1029), (160, 300, 1029), (256, 300, 1029),
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "M", "N"), LAST_BLOCKS if FULL else LAST_BLOCKS[:4])
def test_last_blocks_compile(head_dim: int, M: int, N: int):
    call = dense(head_dim, head_dim, M=M, N=N)
    assert launch_of(*call).arguments["cfg"].LAST_KEYS < 128
    check(call, SPILLS.get(f"last {head_dim}", 0))


@pytest.mark.parametrize("mask", ["full", "causal"] if FULL else ["causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_dropout_compiles(head_dim: int, mask: str):
    call = dense(head_dim, head_dim, causal=mask == "causal", dropout_p=0.1)
    check(drawn(call), SPILLS[f"dropout {head_dim}"])


def test_packed_dropout_compiles():
    check(drawn(packed(causal=True, dropout_p=0.1)), 0)


def test_float16_compiles():
    check(dense(dtype=torch.float16), 0)


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
@pytest.mark.parametrize("head_dim", INSTRUCTIONS)
def test_blocks_stay_lean(head_dim: int):
    blocks = report(launch_of(*dense(head_dim, head_dim))).blocks
    assert len(blocks) == (3 if head_dim == 64 else 2)  # one a consumer
    for block in blocks:
        assert block.length <= INSTRUCTIONS[head_dim]
        assert block.count("BAR.") <= BARRIERS[head_dim]
        assert block.count("VOTE") == 1  # a warp rescales, or does not
        assert spills_nothing(block)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256] if FULL else [64, 128])
def test_statistics_compile(head_dim: int):
    call = dense(head_dim, head_dim, causal=True)
    check(call, SPILLS["statistics 192"] if head_dim == 192 else 0, has_statistics=True)


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_price_of_statistics(head_dim: int):
    """The largest score costs an instruction for each row; the entropy, one for each score too."""
    call = dense(head_dim, head_dim, causal=True)
    found = [
        report(launch_of(*call, has_statistics=facts[0], has_entropy=facts[1])).blocks
        for facts in ((False, False), (True, False), (True, True))
    ]
    plain, largest, both = (min(block.length for block in blocks) for blocks in found)
    assert largest <= plain + 4
    assert both <= plain + 80


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
def test_packed_blocks_are_as_lean():
    blocks = report(launch_of(*packed(2000, causal=True))).blocks
    lengths = sorted(
        block.length for block in blocks
    )  # of each consumer a loop with masks and one without
    assert len(lengths) == 4
    assert lengths[1] <= INSTRUCTIONS[128]


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
@pytest.mark.parametrize("size", [16, 64] if FULL else [16])
def test_blocks_of_pages_are_as_lean(size: int):
    """Consumers do not know of pages, and no register of theirs is moved for the producers."""
    blocks = report(launch_of(*pages(size, causal=True))).blocks
    lengths = sorted(block.length for block in blocks)
    assert len(lengths) == 4
    assert lengths[1] <= INSTRUCTIONS[128]
    assert all(map(spills_nothing, blocks))


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
def test_softcap_adds_two_instructions_a_score():
    """A product and a tanh."""
    scores = 64  # of a thread in a block
    for block in report(launch_of(*dense(softcap=3.0))).blocks:
        assert block.length <= INSTRUCTIONS[128] + 2 * scores
        assert block.count("MUFU.TANH") == scores
        assert spills_nothing(block)


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
@pytest.mark.parametrize(("dropout_p", "bits"), [(0.1, 8), (0.03, 16)])
def test_dropout_draws_each_number_once(dropout_p: float, bits: int):
    """Without an exchange, a thread draws the Philox blocks of its own scores."""
    scores = 32  # of a thread in a block
    draws = scores * bits // 128
    for block in report(launch_of(*drawn(dense(dropout_p=dropout_p)))).blocks:
        assert block.count("IMAD.WIDE.U32") <= 2 * ROUNDS * draws
        assert block.length <= 305 + 58 * draws + 2 * scores
        assert block.count("BAR") <= 1
        assert spills_nothing(block)


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
def test_blocks_of_spans_are_as_lean():
    """The producer reads the spans of a tile in a loop: unrolled, it would cost the consumers 29
    instructions a block."""
    blocks = report(launch_of(*dense(64, 64, N=400, mask=spans(300, 1)))).blocks
    lengths = sorted(
        block.length for block in blocks
    )  # of each consumer two loops with masks and one without
    assert len(lengths) == 6
    assert lengths[1] <= INSTRUCTIONS[64]
    assert all(map(spills_nothing, blocks))


def test_short_causal_loops_have_smaller_tiles():
    short, long = (launch_of(*dense(64, 64, N=N, causal=True)) for N in (1024, 1025))
    assert [x.arguments["cfg"].BLOCK_M for x in (short, long)] == [128, 192]
    check(dense(64, 64, N=1025, causal=True), 0)


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
def test_blocks_of_two_consumers_are_as_lean():
    call = dense(64, 64, M=577)
    assert launch_of(*call).arguments["cfg"].CONSUMERS == 2
    check(call, 0)
    blocks = report(launch_of(*call)).blocks
    assert len(blocks) == 2 and all(block.length <= INSTRUCTIONS[64] for block in blocks)


def test_long_causal_loops_begin_with_the_first_block():
    long, short = (launch_of(*dense(N=N, causal=True)) for N in (8193, 8192))
    assert [x.arguments["cfg"].IS_ASCENDING for x in (long, short)] == [True, False]
    check(dense(N=8193, causal=True), 0)


def test_new_lengths_and_heads_compile_nothing_new():
    lengths = ((65, 1), (128, 15), (300, 16), (1024, 1024), (1000, 1001))
    assert len({key(launch_of(*dense(M=M, N=N))) for M, N in lengths}) == 1


def test_new_probabilities_compile_nothing_new():
    for probabilities in ((1 / 256, 0.1, 0.4999, 0.5, 0.9, 1 - 2.0**-32), (1e-9, 0.01, 0.0624)):
        assert len({key(launch_of(*drawn(dense(dropout_p=p)))) for p in probabilities}) == 1


@pytest.mark.parametrize("option", ["packed", "lengths", "spans", "packed span"])
def test_the_lists_compile(option: str):
    operands, options = OPTIONS[option]()
    problem = AttentionProblem.of(operands, options)
    before = with_lists(problem, plan(problem), operands, launch_of(operands, options))[:-1]
    expected = {
        "packed": [tile_list_kernel],
        "lengths": [tile_list_kernel],
        "spans": [unseen_keys_kernel, span_lists_kernel],
        "packed span": [tile_list_kernel, unseen_keys_kernel, span_lists_kernel],
    }
    assert [launch.kernel for launch in before] == expected[option]
    for launch in before:
        assert any(name.startswith("st.global") for name in report(launch).accesses)


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(
    ("option", "head_dim"),
    [("causal", 128)] + ([("causal", 64), ("causal", 256), ("causal window", 128)] if FULL else []),
)
def test_parts_of_sequences_compile(option: str, head_dim: int, is_partial: bool):
    call = part_call("zigzag", option, head_dim, 0)
    check(call[:2], SPILLS["parts"], is_partial=is_partial)


@pytest.mark.skipif(TRITON_VERSION > (3, 6), reason="newer assemblers move registers about")
def test_blocks_of_parts_are_as_lean():
    """Positions are looked up once a tile."""
    blocks = report(launch_of(*part_call("zigzag", "causal", 128, 0)[:2])).blocks
    lengths = sorted(block.length for block in blocks)
    assert len(lengths) == 4
    assert lengths[1] <= INSTRUCTIONS[128]
