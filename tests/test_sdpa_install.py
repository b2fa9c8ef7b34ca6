"""`sdpa.install()`: its effect, its counter, uninstalling; and modules that bypass it."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rounded_results import judge_client
from torch import nn

from flashtile.integrations import sdpa

pytestmark = pytest.mark.slow

PYTORCH = F.scaled_dot_product_attention
OURS = sdpa.scaled_dot_product_attention
FORWARD = nn.MultiheadAttention.forward


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    yield
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is PYTORCH
    assert torch.backends.mha.get_fastpath_enabled()


def qkv(length=5):
    return torch.randn(3, 2, 4, length, 8).unbind()


def test_a_call_without_with_is_effective_until_uninstall():
    installation = sdpa.install()
    assert F.scaled_dot_product_attention is OURS
    F.scaled_dot_product_attention(*qkv())
    assert installation.calls == 1
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is PYTORCH
    sdpa.uninstall()  # nothing to do
    F.scaled_dot_product_attention(*qkv())
    assert installation.calls == 1


def test_uninstall_undoes_all_also_inside_a_block():
    sdpa.install()
    with sdpa.install():
        sdpa.install(strict=True)
        sdpa.uninstall()
        assert F.scaled_dot_product_attention is PYTORCH
    assert F.scaled_dot_product_attention is PYTORCH


def test_a_block_inside_of_a_call_without_with():
    outer = sdpa.install()
    with sdpa.install() as inner:
        F.scaled_dot_product_attention(*qkv())
    assert F.scaled_dot_product_attention is OURS
    F.scaled_dot_product_attention(*qkv())
    assert (outer.calls, inner.calls) == (2, 1)


def test_blocks_of_two_threads_that_overlap():
    """Two blocks, of which the first ends first: calls of the other still reach flashtile."""
    first_inside, second_inside, first_left = (threading.Event() for _ in range(3))
    seen = []

    def first():
        with sdpa.install():
            first_inside.set()
            second_inside.wait(60)
        first_left.set()

    def second():
        first_inside.wait(60)
        with sdpa.install():
            second_inside.set()
            first_left.wait(60)
            seen.append(F.scaled_dot_product_attention)

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [OURS]
    assert F.scaled_dot_product_attention is PYTORCH


def test_calls_of_all_threads_are_counted():
    q, k, v = qkv(1)
    with sdpa.install() as installation:
        threads = [
            threading.Thread(
                target=lambda: [F.scaled_dot_product_attention(q, k, v) for _ in range(20)]
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert installation.calls == 80


def nested(layout, *lengths):
    rows = [torch.randn(n, 16, requires_grad=True) for n in lengths]
    return torch.nested.as_nested_tensor(rows, layout=layout), rows


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_of_nested_tensors(layout, need_weights):
    """Each sequence by itself, with gradients."""
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    query, rows = nested(layout, 3, 7, 1)
    key, other_rows = nested(layout, 5, 2, 7)
    for k, k_rows in ((query, rows), (key, other_rows)):
        with sdpa.install() as installation:
            out, weights = module(query, k, k, need_weights=need_weights)
        assert installation.calls == (not need_weights)
        assert out.is_nested
        assert out.layout is layout
        assert (weights is None) != need_weights
        for got, one, other in zip(out.unbind(), rows, k_rows, strict=True):
            want, _ = module(one[None], other[None], other[None], need_weights=False)
            torch.testing.assert_close(got, want[0])
            leaves = {id(x): x for x in (one, other)}.values()
            grads = torch.autograd.grad(got.sum(), leaves, retain_graph=True)
            wants = torch.autograd.grad(want.sum(), leaves)
            torch.testing.assert_close(grads, wants)
    assert nn.MultiheadAttention.forward is FORWARD


def test_encoder_layer_of_nested_tensors():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    batch, _ = nested(torch.strided, 3, 7)
    with torch.inference_mode(), sdpa.install() as installation:
        got = layer(batch)
    assert installation.calls == 1
    with torch.inference_mode():
        wanted = layer(batch)
    for mine, theirs in zip(got.unbind(), wanted.unbind(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_nested_tensors_do_not_go_with():
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    batch, _ = nested(torch.strided, 3, 7)
    with sdpa.install():
        for name in ("attn_mask", "key_padding_mask"):
            with pytest.raises(ValueError, match=name):
                module(batch, batch, batch, **{name: torch.zeros(2, 7, dtype=torch.bool)})
        with pytest.raises(TypeError, match="query, key, value"):
            module(batch, torch.randn(2, 7, 16), torch.randn(2, 7, 16))
        with pytest.raises(ValueError, match="different sequences"):
            module(batch, batch, nested(torch.strided, 3, 6)[0])
        with pytest.raises(ValueError, match="batch_first"):
            nn.MultiheadAttention(16, 2)(batch, batch, batch)


PADDING = torch.arange(9) >= torch.tensor([[9], [6]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(9)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "both": {"key_padding_mask": PADDING, "attn_mask": CAUSAL < 0},
}


def outputs_and_gradients(module, x, masks, dtype):
    """`without` is the output without gradients, for which evaluation takes PyTorch's fast path."""
    module, x = copy.deepcopy(module).to(dtype), x.to(dtype).requires_grad_()
    rows = ~PADDING[..., None] if masks else True  # padded rows are not compared

    def output():
        out = module(x, **masks)
        return (out[0] if isinstance(out, tuple) else out) * rows

    out = output()
    gradients = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    with torch.no_grad():
        found = {"out": out.detach(), "without": output()}
    names = ("x", *(name for name, _ in module.named_parameters()))
    return found | {f"d{name}": x for name, x in zip(names, gradients, strict=True)}


def judge_installed(module, masks, seed):
    run = partial(outputs_and_gradients, module, torch.randn(2, 9, 32), masks)
    for dtype in (torch.float64, torch.float32):
        with sdpa.install(strict=True) as installation:
            got = run(dtype)
        assert installation.calls == 2
        judge_client(got, run, seed)


class Attend(nn.MultiheadAttention):
    def forward(self, x, **masks):
        return super().forward(x, x, x, need_weights=False, **masks)


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_multihead_attention(masks, training, seed):
    judge_installed(Attend(32, 4, batch_first=True).train(training), masks, seed)


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transformer_encoder_layer(masks, training, seed):
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True).train(training)
    names = {"key_padding_mask": "src_key_padding_mask", "attn_mask": "src_mask"}
    masks = {names.get(name, name): value for name, value in masks.items()}
    judge_installed(layer, masks, seed)


def test_transformer_encoder_in_evaluation_with_padding(seed):
    """PyTorch makes the padded batch a nested tensor for its fast path."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 9, 32)
    rows = ~PADDING[..., None]

    def plain(dtype):  # with a gradient, for which PyTorch takes its layers one by one
        same = copy.deepcopy(encoder).to(dtype)
        return {"out": (same(x.to(dtype), src_key_padding_mask=PADDING) * rows).detach()}

    with torch.no_grad(), sdpa.install(strict=True) as installation:
        got = encoder(x, src_key_padding_mask=PADDING) * rows
    assert installation.calls == 2
    judge_client({"out": got}, plain, seed)


def test_training_drops_probabilities(seed):
    module = Attend(32, 4, dropout=0.5, batch_first=True)
    x = torch.randn(2, 9, 32)
    with sdpa.install():
        assert not torch.equal(module(x)[0], module(x)[0])
        module.eval()
        assert torch.equal(module(x)[0], module(x)[0])


class OwnSoftmax(nn.Module):
    """Older models pass the mask like this."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling = spelling
        self.module = nn.Softmax(dim=-1)

    def forward(self, x):
        scores = x @ x.mT
        return {
            "method": lambda: scores.softmax(-1),
            "torch": lambda: torch.softmax(scores, dim=-1),
            "functional": lambda: F.softmax(scores, dim=-1),
            "module": lambda: self.module(scores),
        }[self.spelling]() @ x


class WindowAttention(OwnSoftmax):
    pass


@pytest.mark.parametrize("spelling", ["method", "torch", "functional", "module"])
def test_strict_names_the_module_that_bypasses(spelling):
    model = nn.Sequential(nn.Identity(), nn.Sequential(WindowAttention(spelling)))
    x = torch.randn(2, 5, 8)
    want = model(x)
    with sdpa.install():
        assert torch.equal(model(x), want)
    with (
        sdpa.install(strict=True),
        pytest.raises(RuntimeError, match=r"1\.0 \(WindowAttention\)"),
    ):
        model(x)
    assert torch.equal(model(x), want)
    assert "softmax" not in vars(torch.Tensor)


def test_strict_knows_an_attention_by_its_name_in_the_model():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.gate = OwnSoftmax("method"), OwnSoftmax("method")

        def forward(self, name, x):
            return getattr(self, name)(x)

    block, x = Block(), torch.randn(2, 5, 8)
    with sdpa.install(strict=True):
        block("gate", x)  # a softmax outside of attention
        torch.softmax(x, -1)
        with pytest.raises(RuntimeError, match="self_attn"):
            block("self_attn", x)


def test_strict_refuses_multihead_attention_that_returns_weights():
    module, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 5, 32)
    with (
        sdpa.install(strict=True),
        pytest.raises(RuntimeError, match=r"MultiheadAttention.*need_weights=False"),
    ):
        module(x, x, x)


def test_strict_ends_with_its_own_block():
    model, x = WindowAttention("method"), torch.randn(2, 5, 8)
    with sdpa.install() as outer:
        with sdpa.install(strict=True), pytest.raises(RuntimeError):
            model(x)
        model(x)
        F.scaled_dot_product_attention(*qkv())
    assert outer.calls == 1


def test_a_compiled_model(seed):
    module, x = Attend(32, 4, batch_first=True).eval(), torch.randn(2, 9, 32)
    with sdpa.install(strict=True):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        got = compiled(x)[0].detach()
    judge_client(
        {"out": got},
        lambda dtype: {"out": copy.deepcopy(module).to(dtype)(x.to(dtype))[0].detach()},
        seed,
    )


@pytest.mark.parametrize("for_onnx", [False, True])
def test_an_exported_model(for_onnx, monkeypatch):
    """For ONNX, which has no operator of ours, it has PyTorch's attention."""
    module, x = Attend(32, 4, batch_first=True).eval(), torch.randn(2, 9, 32)
    want = module(x)[0]
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: for_onnx)
    with sdpa.install():
        program = torch.export.export(module, (x,), strict=False)
    text = str(program.graph)
    assert ("flashtile" in text, "aten.scaled_dot_product_attention" in text) == (
        not for_onnx,
        for_onnx,
    )
    torch.testing.assert_close(program.module()(x)[0], want)


@pytest.mark.parametrize("lengths", [(9, 9), (6, 9), (9, 6)])
@pytest.mark.parametrize("corner", ["upper_left", "lower_right"])
def test_causal_bias(lengths, corner, seed):
    make = getattr(torch.nn.attention.bias, f"causal_{corner}")
    M, N = lengths
    q, k, v = (torch.randn(2, 4, L, 8, dtype=torch.float64) for L in (M, N, N))
    visible = torch.ones(M, N, dtype=torch.bool).tril(0 if corner == "upper_left" else N - M)
    want = OURS(q, k, v, attn_mask=visible)
    with sdpa.install():
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=make(M, N))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
    with pytest.raises(ValueError, match="attn_mask"):
        OURS(q, k, v, attn_mask=make(M, N + 1))
    with pytest.raises(ValueError, match="is_causal"):
        OURS(q, k, v, attn_mask=make(M, N), is_causal=True)
