"""flashtile behind `torch.nn.attention.activate_flash_attention_impl`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rounded_results import judge_client, judge_with_gradients
from torch.nn import attention as torch_attention

from flashtile import flash_attn_2_cuda
from flashtile.integrations import torch_registry

varlen = pytest.importorskip("torch.nn.attention.varlen")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(torch_attention, "register_flash_attention_impl"),
        reason=f"torch {torch.__version__} has no registry of flash attention",
    ),
]


@pytest.fixture
def activated():
    torch_attention.activate_flash_attention_impl(torch_registry.register())
    yield
    torch_attention.restore_flash_attention_impl()


@pytest.fixture
def calls(activated, monkeypatch):
    """The calls that arrive here."""
    found = []
    for name in ("attention", "prepare"):
        function = getattr(torch_registry, name)
        monkeypatch.setattr(
            torch_registry, name, lambda *a, f=function, n=name, **k: found.append(n) or f(*a, **k)
        )
    return found


def plain(q, k, v, visible=None, scale=None):
    """The formula in the inputs' dtype; rows without visible keys are zero."""
    heads = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


def plain_packed(q, k, v, visible=None):
    """`plain` of one sequence, (length, heads, head_dim)."""
    return plain(*(x.transpose(0, 1)[None] for x in (q, k, v)), visible)[0].transpose(0, 1)


def make(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_registering_activates_nothing():
    assert torch_registry.register() == "flashtile"
    assert "flashtile" in torch_attention.list_flash_attention_impls()
    assert torch_attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("lengths", [(33, 33), (20, 50), (50, 20), (1, 9), (300, 290)])
@pytest.mark.parametrize("option", ["plain", "causal", "bool mask", "float mask", "scale"])
def test_sdpa_on_the_cpu(lengths, option, calls, seed):
    M, N = lengths
    q, k, v = inputs = make((2, 3, M, 8), (2, 3, N, 8), (2, 3, N, 8))
    visible = torch.ones(M, N, dtype=torch.bool)
    options = {"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.2}}.get(option)
    if option == "causal":
        visible = visible.tril()  # from the top left
    elif options is None:
        visible = torch.rand(2, 1, M, N) > 0.3
        visible[:, :, 0] = False
        mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        options = {"attn_mask": visible if option == "bool mask" else mask}
    got = F.scaled_dot_product_attention(q, k, v, **options)
    assert calls
    rows = visible.any(-1, keepdim=True)

    def seen_rows(q, k, v):
        return plain(q, k, v, visible, options.get("scale")) * rows

    judge_with_gradients(got * rows, seen_rows, inputs, seed)


def test_grouped_heads_on_the_cpu(calls, seed):
    inputs = make((2, 6, 20, 8), (2, 2, 30, 8), (2, 2, 30, 8))
    got = F.scaled_dot_product_attention(*inputs, enable_gqa=True)
    judge_with_gradients(got, plain, inputs, seed)


def test_dropout_of_sdpa_still_drops(activated, seed):
    q, k, v = make((2, 3, 20, 8), (2, 3, 30, 8), (2, 3, 30, 8))
    dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.allclose(dropped, plain(q, k, v))


def test_the_cpu_operator_refuses_dropout(activated):
    q = torch.randn(1, 2, 5, 8)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with pytest.raises(NotImplementedError, match=r"dropout_p: got 0\.5"):
        operator(q, q, q, 0.5)
    with pytest.raises(NotImplementedError, match=r"dropout_p: got 0\.5"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            q, q, q, q, q, q[..., 0], 0.5, False
        )


def test_the_log_sum_exp_is_pytorchs(seed):
    q, k, v = torch.randn(3, 2, 3, 40, 8).unbind()
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    want = operator(q, k, v, 0.0, True)
    torch_attention.activate_flash_attention_impl(torch_registry.register())
    try:
        got = operator(q, k, v, 0.0, True)
    finally:
        torch_attention.restore_flash_attention_impl()
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


def test_restoring_gives_pytorch_its_operators_back(calls, seed):
    q = torch.randn(1, 2, 5, 8)
    F.scaled_dot_product_attention(q, q, q)
    assert calls
    torch_attention.restore_flash_attention_impl()
    calls.clear()
    F.scaled_dot_product_attention(q, q, q)
    assert not calls
    packed, offsets = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        varlen.varlen_attn(packed, packed, packed, offsets, offsets, 5, 5)
    torch_attention.activate_flash_attention_impl("flashtile")


def test_a_compiled_call(calls, seed):
    inputs = make((2, 3, 20, 8), (2, 3, 20, 8), (2, 3, 20, 8))

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    visible = torch.ones(20, 20, dtype=torch.bool).tril()
    judge_with_gradients(got, partial(plain, visible=visible), inputs, seed)
    assert calls


def packed_inputs(lengths_q, lengths_k, heads, kv_heads):
    shapes = [(sum(lengths_q), heads, 8)] + [(sum(lengths_k), kv_heads, 8)] * 2
    offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    return make(*shapes), offsets


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 2)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_varlen_attn(window, heads, activated, seed):
    """Aligned to the bottom right, as FlashAttention-2 is."""
    lengths_q, lengths_k = [5, 0, 12, 1], [7, 3, 12, 9]
    (q, k, v), offsets = packed_inputs(lengths_q, lengths_k, *heads)
    aux = varlen.AuxRequest(lse=True)
    got, lse = varlen.varlen_attn(
        q, k, v, *offsets, 12, 12, window_size=window, enable_gqa=True, return_aux=aux
    )
    assert lse.shape == (heads[0], sum(lengths_q))

    def each_sequence(q, k, v):
        outs = []
        split = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
        for one_q, one_k, one_v in split:
            M, N = len(one_q), len(one_k)
            position = torch.arange(M)[:, None] + N - M - torch.arange(N)  # query minus key
            left, right = window
            visible = (left < 0) | (position <= left)
            visible = visible & ((right < 0) | (-position <= right))
            outs.append(plain_packed(one_q, one_k, one_v, visible))
        return torch.cat(outs)

    judge_with_gradients(got, each_sequence, [q, k, v], seed)


def test_varlen_attn_of_pages_and_into_a_given_output(activated, seed):
    q = torch.randn(5, 4, 8)
    pages = torch.randn(2, 6, 4, 2, 8)  # keys and values of six pages of four tokens
    table = torch.tensor([[4, 0], [1, 3]], dtype=torch.int32)
    used = torch.tensor([7, 3], dtype=torch.int32)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    options = {"seqused_k": used, "block_table": table, "enable_gqa": True}
    got = varlen.varlen_attn(q, *pages, offsets, None, 3, 8, **options)
    out = torch.full_like(q, torch.nan)
    varlen.varlen_attn_out(out, q, *pages, offsets, None, 3, 8, **options)
    assert torch.equal(out, got)

    def each_sequence(dtype):
        outs = []
        for b, one_q in enumerate(q.to(dtype).split([2, 3])):
            keys, values = (x[table[b].long()].flatten(0, 1)[: used[b]] for x in pages.to(dtype))
            outs.append(plain_packed(one_q, keys, values))
        return {"out": torch.cat(outs)}

    judge_client({"out": got}, each_sequence, seed)


def test_the_operators_of_cuda_honour_dropout(activated, seed):
    """They are registered for the CPU too, so they can be tested there."""
    q, k, v = torch.randn(3, 2, 3, 20, 8).unbind()
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, _, _, M, N, rng_state, unused, debug_mask = operator(q, k, v, 0.3, True, True)
    assert rng_state.dtype == torch.uint64
    assert lse.shape == (2, 3, 20)
    assert debug_mask.signbit().any()  # dropped
    torch.manual_seed(3)
    first = operator(q, k, v, 0.3)[0]
    torch.manual_seed(3)
    assert torch.equal(operator(q, k, v, 0.3)[0], first)
    dout = torch.randn_like(out)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    rest = (None, None, M, N, 0.3, True, rng_state, unused)
    got = backward(dout, q, k, v, out, lse, *rest)
    dense = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    numbers = (None, 0.3, None, True, -1, -1, 0.0, False)  # no ALiBi, no window, no softcap
    state = rng_state.view(torch.int64)
    want = flash_attn_2_cuda.bwd(*dense, lse, None, None, None, *numbers, None, state)
    for mine, theirs in zip(got, want[:3], strict=True):
        assert torch.equal(mine, theirs.transpose(1, 2))
    without = backward(dout, q, k, v, out, lse, None, None, M, N, 0.0, True, rng_state, unused)
    assert not torch.allclose(got[2], without[2])


def test_lower_right_causal_of_the_operator_of_cuda(activated, seed):
    q, k, v = inputs = [torch.randn(1, 2, length, 8) for length in (4, 7, 7)]
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    visible = torch.ones(4, 7, dtype=torch.bool).tril(3)
    judge_client(
        {"out": out}, lambda dtype: {"out": plain(*(x.to(dtype) for x in inputs), visible)}, seed
    )
    assert out.stride() == q.stride()


def test_a_pytorch_without_the_registry_is_named(monkeypatch):
    monkeypatch.delattr(torch_attention, "register_flash_attention_impl")
    with pytest.raises(ImportError, match=r"got torch 2.*want 2\.13.*sdpa\.install"):
        torch_registry.register()
