"""PyTorch's features applied to flashtile: opcheck, autocast, FLOPs, checkpointing, forward mode,
double backward, vmap. Each gives correct results or a clear error.
"""

from __future__ import annotations

import pytest
import torch
from conformance.calls import assert_same, cache_call, flat, heads_and_lengths
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import flashtile
from flashtile import operators
from flashtile.backends import cpu
from flashtile.problem import Operands, Options
from flashtile.testing import attention_reference, generator, normal, qkv

F64 = torch.float64


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
    new = [cache[n] for n in ("k_cache", "v_cache", "k", "v", "cache_seqlens")]
    rotary = torch.randn(2, 40, 4)
    pages = (*torch.randn(2, 6, 4, 2, 8), torch.arange(6).int().view(2, 3), torch.tensor([9, 1]))
    return {
        "attention_forward": [
            *((x, o) for x in (one, half, narrow, sunk, packed) for o in (plain, causal)),
            (many, rich),
        ],
        "attention_forward_in_workspace": [
            (one._replace(workspace=torch.zeros(64, dtype=torch.uint8)), plain)
        ],
        "attention_backward": [
            ((q.clone(), None, q.clone(), lse, False, *one), plain),
            ((q.clone(), None, q.clone(), lse, False, *one), causal),
            ((ten.clone(), None, ten.clone(), torch.zeros(4, 10), False, *packed), plain),
            ((q.clone(), lse.clone(), q.clone(), lse, True, *many), rich),
            ((q.clone(), lse.clone(), q.clone(), lse, False, *many), rich),
        ],
        "attention_probabilities": [((*one, lse), plain), ((*packed, torch.zeros(4, 10)), plain)],
        "attention_with_statistics": [(one, (*plain, True)), (packed, (*causal, False))],
        "attention_column_sums": [((*one, lse), plain), ((*packed, torch.zeros(4, 10)), causal)],
        "kvcache_append": [(new, [None] * 5)],
        "kvcache_rotate_append": [
            (
                [cache["q"], *new[:4], *rotary, new[4], new[4]],
                [*[None] * 6, True, own_positions],
            )
            for own_positions in (False, True)
        ],
        "gather_pages": [(pages, ())],
        "rotation": [((), (16, 3, torch.device("cpu")))],
        "combine": [((torch.randn(3, 2, 7, 4, 8), torch.randn(3, 2, 7, 4)), (torch.bfloat16,))],
    }


# Ops without a CPU kernel; on a CPU the formula is called instead.
OPS_OF_GPUS = {"rotate_tokens"}
# They draw random numbers, so no two calls agree; test_dropout.py compiles them.
OPS_THAT_DRAW = {"draw_rng_state", "draw_rng_state_again"}
# They differentiate by torch.func, whose tensors have no storage that `opcheck` could compare;
# test_statistics.py compiles them.
OPS_WITH_TRANSFORMS = {"attention_entropy_backward"}
# Ops that need several ranks; tests/distributed/test_compile.py calls them.
OPS_OF_RANKS = {"context_forward", "context_backward"}


class TestOps:
    def test_every_op_is_here(self):
        names = {
            name.split("::")[1].split(".")[0]
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("flashtile::")
        }
        elsewhere = OPS_OF_GPUS | OPS_THAT_DRAW | OPS_OF_RANKS | OPS_WITH_TRANSFORMS
        assert names - elsewhere == set(op_arguments())

    @pytest.mark.parametrize("wanted", [True, False])
    def test_the_gradient_of_a_bias_is_made_where_it_is_wanted(self, wanted, monkeypatch):
        made, backward = [], cpu.backward

        def recorded(*args):
            made.append(backward(*args))
            return made[-1]

        monkeypatch.setattr(cpu, "backward", recorded)
        q, k, v = (x.requires_grad_() for x in heads_and_lengths(7))
        bias = torch.randn(4, 7, 10, requires_grad=wanted)
        flashtile.attention(q, k, v, bias=bias).sum().backward()
        assert [gradients.dbias is not None for gradients in made] == [wanted]
        assert (bias.grad is not None) == wanted

    @pytest.mark.slow
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

    def test_with_a_workspace(self):
        q, k, v = heads_and_lengths(9)
        call = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": 5}
        with FlopCounterMode(display=False) as without:
            flashtile.attention_with_kvcache(**call)
        given = torch.empty(4096, dtype=torch.uint8)
        with FlopCounterMode(display=False) as inside:
            flashtile.attention_with_kvcache(**call, workspace=given)
        assert inside.get_total_flops() == without.get_total_flops() > 0

    def test_of_a_program_that_was_exported_before_any_call(self, monkeypatch):
        monkeypatch.setattr(operators, "_flops_are_registered", False)
        for op in [op for op in flop_registry if str(op).startswith("flashtile.")]:
            monkeypatch.delitem(flop_registry, op)

        class Attend(torch.nn.Module):
            def forward(self, q, k, v):
                return flashtile.attention(q, k, v)

        inputs = tuple(heads_and_lengths(9))
        program = torch.export.export(Attend(), inputs).module()
        with FlopCounterMode(display=False) as counter:
            program(*inputs)
        assert counter.get_total_flops() == 4 * 2 * 4 * 9 * 12 * 8


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
        """Tensors saved for the backward may be offloaded."""
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


VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 1.0},
    "window": {"window_size": (2, 1)},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
class TestHigherDerivatives:
    """Float64 against the reference, whose second derivatives come from autograd."""

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

        assert_same(along(self.flash(options)), along(self.truth(options)))

    @pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
    def test_jvp_in_one_argument(self, options, which, seed):
        primals = self.inputs(seed)
        tangent = torch.ones_like(primals[which])

        def along(function):
            def call(x):
                return function(*primals[:which], x, *primals[which + 1 :])

            return list(jvp(call, (primals[which],), (tangent,))[1])

        assert_same(along(self.flash(options)), along(self.truth(options)))

    def test_dual_numbers(self, options, seed):
        primals, tangents = self.inputs(seed), self.inputs(seed + 1)

        def along(function):
            with torch.autograd.forward_ad.dual_level():
                duals = map(torch.autograd.forward_ad.make_dual, primals, tangents)
                outputs = function(*duals)
                unpacked = [torch.autograd.forward_ad.unpack_dual(x) for x in outputs]
                assert all(x.tangent is not None for x in unpacked), "the tangent was dropped"
                return [x.tangent for x in unpacked]

        assert_same(along(self.flash(options)), along(self.truth(options)))

    def test_double_backward(self, options, seed):
        def twice(function):
            leaves = [x.requires_grad_() for x in self.inputs(seed)]
            out, lse = function(*leaves)
            first = torch.autograd.grad(
                out.square().sum() + lse.square().sum(), leaves, create_graph=True
            )
            return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

        assert_same(twice(self.flash(options)), twice(self.truth(options)))

    def test_grad_of_grad(self, options, seed):
        q, k, v = self.inputs(seed)

        def nested(function):
            def loss(q):
                return function(q, k, v)[0].square().sum()

            return grad(lambda q: grad(loss)(q).square().sum())(q)

        assert_same(nested(self.flash(options)), nested(self.truth(options)))

    def test_hessian(self, options, seed):
        q, k, v = self.inputs(seed)

        def of(function):
            return hessian(lambda k: function(q, k, v)[0].square().sum())(k)

        assert_same(of(self.flash(options)), of(self.truth(options)))

    def test_vjp_and_jacrev(self, options, seed):
        """First derivatives through torch.func work."""
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


@pytest.mark.parametrize(
    ("name", "shape"), [("alibi_slopes", (4,)), ("relative_bias", (4, 5)), ("sink", (4,))]
)
def test_gradients_under_vmap_are_computed_after_a_call_without(name, shape):
    """Inside `grad` of `vmap`, no tensor says that it requires a gradient."""
    q, k, v = qkv(generator(0), M=5, N=7, Hq=4)
    several = torch.randn(2, *shape)

    def sum_of_squares(x):
        return flashtile.attention(q, k, v, **{name: x}).square().sum()

    def total(xs):
        return vmap(sum_of_squares)(xs).sum()

    sum_of_squares(several[0])
    found = grad(total)(several)
    wanted = torch.stack([grad(sum_of_squares)(x) for x in several])
    torch.testing.assert_close(found, wanted)
