"""The functions of ``flash_attn.ops``: their results and gradients against plain PyTorch."""

from __future__ import annotations

import itertools
from unittest import TestCase

import pytest
import torch
import torch.nn.functional as F
from rounded_results import judge_with_gradients
from torch.autograd import gradcheck

from flashtile.integrations import flash_attn
from flashtile.layers import activations, dense, dropout_norm, norm, patch_embed
from flashtile.modules import block, mha, mlp


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def plain_norm(stream, weight, bias, eps, is_rms_norm):
    if not is_rms_norm:
        stream = stream - stream.mean(-1, keepdim=True)
    y = stream / (stream.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return y if bias is None else y + bias


OPTIONS = ((False, True), (False, True), (False, True), ("none", "x1", "rowscale"))


@pytest.mark.parametrize(
    ("is_rms_norm", "prenorm", "has_residual", "more"), list(itertools.product(*OPTIONS))
)
def test_norm_of_a_sum(is_rms_norm, prenorm, has_residual, more, seed):
    p = 0.3 if is_rms_norm == has_residual else 0.0
    x, weight, bias = leaf(2, 5, 16), leaf(16), leaf(16)
    residual = leaf(2, 5, 16) if has_residual else None
    x1, weight1, bias1 = (leaf(2, 5, 16), leaf(16), leaf(16)) if more == "x1" else (None,) * 3
    rowscale = torch.rand(2, 5) if more == "rowscale" else None
    centred = p > 0
    *results, mask, mask1 = norm.layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        1e-3,
        p,
        rowscale,
        prenorm,
        zero_centered_weight=centred,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=True,
    )
    assert len(results) == 1 + (more == "x1") + prenorm
    assert (mask is None) == (p == 0) and (mask1 is None) == (p == 0 or more != "x1")
    if p:
        assert mask.dtype == torch.bool and 0 < mask.float().mean() < 1
    given = {
        "x": x, "weight": weight, "bias": bias, "residual": residual, "x1": x1,
        "weight1": weight1, "bias1": bias1,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}

    def plain(*values):
        take = dict(zip(given, values, strict=True))
        stream = take["x"] if rowscale is None else take["x"] * rowscale.unsqueeze(-1)
        stream = stream if mask is None else stream * mask / (1 - p)
        if "x1" in take:
            stream = stream + (take["x1"] if mask1 is None else take["x1"] * mask1 / (1 - p))
        if "residual" in take:
            stream = stream + take["residual"]
        ys = [
            plain_norm(stream, take[f"weight{n}"] + centred, take[f"bias{n}"], 1e-3, is_rms_norm)
            for n in (("", "1") if "x1" in take else ("",))
        ]
        return torch.cat(ys + [stream] * prenorm)

    judge_with_gradients(torch.cat(results), plain, list(given.values()), seed)


def test_dtypes_of_norms():
    """The norm has the dtype of x, the sum that of the residual; both are rounded once."""
    x, residual = leaf(3, 8, dtype=torch.bfloat16), leaf(3, 8)
    weight, bias = leaf(8), leaf(8)
    y, total = norm.layer_norm_fn(x, weight, bias, residual, prenorm=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual)
    assert torch.equal(y, F.layer_norm(total, (8,), weight, bias, 1e-6).bfloat16())
    y, total = norm.rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    y, total = norm.rms_norm_fn(x, weight, None, prenorm=True, out_dtype=torch.float32)
    assert (y.dtype, total.dtype) == (torch.float32, torch.bfloat16)
    out, sums = torch.empty(3, 8, dtype=torch.bfloat16), torch.empty(3, 8)
    got = norm.layer_norm_fn(x, weight, bias, residual, prenorm=True, out=out, residual_out=sums)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == sums.data_ptr()
    assert torch.equal(sums, x.float() + residual)
    with pytest.raises(ValueError, match="rowscale: want None with x1"):
        norm.layer_norm_fn(x, weight, bias, x1=x, rowscale=torch.ones(3))


@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_norm_and_linear(is_rms_norm, seed):
    inputs = [leaf(3, 8), leaf(8), leaf(8), leaf(6, 8), leaf(6), leaf(3, 8)]
    got, total = norm.layer_norm_linear_fn(*inputs, prenorm=True, is_rms_norm=is_rms_norm)

    def plain(x, weight, bias, matrix, offset, residual):
        y = plain_norm(x + residual, weight, bias, 1e-6, is_rms_norm)
        return torch.cat((y @ matrix.t() + offset, x + residual), dim=1)

    judge_with_gradients(torch.cat((got, total), dim=1), plain, inputs, seed)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm.layer_norm_linear_fn(*inputs[:5]).dtype == torch.bfloat16


@pytest.mark.parametrize("is_rms_norm", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_dropout_add_norm(is_rms_norm, p, seed):
    """With a factor for each row and each feature."""
    inputs = [leaf(2, 4, 8), leaf(2, 4, 8), leaf(8), leaf(8), leaf(8)]
    rowscale = torch.rand(2, 4)
    function = dropout_norm.dropout_add_layer_norm
    if is_rms_norm:
        function = dropout_norm.dropout_add_rms_norm
    x, residual, weight, bias, layerscale = inputs
    y, total, mask = function(
        x, residual, weight, bias, p, 1e-5, rowscale, layerscale, prenorm=True,
        return_dropout_mask=True,
    )  # fmt: skip
    assert mask.dtype == torch.uint8 and mask.shape == x.shape and bool(mask.all()) == (p == 0)

    def plain(x, residual, weight, bias, layerscale):
        stream = x * rowscale.unsqueeze(-1) * mask / (1 - p) * layerscale + residual
        return torch.cat((plain_norm(stream, weight, bias, 1e-5, is_rms_norm), stream))

    judge_with_gradients(torch.cat((y, total)), plain, inputs, seed)


def test_dropout_of_everything_leaves_the_residual(seed):
    x, residual, weight, bias = leaf(2, 4, 8), leaf(2, 4, 8), leaf(8), leaf(8)
    y = norm.layer_norm_fn(x, weight, bias, residual, dropout_p=1.0, eps=1e-5)
    torch.testing.assert_close(y, norm.layer_norm_fn(residual, weight, bias, eps=1e-5))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_norm_of_kept_rows(seed):
    """Rows 0 and 2 of four sequences take part, and sequences 1 and 2 go on."""
    x, residual, weight, bias = leaf(2, 3, 8), leaf(4, 3, 8), leaf(8), leaf(8)
    into = torch.tensor([1, 0, 2, 0]).repeat_interleave(3) * 3
    into = (into - torch.arange(3).repeat(4).flip(0)).clamp(min=0)  # 1, 2, 3, 0, 0, 0, 4, 5, 6, ...
    out = torch.tensor([0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0])
    y, total, mask = dropout_norm.dropout_add_layer_norm_subset(
        x, residual, weight, bias, 0.3, 1e-5, None, into, out, 2.0, 6, prenorm=True,
        return_dropout_mask=True,
    )  # fmt: skip
    assert (y.shape, total.shape, mask.shape) == ((2, 3, 8), (4, 3, 8), x.shape)

    def plain(x, residual, weight, bias):
        stream = residual + torch.zeros_like(residual).index_add(
            0, torch.tensor([0, 2]), 2.0 * x * mask / 0.7
        )
        return torch.cat((plain_norm(stream[1:3], weight, bias, 1e-5, False), stream))

    judge_with_gradients(torch.cat((y, total)), plain, [x, residual, weight, bias], seed)


def test_results_of_the_other_norms():
    x, weight, bias = leaf(3, 8), leaf(8), leaf(8)
    for is_rms_norm, parallel in (
        (False, dropout_norm.dropout_add_layer_norm_parallel_residual),
        (True, dropout_norm.dropout_add_rms_norm_parallel_residual),
    ):
        y0, y1 = parallel(x, None, None, weight, bias, None, None, 0.0, 1e-5)
        assert y1 is None
        torch.testing.assert_close(y0, plain_norm(x, weight, bias, 1e-5, is_rms_norm))
        found = parallel(x, x, x, weight, bias, bias, None, 0.0, 1e-5, True, False, True)
        assert len(found) == 5
        torch.testing.assert_close(found[1], plain_norm(3 * x, bias, None, 1e-5, is_rms_norm))
        assert torch.equal(found[2], x + x + x)
    torch.testing.assert_close(
        dropout_norm.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (8,), weight, bias)
    )
    layer = dropout_norm.RMSNorm(8, 1e-5, "cpu", torch.float64)
    assert layer.weight.dtype == torch.float64
    assert torch.equal(layer(x.double()), dropout_norm.rms_norm(x.double(), layer.weight, 1e-5))
    for make in (dropout_norm.DropoutAddLayerNorm, dropout_norm.DropoutAddRMSNorm):
        layer = make(8, prenorm=True, p=0.5)
        assert (layer.bias is None) == (make is dropout_norm.DropoutAddRMSNorm)
        assert torch.equal(layer.eval()(x, x)[1], x + x)
        assert not torch.equal(layer.train()(x, x)[1], x + x)
    layer = norm.RMSNorm(8, dropout_p=0.5, zero_centered_weight=True)
    assert torch.equal(layer.eval()(x), F.rms_norm(x, (8,), eps=1e-5))


X = torch.tensor([-3.0, -0.7, 0.2, 2.5], dtype=torch.float64)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "gelu", "gelu_approx", "squared_relu"])
def test_activations_and_their_derivatives(name):
    x, g = X.clone().requires_grad_(), torch.randn(4, dtype=torch.float64)
    function = activations.get_triton_activation_kernel(activations.Activation(name))
    derivative = activations.get_triton_activation_bwd_kernel(name)
    assert function is getattr(activations, name)
    assert gradcheck(function, (x,))
    function(x).sum().backward()
    torch.testing.assert_close(derivative(X), x.grad)
    weight = torch.randn(4, 4, dtype=torch.float64)
    y, act_input = dense.triton_linear_act(X, weight, X, name, save_act_input=True)
    assert torch.equal(y, function(act_input)) and torch.equal(act_input, weight @ X + X)
    torch.testing.assert_close(dense.triton_dgrad_act(g, weight, name, X), (g @ weight) * x.grad)
    with pytest.raises(ValueError, match="act_input: needed with activation"):
        dense.triton_dgrad_act(g, weight, name)


@pytest.mark.parametrize(
    ("function", "backward"),
    [
        (activations.gelu_fwd, activations.gelu_bwd),
        (activations.relu, activations.relu_bwd),
        (activations.sqrelu_fwd, activations.sqrelu_bwd),
    ],
)
def test_backward_functions(function, backward):
    x, g = X.clone().requires_grad_(), torch.randn(4, dtype=torch.float64)
    function(x).backward(g)
    torch.testing.assert_close(backward(g, X), x.grad)


def test_activations_of_two_tensors():
    x, y = X.clone().requires_grad_(), X.flip(0).clone().requires_grad_()
    g = torch.randn(4, dtype=torch.float64)
    out = activations.swiglu(x, y)
    torch.testing.assert_close(out, x * x.sigmoid() * y)
    out.backward(g)
    for got, want in zip(activations.swiglu_bwd(X, y.detach(), g), (x.grad, y.grad), strict=True):
        torch.testing.assert_close(got, want)
    rows, bias = leaf(3, 4, dtype=torch.float64), leaf(4, dtype=torch.float64)
    g = torch.randn(3, 4, dtype=torch.float64)
    activations.bias_gelu_impl(rows, bias).backward(g)
    got = activations.bias_gelu_back(g, rows.detach(), bias.detach())
    for x, want in zip(got, (rows.grad, bias.grad), strict=True):
        torch.testing.assert_close(x, want)


def test_dense_layers():
    x = leaf(3, 8)
    layer = dense.FusedDense(8, 5, return_residual=True)
    y, same = layer(x)
    assert same is x and torch.equal(y, F.linear(x, layer.weight, layer.bias))
    for make, function in (
        (mlp.FusedMLP, activations.gelu_approx),
        (lambda *sizes: mlp.FusedMLP(*sizes, activation="sqrelu"), activations.sqrelu_fwd),
        (lambda *sizes: mlp.FusedMLP(*sizes, activation="relu"), torch.relu),
        (mlp.FusedDenseSqreluDense, activations.sqrelu_fwd),
    ):
        layer = make(8, 12, 6)
        assert torch.equal(layer(x), layer.fc2(function(layer.fc1(x))))
    weights = (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias)
    assert torch.equal(dense.fused_dense_sqrelu_dense_function(x, *weights), layer(x))
    y, same = mlp.FusedMLP(8, return_residual=True)(x)
    assert same is x
    with pytest.raises(ValueError, match="bias1, bias2: got False and True"):
        mlp.FusedDenseSqreluDense(8, bias1=False)


def test_patches_of_images():
    """In the order in which a convolution has them."""
    x = torch.randn(2, 3, 8, 12)
    layer = patch_embed.PatchEmbed((8, 12), 4, 3, 16, norm_layer=torch.nn.LayerNorm)
    assert (layer.grid_size, layer.num_patches) == ((2, 3), 6)
    grid = F.conv2d(x, layer.proj.weight.view(16, 3, 4, 4), layer.proj.bias, stride=4)
    torch.testing.assert_close(layer(x), layer.norm(grid.flatten(2).transpose(1, 2)))
    grid_of_tokens = patch_embed.PatchEmbed((8, 12), 4, 3, 16, flatten=False)(x)
    assert grid_of_tokens.shape == (2, 2, 3, 16)
    with pytest.raises(ValueError, match=r"x: got an image of \(12, 8\), want \(8, 12\)"):
        layer(x.transpose(2, 3))


def test_arguments_that_select_a_kernel_are_named():
    with TestCase().assertNoLogs("flashtile.hints"):
        mha.MHA(16, 4)
        mlp.FusedMLP(16)
    with TestCase().assertLogs("flashtile.hints") as hints:
        mha.MHA(16, 4, use_flash_attn=True, fused_bias_fc=True, checkpointing=True)
        mlp.FusedMLP(16, checkpoint_lvl=2, heuristic=1)
        block.Block(16, lambda dim: mha.MHA(dim, 4), fused_dropout_add_ln=True)
        block.ParallelBlock(16, lambda dim: mha.MHA(dim, 4), fused_dropout_add_ln=True)
    messages = [record.getMessage() for record in hints.records]
    names = [message.split(",")[0].replace("=True", "") for message in messages]
    assert names == [
        "MHA: ignored fused_bias_fc",
        "FusedMLP: ignored checkpoint_lvl=2",
        "Block: ignored fused_dropout_add_ln",
        "ParallelBlock: ignored fused_dropout_add_ln",
    ]
    assert "use_flash_attn=True, checkpointing=True" in messages[0]
    assert "heuristic=True" in messages[1]


def test_registered_operators(seed):
    """Of FlashAttention-2 and -3, while they are installed; a compiler takes them."""
    q, k, v = (torch.randn(2, 8, 2, 16) for _ in range(3))
    options = (0.0, 0.25, True, -1, -1, 0.0, None)
    with flash_attn.install():
        import flash_attn_interface as fa3
        from flash_attn import flash_attn_interface as fa2

        ops, ops3 = torch.ops.flash_attn, torch.ops.flash_attn_3
        out, lse, *_ = ops._flash_attn_forward(q, k, v, *options, False)
        assert torch.equal(out, fa2.flash_attn_func(q, k, v, causal=True))
        compiled = torch.compile(ops._flash_attn_forward, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q, k, v, *options, False)[0], out)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        softmax_d = ops._flash_attn_backward(out, q, k, v, out, lse, *grads, *options, False)
        wanted = [torch.empty_like(x) for x in (q, k, v)]
        same_d = fa2._flash_attn_backward(out, q, k, v, out, lse, *wanted, *options, False)
        for got, want in zip([*grads, softmax_d], [*wanted, same_d], strict=True):
            assert torch.equal(got, want)

        cu_seqlens = torch.tensor([0, 8, 16], dtype=torch.int32)
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        lengths = (cu_seqlens, cu_seqlens, 8, 8)
        found = ops._flash_attn_varlen_forward(*packed, *lengths, *options[:3])
        assert torch.equal(found[0], out.flatten(0, 1))
        grads = [torch.empty_like(x) for x in packed]
        rows = (found[0], *packed, found[0], found[1])
        ops._flash_attn_varlen_backward(*rows, *grads, *lengths, *options, False)
        for got, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got, want.flatten(0, 1))

        assert torch.equal(ops3.fwd(q, k, v, is_causal=True)[0], out)
        into = torch.empty_like(out)
        assert ops3._flash_attn_forward(q, k, v, out_=into, causal=True)[1].shape == lse.shape
        assert torch.equal(into, out)
        found = ops3.bwd(out, q, k, v, out, lse, is_causal=True)
        assert len(found) == 8 and torch.equal(found[3], same_d)
        for got, want in zip(found, wanted, strict=False):
            assert torch.equal(got, want)
        parts = (torch.randn(2, 1, 3, 2, 16), torch.randn(2, 1, 3, 2))
        for got, want in zip(ops3.fwd_combine(*parts), fa3.flash_attn_combine(*parts), strict=True):
            assert torch.equal(got, want)
    assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")
    assert not hasattr(torch.ops.flash_attn_3, "fwd")
