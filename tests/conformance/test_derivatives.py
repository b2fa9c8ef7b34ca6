"""Derivatives of derivatives, and derivatives in forward mode, in every option."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tangent_error import tangent_variance, tangents_of
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile.call.options import AttentionOptions
from flashtile.masks import BlockMask, Spans
from flashtile.testing import (
    assert_close,
    attention_reference,
    cu_seqlens,
    floor_of,
    generator,
    normal,
)

Call = Callable[..., Any]
M, N = 5, 6
SPAN = torch.tensor([0, 2, 1, 6, 4], dtype=torch.int32).view(1, 1, M, 1)
LISTED = torch.tensor([0, 2, 1, -1, 3, 0, 2, 5, 4, 0], dtype=torch.int32).view(1, M, 1, 2)
VISIBLE = torch.rand(2, 4, M, N, generator=generator(1)) < 0.5
LENGTHS = cu_seqlens([3, 0, 5])


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    g = generator(0)
    return tuple(normal(g, *shape, dtype=dtype).detach().requires_grad_() for shape in shapes)


def dense(*more: tuple[int, ...], **options: Any) -> tuple[Call, tuple[Tensor, ...]]:
    """A call with options; those that are ... are tensors of the shapes `more`."""
    names = [name for name, x in options.items() if x is ...]
    plain = {name: x for name, x in options.items() if x is not ...}

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
        given = dict(zip(names, others, strict=True))
        out, lse = flashtile.attention(q, k, v, return_lse=True, **plain, **given)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)  # rows without a key

    return call, tensors((2, M, 4, 4), (2, N, 2, 4), (2, N, 2, 3), *more)


def captured(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * slopes[h] + torch.tanh(s) * (i - j)

    return flashtile.attention(q, k, v, score_mod=score_mod)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return flashtile.attention(q, k, v, dropout_p=0.3, generator=generator)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashtile.attention_varlen(q, k, v, LENGTHS, LENGTHS, 5, 5, causal=True)


CASES: dict[str, Callable[[], tuple[Call, tuple[Tensor, ...]]]] = {
    "plain": dense,
    "causal": lambda: dense(causal=True),
    "softcap in a window": lambda: dense(softcap=2.0, window_size=(2, 1)),
    "bias and sink": lambda: dense((1, 4, M, N), (4,), bias=..., sink=...),
    "bias of all queries": lambda: dense((1, 1, 1, N), bias=...),
    "alibi": lambda: dense((4,), alibi_slopes=..., causal=True),
    "relative bias": lambda: dense((4, 7), relative_bias=...),
    "rows without a key, and a sink": lambda: dense((4,), sink=..., window_size=(-1, -5)),
    "chunk": lambda: dense(attention_chunk=2),
    "used lengths": lambda: dense(
        seqused_q=torch.tensor([5, 2], dtype=torch.int32),
        seqused_k=torch.tensor([3, 6], dtype=torch.int32),
    ),
    "a mask that is added": lambda: dense((2, 1, M, N), attn_mask=..., softmax_scale=0.3),
    "padding": lambda: dense(key_padding_mask=VISIBLE[:, 0, 0]),
    "equal bits": lambda: dense(batch_invariant=True, deterministic=True),
    "spans": lambda: dense(mask=Spans(SPAN, SPAN + 3)),
    "block mask": lambda: dense(block_mask=BlockMask.from_dense(VISIBLE, (2, 3))),
    "listed blocks": lambda: dense(
        key_blocks=torch.tensor([1, 0, 1], dtype=torch.int32).view(1, 1, 3, 1).expand(2, 2, 3, 1),
        block_size=(2, 3),
    ),
    "listed keys": lambda: dense(key_index=LISTED.expand(2, M, 1, 2), causal=True),
    "score function": lambda: (captured, tensors((1, M, 2, 4), (1, N, 1, 4), (1, N, 1, 3), (2,))),
    "dropout": lambda: (dropped, dense()[1]),
    "packed": lambda: (packed, tensors((8, 4, 4), (8, 2, 4), (8, 2, 3))),
    "absorbed": lambda: (
        lambda q, k, v, qv: flashtile.attention(q, k, v, qv=qv),
        tensors((1, M, 2, 4), (1, N, 1, 4), (1, N, 1, 3), (1, M, 2, 3)),
    ),
    "several tiles": lambda: (
        lambda q, k, v: flashtile.attention(q, k, v, causal=True)[:, ::19],
        tensors(*[(1, 150, 1, 2)] * 3),
    ),
    "nothing": lambda: (flashtile.attention, tensors((2, 0, 4, 4), (2, N, 2, 4), (2, N, 2, 3))),
}


@pytest.mark.parametrize("name", CASES)
def test_of_every_option(name: str) -> None:
    """Forward mode and the second derivative, against differences of float64."""
    call, inputs = CASES[name]()
    torch.manual_seed(0)  # gradcheck draws directions
    assert gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, inputs, fast_mode=True)


def test_no_option_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """But float8, which has no derivative, and hints."""
    used, attention = set(), flashtile.attention

    def recorded(*tensors: Tensor, **options: Any) -> Any:
        used.update(options)
        return attention(*tensors, **options)

    monkeypatch.setattr(flashtile, "attention", recorded)
    for make in CASES.values():
        call, inputs = make()
        call(*inputs)
    float8, hints = {"q_descale", "k_descale", "v_descale"}, {"num_splits", "pack_gqa", "sm_margin"}
    assert AttentionOptions.__annotations__.keys() - used == float8 | hints


@pytest.mark.parametrize("name", CASES)
def test_of_one_input(name: str) -> None:
    """A tangent alone gives what it gives beside tangents of 0, whose products are computed."""
    call, inputs = CASES[name]()
    inputs = tuple(x.detach() for x in inputs)
    for i, x in enumerate(inputs):
        tangents = [torch.zeros_like(x) for x in inputs]
        tangents[i] = normal(generator(2), *x.shape, dtype=x.dtype).detach()

        def of_one(x: Tensor, i: int = i) -> Any:
            return call(*inputs[:i], x, *inputs[i + 1 :])

        alone, beside = jvp(of_one, (x,), (tangents[i],)), jvp(call, inputs, tuple(tangents))
        torch.testing.assert_close(alone, beside)


X, T = (x.detach() for x in tensors((1, M, 4, 4), (1, M, 4, 4)))
K, V = (x.detach() for x in tensors((1, N, 2, 4), (1, N, 2, 3)))
COMPOSITIONS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "forward over reverse": lambda f: jvp(grad(f), (X,), (T,))[1],
    "reverse over forward": lambda f: grad(lambda x: jvp(f, (x,), (T,))[1])(X),
    "columns": lambda f: jacfwd(f)(X),
    "third": lambda f: grad(lambda x: (grad(lambda y: (grad(f)(y) * T).sum())(x) * T).sum())(X),
    "vectorised hessian": lambda f: torch.autograd.functional.hessian(f, X, vectorize=True),
    "vectorised forward mode": lambda f: torch.autograd.functional.hessian(
        f, X, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "vectorised jacobian": lambda f: torch.autograd.functional.jacobian(
        f, X, vectorize=True, strategy="forward-mode"
    ),
    "mapped": lambda f: vmap(lambda t: jvp(grad(f), (X,), (t,))[1])(torch.stack((T, X))),
}


CONSTANTS: dict[str, dict[str, Any]] = {  # options without a derivative
    "causal": {"causal": True},
    "bias": {"bias": normal(generator(1), 1, 4, M, N, dtype=torch.float64).detach()},
    "alibi": {"alibi_slopes": torch.rand(4, generator=generator(1))},
    "sink": {"sink": torch.rand(4, generator=generator(1), dtype=torch.float64)},
}


@pytest.mark.parametrize("options", CONSTANTS.values(), ids=CONSTANTS)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(name: str, options: dict[str, Any]) -> None:
    """PyTorch's own derivatives of the reference are the truth."""
    got, wanted = (
        COMPOSITIONS[name](lambda q, f=f: f(q).square().sum())
        for f in (
            lambda q: flashtile.attention(q, K, V, **options),
            lambda q: attention_reference(q, K, V, **options).out,
        )
    )
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("options", CONSTANTS.values(), ids=CONSTANTS)
def test_gradients_of_tangents(options: dict[str, Any]) -> None:
    """A tangent is a function of the point and of the direction."""
    g = generator(2)
    points, directions = (
        tuple(normal(g, *x.shape, dtype=x.dtype) for x in (X, K, V)) for _ in "pd"
    )
    found = []
    for attend in (flashtile.attention, lambda *x, **o: attention_reference(*x, **o).out):

        def along(x: tuple[Tensor, ...], t: tuple[Tensor, ...], attend: Call = attend) -> Tensor:
            return jvp(lambda *y: attend(*y, **options).square().sum(), x, t)[1]

        found.append(grad(along, argnums=(0, 1))(points, directions))
    torch.testing.assert_close(*found)


class Calls(TorchDispatchMode):
    """How often our own operations run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "flashtile"
        return func(*args, **(kwargs or {}))


def test_mapped_calls_are_one_batch() -> None:
    """A forward and a backward for all directions; with a bias, for each of them."""
    rows = torch.stack((X, T, X - T))
    for options, count in (({}, 2), ({"bias": CONSTANTS["bias"]["bias"]}, 6)):

        def loss(x: Tensor, options: dict[str, Any] = options) -> Tensor:
            return flashtile.attention(x, K, V, **options).square().sum()

        with Calls() as calls:
            found = vmap(grad(loss))(rows)
        assert calls.count == count
        torch.testing.assert_close(found, torch.stack([grad(loss)(x) for x in rows]))


def test_dual_numbers_with_constants() -> None:
    """Forward over reverse outside of torch.func."""
    for options in CONSTANTS.values():
        found = []
        for attend in (flashtile.attention, lambda *x, **o: attention_reference(*x, **o).out):
            with forward_ad.dual_level():
                q = forward_ad.make_dual(X.clone().requires_grad_(), T)
                total = attend(q, K, V, **options).square().sum()
                (first,) = torch.autograd.grad(total, q, create_graph=True)
                found.append(forward_ad.unpack_dual(first).tangent.detach())
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(dtype: torch.dtype, backend: str) -> None:
    """The gradient of a gradient, by the rule."""
    leaves = tensors((2, 70, 4, 16), (2, 90, 2, 16), (2, 90, 2, 16), dtype=dtype)

    def twice(attend: Call, x: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(attend(*x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), x)

    def reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention_reference(q, k, v, causal=True, compute_dtype=dtype).out

        return twice(attend, [x.detach().to(dtype).requires_grad_() for x in leaves])

    got = twice(
        lambda q, k, v: flashtile.attention(q, k, v, causal=True, backend=backend), list(leaves)
    )
    for name, x, truth, plain in zip(
        "qkv", got, reference(torch.float64), reference(dtype), strict=True
    ):
        assert_close(f"d{name}", x, truth, plain, dtype=dtype)


SMALL, LARGE = (70, 90, 16), (300, 550, 64)  # queries, keys, head dim
TANGENTS: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "causal": ({"causal": True}, SMALL, {}),
    "softcap in a window": ({"softcap": 3.0, "window_size": (40, 5)}, SMALL, {}),
    "bias and sink": ({}, SMALL, {"bias": (1, 4, 70, 90), "sink": (4,)}),
    "rows without a key": ({"window_size": (-1, -50)}, SMALL, {}),
    "large tiles": ({"causal": True}, LARGE, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TANGENTS)
def test_precision_of_tangents(name: str, dtype: torch.dtype, backend: str) -> None:
    """Forward mode along a direction of all inputs, by the rule."""
    options, (M, N, D), more = TANGENTS[name]
    shapes = ((2, M, 4, D), (2, N, 2, D), (2, N, 2, D), *more.values())
    g = generator(0)
    point, direction = (
        tuple(normal(g, *shape, dtype=dtype).detach() for shape in shapes) for _ in range(2)
    )

    def along(attend: Call, dtype: torch.dtype) -> list[Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            return attend(q, k, v, **options, **dict(zip(more, others, strict=True)))

        return tangents_of(call, *([x.to(dtype) for x in given] for given in (point, direction)))

    def reference(compute_dtype: torch.dtype, **how: Any) -> list[Tensor]:
        def attend(*args: Any, **given: Any) -> tuple[Tensor, Tensor]:
            found = attention_reference(*args, compute_dtype=compute_dtype, **given, **how)
            return found.out, found.lse.masked_fill(found.lse == -torch.inf, 0.0)

        return along(attend, compute_dtype)

    got = along(partial(flashtile.attention, backend=backend, return_lse=True), dtype)
    truth, plain = reference(torch.float64), reference(dtype)
    floors = map(floor_of, reference(torch.float64, attend=tangent_variance(dtype)))
    for result, *compared, floor in zip(("out", "lse"), got, truth, plain, floors, strict=True):
        assert_close(result, *compared, floor=floor, dtype=dtype)


def test_huge_scores_keep_their_sums() -> None:
    """Beside -1e9 the log of a row's sum is lost in float32; its tangents are not."""
    q, k, v = (torch.ones(1, 5, 2, 4) for _ in range(3))
    bias = torch.full((1, 1, 5, 5), -1e9)
    (out, lse), (dout, _) = jvp(
        lambda v: flashtile.attention(q, k, v, bias=bias, return_lse=True), (v,), (v,)
    )
    torch.testing.assert_close(dout, out)
    (dlse,) = jvp(
        lambda bias: flashtile.attention(q, k, v, bias=bias, return_lse=True)[1:],
        (bias,),
        (torch.ones_like(bias),),
    )[1]
    torch.testing.assert_close(dlse, torch.ones_like(lse))


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.numel())
        return found


def test_memory_is_linear() -> None:
    """No tensor is larger than the scores of 128 queries."""
    q, k, v = tensors(*[(1, 512, 1, 4)] * 3)
    with Largest() as largest:
        (first,) = torch.autograd.grad(
            flashtile.attention(q, k, v).square().sum(), q, create_graph=True
        )
        torch.autograd.grad(first.sum(), (q, k, v))
        jvp(lambda x: flashtile.attention(x, k.detach(), v.detach()), (q.detach(),), (q.detach(),))
    assert largest.numbers <= 128 * 512


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match=r"inside torch\.func\.jvp; expected at most"):
        jacfwd(jacfwd(lambda q: flashtile.attention(q, K, V).sum()))(X)
    compiled = torch.compile(flashtile.attention, backend="eager", fullgraph=True)
    with forward_ad.dual_level(), pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(forward_ad.make_dual(X, T), K, V)
    cache, new = torch.zeros(1, 8, 2, 4), torch.ones(1, 1, 2, 4)
    lengths = torch.tensor([2], dtype=torch.int32)

    def append(k: Tensor) -> Tensor:
        q = torch.ones(1, 1, 4, 4)
        return flashtile.flash_attn_with_kvcache(q, cache, cache, k, new, cache_seqlens=lengths)

    with pytest.raises(NotImplementedError, match="k: got a forward-mode tangent, expected none"):
        jvp(append, (new,), (new,))
    q, k = (x.to(torch.float8_e4m3fn) for x in (X, K))
    with pytest.raises(NotImplementedError, match="q: got float8_e4m3fn, of which there are"):
        jvp(
            lambda sink: flashtile.attention(q, k, k, sink=sink),
            (torch.ones(4),),
            (torch.ones(4),),
        )
