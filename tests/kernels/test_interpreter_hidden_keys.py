"""NaN and infinity in keys that no query sees, and NaN in gradients of queries that see no key, in
Triton's interpreter.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_hidden_keys.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend
from flashtile.call.converted_masks import additive
from flashtile.masks import BlockMask, Spans
from flashtile.masks.block_mask import with_every_tile
from flashtile.testing import alibi_slopes, generator, normal

from .cases import Call, Make, by_distance, dense, dropped, many_operations, scored
from .compare import everything

FIRST = 20  # all masks here hide the keys before this one
SIZES = {"B": 1, "M": 37, "N": 100, "Hq": 2, "Hk": 1, "D": 16}


def seen(g: torch.Generator, *shape: int) -> torch.Tensor:
    mask = torch.rand(*shape, 100, generator=g) < 0.7
    mask[..., :FIRST], mask[..., FIRST:24] = False, True
    return mask


def masked(options: Callable[..., dict[str, Any]], **sizes: int) -> Make:
    return dense(**(SIZES | sizes))(options)


def block_mask(g: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    return {"block_mask": BlockMask.from_dense(seen(g, 1, 2, 37), (32, 32))}


def spans(g: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    starts = torch.randint(FIRST, 60, (1, 2, 37, 2), generator=g, dtype=torch.int32)
    return {"mask": Spans(starts, starts + 15)}


CASES: dict[str, Make] = {
    "window": masked(lambda g, t: {"window_size": (40, -1), "softcap": 2.0}),
    "window before the query": masked(lambda g, t: {"window_size": (90, -20)}, M=100),
    "chunk": masked(lambda g, t: {"attention_chunk": 50, "causal": True}),
    "block mask": masked(block_mask),
    "block mask that stores every tile": masked(
        lambda g, t: {"block_mask": with_every_tile(seen(g, 1, 2, 37), (32, 32))}
    ),
    "block mask of each sequence": masked(
        lambda g, t: {"block_mask": BlockMask.from_dense(seen(g, 2, 2, 37), (32, 32))}, B=2
    ),
    "block mask, biases by distance": by_distance(masked(block_mask)),
    "block mask and bias": masked(
        lambda g, t: block_mask(g, t) | {"bias": additive(seen(g, 1, 1, 37)), "softcap": 3.0}
    ),
    "spans": dropped(masked(spans)),
    "spans and score function": scored(masked(spans), many_operations),
    "bias of one query": masked(
        lambda g, t: {"bias": additive(seen(g, 1, 2, 1)), "alibi_slopes": alibi_slopes(g, 2)}, M=1
    ),
}


def with_hidden(call: Call, key: float, value: float) -> Call:
    operands, options = call
    k, v = operands.k.clone(), operands.v.clone()
    hidden = slice(80, None) if options.window_right == -20 else slice(FIRST)
    if options.attention_chunk:
        hidden = slice(50)
    k[:, hidden], v[:, hidden] = key, value
    return operands._replace(k=k, v=v), options


@pytest.mark.parametrize("name", CASES)
def test_what_hidden_keys_hold_does_not_matter(name: str, seed: int):
    dtype = torch.float16
    operands, options = CASES[name](generator(seed), dtype)
    g = generator(seed + 1)
    B, M, Hq, _ = operands.q.shape
    dout, dlse = normal(g, B, M, Hq, 16, dtype=dtype).detach(), normal(g, B, Hq, M).detach()
    runs = [
        everything(backend, *with_hidden((operands, options), *hold), dout, dlse)
        for hold in ((1.0, 1.0), (math.nan, math.inf), (1.0, math.nan))
    ]
    for run in runs[1:]:
        for result, wanted in runs[0].items():
            assert torch.equal(run[result], wanted), result


def half_seen(g: torch.Generator, *shape: int) -> torch.Tensor:
    """A mask that hides all keys from queries 10 to 19."""
    mask = seen(g, *shape)
    mask[..., 10:20, :] = False
    return mask


def half_spans(g: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    stops = half_seen(g, 1, 2, 37).sum(-1, keepdim=True, dtype=torch.int32)
    return {"mask": Spans(torch.zeros_like(stops), stops)}


# In each call some query sees no key.
DEAD: dict[str, Make] = {
    "causal": dropped(masked(lambda g, t: {"causal": True}, M=70, N=37)),
    "causal, sink": masked(lambda g, t: {"causal": True, "sink": normal(g, 2)}, M=70, N=37),
    "causal, biases by distance": by_distance(masked(lambda g, t: {"causal": True}, M=70, N=37)),
    "window before the query": masked(lambda g, t: {"window_size": (90, -80), "softcap": 2.0}),
    "block mask": masked(
        lambda g, t: {"block_mask": BlockMask.from_dense(half_seen(g, 1, 2, 37), (32, 32))}
    ),
    "spans and score function": scored(masked(half_spans), many_operations),
    "bias": masked(lambda g, t: {"bias": additive(half_seen(g, 1, 2, 37))}),
}


@pytest.mark.parametrize("name", DEAD)
def test_what_the_gradient_of_a_query_without_a_key_holds_does_not_matter(name: str, seed: int):
    dtype = torch.float16
    operands, options = DEAD[name](generator(seed), dtype)
    g = generator(seed + 1)
    B, M, Hq, _ = operands.q.shape
    dout, dlse = normal(g, B, M, Hq, 16, dtype=dtype).detach(), torch.zeros(B, Hq, M)
    wanted = everything(backend, operands, options, dout, dlse)
    dead = (wanted["out"] == 0).all(-1, keepdim=True)
    if operands.sink is None:
        dead = (wanted["lse"] == -math.inf).transpose(1, 2)[..., None]
    assert dead.any()
    dout = dout.masked_fill(dead, math.nan)
    for number in (0.0, math.nan):  # with a sink, the log-sum-exp of such a row is the sink
        dlse = dlse.masked_fill(dead[..., 0].transpose(1, 2), number)
        got = everything(backend, operands, options, dout, dlse)
        for result, x in wanted.items():
            assert (math.isnan(number) and result == "dsink") or torch.equal(got[result], x), result


SEEN = {
    "short": masked(lambda g, t: {}, N=60),
    "short, sink": masked(lambda g, t: {"sink": normal(g, 2)}, N=60),
    "hidden keys": masked(lambda g, t: {"window_size": (3, 0)}, N=100),
    "tiles": masked(lambda g, t: {"causal": True}, M=101),
    "parts of the keys": masked(lambda g, t: {}, M=1, N=600),
}


@pytest.mark.parametrize("name", SEEN)
def test_nan_in_a_query_is_its_result(name: str, seed: int):
    operands, options = SEEN[name](generator(seed), torch.float16)
    assert operands.q is not None
    B, M, Hq, _ = operands.q.shape
    dout, dlse = torch.ones(B, M, Hq, 16, dtype=torch.float16), torch.zeros(B, Hq, M)
    wanted = everything(backend, operands, options, dout, dlse)
    operands.q[0, M - 1, 1] = math.nan
    got = everything(backend, operands, options, dout, dlse)
    assert got["out"][0, M - 1, 1].isnan().all() and got["lse"][0, 1, M - 1].isnan()
    assert got["dq"][0, M - 1, 1].isnan().all() and got["dv"][0, -1].isnan().all()
    for result in ("out", "lse"):
        others = ~got[result].isnan()
        assert torch.equal(got[result][others], wanted[result][others])
