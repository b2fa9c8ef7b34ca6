"""The kernels of the Hopper backward compiled for sm_90a, with the compiler's report read.

No GPU is needed.
FLASHTILE_ALL_CONFIGURATIONS=1 takes every head dim, dtype and option.
"""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from typing import Any

import pytest
import torch
from configurations import FULL

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton decides at import; these tests read what its compiler makes.
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from flashtile.backends.hopper.forward.plan import OLDEST_TRITON, TRITON_VERSION
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.masks import BlockMask, Spans
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import alibi_slopes, cu_seqlens, generator, normal, packed_qkv, qkv

if TRITON_VERSION is None or TRITON_VERSION < OLDEST_TRITON:
    # The backend refuses it too, with this reason.
    pytest.skip("Triton is too old for Gluon on Hopper", allow_module_level=True)

from compiled_kernels import key, report

from flashtile.backends.hopper.backward import launch as backward_launch
from flashtile.backends.hopper.backward.dq import round_kernel
from flashtile.backends.hopper.backward.launch import backward_launches, config_of, lists_of
from flashtile.backends.hopper.backward.plan import Order
from flashtile.gpu.launch import Launch

from .inputs import drawn
from .launches import CAPABILITY, SHARED_LIMIT
from .pieces import part_call

# Bytes a thread that may spill. The assembler of Triton 3.9 spills more. Persistent programs have
# no limit; the record of compiled kernels has their numbers. Variants with half the spills and
# without reloads took 0.94 to 1.10 of their time on an H200, in one round in which kernels that
# were the same differed by up to 6 %.
NEWER = TRITON_VERSION >= (3, 9)
NO_LIMIT = sys.maxsize
SPILLS = {
    "plain": 128 if NEWER else 0,
    64: 128,
    96: 128 if NEWER else 16,
    128: NO_LIMIT,
    "option": 256 if NEWER else 128,
    "alibi": NO_LIMIT,
    "short loops": 64 if NEWER else 36,
    "block mask": 256 if NEWER else 160,
    "spans": 480,  # nearly all of it in partial blocks
    "packed": 640 if NEWER else 208,
    "packed 128": 576 if NEWER else 132,
    "positions": 48 if NEWER else 24,  # besides those of packed batches
    "dropout": 464 if NEWER else 148,
    "dropout and more": 780 if NEWER else 168,
}
# Loads and stores of such bytes a step, in a loop over blocks without masks. Where the newest
# release has no limit, clearing hidden rows added 1 to 12.
RELOADS = {
    "any": 6 if NEWER else 0,
    64: NO_LIMIT,  # how many tiles a persistent program has had
    128: NO_LIMIT,
    "short loops": NO_LIMIT if NEWER else 1,
    "block mask 64": 6 if NEWER else 3,
    "block mask 96": 8 if NEWER else 0,
    "block mask alibi": 18 if NEWER else 0,
    "spans": NO_LIMIT if NEWER else 3,
    "packed 64": 10 if NEWER else 0,
    "packed 96": 8 if NEWER else 0,
    "packed 128": 11 if NEWER else 2,
    "packed parts": NO_LIMIT if NEWER else 2,
    "packed 256": 6 if NEWER else 1,
    "dropout": 47 if NEWER else 5,
    "dropout and more": 70 if NEWER else 15,
}

Call = tuple[Operands, Options]


def launches_of(
    call: Call, parts: int = 1, is_partial: bool = False, dq_dtype: torch.dtype = torch.float32
) -> list[Launch]:
    """The launches that the backward of a call would make on the device, if `parts` programs share
    a tile; `dq_dtype` is that of the sum of a partial problem."""
    operands, options = call
    problem = AttentionProblem.of(operands, options)
    facts = {"capability": CAPABILITY, "device_type": "cuda", "is_partial": is_partial}
    problem = problem._replace(**facts)
    q, v = operands.q, operands.v
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = torch.zeros(q.shape[:-1]).transpose(-2, -1).contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_launch, "order_of_call", lambda *_: Order(parts, 1))
        made = backward_launch.allocation(problem, operands).buffers()
        if is_partial:
            made = made._replace(dq=torch.zeros(q.shape, dtype=dq_dtype))
        lists = lists_of(problem, config_of(problem, operands), operands)
        return backward_launches(problem, operands, out, lse, out, lse, made, lists)


def dense(
    head_dim: int = 128, value_dim: int | None = None, dtype: torch.dtype = torch.bfloat16,
    M: int = 300, N: int = 400, **options: Any,
) -> Call:  # fmt: skip
    sizes = {"M": M, "N": N, "D": head_dim, "Dv": value_dim or head_dim}
    inputs = qkv(generator(0), B=2, Hq=4, Hk=2, **sizes, dtype=dtype)
    return describe(inputs, Dense(), options)


def packed(head_dim: int = 128, **options: Any) -> Call:
    lengths = [130, 5, 0, 70]
    inputs = packed_qkv(generator(0), lengths, lengths, D=head_dim, dtype=torch.bfloat16)
    layout = Packed(cu_seqlens(lengths), cu_seqlens(lengths), 130, 130)
    return describe(inputs, layout, options)


def spans(intervals: int) -> Spans:
    return Spans(*torch.zeros(2, 1, 1, 300, intervals, dtype=torch.int32))


def half_visible() -> BlockMask:
    return BlockMask.from_dense(torch.rand(300, 400, generator=generator(0)) < 0.5)


SHORT_LOOPS: dict[str, Any] = {
    "window": lambda: dense(window_size=(50, 20)),
    "causal window": lambda: dense(window_size=(50, 0)),
    "chunk": lambda: dense(attention_chunk=100, causal=True),
}
OPTIONS: dict[str, Any] = {
    "softcap": lambda: dense(softcap=3.0),
    "alibi": lambda: dense(alibi_slopes=alibi_slopes(generator(0), 4), causal=True),
    "sink": lambda: dense(sink=normal(generator(0), 4), causal=True),
    "deterministic": lambda: dense(deterministic=True, causal=True),
    "float16": lambda: dense(dtype=torch.float16),
    "head dim 72": lambda: dense(72, causal=True),
    "values of 128": lambda: dense(192, 128, causal=True),
}
BLOCK_MASKS: dict[str, Any] = {
    "64": lambda: dense(64, block_mask=half_visible()),
    "80": lambda: dense(80, block_mask=half_visible()),
    "96": lambda: dense(96, block_mask=half_visible()),
    "128": lambda: dense(128, block_mask=half_visible()),
    "144": lambda: dense(144, block_mask=half_visible()),
    "192": lambda: dense(192, block_mask=half_visible()),
    "256": lambda: dense(256, block_mask=half_visible()),
    "causal": lambda: dense(block_mask=half_visible(), causal=True),
    "window": lambda: dense(block_mask=half_visible(), window_size=(50, 20)),
    "softcap": lambda: dense(block_mask=half_visible(), softcap=3.0),
    "alibi": lambda: dense(block_mask=half_visible(), alibi_slopes=alibi_slopes(generator(0), 4)),
    "deterministic": lambda: dense(block_mask=half_visible(), deterministic=True),
    "deterministic 256": lambda: dense(256, block_mask=half_visible(), deterministic=True),
}


def check(
    call: Call,
    spills: int,
    reloads: int = RELOADS["any"],
    parts: int = 1,
    is_partial: bool = False,
    selects: float = 0,
) -> None:
    """Reloads are counted in loops that have at most `selects` selects: others have a mask."""
    for launch in launches_of(call, parts, is_partial):
        found = report(launch)
        assert found.shared <= SHARED_LIMIT
        assert not found.warnings  # among them those of products that wait for each other
        assert not found.unused_barriers
        assert found.spilled <= spills
        for block in found.blocks:
            found_reloads = block.count("LDL") + block.count("STL")
            assert block.count("FSEL") > selects or found_reloads <= reloads


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256] + ([80, 144, 160] if FULL else []))
def test_head_dims_compile(head_dim: int, mask: str):
    spills, reloads = (x.get(head_dim, x[y]) for x, y in ((SPILLS, "plain"), (RELOADS, "any")))
    check(dense(head_dim, causal=mask == "causal"), spills, reloads)


@pytest.mark.parametrize("option", OPTIONS if FULL else ["deterministic"])
def test_options_compile(option: str):
    check(OPTIONS[option](), SPILLS.get(option, SPILLS["option"]), RELOADS[128])


@pytest.mark.parametrize("option", SHORT_LOOPS if FULL else ["window"])
def test_short_loops_compile(option: str):
    check(SHORT_LOOPS[option](), SPILLS["short loops"], RELOADS["short loops"])


@pytest.mark.parametrize(
    ("intervals", "head_dim"), [(1, 128)] + ([(1, 64), (2, 64), (2, 128), (2, 256)] if FULL else [])
)
def test_spans_compile(intervals: int, head_dim: int):
    check(dense(head_dim, mask=spans(intervals)), SPILLS["spans"], RELOADS["spans"])


@pytest.mark.parametrize("kind", BLOCK_MASKS if FULL else ["128", "256"])
def test_block_masks_compile(kind: str):
    reloads = RELOADS.get(f"block mask {kind}", RELOADS["any"])
    check(BLOCK_MASKS[kind](), SPILLS["block mask"], reloads)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 144, 160, 256] if FULL else [128])
def test_packed_compiles(head_dim: int):
    kind = f"packed {head_dim}"
    spills = SPILLS.get(kind, SPILLS["packed"])
    check(packed(head_dim, causal=True), spills, RELOADS.get(kind, RELOADS["any"]))


@pytest.mark.parametrize("head_dim", [64, 128, 160, 256] + ([80, 96, 192] if FULL else []))
def test_dropout_compiles(head_dim: int):
    """Dropout selects the sign of each of a thread's 32 scores in every loop."""
    call = drawn(dense(head_dim, causal=True, dropout_p=0.1))
    check(call, SPILLS["dropout"], RELOADS["dropout"], selects=32)


@pytest.mark.parametrize("kind", ["packed", "deterministic"] if FULL else ["packed"])
def test_dropout_with_options_compiles(kind: str):
    call = packed if kind == "packed" else partial(dense, deterministic=True)
    spills, reloads = SPILLS["dropout and more"], RELOADS["dropout and more"]
    check(drawn(call(causal=True, dropout_p=0.1)), spills, reloads, selects=math.inf)


@pytest.mark.parametrize("head_dim", [64, 128, 256] if FULL else [128])
def test_parts_compile(head_dim: int):
    check(dense(head_dim, causal=True), SPILLS.get(head_dim, SPILLS["plain"]), parts=2)


@pytest.mark.parametrize("kind", ["deterministic", "packed"] if FULL else ["packed"])
def test_parts_with_options_compile(kind: str):
    call = packed(causal=True) if kind == "packed" else OPTIONS[kind]()
    spills, reloads = (
        (SPILLS["packed"], RELOADS["packed parts"])
        if kind == "packed"
        else (SPILLS["option"], RELOADS["any"])
    )
    check(call, spills, reloads, parts=2)


@pytest.mark.parametrize("options", [{}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("parts", [(1, 1, 1, 1, 1), (2, 3, 4, 16, 17)])
def test_new_lengths_and_heads_compile_nothing_new(parts: tuple[int, ...], options: dict[str, Any]):
    """The longer deterministic calls have two phases, the shorter ones have one. A causal call with
    more queries than keys has rows without a key, and a kernel of its own, as have loops of more
    steps than `plan.MOST_STEPS`.
    """
    most = 1024 if options else 640
    more_keys = ((65, 65), (128, 130), (300, 316), (most, most), (most - 24, most - 23))
    more_queries = ((65, 1), (128, 15), (300, 16), (most, most - 24), (most - 23, most - 24))
    kinds = [
        {
            tuple(map(key, launches_of(dense(M=M, N=N, **options), count)))
            for (M, N), count in zip(lengths, parts, strict=True)
        }
        for lengths in (more_keys, more_queries)
    ]
    assert list(map(len, kinds)) == [1, 1]
    assert (kinds[0] != kinds[1]) == ("causal" in options)


@pytest.mark.parametrize("parts", [1, 2] if FULL else [1])
@pytest.mark.parametrize("head_dim", [64, 128, 256] if FULL else [128])
def test_parts_of_sequences_compile(head_dim: int, parts: int):
    spills = SPILLS.get(f"packed {head_dim}", SPILLS["packed"]) + SPILLS["positions"]
    call = part_call("zigzag", "causal", head_dim, 0)[:2]
    check(call, spills, RELOADS["packed parts"], parts, is_partial=True)


def test_a_sum_that_is_rounded_compiles():
    """Where one call computes all of dq, the last kernel adds it to zeros in the inputs' dtype."""
    call = part_call("zigzag", "causal", 128, 0)[:2]
    *_, rounding = launches_of(call, is_partial=True, dq_dtype=torch.bfloat16)
    assert rounding.kernel is round_kernel
    assert report(rounding).spilled == 0
