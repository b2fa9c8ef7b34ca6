"""Float8 queries, keys and values in the Triton kernel, interpreted: calls that the float8 kernel
for Hopper does not support, against the float64 reference by the rule for float8."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from float8_numbers import descales as of_quantized

import flashtile
from flashtile.backends import triton as backend
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import (
    alibi_slopes,
    assert_close,
    attention_in_float8,
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
    packed_qkv,
    paged,
    qkv,
)

E4M3 = torch.float8_e4m3fn


def small(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.to(E4M3) for x in tensors)


def descales(g: torch.Generator, B: int, Hk: int) -> dict[str, Tensor]:
    names = ("q_descale", "k_descale", "v_descale")
    return {name: 0.5 + torch.rand(B, Hk, generator=g) for name in names}


def block_descales(g: torch.Generator, B: int, M: int, N: int) -> dict[str, Tensor]:
    """One for each block of rows, of 4 query heads and 2 key heads; those of v are far apart."""
    blocks_q, blocks_k = -(-M // 64), -(-N // 128)
    return {
        "q_descale": 0.5 + torch.rand(B, 4, blocks_q, generator=g),
        "k_descale": 0.5 + torch.rand(B, 2, blocks_k, generator=g),
        "v_descale": 2.0 ** torch.randint(-6, 6, (B, 2, blocks_k), generator=g),
    }


def check(call: tuple[Operands, Options], reference: Any, seed: int, splits: int = 0) -> None:
    """(out, lse) of the backend by the rule; `reference(**how)` in any precision."""
    operands, options = call
    problem = AttentionProblem.of(operands, options._replace(num_splits=splits))
    described = problem._replace(device_type="cuda", capability=(9, 0))
    assert not backend.unsupported_reasons(described)
    assert "with float8 keys" in backend.describe_plan(described)
    out, lse = backend.forward(problem, operands)
    assert out.dtype == torch.bfloat16
    truth, plain = reference(), reference(compute_dtype=torch.float32, attend=attention_in_float8)
    assert_close("out", out, truth.out, plain.out, dtype=torch.bfloat16, seed=seed)
    # As on the tensor cores, sums are in float32 and in another order.
    assert_close("lse", lse, truth.lse, plain.lse, dtype=torch.bfloat16, seed=seed)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "chunk": {"attention_chunk": 24, "causal": True},
    "lengths": {"seqused_q": [5, 9], "seqused_k": [61, 17]},
    "alibi and sink": {"causal": True, "alibi_slopes": True, "sink": True},
}


@pytest.mark.parametrize("M", [1, 9])
@pytest.mark.parametrize("option", OPTIONS)
def test_dense(option: str, M: int, seed: int):
    g = generator(seed)
    given: dict[str, Any] = dict(OPTIONS[option])
    for name in ("seqused_q", "seqused_k"):
        if name in given:
            given[name] = torch.tensor(given[name], dtype=torch.int32).clamp(max=max(M, 61))
    if "seqused_q" in given:
        given["seqused_q"].clamp_(max=M)
    if "sink" in given:
        given |= {"sink": normal(g, 4), "alibi_slopes": alibi_slopes(g, 4)}
    tensors = small(*qkv(g, B=2, M=M, N=61, Hq=4, Hk=2, D=32, Dv=16))
    given |= descales(g, 2, 2)
    call = describe(tensors, Dense(), given)
    check(call, lambda **how: attention_reference(*tensors, **given, **how), seed)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [0, 16, 3])
def test_packed_and_pages(page_size: int, splits: int, seed: int):
    g = generator(seed)
    lengths_q, lengths_k = [3, 0, 1], [40, 7, 64]
    starts = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    given: dict[str, Any] = {"causal": True} | descales(g, 3, 2)
    table = None
    if page_size == 0:
        q, k, v = packed_qkv(g, lengths_q, lengths_k, Hq=4, Hk=2, D=32)
    else:
        q = normal(g, 4, 4, 32)
        rows = [normal(g, 3, 64, 2, 32) for _ in "kv"]
        (k, table), (v, _) = (paged(generator(seed), x, page_size) for x in rows)
    tensors = small(q, k, v)
    call = describe(tensors, Packed(*starts, 3, 64, table), given)

    def reference(**how: Any) -> Any:
        return attention_varlen_reference(
            *tensors, *starts, 3, 64, page_table=table, **given, **how
        )

    check(call, reference, seed, splits)


BLOCK_CASES: dict[str, dict[str, Any]] = {
    "one query": {"M": 1},
    "grouped heads in a tile": {"M": 9, "options": {"causal": True}},
    "blocks of queries": {"M": 70},
    "chunk": {"M": 70, "options": {"causal": True, "attention_chunk": 100}},
    "lengths": {"M": 70, "lengths": ([70, 3], [300, 129])},
    "softcap": {"M": 9, "options": {"softcap": 3.0}},
    "odd head dim, unpaired": {"M": 1, "D": 33, "Dv": 47},
    "keys split among programs": {"M": 9, "splits": 3},
}


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_per_block_scales(case: str, seed: int):
    g, changes = generator(seed), dict(BLOCK_CASES[case])
    splits = changes.pop("splits", 1)
    given = dict(changes.pop("options", {}))
    if "lengths" in changes:
        used = [torch.tensor(x, dtype=torch.int32) for x in changes.pop("lengths")]
        given |= dict(zip(("seqused_q", "seqused_k"), used, strict=True))
    tensors = small(*qkv(g, **({"B": 2, "N": 300, "Hq": 4, "Hk": 2, "D": 32} | changes)))
    given |= block_descales(g, 2, changes["M"], 300)
    call = describe(tensors, Dense(), given)
    check(call, lambda **how: attention_reference(*tensors, **given, **how), seed, splits)


@pytest.mark.parametrize(("page_size", "splits"), [(0, 1), (16, 1), (256, 3)])
def test_per_block_scales_of_packed_queries_and_pages(page_size: int, splits: int, seed: int):
    """Blocks are counted from the start of each sequence, wherever it begins."""
    g = generator(seed)
    lengths_q, lengths_k = [3, 0, 70], [200, 7, 300]
    starts = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    given: dict[str, Any] = {"causal": True} | block_descales(g, 3, 70, 300)
    table = None
    if page_size == 0:
        q, k, v = packed_qkv(g, lengths_q, lengths_k, Hq=4, Hk=2, D=32)
    else:
        q = normal(g, 73, 4, 32)
        rows = [normal(g, 3, 300, 2, 32) for _ in "kv"]
        (k, table), (v, _) = (paged(generator(seed), x, page_size) for x in rows)
    tensors = small(q, k, v)
    call = describe(tensors, Packed(*starts, 70, 300, table), given)

    def reference(**how: Any) -> Any:
        return attention_varlen_reference(
            *tensors, *starts, 70, 300, page_table=table, **given, **how
        )

    check(call, reference, seed, splits)


@pytest.mark.parametrize("length", [1, 200])
def test_what_quantize_qkv_makes(length: int, seed: int):
    """Its defaults, decoded and as a chunk, as the float64 numbers that float8 holds."""
    q, k, v = qkv(generator(seed), B=1, M=length, N=200, Hq=4, Hk=2, D=64)
    made = flashtile.quantize_qkv(q, k, v)
    given: dict[str, Any] = {"causal": True, "attention_chunk": 96} | of_quantized(made)
    call = describe((made.q, made.k, made.v), Dense(), given)
    reference = partial(attention_reference, made.q, made.k, made.v, **given)
    check(call, reference, seed)


def test_what_it_does_not_do():
    tensors = small(*qkv(generator(0), B=1, M=1, N=200, Hq=2, Hk=2, D=32))
    problem = AttentionProblem.of(*describe(tensors, Dense(), {}))
    problem = problem._replace(device_type="cuda", capability=(8, 0))
    assert "float8 keys and values on sm_80" in backend.unsupported_reasons(problem)[0]
