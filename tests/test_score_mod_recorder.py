"""What the recorder of score functions makes of views, in-place operations, modes and threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _python_dispatch

import flashtile
from flashtile.score_mod.trace import traced
from flashtile.testing import attention_reference, generator, normal, qkv

Function = Callable[..., Tensor]
NUMBERS = torch.tensor([0.5, 2.0])
SIZE = torch.tensor(3)
DOUBLES = torch.tensor([0.25, 3.0], dtype=torch.float64)


def program(function: Function) -> str:
    return traced(function, torch.float32, torch.device("cpu")).program


def through_a_view(score, b, h, i, j):
    copy = score * 1
    copy.view(score.shape).mul_(3)
    return copy


def of_a_view(score, b, h, i, j):
    view = score.clone().detach().view(score.shape)
    return score + view.mul_(3)


def read_before_and_after(score, b, h, i, j):
    numbers = NUMBERS.clone()
    before = numbers[h]
    numbers.mul_(2)
    return score * before + numbers[h]


def to_the_dtype_of_the_first(score, b, h, i, j):
    score *= DOUBLES[h]
    return score


def filled(score, b, h, i, j):
    return score * NUMBERS.clone().index_fill_(0, torch.tensor([1]), 7.0)[h] + torch.tensor(1.0)


def changed_shape(score, b, h, i, j):
    numbers = NUMBERS.clone()
    row = numbers.unsqueeze_(0)
    return score * row[0, h] + numbers.squeeze_(0)[h]


def many_temporaries(score, b, h, i, j):
    """Whose ids are used again."""
    for n in range(200):
        score = score + (NUMBERS * n)[h] * (j - n).abs() / 1000
    return score


def differentiated_inside(score, b, h, i, j):
    with torch.enable_grad():
        x = score.detach().requires_grad_()
        (slope,) = torch.autograd.grad(x**3, x, torch.ones_like(x))
    return score + slope


def in_inference_mode(score, b, h, i, j):
    with torch.inference_mode():
        return torch.where(i > j, torch.nn.functional.hardsigmoid(score), 0.5) + score


def powers(score, b, h, i, j):
    """In-place operations whose overloads have other names than those that return a result."""
    square = score * 0.25  # larger scores would have errors beyond the tolerance
    square **= 2
    power = square + 0.5
    power.pow_(NUMBERS[h])
    return power


def quotients(score, b, h, i, j):
    new = score * 1
    new //= 0.5
    return new.floor_divide_(NUMBERS[h])


def divided(score, b, h, i, j):
    """Integers by a captured number, which is 0 in a trace."""
    index = j % SIZE + i // SIZE + torch.fmod(i - j, SIZE) + torch.div(j, SIZE).int()
    index %= SIZE
    return score + index + torch.div(i - j, SIZE, rounding_mode="trunc") + (SIZE % SIZE)


def activated_in_place(score, b, h, i, j):
    new = score.mul(2).addcmul_(score, score, value=0.1)
    return F.elu(F.leaky_relu(new, inplace=True) * 1, inplace=True)


def replaced(score, b, h, i, j):
    """Values that do not depend on the ones before."""
    new, bias, zero, mask, truncated = score * 1, score * 1, score * 1, score > i, (score + j).int()
    new[...] = score * NUMBERS[h]
    bias.copy_(i)
    mask.fill_(5)
    truncated.fill_(2.7)
    return torch.where(mask, new + bias.fill_(NUMBERS.sum()) + zero.zero_(), 0) * truncated


# FlexAttention trains all of these. Scores of up to 200 reach the branches that PyTorch's own
# compositions overflow in.
ACTIVATIONS = [
    F.silu, F.mish, F.softplus, F.leaky_relu, F.elu, partial(F.elu, alpha=0.5), F.celu, F.selu,
    partial(F.celu, alpha=2.0), F.hardtanh, F.relu6, F.hardsigmoid, F.hardswish, F.hardshrink,
    F.softshrink, F.logsigmoid, F.gelu, F.softsign, F.tanhshrink,
    lambda s: F.prelu(s, torch.tensor([0.2], dtype=s.dtype)),
    lambda s: torch.addcdiv(s, s, s * s + 1, value=0.5),
    lambda s: torch.rsub(s, 1.0),
    partial(F.gelu, approximate="tanh"),
    lambda s: torch.addcmul(s, s.tanh(), s, value=-0.5),
    lambda s: torch.lerp(s, s.tanh(), 0.3),
    lambda s: torch.lerp(s, s.tanh(), s.sigmoid()),
    lambda s: s + s.frac(), lambda s: s + s.round() + s.round(decimals=1) + s.trunc(),
    lambda s: F.threshold(s, 0.1, 2.0),
    lambda s: s.sigmoid().clamp(0.01, 0.99).logit(), lambda s: s.sigmoid().logit(1e-3),
    lambda s: torch.logaddexp(s, 1 - s), lambda s: s.nan_to_num(0.5, 1, -1),
    lambda s: torch.where(s.isinf(), 0, s.deg2rad() + s.tanh().rad2deg()),
    lambda s: s * torch.full_like(s, -0.5).abs(),
]  # fmt: skip


@pytest.mark.parametrize("size", [1.0, 200.0])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=range(len(ACTIVATIONS)))
def test_activations_and_their_gradients(activation, size, seed) -> None:
    q, k, v = qkv(generator(seed), B=1, M=7, N=9, Hq=2, Hk=2, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (size * q, k, v)]
    out = flashtile.attention(*inputs, score_mod=lambda s, b, h, i, j: activation(s))
    scores = torch.einsum("bmhd,bnhd->bhmn", *inputs[:2]) * q.shape[-1] ** -0.5
    wanted = torch.einsum("bhmn,bnhd->bmhd", activation(scores).softmax(-1), inputs[2])
    torch.testing.assert_close(out, wanted)
    pairs = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_result_of_another_dtype_is_converted(dtype, seed) -> None:
    inputs = qkv(generator(seed), B=1, M=7, N=9, Hq=2, Hk=2)
    out, wanted = (
        flashtile.attention(*inputs, score_mod=function)
        for function in (
            lambda s, b, h, i, j: s.to(dtype),
            lambda s, b, h, i, j: s.to(dtype).float(),
        )
    )
    torch.testing.assert_close(out, wanted)


IN_PLACE = [
    through_a_view,
    of_a_view,
    read_before_and_after,
    to_the_dtype_of_the_first,
    filled,
    changed_shape,
    many_temporaries,
    differentiated_inside,
    powers,
    activated_in_place,
    divided,
    replaced,
]


@pytest.mark.parametrize("function", [*IN_PLACE, quotients, in_inference_mode])
@pytest.mark.parametrize("inference", [False, True])
def test_a_program_computes_what_the_function_does(function, inference, seed) -> None:
    q, k, v = qkv(generator(seed), B=2, M=7, N=9, Hq=2, Hk=2)
    numbers = NUMBERS.clone(), DOUBLES.clone()
    with torch.inference_mode(inference):
        out = flashtile.attention(q, k, v, score_mod=function)
    wanted = attention_reference(q, k, v, score_mod=function, compute_dtype=torch.float32).out
    torch.testing.assert_close(out, wanted)
    assert torch.equal(NUMBERS, numbers[0]) and torch.equal(DOUBLES, numbers[1])


@pytest.mark.parametrize("function", IN_PLACE)
def test_gradients(function, seed) -> None:
    inputs = [x.requires_grad_() for x in qkv(generator(seed), B=2, M=7, N=9, Hq=2, Hk=2)]
    out = flashtile.attention(*inputs, score_mod=function)
    wanted = attention_reference(*inputs, score_mod=function, compute_dtype=torch.float32).out
    dout = normal(generator(seed), *out.shape)
    pairs = (torch.autograd.grad(x, inputs, dout) for x in (out, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def in_a_hook(score, b, h, i, j):
    with torch.enable_grad():
        x = (score * 1).requires_grad_()
        x.register_hook(lambda gradient: gradient * NUMBERS[0])
        return score + torch.autograd.grad(x * 3, x)[0]


def saved_as_numbers(score, b, h, i, j):
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(), torch.from_numpy)
    with torch.enable_grad(), hooks:
        x = (score * 1).requires_grad_()
        return score + torch.autograd.grad(x**3, x)[0]


def list_of_tensors(score, b, h, i, j):
    new = score * 1
    torch._foreach_add_([new], 1)
    return new


def data_of_a_score(score, b, h, i, j):
    new = score * 1
    new.data = score * 3
    return new


def written_part(score, b, h, i, j):
    numbers = torch.zeros(2)
    numbers[0] = 5.0
    return score + numbers[h]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda s, b, h, i, j: s + NUMBERS.view(-1).add_(1)[h], "add_ .* changes a captured"),
        (lambda s, b, h, i, j: s + NUMBERS[0].add_(1), "add_ .* changes a captured tensor"),
        (lambda s, b, h, i, j: s + NUMBERS.data.add_(1)[h], "add_ .* changes a captured tensor"),
        (lambda s, b, h, i, j: s + NUMBERS.unsqueeze_(0)[0, h], "unsqueeze_ .* changes a captured"),
        (lambda s, b, h, i, j: torch.exp(s, out=torch.empty(())), "exp .* writes to one of its"),
        (lambda s, b, h, i, j: torch.func.grad(lambda x: x**3)(s), "a transform of torch.func"),
        (lambda s, b, h, i, j: s + torch.vmap(torch.exp)(NUMBERS)[h], "a transform of torch.func"),
        (lambda s, b, h, i, j: torch.frexp(s)[0], r"aten\.frexp"),
        (in_a_hook, r"grad \(aten.*\) reads a tensor that has not been recorded"),
        (saved_as_numbers, r"\(aten.* runs under hooks for saved tensors"),
        (list_of_tensors, "_foreach_add_ .* writes to one of its arguments"),
        (lambda s, b, h, i, j: s + copy.deepcopy(NUMBERS)[h], "deepcopy.* reads the memory"),
        (written_part, "reads a tensor after an operation in place on a view of it"),
        (data_of_a_score, "data.__set__ replaces the numbers of a tensor"),
    ],
)
def test_what_a_program_cannot_say_is_refused(function, named) -> None:
    before = NUMBERS.clone()
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=f"score_mod: .*{named}"):
        flashtile.attention(q, q, q, score_mod=function)
    assert torch.equal(NUMBERS, before)


def test_in_place_activations_are_composed_too() -> None:
    for name in ("leaky_relu", "elu", "addcmul"):
        assert f"{name}." not in program(activated_in_place)


def test_constants_of_the_function_stay_constants() -> None:
    def function(score: Tensor, *indices: Tensor) -> Tensor:
        numbers = torch.full((), 3.0), torch.zeros(()), torch.ones_like(score)
        return score * numbers[0] + numbers[1] + numbers[2] + torch.full_like(score, 2)

    assert program(function).count("constant(") == 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_is_that_function(backend) -> None:
    """Also one that is a part of it; PyTorch compiles nothing in order to trace it."""

    def double(score: Tensor) -> Tensor:
        return score * 2 + NUMBERS[0]

    inner = torch.compile(double, backend=backend, fullgraph=True)
    outer = torch.compile(lambda s, b, h, i, j: double(s), backend=backend, fullgraph=True)
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    wanted = program(lambda s, b, h, i, j: double(s))
    assert program(lambda s, b, h, i, j: inner(s)) == program(outer) == wanted
    assert frames["total"] == before


def test_modes_of_the_call_see_nothing() -> None:
    class Count(_python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += 1
            return function(*args, **(kwargs or {}))

    with Count() as count, torch.autocast("cpu", torch.bfloat16):
        assert "bfloat16" not in program(lambda s, b, h, i, j: s + NUMBERS[h] * j)
    assert count.seen == 0


def test_a_call_inside_of_a_function(seed) -> None:
    """With a score function, and a derivative, of its own."""
    q, k, v = qkv(generator(seed), B=1, M=5, N=5, Hq=2, Hk=2)

    def inner(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * NUMBERS[h]

    def outer(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        with torch.enable_grad():
            x = q.clone().requires_grad_()
            table = flashtile.attention(x, k, v, score_mod=inner).detach()
        return score + table[0, i, h, 0]

    found: list[Tensor] = []
    thread = threading.Thread(
        target=lambda: found.append(flashtile.attention(q, k, v, score_mod=outer)), daemon=True
    )
    thread.start()
    thread.join(60)
    assert found, "two traces of one thread wait for each other"
    table = attention_reference(q, k, v, score_mod=inner, compute_dtype=torch.float32).out
    torch.testing.assert_close(flashtile.attention(q, k, v, score_mod=inner), table)
    table = table[0, :, :, 0]
    bias = table.T[None, :, :, None].expand(1, 2, 5, 5)
    torch.testing.assert_close(found[0], flashtile.attention(q, k, v, bias=bias))


def test_threads_leave_no_mode_behind(monkeypatch) -> None:
    """PyTorch keeps in a global variable whether a dispatch mode is active."""
    # Modes that other tests enter in several threads may have left it set.
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: program(lambda s, b, h, i, j: s * n), range(200)))
    assert not _python_dispatch.is_in_torch_dispatch_mode()


def test_a_number_after_a_table(seed) -> None:
    """Captured numbers lie side by side, whatever is read first; some indices are negative."""
    g = generator(seed)
    q, k, v = qkv(g, B=1, M=9, N=9, Hq=2, Hk=2, dtype=torch.float64)
    table, shift = normal(g, 24, dtype=torch.float64), normal(g, 2, dtype=torch.float64)
    factor = torch.tensor(1.7, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, table, factor, shift)]

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + factor * table[j - i] * shift[h]

    distance = torch.arange(9) - torch.arange(9)[:, None]
    bias = factor * table[distance] * shift[:, None, None]
    results = (
        flashtile.attention(q, k, v, score_mod=biased, backend="cpu"),
        flashtile.attention(q, k, v, bias=bias, backend="cpu"),
    )
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), leaves) for x in results))


def test_an_operation_with_two_results(seed) -> None:
    g = generator(seed)
    q, k, v = qkv(g, B=1, M=5, N=5, Hq=2, Hk=2)
    table = normal(g, 9)

    def scaled(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        low, high = torch.aminmax(table)
        return score * (high - low)

    factor = table.max() - table.min()
    out = flashtile.attention(q, k, v, score_mod=scaled)
    torch.testing.assert_close(out, flashtile.attention(q * factor, k, v))
