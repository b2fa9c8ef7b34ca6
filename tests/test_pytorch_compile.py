"""`torch.compile(fullgraph=True)` with dynamic shapes and `torch.export`, of every function."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from conformance.calls import (
    assert_same,
    cache_call,
    flat,
    heads_and_lengths,
    same_heads,
    tensors,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import flashtile
from flashtile.bert_padding import index_first_axis, index_put_first_axis, pad_input
from flashtile.call import memo, prepare
from flashtile.flash_blocksparse_attn_interface import flash_blocksparse_attn_func
from flashtile.integrations import sdpa
from flashtile.layers.rotary import (
    apply_rotary_emb,
)
from flashtile.masks import BlockMask, Spans
from flashtile.testing import cu_seqlens, generator, normal, qkv, rotary_tables

pytestmark = pytest.mark.slow


def dense(function, **options):
    def call(q, k, v):
        return function(q, k, v, **options)

    return call, lambda n: dict(zip("qkv", heads_and_lengths(n), strict=True))


def varlen(**options):
    def call(q, k, v, cu_seqlens_q, cu_seqlens_k):
        bound = q.shape[0]
        return flashtile.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, bound, bound, **options
        )

    return call, flat


def with_bias(q, k, v, bias, sink):
    return flashtile.attention(q, k, v, bias=bias, sink=sink, softcap=2.0, return_lse=True)


def bias_and_sink(n):
    call = dict(zip("qkv", heads_and_lengths(n), strict=True))
    bias = normal(generator(n), 1, 4, n, 1)
    return call | {"bias": bias, "sink": normal(generator(n), 4)}


def with_lengths(q, k, v, used):
    return flashtile.attention(q, k, v, seqused_q=used, seqused_k=used, causal=True)


def lengths(n):
    return dict(zip("qkv", heads_and_lengths(n), strict=True)) | {
        "used": torch.tensor([2, n]).int()
    }


ALL_RECIPES = {"hadamard_v": True, "smooth_k": True}

# Every public attention function; the tensors with gradients are its first arguments.
TRAINING = {
    "attention": dense(flashtile.attention, return_lse=True),
    "attention, causal window": dense(flashtile.attention, causal=True, window_size=(5, 2)),
    "attention, dropout": dense(flashtile.attention, dropout_p=0.5),
    "attention, probabilities": dense(flashtile.attention, return_attn_probs=True),
    "attention, bias and sink": (with_bias, bias_and_sink),
    "attention, lengths": (with_lengths, lengths),
    "attention_varlen": varlen(causal=True, return_lse=True),
    "attention_fp8": dense(flashtile.attention_fp8, causal=True, return_lse=True, **ALL_RECIPES),
    "flash_attn_func": dense(flashtile.flash_attn_func, causal=True, softcap=3.0),
    "flash_attn_kvpacked_func": (
        lambda q, kv: flashtile.flash_attn_kvpacked_func(q, kv, causal=True),
        lambda n: {"q": same_heads(n, 2, n), "kv": same_heads(n + 1, 2, n, 2)},
    ),
    "flash_attn_qkvpacked_func": (
        lambda qkv: flashtile.flash_attn_qkvpacked_func(qkv, causal=True),
        lambda n: {"qkv": same_heads(n, 2, n, 3)},
    ),
    "flash_attn_varlen_func": (
        lambda q, k, v, cu_seqlens_q, cu_seqlens_k: flashtile.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]
        ),
        flat,
    ),
    "flash_attn_varlen_kvpacked_func": (
        lambda q, kv, cu: flashtile.flash_attn_varlen_kvpacked_func(
            q, kv, cu, cu, q.shape[0], q.shape[0]
        ),
        lambda n: {
            "q": same_heads(n, n),
            "kv": same_heads(n + 1, n, 2),
            "cu": cu_seqlens([n - 2, 2]),
        },
    ),
    "flash_attn_varlen_qkvpacked_func": (
        lambda qkv, cu: flashtile.flash_attn_varlen_qkvpacked_func(qkv, cu, qkv.shape[0]),
        lambda n: {"qkv": same_heads(n, n, 3), "cu": cu_seqlens([n - 2, 2])},
    ),
    "flash_blocksparse_attn_func": (
        lambda qkv, cu, mask: flash_blocksparse_attn_func(qkv, cu, mask, 0.0, qkv.shape[0]),
        lambda n: {
            "qkv": same_heads(n, n, 3),
            "cu": cu_seqlens([n - 2, 2]),
            "mask": torch.ones(8, 1, dtype=torch.bool),
        },
    ),
    "flash_attn_combine": (
        lambda out_partial, lse_partial: flashtile.flash_attn_combine(out_partial, lse_partial),
        lambda n: {
            "out_partial": same_heads(n, 3, 2, n),
            "lse_partial": normal(generator(n), 3, 2, n, 4),
        },
    ),
    "apply_rotary_emb": (
        lambda x, cos, sin: apply_rotary_emb(x, cos, sin),
        lambda n: dict(
            zip(("x", "cos", "sin"), (same_heads(n, 2, n), *rotary_tables(40, 8)), strict=True)
        ),
    ),
    "index_first_axis": (
        lambda x, i: index_put_first_axis(index_first_axis(x, i), i, x.shape[0]),
        lambda n: {"x": same_heads(n, n), "i": torch.arange(0, n, 2)},
    ),
    "pad_input": (
        lambda x, i: pad_input(x, i, 2, x.shape[0]),
        lambda n: {"x": same_heads(n, n), "i": torch.arange(n)},
    ),
}


# PyTorch compiles a call twice if a float, such as the default of an argument, could be an input of
# the graph: no default of these is one.
COMPILED_ONCE = (
    "attention",
    "attention, causal window",
    "attention, lengths",
    "attention_varlen",
    "attention_fp8",
)


def attend(options):
    """(q, k, v, another argument by its name) -> attention, or PyTorch's function on flashtile."""

    def call(q, k, v, **given):
        return flashtile.attention(q, k, v, **given, **options)

    return call


def sdpa_attend(q, k, v, **given):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa.scaled_dot_product_attention(q, k, v, **given, enable_gqa=True)


# What broadcasts to the sizes of a call, for two sequences of n tokens.
BROADCAST = {
    "attn_mask": (attend({}), lambda n: {"attn_mask": torch.ones(n, n + 3).tril().bool()}),
    "bias": (attend({"causal": True}), lambda n: {"bias": normal(generator(n), 2, 1, n, n + 3)}),
    "spans": (attend({}), lambda n: {"mask": Spans.documents(torch.arange(2 * n).view(2, n) // 5)}),
    "sdpa": (sdpa_attend, lambda n: {"attn_mask": torch.ones(n, n + 3).tril().bool()}),
}


def outputs_and_gradients(function, arguments):
    """Results, then gradients of the floating arguments, from the same seed each time."""
    torch.manual_seed(0)
    leaves = {
        n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in arguments.items()
    }
    for name in ("cos", "sin"):
        if name in leaves:
            leaves[name].requires_grad_(False)
    results = tensors(function(**leaves))
    loss = sum(x.square().sum() for x in results if x.requires_grad)
    wanted = [x for x in leaves.values() if x.requires_grad]
    return [x.detach() for x in results] + list(torch.autograd.grad(loss, wanted))


class TestCompile:
    """One graph without breaks, and the same graph for other lengths."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("name", TRAINING)
    def test_training(self, name):
        function, make = TRAINING[name]
        counted = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, backend=counted, fullgraph=True, dynamic=True)
        assert_same(
            outputs_and_gradients(compiled, make(9)), outputs_and_gradients(function, make(9))
        )
        assert counted.frame_count == 1 or name not in COMPILED_ONCE
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = outputs_and_gradients(compiled, make(14))
        assert_same(got, outputs_and_gradients(function, make(14)))

    def test_without_gradients(self):
        function, make = TRAINING["attention_varlen"]
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in (9, 14):
            assert_same(tensors(compiled(**make(n))), tensors(function(**make(n))))

    @pytest.mark.parametrize(
        ("function", "storage"),
        [
            (flashtile.attention_with_kvcache, "contiguous"),
            (flashtile.attention_with_kvcache, "packed"),
            (flashtile.flash_attn_with_kvcache, "paged"),
        ],
    )
    def test_cache(self, function, storage):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in (5, 7):
            call, again = cache_call(n, storage), cache_call(n, storage)
            if function is flashtile.flash_attn_with_kvcache:
                again.pop("return_lse"), call.pop("return_lse")
            got, wanted = compiled(**call), function(**again)
            assert_same(tensors(got), tensors(wanted))
            assert_same([call["k_cache"], call["v_cache"]], [again["k_cache"], again["v_cache"]])

    def test_a_workspace_is_written_by_an_op_that_says_so(self):
        written = {}  # by each op that writes: PyTorch puts such an op into another one

        def record(graph, inputs):
            for node in graph.graph.nodes:
                if "auto_functionalized" in str(node.target):
                    names = {name for name in node.kwargs if name.endswith("_base_index")}
                    written[str(node.args[0])] = names
            return graph

        compiled = torch.compile(
            flashtile.attention_with_kvcache,
            backend=aot_autograd(fw_compiler=record),
            fullgraph=True,
        )
        given = {"workspace": torch.zeros(64, dtype=torch.uint8)}
        call, again = cache_call(5, "paged") | given, cache_call(5, "paged")
        assert_same(compiled(**call), flashtile.attention_with_kvcache(**again))
        op = "flashtile.attention_forward_in_workspace.default"
        assert written[op] == {"_workspace_base_index"}

    def test_a_block_mask_made_outside(self):
        mask = BlockMask.from_tiles(torch.tensor([[1, 0], [1, 1]]), (8, 8))

        def function(q, k, v):
            return flashtile.attention(q, k, v, block_mask=mask)

        call = dict(zip("qkv", heads_and_lengths(11), strict=True))
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert_same(outputs_and_gradients(compiled, call), outputs_and_gradients(function, call))

    def test_spans_made_inside_and_outside(self):
        def inside(q, k, v):
            stops = torch.arange(q.shape[1], dtype=torch.int32).view(1, 1, -1, 1) + 1
            return flashtile.attention(q, k, v, mask=Spans(stops - 4, stops))

        compiled, attend = (
            torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
            for function in (inside, flashtile.attention)
        )
        for n in (11, 14):
            call = dict(zip("qkv", heads_and_lengths(n), strict=True))
            wanted = outputs_and_gradients(inside, call)
            assert_same(outputs_and_gradients(compiled, call), wanted)
            stops = torch.arange(n, dtype=torch.int32).view(1, 1, -1, 1) + 1
            given = partial(attend, mask=Spans(stops - 4, stops))
            assert_same(outputs_and_gradients(given, call), wanted)

    def test_gradients_by_distance(self):
        def function(q, k, v, relative_bias, alibi_slopes):
            return flashtile.attention(
                q, k, v, relative_bias=2 * relative_bias, alibi_slopes=alibi_slopes.exp()
            )

        call = dict(zip("qkv", heads_and_lengths(11), strict=True))
        heads = call["q"].shape[2]
        call["relative_bias"] = torch.randn(heads, 7, requires_grad=True)
        call["alibi_slopes"] = torch.randn(heads, requires_grad=True)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert_same(outputs_and_gradients(compiled, call), outputs_and_gradients(function, call))

    def test_gradients_of_torch_func(self):
        """Also of inputs of the differentiated function that the call gets as they are."""

        def function(q, k, v, slopes):
            def loss(q, k, slopes):
                return flashtile.attention(q, k, v, alibi_slopes=slopes.exp()).sin().sum()

            return torch.func.grad(loss, argnums=(0, 1, 2))(q, k, slopes)

        call = dict(zip("qkv", heads_and_lengths(11), strict=True))
        call["slopes"] = torch.randn(call["q"].shape[2])
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert_same(compiled(**call), function(**call))

    @pytest.mark.parametrize("name", ["attention", "attention_with_kvcache"])
    def test_a_graph_for_a_gpu_prepares_no_launches(self, name, monkeypatch):
        """What can be prepared is found by `id`, which PyTorch 2.11 does not trace for numbers."""
        decide = prepare.decide

        def as_on_a_gpu(call):
            return decide(call)._replace(device_type="cuda")

        def pick(*call):
            raise AssertionError("called")

        monkeypatch.setattr(prepare, "decide", as_on_a_gpu)
        monkeypatch.setattr(memo, "_pick", pick)
        monkeypatch.setattr(memo, "decisions", {})
        function = getattr(flashtile, name)
        call = cache_call(5, "contiguous")
        if function is flashtile.attention:
            call = dict(zip("qkv", heads_and_lengths(11), strict=True)) | {"causal": True}
        torch.compile(function, backend="aot_eager", fullgraph=True)(**call)
        with pytest.raises(AssertionError, match="called"):
            function(**call)

    @pytest.mark.parametrize("name", BROADCAST)
    def test_sizes_that_are_numbers_fit_sizes_that_are_symbols(self, name):
        """The lengths of q, k and v have changed when the mask comes, so that they are symbols."""
        function, make = BROADCAST[name]
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for n in (9, 14):
            compiled(*heads_and_lengths(n))
        inputs, given = heads_and_lengths(20), make(20)
        assert_same(compiled(*inputs, **given), function(*inputs, **given))

    @pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler, g++")
    def test_inductor(self):
        function, make = TRAINING["attention, bias and sink"]
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for n in (9, 14):
            assert_same(
                outputs_and_gradients(compiled, make(n)), outputs_and_gradients(function, make(n))
            )


class TestExport:
    length = torch.export.Dim("length", min=3, max=64)

    @pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=str)
    def test_attention(self, options):
        class Module(torch.nn.Module):
            def forward(self, q, k, v):
                return flashtile.attention(q, k, v, return_lse=True, **options)

        def arguments(n):
            return qkv(generator(n), M=n, N=n, D=8)

        program = torch.export.export(Module(), arguments(9), dynamic_shapes=[{1: self.length}] * 3)
        assert any("flashtile" in str(node.target) for node in program.graph.nodes)
        assert_same(program.module()(*arguments(20)), Module()(*arguments(20)))

    def test_varlen(self):
        class Module(torch.nn.Module):
            def forward(self, q, k, v, cu):
                return flashtile.attention_varlen(q, k, v, cu, cu, 64, 64, causal=True)

        def arguments(n):
            return (*flat(n).values(),)

        *inputs, cu, _ = arguments(10)
        total = torch.export.Dim("total", min=3, max=64)
        program = torch.export.export(
            Module(), (*inputs, cu), dynamic_shapes=[{0: total}] * 3 + [None]
        )
        *inputs, cu, _ = arguments(20)
        assert_same([program.module()(*inputs, cu)], [Module()(*inputs, cu)])

    def test_cache(self):
        class Module(torch.nn.Module):
            def forward(self, q, k_cache, v_cache, k, v, seqlens):
                return flashtile.attention_with_kvcache(
                    q, k_cache, v_cache, k, v, cache_seqlens=seqlens, causal=True
                )

        def arguments():
            call = cache_call(4, "contiguous")
            return tuple(call[n] for n in ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens"))

        program = torch.export.export(Module(), arguments())
        mine, other = arguments(), arguments()
        assert_same([program.module()(*mine)], [Module()(*other)])
        assert_same(mine, other)  # the caches were written in both
