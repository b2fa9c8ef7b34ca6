"""Short sequences, whose heads are one tile each, in Triton's interpreter: every option of
`cases.py` that these kernels have, at most sizes.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_short.py
"""

from __future__ import annotations

import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend
from flashtile.backends.triton.kernel_launches import BackwardBuffers, backward_launches
from flashtile.backends.triton.launch import backward_buffers, forward_buffers
from flashtile.backends.triton.plan import is_short
from flashtile.call.layouts import Packed
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem
from flashtile.testing import alibi_slopes, cu_seqlens, generator, normal, packed_qkv

from .cases import CASES, SHORT_CASES, Call, Make, bias, dense
from .compare import assert_call, everything

SIZES = {"B": 2, "M": 49, "N": 49, "Hq": 4, "Hk": 4, "D": 32}


def described(make: Make) -> AttentionProblem:
    return AttentionProblem.of(*make(generator(0), torch.float16))


SHORT: dict[str, Make] = {name: make for name, make in CASES.items() if is_short(described(make))}
SHORT |= SHORT_CASES


def test_cases_of_all_other_options_are_short():
    """Many of `cases.py`, none of them by pages, spans or score functions."""
    assert sum(name in CASES for name in SHORT) >= 19
    assert not any(word in name for name in SHORT for word in ("page", "span", "score", "block"))


@pytest.mark.parametrize("name", SHORT)
def test_forward_and_backward(name: str, seed: int):
    torch.manual_seed(seed)  # of the dropout
    dtype = torch.float16
    assert_call(backend, SHORT[name](generator(seed), dtype), dtype, seed)


@pytest.mark.parametrize("bias_kind", [(2, 4, 49, 49), (1, 4, 49, 49), (2, 1, 1, 49)], ids=str)
def test_a_backward_is_one_launch(bias_kind: tuple[int, ...]):
    """Without a workspace: only a bias that is shared has more memory than its gradient."""
    operands, options = dense(**SIZES)(bias(*bias_kind))(generator(0), torch.float16)
    problem = AttentionProblem.of(operands, options)._replace(bias_needs_grad=True)
    out, lse = forward_buffers(problem, operands)
    made = backward_buffers(problem, operands, torch.float16)
    launches = backward_launches(problem, (*operands, out, lse, out, None), made)
    assert [launch.kernel.__name__ for launch in launches] == ["short_backward_kernel"]
    assert made.dbias.shape == (2, 4, 49, 49)
    assert made.dbias.dtype == (torch.float16 if bias_kind == (2, 4, 49, 49) else torch.float32)
    others = made._replace(dq=None, dk=None, dv=None, dbias=None)
    assert others == BackwardBuffers(None, None, None)


def hidden(call: Call, key: float, value: float) -> Call:
    """Other numbers in the keys before the twelfth, which no query sees."""
    operands, options = call
    k, v = operands.k.clone(), operands.v.clone()
    k[:, :12], v[:, :12] = key, value
    return operands._replace(k=k, v=v), options


@pytest.mark.parametrize("rule", ["window", "chunk", "grouped"])
def test_what_hidden_keys_hold_does_not_matter(rule: str, seed: int):
    sizes = SIZES | {"M": 20, "N": 49, "D": 16, "Hk": 2 if rule == "grouped" else 4}
    options = {"window_size": (15, -1), "softcap": 2.0}
    if rule == "chunk":
        options = {"attention_chunk": 14, "causal": True}
    call = dense(**sizes)(lambda g, t: options)(generator(seed), torch.float16)
    g = generator(seed + 1)
    dout = normal(g, 2, 20, 4, 16, dtype=torch.float16).detach()
    dlse = normal(g, 2, 4, 20).detach()
    holds = ((1.0, 1.0), (math.nan, math.inf), (1.0, math.nan))
    wanted, *found = (everything(backend, *hidden(call, *x), dout, dlse) for x in holds)
    for run in found:
        assert all(torch.equal(run[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("rule", ["causal", "bias", "softcap"])
def test_gradients_of_queries_without_a_key_do_not_matter(rule: str, sink: bool, seed: int):
    def options(g: torch.Generator, dtype: torch.dtype) -> dict[str, object]:
        found: dict[str, object] = {"sink": normal(g, 4)} if sink else {}
        if rule == "bias":
            hides = torch.zeros(2, 1, 40, 25)
            hides[..., 3:9, :] = -math.inf
            return found | {"bias": hides.to(dtype)}
        return found | {"causal": True, "softcap": 2.0 if rule == "softcap" else 0.0}

    call = dense(**(SIZES | {"M": 40, "N": 25, "Hk": 2}))(options)(generator(seed), torch.float16)
    dout = normal(generator(seed + 1), 2, 40, 4, 32, dtype=torch.float16).detach()
    wanted = everything(backend, *call, dout, torch.zeros(2, 4, 40))
    dead = (wanted["out"] == 0).all(-1, keepdim=True)
    assert dead.any() and not dead.all()
    got = everything(backend, *call, dout.masked_fill(dead, math.nan), torch.zeros(2, 4, 40))
    assert all(torch.equal(got[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("sink", [False, True])
def test_what_lone_queries_and_keys_hold_does_not_matter(sink: bool, seed: int):
    """The queries of a sequence without keys, their gradients, and keys without queries."""
    g = generator(seed)
    M, N = [9, 12, 0, 20], [17, 0, 11, 30]
    q, k, v = packed_qkv(g, M, N, Hq=4, Hk=2, D=32, dtype=torch.float16)
    options = {"softcap": 2.0, "alibi_slopes": alibi_slopes(g, 4)}
    options |= {"sink": normal(g, 4)} if sink else {}
    layout = Packed(cu_seqlens(M), cu_seqlens(N), 20, 30)
    dout = normal(g, 41, 4, 32, dtype=torch.float16).detach()
    runs = []
    for x in (0.0, math.nan):
        lone_q, lone_k, lone_v, lone_dout = q.clone(), k.clone(), v.clone(), dout.clone()
        lone_q[9:21], lone_dout[9:21], lone_k[17:28], lone_v[17:28] = x, x, x, x
        call = describe((lone_q, lone_k, lone_v), layout, options)
        runs.append(everything(backend, *call, lone_dout, torch.zeros(4, 41)))
    assert all(torch.equal(runs[1][name], x) for name, x in runs[0].items())
