"""Lists of keys for each query, in Triton's interpreter, by the rule.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_listed.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from configurations import one_kind_each

from flashtile.backends import triton as backend
from flashtile.testing import generator, normal

from .cases import Call, Make, dense, lengths, packed
from .compare import assert_call, everything

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

SIZES = {"B": 2, "M": 9, "N": 45, "Hq": 4, "Hk": 2, "D": 16}


def listed(
    make: Make, run: int = 1, top: int = 7, heads: int = 2, batch: int | None = None
) -> Make:
    """The call with `top` distinct runs of `run` keys for each query and each of `heads` key heads,
    some of them -1 or past the end."""

    def with_lists(g: torch.Generator, dtype: torch.dtype) -> Call:
        operands, options = make(g, dtype)
        runs = -(-options.max_seqlen_k // run)
        rows = operands.q.shape[-3]
        is_packed = operands.cu_seqlens_q is not None
        lead = 1 if is_packed else batch or operands.q.shape[0]
        order = torch.rand(lead, rows, heads, runs + 2, generator=g).argsort(-1)[..., :top]
        index = torch.where(order > runs, -1, order).int()  # one is past the end
        return operands._replace(key_index=index), options._replace(key_run=run)

    return with_lists


def small(**sizes: int) -> Any:
    return dense(**(SIZES | sizes))


CASES: dict[str, Make] = {
    "keys": listed(small()()),
    "keys for all heads, causal": listed(small()(lambda g, t: {"causal": True}), heads=1),
    "keys of one sequence for all, window": listed(
        small()(lambda g, t: {"window_size": (20, 3)}), batch=1
    ),
    "chunk, softcap": listed(small()(lambda g, t: {"attention_chunk": 20, "softcap": 1.5}), top=20),
    "sink": listed(small()(lambda g, t: {"sink": normal(g, 4), "causal": True}), top=3),
    "negative scale": listed(small()(lambda g, t: {"softmax_scale": -0.3})),
    "more heads than rows": listed(small(B=1, M=3, Hq=70, Hk=1)(), run=4, top=4, heads=1),
    "heads of one": listed(small(Hq=2)(), run=5),
    "three heads": listed(small(Hq=6, D=20, Dv=12)(), run=8, top=3),
    "blocks": listed(small(M=5, N=300, Hq=8)(lambda g, t: {"causal": True}), run=64, top=3),
    "blocks larger than a tile": listed(small(M=5, N=400, Hk=1)(), run=96, top=2, heads=1),
    "wide": listed(small(M=3, D=144, Dv=256)(), run=16, top=2),
    "lengths": listed(
        small()(
            lambda g, t: {
                "seqused_q": lengths(7, 0), "seqused_k": lengths(45, 13), "sink": normal(g, 4)
            }
        )
    ),
    "packed": listed(packed, top=5),
    "packed blocks": listed(packed, run=4, top=3, heads=1),
    "an empty list": listed(small()(), top=0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    one_kind_each(CASES, (torch.float32, torch.float16)),
    ids=lambda x: str(x).removeprefix("torch."),
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_and_backward(name: str, deterministic: bool, dtype: torch.dtype, seed: int):
    torch.manual_seed(seed)
    operands, options = CASES[name](generator(seed), dtype)
    options = options._replace(deterministic=deterministic)
    assert_call(backend, (operands, options), dtype, seed)


def test_what_is_hidden_may_hold_nan(seed: int):
    """Keys that no list has, or that are masked for all of them, and the output of a query that
    sees no key."""
    torch.manual_seed(seed)
    make = small(M=45)(lambda g, t: {"causal": True, "sink": normal(g, 4)})
    operands, options = listed(make, top=3, heads=1)(generator(seed), torch.float16)
    index = operands.key_index
    assert index is not None
    index[:, 5] = torch.tensor([-1, 30, 44])
    index[index == 9] = -1
    dout, dlse = torch.randn(operands.q.shape).half(), torch.randn(2, 4, 45)
    found = []
    for hidden in (0.0, torch.nan):
        operands.k[:, 9], operands.v[:, 9], dout[:, 5] = hidden, hidden, hidden
        found.append(everything(backend, operands, options, dout, dlse))
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name


def test_float32_in_six_products(seed: int):
    torch.manual_seed(seed)
    call = CASES["keys"](generator(seed), torch.float32)
    assert_call(backend, call, torch.float32, seed, capability=(9, 0))
