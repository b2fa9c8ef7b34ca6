"""FlashAttention-2's private functions, as ring attention and others call them."""

from __future__ import annotations

import inspect

import pytest
import torch
from conformance.harness import compare

import flashtile
from flashtile import flash_attn_2_cuda, flash_attn_2_interface
from flashtile.flash_attn_2_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    maybe_contiguous,
    round_multiple,
)
from flashtile.testing import (
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
    packed_qkv,
    paged,
    qkv,
    strided,
)

# FlashAttention 2.8.4's own parameters, in order.
TAIL = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
PACKING = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
GRADIENTS = "dout q k v out softmax_lse dq dk dv"
PARAMETERS = {
    "_flash_attn_forward": f"q k v {TAIL} return_softmax",
    "_flash_attn_varlen_forward": f"q k v {PACKING} {TAIL} return_softmax block_table leftpad_k "
    "seqused_k zero_tensors num_splits",
    "_flash_attn_backward": f"{GRADIENTS} {TAIL} deterministic rng_state",
    "_flash_attn_varlen_backward": f"{GRADIENTS} {PACKING} {TAIL} deterministic rng_state "
    "zero_tensors",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_positional_order(name):
    for function in (name, f"_wrapped{name}"):
        parameters = inspect.signature(getattr(flash_attn_2_interface, function)).parameters
        positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == PARAMETERS[name].split()


RULE = {"causal": True, "window_size_left": 9, "window_size_right": -1, "softcap": 2.0}
OPTIONS = {"causal": True, "window_size": (9, -1), "softcap": 2.0}  # the same under other names


class Client(torch.autograd.Function):
    """A layer over the private functions, with gradients in memory that is strided and dirty."""

    @staticmethod
    def forward(ctx, q, k, v, layout, dropout_p):
        forward = _flash_attn_varlen_forward if layout else _flash_attn_forward
        rule = {**layout, **RULE, "dropout_p": dropout_p, "softmax_scale": None}
        rule["alibi_slopes"] = None
        out, lse, S_dmask, rng_state = forward(q, k, v, **rule, return_softmax=False)
        assert S_dmask.numel() == 0 and not out.requires_grad
        ctx.rule = rule
        ctx.save_for_backward(q, k, v, out, lse, rng_state)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse, rng_state = ctx.saved_tensors
        gradients = [strided(torch.full_like(x, torch.nan), "sliced") for x in (q, k, v)]
        backward = (
            _flash_attn_varlen_backward if "cu_seqlens_q" in ctx.rule else _flash_attn_backward
        )
        results = (dout, q, k, v, out, lse, *gradients)
        softmax_d = backward(*results, **ctx.rule, deterministic=False, rng_state=rng_state)
        assert softmax_d.dtype == torch.float32 and softmax_d.isfinite().all()
        return *gradients, None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_dense_client(dtype, seed):
    compare(
        lambda x: Client.apply(x["q"], x["k"], x["v"], {}, 0.0)[0],
        lambda x, **how: attention_reference(**x, **OPTIONS, **how),
        dict(zip("qkv", qkv(generator(seed), dtype=dtype), strict=True)),
        seed=seed,
    )


LENGTHS = ([3, 0, 17], [5, 4, 9])


def packing():
    """A layout of packed sequences, one without queries, by FlashAttention-2's names."""
    values = (*map(cu_seqlens, LENGTHS), *map(max, LENGTHS))
    return dict(zip(PACKING.split(), values, strict=True))


def test_packed_client(seed):
    layout = packing()
    compare(
        lambda x: Client.apply(x["q"], x["k"], x["v"], layout, 0.0)[0],
        lambda x, **how: attention_varlen_reference(**x, **layout, **OPTIONS, **how),
        dict(zip("qkv", packed_qkv(generator(seed), *LENGTHS), strict=True)),
        seed=seed,
    )


@pytest.mark.parametrize("is_packed", [False, True])
def test_dropout_is_that_of_the_forward(is_packed, seed):
    g = generator(seed)
    layout = packing() if is_packed else {}
    make = packed_qkv(g, *LENGTHS) if is_packed else qkv(g)
    leaves = [x.double().requires_grad_() for x in make]
    attention = flashtile.attention_varlen if is_packed else flashtile.attention
    results = []
    for call in (
        lambda: Client.apply(*leaves, layout, 0.4),
        lambda: attention(*leaves, **layout, **OPTIONS, dropout_p=0.4, return_lse=True),
    ):
        torch.manual_seed(seed)
        out, lse = call()
        torch.manual_seed(seed + 1)  # the backward must not draw
        results.append((out, lse, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-10)


def test_a_generator_is_honoured(seed):
    q, k, v = qkv(generator(seed))
    rest = (0.5, None, False, -1, -1, 0.0, None, False)
    first, again, other = (
        _flash_attn_forward(q, k, v, *rest, generator=generator(n)) for n in (1, 1, 2)
    )
    assert torch.equal(first[0], again[0]) and torch.equal(first[3], again[3])
    assert not torch.equal(first[0], other[0])
    with pytest.raises(RuntimeError, match=r"`generator` argument is no longer supported"):
        _flash_attn_forward(q, k, v, *rest, generator=torch.zeros(1))


def test_S_dmask_has_the_padded_layout(seed):
    q, k, v = (x.double() for x in qkv(generator(seed), M=5, N=130))
    rest = (0.3, None, True, -1, -1, 0.0, None, True)
    torch.manual_seed(seed)
    _, _, S_dmask, _ = _flash_attn_forward(q, k, v, *rest)
    torch.manual_seed(seed)
    options = {"dropout_p": 0.3, "causal": True, "return_attn_probs": True}
    _, _, S_dmask_of_public = flash_attn_2_interface.flash_attn_func(q, k, v, **options)
    assert torch.equal(S_dmask, S_dmask_of_public)
    torch.manual_seed(seed)
    _, _, probabilities = flashtile.attention(q, k, v, **options)
    assert S_dmask.shape == (2, 4, 128, 256)
    decoded = S_dmask[:, :, :5, :130]
    torch.testing.assert_close(decoded.abs().amax(-1), torch.ones(2, 4, 5).double())
    decoded = decoded / decoded.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(decoded, probabilities, rtol=1e-10, atol=1e-10)
    assert S_dmask[:, :, 5:].count_nonzero() == S_dmask[..., 130:].count_nonzero() == 0


def test_without_dropout_there_is_no_S_dmask(seed):
    q, k, v = qkv(generator(seed))
    out, lse, S_dmask = flash_attn_2_interface.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, flashtile.attention(q, k, v))
    assert lse.shape == (2, 4, 17) and S_dmask.numel() == 0
    assert torch.is_tensor(flash_attn_2_interface.flash_attn_func(q, k, v))


def test_softmax_d(seed):
    g = generator(seed)
    rest = (0.0, None, False, -1, -1, 0.0, None)
    q, k, v = qkv(g)
    dout = torch.randn(q.shape, generator=g)
    out, lse, _, _ = _flash_attn_forward(q, k, v, *rest, False)
    wanted = (dout * out).sum(-1).transpose(1, 2)
    softmax_d = _flash_attn_backward(dout, q, k, v, out, lse, None, None, None, *rest, False)
    assert softmax_d.shape == (2, 4, 128)
    torch.testing.assert_close(softmax_d[..., :17], wanted)
    assert softmax_d[..., 17:].count_nonzero() == 0

    q, k, v = packed_qkv(g, *LENGTHS)
    dout = torch.randn(q.shape, generator=g)
    layout = tuple(packing().values())
    out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, *layout, *rest)
    softmax_d = _flash_attn_varlen_backward(
        dout, q, k, v, out, lse, None, None, None, *layout, *rest, False
    )
    wanted = (dout * out).sum(-1).t()
    assert softmax_d.shape == (4, 20 + 3 * 128)
    torch.testing.assert_close(softmax_d[:, :3], wanted[:, :3])
    torch.testing.assert_close(softmax_d[:, 3 + 256 : 20 + 256], wanted[:, 3:])


def test_packed_keys_behind_a_left_pad_and_in_pages(seed):
    g = generator(seed)
    layout = packing()
    q, k, v = packed_qkv(g, *LENGTHS)
    pad, used = torch.tensor([1, 4, 0]).int(), torch.tensor([4, 4, 7]).int()
    options = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True}
    out, *_ = _flash_attn_varlen_forward(
        q, k, v, **layout, **options, leftpad_k=pad, seqused_k=used
    )
    rows = [slice(1, 4), slice(9, 9), slice(9, 16)]
    starts = layout["cu_seqlens_q"].tolist()
    for rows_k, first, last in zip(rows, starts, starts[1:], strict=False):
        wanted = flashtile.attention(
            q[None, first:last], k[None, rows_k], v[None, rows_k], softmax_scale=0.3, causal=True
        )
        torch.testing.assert_close(out[None, first:last], wanted)

    cache = normal(g, 3, 8, 2, 16)
    pages, table = paged(g, cache, 4)
    layout |= {"cu_seqlens_k": cu_seqlens([8, 8, 8]), "max_seqlen_k": 8}
    out, *_ = _flash_attn_varlen_forward(q, pages, pages, **layout, **options, block_table=table)
    flat = cache.flatten(0, 1)
    wanted, *_ = _flash_attn_varlen_forward(q, flat, flat, **layout, **options)
    torch.testing.assert_close(out, wanted)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        _flash_attn_varlen_forward(
            q, pages, pages, **layout, **options, block_table=table, num_splits=2
        )


@pytest.mark.parametrize("pad", [[1, 2], [6, 4, 0], [-1, 0, 0]], ids=["short", "past", "negative"])
def test_wrong_left_pads_are_refused(pad, seed):
    q, k, v = packed_qkv(generator(seed), *LENGTHS)
    options = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True}
    with pytest.raises(ValueError, match="leftpad_k"):
        _flash_attn_varlen_forward(
            q, k, v, **packing(), **options, leftpad_k=torch.tensor(pad).int()
        )


def test_wrong_gradients_are_refused_before_anything_is_written(seed):
    q, k, v = qkv(generator(seed))
    rest = (0.0, None, False, -1, -1, 0.0, None)
    out, lse, *_ = _flash_attn_forward(q, k, v, *rest, False)
    dq = torch.zeros_like(q)
    with pytest.raises(ValueError, match=r"dv: got shape \(2, 1, 2, 16\), want \(2, 23, 2, 16\)"):
        _flash_attn_backward(out, q, k, v, out, lse, dq, None, v[:, :1], *rest, False)
    with pytest.raises(ValueError, match="softmax_lse: got shape"):
        _flash_attn_backward(out, q, k, v, out, lse[:1], dq, None, None, *rest, False)
    with pytest.raises(ValueError, match="rng_state: got None"):
        _flash_attn_backward(out, q, k, v, out, lse, dq, None, None, 0.5, *rest[1:], False)
    assert dq.count_nonzero() == 0


@pytest.mark.slow
def test_results_of_both_directions_compile(seed):
    leaves = qkv(generator(seed))

    def both(q, k, v):
        rest = (0.2, None, True, -1, -1, 0.0, None)
        out, lse, S_dmask, rng_state = _flash_attn_forward(q, k, v, *rest, True)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        softmax_d = _flash_attn_backward(
            out, q, k, v, out, lse, dq, dk, dv, *rest, False, rng_state=rng_state
        )
        return out, lse, S_dmask, dq, dk, dv, softmax_d

    results = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(seed)
        results.append(function(*leaves))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_public_functions_compile_with_S_dmask(seed):
    q, k, v = qkv(generator(seed))

    def call(q, k, v):
        return flash_attn_2_interface.flash_attn_func(q, k, v, 0.1, return_attn_probs=True)

    results = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(seed)
        results.append(function(q, k, v))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


CLASSES = {
    "FlashAttnFunc": "qkv",
    "FlashAttnKVPackedFunc": "q kv",
    "FlashAttnQKVPackedFunc": "qkv in one",
}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_autograd_classes_apply_by_position(name, is_packed, seed):
    q, k, v = qkv(generator(seed), M=9, N=9, Hk=4)
    tensors = {
        "qkv": (q, k, v),
        "q kv": (q, torch.stack((k, v), 2)),
        "qkv in one": (torch.stack((q, k, v), 2),),
    }[CLASSES[name]]
    layout, block_table = (), ()
    if is_packed:
        name = name.replace("FlashAttn", "FlashAttnVarlen")
        tensors = tuple(x.flatten(0, 1) for x in tensors)
        ends = cu_seqlens([9, 9])
        layout = (ends, 9) if len(tensors) == 1 else (ends, ends, 9, 9)
        block_table = (None,) if len(tensors) == 3 else ()
    tensors = [x.requires_grad_() for x in tensors]
    rule = (0.0, None, True, (4, 0), 1.5, None, False)
    wanted = flashtile.attention(q, k, v, causal=True, window_size=(4, 0), softcap=1.5)
    apply = getattr(flash_attn_2_interface, name).apply
    out = apply(*tensors, *layout, *rule, False, *block_table, True)
    torch.testing.assert_close(out.view_as(wanted), wanted)
    out.sum().backward()
    assert all(x.grad is not None for x in tensors)
    out, lse, S_dmask = apply(*tensors, *layout, *rule, True, *block_table, False)
    assert not out.requires_grad and lse.dtype == torch.float32 and S_dmask.numel() == 0


def test_extension_writes_into_out_and_reads_caches(seed):
    q, k, v = qkv(generator(seed))
    out = torch.full_like(q, torch.nan)
    result, *_ = flash_attn_2_cuda.fwd(q, k, v, out, None, 0.0, None, True, -1, -1, 0.0, False)
    assert result is out
    wanted, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, wanted)
    nothing = (None,) * 8
    found = flash_attn_2_cuda.fwd_kvcache(
        q, k, v, *nothing, None, None, None, True, -1, -1, 0.0, True, 0
    )
    torch.testing.assert_close(found, [wanted, lse])


def test_small_functions():
    x = torch.zeros(3, 4).t()
    assert maybe_contiguous(x).stride(-1) == 1 and maybe_contiguous(None) is None
    y = torch.zeros(3, 4)
    assert maybe_contiguous(y) is y
    assert [round_multiple(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
