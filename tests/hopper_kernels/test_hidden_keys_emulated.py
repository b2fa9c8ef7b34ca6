"""NaN and infinity in keys that no query sees, and NaN in gradients of queries that see no key, in
the Hopper backend's source run in PyTorch (`emulator.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.masks import BlockMask, Spans
from flashtile.problem import Operands, Options
from flashtile.testing import (
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
    packed_qkv,
    qkv,
)

from .test_backward_emulated import gradients
from .test_forward_emulated import emulate, intrinsics, tiles_of_more_keys

__all__ = ["intrinsics", "tiles_of_more_keys"]  # fixtures

Call = tuple[list[Tensor], Dense | Packed, dict[str, Any]]
M, N = 130, 330


def dense(
    D: int = 64, rows: int = M, keys: int = N, batch: int = 1, **options: Any
) -> Callable[[], Call]:
    def make() -> Call:
        sizes = {"B": batch, "M": rows, "N": keys, "Hq": 2, "Hk": 1, "D": D}
        return list(qkv(generator(0), **sizes, dtype=torch.bfloat16)), Dense(), options

    return make


def packed(D: int = 64, **options: Any) -> Callable[[], Call]:
    def make() -> Call:
        rows, keys = [70, 0, 130], [200, 40, 150]
        tensors = packed_qkv(generator(0), rows, keys, Hq=2, Hk=1, D=D, dtype=torch.bfloat16)
        return list(tensors), Packed(cu_seqlens(rows), cu_seqlens(keys), 130, 200), options

    return make


def half_seen(heads: int = 1, batch: int = 1) -> BlockMask:
    """Half of the keys are seen by no query, and half of the queries see no key."""
    g = generator(1)
    seen = torch.rand(batch, heads, M, N, generator=g) < 0.5
    seen &= torch.rand(batch, heads, M, 1, generator=g) < 0.5
    seen &= torch.rand(batch, 1, 1, N, generator=g) < 0.5
    return BlockMask.from_dense(seen, (128, 128))


def without_keys() -> Call:
    """The second sequence has queries and a sink, but no key."""
    rows, keys = [70, 40], [100, 0]
    tensors = packed_qkv(generator(0), rows, keys, Hq=2, Hk=1, D=64, dtype=torch.bfloat16)
    layout = Packed(cu_seqlens(rows), cu_seqlens(keys), 70, 100)
    return list(tensors), layout, {"sink": torch.tensor([0.3, -0.7])}


def few_spans(intervals: int, heads: int = 1) -> Spans:
    """Keys before, between and after the intervals are seen by no query; some rows see none."""
    g = generator(2)
    starts = torch.randint(0, 3, (1, heads, M, intervals), generator=g) * 110 + 30
    return Spans(starts.int(), (starts + torch.randint(-20, 30, starts.shape, generator=g)).int())


CALLS: dict[str, Callable[[], Call]] = {
    "window": dense(window_size=(40, 0)),
    "window to the left": dense(128, window_size=(90, None)),
    "window and softcap": dense(96, window_size=(40, 10), softcap=2.0),
    "window of 160 columns": dense(160, window_size=(40, 0)),
    "window of 256 columns": dense(256, window_size=(40, 0)),
    "chunk": dense(attention_chunk=100, causal=True),
    "packed window": packed(window_size=(20, 0)),
    "packed window of 256 columns": packed(256, window_size=(20, 0)),
    "block mask": lambda: dense(block_mask=half_seen(2))(),
    "block mask of each sequence": lambda: dense(batch=2, block_mask=half_seen(batch=2))(),
    "causal block mask": lambda: dense(128, block_mask=half_seen(), causal=True)(),
    "span": lambda: dense(mask=few_spans(1))(),
    "spans": lambda: dense(128, mask=few_spans(2, 2))(),
    "spans of 160 columns": lambda: dense(160, mask=few_spans(2), causal=True)(),
}
DEAD: dict[str, Callable[[], Call]] = {
    "causal": dense(64, 330, 130, causal=True),
    "causal of 128 columns": dense(128, 330, 130, window_size=(None, 5), softcap=3.0),
    "causal of 256 columns": dense(256, 330, 130, causal=True),
    "chunk": dense(64, 330, 130, attention_chunk=50),
    "causal, sink": dense(64, 330, 130, causal=True, sink=torch.tensor([0.3, -0.7])),
    "sink of 160 columns": dense(160, 330, 130, causal=True, sink=torch.tensor([0.3, -0.7])),
    "packed causal": lambda: swapped(packed(64, causal=True)()),
    "packed causal of 256 columns": lambda: swapped(packed(256, causal=True)()),
    "packed without keys": without_keys,
    "block mask": CALLS["block mask"],
    "block mask of 256 columns": lambda: dense(
        256, block_mask=half_seen(), sink=torch.tensor([0.3, -0.7])
    )(),
    "spans": CALLS["spans"],
    "span and sink": lambda: dense(mask=few_spans(1), sink=torch.tensor([0.3, -0.7]))(),
}


def swapped(call: Call) -> Call:
    """More queries than keys."""
    (q, k, _), layout, options = call
    assert isinstance(layout, Packed)
    cu_q, cu_k, longest_q, longest_k = layout[:4]
    rows, keys = q.shape[0], k.shape[0]
    g, D = generator(3), q.shape[-1]
    tensors = [
        normal(g, n, h, D, dtype=torch.bfloat16).detach()
        for n, h in ((keys, 2), (rows, 1), (rows, 1))
    ]
    return tensors, Packed(cu_k, cu_q, longest_k, longest_q), options


def reference(call: Call) -> Any:
    tensors, layout, options = call
    options = {"compute_dtype": torch.float32, **options}
    if isinstance(layout, Packed):
        return attention_varlen_reference(*tensors, *layout[:4], **options)
    return attention_reference(*tensors, **options)


def hidden_keys(call: Call) -> Tensor:
    """(rows of k,) or (B, N): which keys no query sees."""
    tensors, layout, options = call
    if not isinstance(layout, Packed):
        return ~(reference(call).probs != 0).any(1).any(1)
    hidden = torch.zeros(tensors[1].shape[0], dtype=torch.bool)
    for b in range(len(layout.cu_seqlens_q) - 1):
        rows, keys = (slice(*cu[b : b + 2].tolist()) for cu in layout[:2])
        q, k, v = tensors[0][rows], tensors[1][keys], tensors[2][keys]
        probs = attention_reference(q[None], k[None], v[None], **options).probs
        hidden[keys] = ~(probs != 0).any(1).any(1)[0] if len(q) else True
    return hidden


def described(call: Call) -> tuple[Operands, Options]:
    return describe(call[0], call[1], call[2])


@pytest.mark.parametrize("name", CALLS)
def test_the_forward_ignores_hidden_keys(name: str):
    tensors, *rest = CALLS[name]()
    hidden = hidden_keys((tensors, *rest))
    assert hidden.any()
    wanted = emulate(*described((tensors, *rest)), seed=0)
    for junk in (math.nan, math.inf):
        q, k, v = (x.clone() for x in tensors)
        k[hidden], v[hidden] = junk, junk
        for got, x in zip(emulate(*described(([q, k, v], *rest)), seed=0), wanted, strict=True):
            assert torch.equal(got, x)


def backward_of(
    call: Call, dout: Tensor, dlse: Tensor, results: Any, parts: int = 1
) -> tuple[Tensor, ...]:
    operands, options = described(call)
    out, lse = results
    return gradients(operands, options, out, lse, dout, dlse, seed=0, parts=parts)


def results_of(call: Call) -> tuple[Tensor, Tensor]:
    found = reference(call)
    return found.out.detach().bfloat16(), found.lse.detach().float()


@pytest.mark.parametrize(
    ("name", "parts"), [*((name, 1) for name in CALLS), ("window", 2), ("packed window", 2)]
)
def test_the_backward_ignores_hidden_keys(name: str, parts: int):
    tensors, *rest = CALLS[name]()
    results = results_of((tensors, *rest))
    dout, dlse = (
        normal(generator(4), *results[0].shape, dtype=torch.bfloat16),
        normal(generator(5), *results[1].shape),
    )
    hidden = hidden_keys((tensors, *rest))
    wanted = backward_of((tensors, *rest), dout, dlse, results, parts)
    for junk in (math.nan, math.inf):
        q, k, v = (x.clone() for x in tensors)
        k[hidden], v[hidden] = junk, junk
        for got, x in zip(
            backward_of(([q, k, v], *rest), dout, dlse, results, parts), wanted, strict=True
        ):
            torch.testing.assert_close(got, x)


@pytest.mark.parametrize("name", DEAD)
def test_the_backward_ignores_the_gradients_of_rows_without_a_key(name: str):
    call = DEAD[name]()
    out, lse = results_of(call)
    sink = call[2].get("sink")
    dead = lse == (-math.inf if sink is None else sink[:, None])
    assert dead.any()
    dout = normal(generator(4), *out.shape, dtype=torch.bfloat16).detach()
    dlse = normal(generator(5), *lse.shape).detach()
    rows = dead.transpose(-1, -2)[..., None]
    wanted = backward_of(call, dout.masked_fill(rows, 0.0), dlse, (out, lse))
    got = backward_of(call, dout.masked_fill(rows, math.nan), dlse, (out, lse))
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)
    got = backward_of(
        call, dout.masked_fill(rows, math.nan), dlse.masked_fill(dead, math.nan), (out, lse)
    )
    for x, y in zip(got[:3], wanted, strict=False):  # the sink is the log-sum-exp of such a row
        torch.testing.assert_close(x, y)


SEEN: dict[str, Callable[[], Call]] = {
    "dense": dense(),
    "causal of 128 columns": dense(128, causal=True),
    "sink of 256 columns": dense(256, sink=torch.tensor([0.3, -0.7])),
    "packed": packed(),
}


@pytest.mark.parametrize("name", SEEN)
def test_nan_in_a_query_is_its_result(name: str):
    (q, *keys), *rest = SEEN[name]()
    wanted = emulate(*described(([q, *keys], *rest)), seed=0)
    q[..., 3, 1, :] = math.nan
    out, lse = emulate(*described(([q, *keys], *rest)), seed=0)
    assert out[..., 3, 1, :].isnan().all() and lse[..., 1, 3].isnan().all()
    for got, x in zip((out, lse), wanted, strict=True):
        assert torch.equal(got[~got.isnan()], x[~got.isnan()])
