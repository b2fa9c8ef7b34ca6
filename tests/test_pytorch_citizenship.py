"""What PyTorch does to functions, done to ours: compile, export, opcheck, autocast, FLOPs,
checkpointing, forward mode, double backward, vmap. Right answers or a clear error, never silence.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile.bert_padding import index_first_axis, index_put_first_axis, pad_input
from flashtile.flash_blocksparse_attn_interface import flash_blocksparse_attn_func
from flashtile.layers.rotary import (
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from flashtile.masks import BlockMask
from flashtile.problem import Operands, Options
from flashtile.testing import (
    attention_reference,
    cu_seqlens,
    generator,
    normal,
    paged,
    qkv,
    rotary_tables,
)

F64 = torch.float64


def heads_and_lengths(n, dtype=torch.float32):
    """q, k, v whose lengths grow with n."""
    return qkv(generator(n), B=2, M=n, N=n + 3, Hq=4, Hk=2, D=8, dtype=dtype)


def flat(n):
    """Packed q, k, v of two sequences, with their lengths."""
    lengths = [n, n // 2]
    q, k, v = (normal(generator(i), sum(lengths), h, 8) for i, h in enumerate((4, 2, 2)))
    cu = cu_seqlens(lengths)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu}


def same_heads(n, *shape):
    return normal(generator(n), *shape, 4, 8)


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


# Every public function that attends, with the leaves of its gradient first in the arguments.
TRAINING = {
    "attention": dense(flashtile.attention, return_lse=True),
    "attention, causal window": dense(flashtile.attention, causal=True, window_size=(5, 2)),
    "attention, dropout": dense(flashtile.attention, dropout_p=0.5),
    "attention, probabilities": dense(flashtile.attention, return_attn_probs=True),
    "attention, bias and sink": (with_bias, bias_and_sink),
    "attention, lengths": (with_lengths, lengths),
    "attention_varlen": varlen(causal=True, return_lse=True),
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


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


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


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


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
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        assert_same(
            outputs_and_gradients(compiled, make(9)), outputs_and_gradients(function, make(9))
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = outputs_and_gradients(compiled, make(14))
        assert_same(got, outputs_and_gradients(function, make(14)))

    @pytest.mark.parametrize("name", ["attention", "attention_varlen", "flash_attn_func"])
    def test_without_gradients(self, name):
        function, make = TRAINING[name]
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in (9, 14):
            assert_same(tensors(compiled(**make(n))), tensors(function(**make(n))))

    @pytest.mark.parametrize("storage", ["contiguous", "paged", "packed"])
    @pytest.mark.parametrize(
        "function", [flashtile.attention_with_kvcache, flashtile.flash_attn_with_kvcache]
    )
    def test_cache(self, storage, function):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in (5, 7):
            call, again = cache_call(n, storage), cache_call(n, storage)
            if function is flashtile.flash_attn_with_kvcache:
                again.pop("return_lse"), call.pop("return_lse")
            got, wanted = compiled(**call), function(**again)
            assert_same(tensors(got), tensors(wanted))
            assert_same([call["k_cache"], call["v_cache"]], [again["k_cache"], again["v_cache"]])

    @pytest.mark.parametrize("name", ["qkv", "kv"])
    def test_rotary_in_place(self, name):
        function = {"qkv": apply_rotary_emb_qkv_, "kv": apply_rotary_emb_kv_}[name]
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in (5, 7):
            x = same_heads(n, 2, n, len(name))
            mine, other = x.clone(), x.clone()
            result = compiled(mine, *rotary_tables(16, 8))
            function(other, *rotary_tables(16, 8))
            torch.testing.assert_close(mine, other)
            torch.testing.assert_close(result, other)

    def test_a_block_mask_made_outside(self):
        mask = BlockMask.from_tiles(torch.tensor([[1, 0], [1, 1]]), (8, 8))

        def function(q, k, v):
            return flashtile.attention(q, k, v, block_mask=mask)

        call = dict(zip("qkv", heads_and_lengths(11), strict=True))
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert_same(outputs_and_gradients(compiled, call), outputs_and_gradients(function, call))

    def test_the_first_call_of_a_process_may_be_a_compiled_one(self):
        code = (
            "import torch, flashtile\n"
            "x = torch.randn(2, 9, 4, 8)\n"
            "f = torch.compile(flashtile.attention, backend='aot_eager', fullgraph=True)\n"
            "compiled = f(x, x, x)\n"
            "torch.testing.assert_close(compiled, flashtile.attention(x, x, x))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]

    @pytest.mark.slow
    @pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler, g++")
    def test_inductor(self):
        function, make = TRAINING["attention, bias and sink"]
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for n in (9, 14):
            assert_same(
                outputs_and_gradients(compiled, make(n)), outputs_and_gradients(function, make(n))
            )


def cache_call(n, storage):
    """Append n tokens to a cache of 32 and attend, with rotation."""
    g = generator(n)
    cos, sin = rotary_tables(40, 8)
    call = {
        "q": normal(g, 2, n, 4, 8),
        "k_cache": normal(g, 2, 32, 2, 8),
        "v_cache": normal(g, 2, 32, 2, 8),
        "k": normal(g, 2, n, 2, 8),
        "v": normal(g, 2, n, 2, 8),
        "rotary_cos": cos,
        "rotary_sin": sin,
        "cache_seqlens": torch.tensor([3, 11], dtype=torch.int32),
        "causal": True,
        "return_lse": True,
    }
    if storage == "paged":
        call["k_cache"], call["page_table"] = paged(generator(n), call["k_cache"], 8)
        call["v_cache"], _ = paged(generator(n), call["v_cache"], 8)
        for name in ("k_cache", "v_cache"):
            call[name] = call[name].nan_to_num()
    if storage == "packed":
        call["q"] = call["q"].flatten(0, 1)
        call |= {"cu_seqlens_q": cu_seqlens([n + 1, n - 1]), "max_seqlen_q": n + 1}
    return call


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


def op_arguments():
    """Arguments of every registered op."""
    q, k, v = heads_and_lengths(7)
    lse = torch.zeros(2, 4, 7)
    plain = Options(max_seqlen_q=7, max_seqlen_k=10, softmax_scale=0.3, backend="cpu")
    rich = plain._replace(window_right=0, softcap=2.0, dropout_p=0.3)
    state = torch.tensor([5, 9])
    many = Operands(q, k, v, bias=torch.zeros(1, 4, 7, 10), sink=torch.zeros(4), rng_state=state)
    one = Operands(q, k, v)
    half = Operands(*(x.bfloat16() for x in one[:3]))
    narrow = Operands(q, k, v[..., :5].contiguous())
    sunk = one._replace(sink=torch.zeros(4))
    call = flat(7)
    cu = {n: call.pop(n) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    packed = Operands(**call, **cu)
    ten = call["q"]
    causal = plain._replace(window_right=0)
    cache = cache_call(4, "contiguous")
    return {
        "attention_forward": [
            *((x, o) for x in (one, half, narrow, sunk, packed) for o in (plain, causal)),
            (many, rich),
        ],
        "attention_backward": [
            ((q.clone(), None, q.clone(), lse, *one), plain),
            ((q.clone(), None, q.clone(), lse, *one), causal),
            ((ten.clone(), None, ten.clone(), torch.zeros(4, 10), *packed), plain),
            ((q.clone(), lse.clone(), q.clone(), lse, *many), rich),
        ],
        "attention_probabilities": [((*one, lse), plain), ((*packed, torch.zeros(4, 10)), plain)],
        "kvcache_append": [
            (
                [cache[n] for n in ("k_cache", "v_cache", "k", "v", "cache_seqlens")],
                [None, None, None],
            )
        ],
    }


class TestOps:
    def test_every_op_is_here(self):
        names = {
            name.split("::")[1].split(".")[0]
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("flashtile::")
        }
        assert names == set(op_arguments())

    @pytest.mark.parametrize("name", op_arguments())
    def test_opcheck(self, name):
        op = getattr(torch.ops.flashtile, name).default
        for operands, options in op_arguments()[name]:
            torch.library.opcheck(op, (*operands, *options))


class TestAutocast:
    """The op casts as SDPA does."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_dense(self, dtype):
        inputs = [x.requires_grad_() for x in heads_and_lengths(9)]
        with torch.autocast("cpu", dtype=dtype):
            out, lse = flashtile.attention(*inputs, return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        cast = [x.detach().to(dtype).requires_grad_() for x in inputs]
        wanted = flashtile.attention(*cast)
        assert torch.equal(out, wanted)
        mine = torch.autograd.grad(out.float().square().sum(), inputs)
        theirs = torch.autograd.grad(wanted.float().square().sum(), cast)
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a.to(dtype), b)

    def test_mixed_inputs(self):
        q, k, v = heads_and_lengths(9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = flashtile.flash_attn_func(q, k.bfloat16(), v.bfloat16(), causal=True)
        assert out.dtype == torch.bfloat16

    def test_packed(self):
        call = flat(9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = flashtile.attention_varlen(**call, max_seqlen_q=9, max_seqlen_k=9)
        assert out.dtype == torch.bfloat16

    def test_float64_stays(self):
        inputs = heads_and_lengths(9, F64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert flashtile.attention(*inputs).dtype == F64

    def test_a_16_bit_cache(self):
        """The caches stay as they are, and are written in place; what goes into them is cast."""
        call = cache_call(4, "contiguous")
        half = {
            n: x.bfloat16() for n, x in call.items() if n in ("q", "k", "v", "k_cache", "v_cache")
        }
        wanted = flashtile.attention_with_kvcache(**(call | half))
        mine = call | {n: x.bfloat16() for n, x in call.items() if n.endswith("_cache")}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = flashtile.attention_with_kvcache(**mine)
        assert_same(got, wanted)
        assert_same([mine["k_cache"], mine["v_cache"]], [half["k_cache"], half["v_cache"]])

    def test_off_inside(self):
        inputs = heads_and_lengths(9)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert flashtile.attention(*inputs).dtype == torch.float32


class TestFlops:
    @pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 1.0}], ids=str)
    def test_as_sdpa(self, options):
        B, M, N, Hq, D = 2, 9, 12, 4, 8
        inputs = [x.requires_grad_() for x in heads_and_lengths(9)]
        with FlopCounterMode(display=False) as forward:
            out = flashtile.attention(*inputs, **options)
        assert forward.get_total_flops() == 4 * B * Hq * M * N * D
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        assert backward.get_total_flops() == 10 * B * Hq * M * N * D


class TestCheckpoint:
    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("options", [{"dropout_p": 0.4}, {"causal": True}], ids=str)
    def test_the_recomputed_dropout_is_the_same(self, reentrant, options):
        def block(q, k, v):
            return flashtile.attention(q, k, v, **options)

        grads = []
        for run in (block, lambda *x: checkpoint(block, *x, use_reentrant=reentrant)):
            torch.manual_seed(3)
            leaves = [x.requires_grad_() for x in heads_and_lengths(9)]
            run(*leaves).square().sum().backward()
            grads.append([x.grad for x in leaves])
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)

    def test_saved_tensor_hooks(self):
        """Tensors saved for the backward may be moved away and back."""
        leaves = [x.requires_grad_() for x in heads_and_lengths(9)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            out = flashtile.attention(*leaves, causal=True)
        mine = torch.autograd.grad(out.square().sum(), leaves)
        wanted = torch.autograd.grad(
            flashtile.attention(*leaves, causal=True).square().sum(), leaves
        )
        assert_same(mine, wanted)

    def test_writing_to_a_saved_input_is_noticed(self):
        leaves = [x.requires_grad_() for x in heads_and_lengths(9)]
        k = leaves[1].clone()
        out = flashtile.attention(leaves[0], k, leaves[2])
        k.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def answer(call, wanted):
    """The right answer, or NotImplementedError with words; never something else."""
    refusal = None
    try:
        got = call()
    except NotImplementedError as error:
        refusal = str(error)
    if refusal is not None:
        assert re.search("derivative|tangent|not implemented", refusal), refusal
        return
    for a, b in zip(tensors(got), tensors(wanted()), strict=True):
        torch.testing.assert_close(a, b)


VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 1.0},
    "window": {"window_size": (2, 1)},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
class TestHigherDerivatives:
    """Float64 against the reference, which autograd differentiates as often as one likes."""

    def flash(self, options):
        return lambda q, k, v: flashtile.attention(q, k, v, return_lse=True, **options)

    def truth(self, options):
        def call(q, k, v):
            result = attention_reference(q, k, v, **options)
            return result.out, result.lse

        return call

    def inputs(self, seed):
        return qkv(generator(seed), B=1, M=3, N=4, Hq=2, Hk=1, D=2, dtype=F64)

    def test_jvp(self, options, seed):
        primals, tangents = self.inputs(seed), self.inputs(seed + 1)

        def along(function):
            values, derivatives = jvp(function, primals, tangents)
            return [*values, *derivatives]

        answer(lambda: along(self.flash(options)), lambda: along(self.truth(options)))

    @pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
    def test_jvp_in_one_argument(self, options, which, seed):
        primals = self.inputs(seed)
        tangent = torch.ones_like(primals[which])

        def along(function):
            def call(x):
                return function(*primals[:which], x, *primals[which + 1 :])

            return list(jvp(call, (primals[which],), (tangent,))[1])

        answer(lambda: along(self.flash(options)), lambda: along(self.truth(options)))

    def test_dual_numbers(self, options, seed):
        primals, tangents = self.inputs(seed), self.inputs(seed + 1)

        def along(function):
            with torch.autograd.forward_ad.dual_level():
                duals = map(torch.autograd.forward_ad.make_dual, primals, tangents)
                outputs = function(*duals)
                unpacked = [torch.autograd.forward_ad.unpack_dual(x) for x in outputs]
                assert all(x.tangent is not None for x in unpacked), "the tangent was dropped"
                return [x.tangent for x in unpacked]

        answer(lambda: along(self.flash(options)), lambda: along(self.truth(options)))

    def test_double_backward(self, options, seed):
        def twice(function):
            leaves = [x.requires_grad_() for x in self.inputs(seed)]
            out, lse = function(*leaves)
            first = torch.autograd.grad(
                out.square().sum() + lse.square().sum(), leaves, create_graph=True
            )
            return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

        answer(lambda: twice(self.flash(options)), lambda: twice(self.truth(options)))

    def test_grad_of_grad(self, options, seed):
        q, k, v = self.inputs(seed)

        def nested(function):
            def loss(q):
                return function(q, k, v)[0].square().sum()

            return grad(lambda q: grad(loss)(q).square().sum())(q)

        answer(lambda: nested(self.flash(options)), lambda: nested(self.truth(options)))

    def test_hessian(self, options, seed):
        q, k, v = self.inputs(seed)

        def of(function):
            return hessian(lambda k: function(q, k, v)[0].square().sum())(k)

        answer(lambda: of(self.flash(options)), lambda: of(self.truth(options)))

    def test_vjp_and_jacrev(self, options, seed):
        """First derivatives through torch.func are there, not just refused."""
        primals = self.inputs(seed)
        out, pull = vjp(self.flash(options), *primals)
        true_out, true_pull = vjp(self.truth(options), *primals)
        live = tuple(x.nan_to_num(neginf=0.0) for x in out)
        assert_same(out, true_out)
        assert_same(pull(live), true_pull(live))
        mine = jacrev(lambda q: self.flash(options)(q, *primals[1:])[0])(primals[0])
        true = jacrev(lambda q: self.truth(options)(q, *primals[1:])[0])(primals[0])
        torch.testing.assert_close(mine, true)


class TestVmap:
    """The mapped dimension is one more batch."""

    def stacked(self, seed, count=3):
        rows = [qkv(generator(seed + i), B=2, M=5, N=6, dtype=F64) for i in range(count)]
        return [torch.stack(x) for x in zip(*rows, strict=True)]

    @pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
    def test_over_all(self, options, seed):
        q, k, v = self.stacked(seed)

        def function(q, k, v):
            return flashtile.attention(q, k, v, return_lse=True, **options)

        out, lse = vmap(function)(q, k, v)
        for i in range(3):
            assert_same([out[i], lse[i]], function(q[i], k[i], v[i]))

    def test_over_queries_alone(self, seed):
        q, k, v = self.stacked(seed)
        out = vmap(flashtile.attention, in_dims=(0, None, None))(q, k[0], v[0])
        for i in range(3):
            torch.testing.assert_close(out[i], flashtile.attention(q[i], k[0], v[0]))

    def test_over_another_dimension(self, seed):
        q, k, v = self.stacked(seed)
        moved = [x.movedim(0, 3) for x in (q, k, v)]
        out = vmap(flashtile.attention, in_dims=3, out_dims=1)(*moved)
        torch.testing.assert_close(out.movedim(1, 0), vmap(flashtile.attention)(q, k, v))

    def test_over_a_bias(self, seed):
        q, k, v = (x[0] for x in self.stacked(seed))
        bias = normal(generator(seed), 3, 4, 5, 6, dtype=F64)

        def function(bias):
            return flashtile.attention(q, k, v, bias=bias)

        out = vmap(function)(bias)
        for i in range(3):
            torch.testing.assert_close(out[i], function(bias[i]))

    def test_gradients_per_sample(self, seed):
        q, k, v = self.stacked(seed)

        def loss(q, k, v):
            return flashtile.attention(q, k, v, causal=True).square().sum()

        grads = vmap(grad(loss, argnums=(0, 1, 2)))(q, k, v)
        for i in range(3):
            assert_same([x[i] for x in grads], grad(loss, argnums=(0, 1, 2))(q[i], k[i], v[i]))

    def test_gradient_of_vmap(self, seed):
        q, k, v = self.stacked(seed)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        mine = torch.autograd.grad(vmap(flashtile.attention)(*leaves).square().sum(), leaves)
        looped = torch.stack([flashtile.attention(*x) for x in zip(*leaves, strict=True)])
        assert_same(mine, torch.autograd.grad(looped.square().sum(), leaves))

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_dropout(self, randomness, seed):
        q, k, v = self.stacked(seed)
        alike = [x[:1].expand(3, *x.shape[1:]) for x in (q, k, v)]
        function = vmap(
            lambda q, k, v: flashtile.attention(q, k, v, dropout_p=0.5), randomness=randomness
        )
        out = function(*alike)
        assert torch.equal(out[0], out[1]) == (randomness == "same")


def test_a_module_called_functionally(seed):
    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x):
            packed = self.project(x).view(*x.shape[:2], 3, 1, 8)
            return flashtile.flash_attn_qkvpacked_func(packed, causal=True)

    module = Attend()
    x = normal(generator(seed), 2, 5, 8)
    weights = dict(module.named_parameters())
    grads = grad(lambda w: functional_call(module, w, x).square().sum())(weights)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


@pytest.mark.parametrize("threads", [1, 2])
def test_deterministic_algorithms_repeat_bit_for_bit(threads, seed):
    before = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    try:
        leaves = [x.requires_grad_() for x in qkv(generator(seed), M=70, N=90)]
        runs = []
        for _ in range(3):
            out = flashtile.attention(*leaves, causal=True, softcap=1.0)
            runs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
