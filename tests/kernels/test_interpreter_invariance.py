"""`batch_invariant` in Triton's interpreter: equal bits of a row in all layouts, forward and
backward, with a KV loop in one part or several, in one program or one for each part.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.invariance_check import check_bits, check_gradient_bits
from flashtile.lru import clear_caches
from flashtile.problem import Appending, AttentionProblem, NewTokens, Operands, Options
from flashtile.testing import cu_seqlens, generator, normal

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

import numpy as np

from flashtile.backends import triton as backend
from flashtile.backends.triton import launch, plan

N, D, HEADS, KV_HEADS = 200, 32, 4, 2
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"window_right": 0},
    "window": {"window_left": 37, "window_right": 0},
    "chunk": {"window_right": 0, "attention_chunk": 50},
}


@pytest.fixture(autouse=True)
def sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by NumPy, whose BLAS adds up a row in an order that depends on the
    number of rows, at least on processors without AVX-512. A GPU's products do not.
    """

    def matmul(x: Any, y: Any, dtype: Any) -> Any:
        return np.einsum("ik,kj->ij", x.astype(np.float64), y.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.fixture(params=[64, 1024], ids=["parts", "one part"])
def part_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(plan, "PART_KEYS", request.param)
    clear_caches()
    yield request.param
    clear_caches()


def described(operands: Operands, M: int, N: int, **options: Any) -> AttentionProblem:
    return AttentionProblem.of(
        operands, Options(M, N, D**-0.5, deterministic=True, batch_invariant=True, **options)
    )


def tensors(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = generator(seed)
    return (
        normal(g, 1, N, HEADS, D, dtype=torch.float16),
        normal(g, 1, N, KV_HEADS, D, dtype=torch.float16),
        normal(g, 1, N, KV_HEADS, D, dtype=torch.float16),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sink", [False, True])
def test_a_decoded_row(mask: str, sink: bool, part_keys: int, seed: int, monkeypatch: Any) -> None:
    q, k, v = tensors(seed)
    logits = torch.randn(HEADS) if sink else None
    whole = Operands(q, k, v, sink=logits)
    monkeypatch.setattr(launch, "_splits_of", lambda *call: 1)
    out, lse = backend.forward(described(whole, N, N, **MASKS[mask]), whole)
    truth = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    if mask == "causal" and not sink:
        assert (out - truth).abs().max() < 4e-3
    parts = -(-N // part_keys)
    for p, page_size in ((0, 16), (70, 0), (130, 16), (199, 3)):
        keys, values, more = k[:, : p + 1], v[:, : p + 1], {}
        if page_size:
            pages = -(-N // page_size)
            order = torch.randperm(pages)
            filled = (torch.cat((x[0], x[0][: pages * page_size - N])) for x in (k, v))
            keys, values = (
                x.view(pages, page_size, KV_HEADS, D)[order].contiguous() for x in filled
            )
            table = torch.argsort(order)[None].int()
            more = {"page_table": table, "seqused_k": torch.tensor([p + 1], dtype=torch.int32)}
        for splits in {1, parts}:
            monkeypatch.setattr(launch, "_splits_of", lambda *call, n=splits: n)
            row = Operands(q[:, p : p + 1].contiguous(), keys, values, sink=logits, **more)
            if not page_size:
                row = row._replace(k=k, v=v, seqused_k=torch.tensor([p + 1], dtype=torch.int32))
            problem = described(row, 1, N, **MASKS[mask])
            o, l = backend.forward(problem, row)
            assert torch.equal(o[0, 0], out[0, p]), (p, page_size, splits)
            assert torch.equal(l[0, :, 0], lse[0, :, p]), (p, page_size, splits)


@pytest.mark.parametrize("has_parts", [False, True])
def test_an_appended_token(
    has_parts: bool, part_keys: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of the part that sees the new token stores it."""
    q, k, v = tensors(seed)
    whole = Operands(q, k, v)
    monkeypatch.setattr(launch, "_splits_of", lambda *call: 1)
    out, _ = backend.forward(described(whole, N, N, window_right=0), whole)
    parts = -(-N // part_keys) if has_parts else 1
    monkeypatch.setattr(launch, "_splits_of", lambda *call: parts)
    for p in (0, 63, 64, 199):
        caches = [x.clone() for x in (k, v)]
        for cache in caches:
            cache[:, p:] = torch.nan
        held = torch.tensor([p], dtype=torch.int32)
        row = Operands(q[:, p : p + 1].contiguous(), *caches, seqused_k=held)
        appending = Appending(1, 0, False, False)
        problem = described(row, 1, N, window_right=0)._replace(appending=appending)
        new = NewTokens(k[:, p : p + 1].contiguous(), v[:, p : p + 1].contiguous())
        got, _ = backend.append_and_forward(problem, row, new)
        assert torch.equal(got[0, 0], out[0, p])
        assert torch.equal(caches[0][0, p], k[0, p])


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_packed_queries(mask: str, part_keys: int, seed: int) -> None:
    """Of a sequence from its 37th query on, behind another one: the same keys' gradients."""
    q, k, v = tensors(seed)
    dout, first = torch.randn(1, N, HEADS, D).half(), 37
    whole = Operands(q, k, v)
    problem = described(whole, N, N, **MASKS[mask])
    out, lse = backend.forward(problem, whole)
    wanted = backend.backward(problem, whole, out, lse, dout, None)
    packed = Operands(
        torch.cat((q[0, :5], q[0, first:])),
        torch.cat((k[0, :9], k[0])),
        torch.cat((v[0, :9], v[0])),
        cu_seqlens_q=cu_seqlens([5, N - first]),
        cu_seqlens_k=cu_seqlens([9, N]),
    )
    problem = described(packed, N, N, **MASKS[mask])
    o, l = backend.forward(problem, packed)
    assert torch.equal(o[5:], out[0, first:])
    assert torch.equal(l[:, 5:], lse[0, :, first:])
    d = torch.cat((dout[0, :5], dout[0, first:]))
    got = backend.backward(problem, packed, o, l, d, None)
    check_bits(backend.forward, problem, packed, o, l)
    check_gradient_bits(backend.backward, problem, (*packed, o, l, d, None), got)
    assert torch.equal(got.dq[5:], wanted.dq[0, first:])
    assert torch.equal(got.dk[9 + first :], wanted.dk[0, first:])
    assert torch.equal(got.dv[9 + first :], wanted.dv[0, first:])
