"""Score functions: packed and padded calls, caches, captured tensors and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.call import prepare
from flashtile.distributed import decode
from flashtile.integrations import dtensor
from flashtile.problem import Operands, Options
from flashtile.score_mod import times_traced
from flashtile.testing import attention_reference, generator, normal, qkv

from .caches import CAPACITY, B, Cache
from .harness import OPTIONS, Sizes, check_dense, check_varlen

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

FUNCTIONS = [name for name in OPTIONS if "score function" in name]
ScoreMod = Callable[..., Tensor]


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("options", ["causal window + sink", "chunk + bias + seqused", "dropout"])
def test_packed_sequences(name, options, backend, seed) -> None:
    """Queries and keys count from the first of their sequence, sequences from the first one."""
    s = Sizes(B=4, M=290, N=300, Hq=4, Hk=2, D=8)
    lengths = ([290, 0, 3, 17], [31, 12, 300, 0])
    check_varlen(*lengths, s, f"{name} + {options}", torch.float32, backend, seed)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("storage", ["contiguous", "paged", "rows"])
def test_caches(name, storage, backend, seed) -> None:
    """Keys count from the first one after the left pad, queries from the first new one."""
    rows = 5 if storage == "rows" else B
    c = Cache(seed, torch.float32, (3, 17, 25), 5, 4, 2, 16, None, rows=rows)
    if storage == "rows":
        c.call["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
    if storage == "paged":
        c.to_pages(4)
    c.call["cache_leftpad"] = torch.tensor([1, 0, 20], dtype=torch.int32)
    c.call |= c.new_tokens()
    c.call["options"] = f"{name} + causal + softcap"
    c.check(backend)
    assert CAPACITY > 25


Gradients = list[Tensor]


def captured_gradients(
    g: torch.Generator, dtype: torch.dtype, **options: Any
) -> tuple[Gradients, Gradients, Callable[[], Gradients]]:
    """Gradients of q, k, v and everything that a function captures: from a call in `dtype`, in
    plain PyTorch in float64, and likewise after roundings of inputs and scores to float32.
    """
    inputs = [*qkv(g, B=2, M=300, N=270, Hq=4, Hk=2, D=8, dtype=dtype)]
    inputs += [
        normal(g, 4, 571),  # a number for each head and distance
        normal(g, 300, 270, dtype=torch.bfloat16),  # a matrix
        normal(g, 8),  # read with an index that depends on other captured numbers
        torch.tensor(0.5),  # one number
    ]
    buckets = torch.randint(-8, 8, (2, 270), generator=g)

    def function(
        table: Tensor, matrix: Tensor, weights: Tensor, factor: Tensor,
        score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor,
    ) -> Tensor:  # fmt: skip
        score = score * torch.exp(factor) + table[h, j - i + 300] / 4
        score = score + matrix[i, j] * weights.tanh()[buckets[b, j]]
        return torch.where(i % 7 == 3, 3 * torch.tanh(score / 3), score)

    dout = normal(g, 2, 300, 4, 8, dtype=torch.float64)

    def gradients(run: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> Gradients:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = run(*leaves[:3], score_mod=partial(function, *leaves[3:]), **options)
        return list(torch.autograd.grad(out, leaves, dout.to(out.dtype)))

    def reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attention_reference(q, k, v, compute_dtype=q.dtype, **options).out

    def changed(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=g, dtype=x.dtype)
        return x * (1 + torch.finfo(torch.float32).eps * noise)

    def with_rounded_scores(
        *qkv: Tensor, score_mod: Callable[..., Tensor], **options: Any
    ) -> Tensor:
        return reference(*qkv, score_mod=lambda *x: changed(score_mod(*x)), **options)

    def rounded() -> Gradients:
        return gradients(with_rounded_scores, [changed(x) for x in exact], changed(dout))

    exact = [x.double() for x in inputs]
    mine = gradients(flashtile.attention, exact if dtype == torch.float64 else inputs, dout)
    return mine, gradients(reference, exact, dout), rounded


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=["all", "causal"])
def test_gradients_of_captured_tensors(options, seed) -> None:
    """In float64, exactly; in float32, with an error like that of rounded inputs and scores."""
    exact, truth, _ = captured_gradients(generator(seed), torch.float64, **options)
    for x, y in zip(exact, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11 * float(y.abs().max()))
    got, truth, rounded = captured_gradients(generator(seed), torch.float32, **options)
    changes = zip(*(rounded() for _ in range(8)), strict=True)
    for x, y, changed in zip(got, truth, changes, strict=True):
        deviation = (torch.stack(changed) - y).square().mean().sqrt()
        allowed = 6 * deviation + torch.finfo(x.dtype).eps * y.abs().max()
        assert (x - y).square().mean().sqrt() <= allowed


def test_a_captured_value_that_is_hidden_has_no_gradient(seed) -> None:
    """Not even where the function has none there: log(0) and log of negative numbers."""
    q, k, v = qkv(generator(seed), B=1, M=9, N=9, Hq=2, Hk=2)
    q.requires_grad_()
    slope = torch.tensor([0.5, 2.0], requires_grad=True)

    def far(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slope[h] * torch.log((i - j) * 1.0)

    out = flashtile.attention(q, k, v, score_mod=far, window_size=(-1, -2))
    gradients = torch.autograd.grad(out.sum() + out.square().sum(), (q, slope))
    assert all(x.isfinite().all() for x in (out, *gradients))
    assert gradients[1].abs().sum() > 0


def test_the_order_of_operations(seed) -> None:
    """Scale, softcap, score function, ALiBi, bias."""
    g = generator(seed)
    q, k, v = qkv(g, B=1, M=5, N=5, Hq=2, Hk=2, D=4, dtype=torch.float64)
    slopes, bias = torch.tensor([0.5, 0.25]), normal(g, 5, 5, dtype=torch.float64)
    out = flashtile.attention(
        q, k, v, softmax_scale=0.3, softcap=1.5, alibi_slopes=slopes, bias=bias,
        score_mod=lambda score, b, h, i, j: score * score,
    )  # fmt: skip
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * 0.3
    scores = (1.5 * torch.tanh(scores / 1.5)).square()
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    scores = scores - slopes.double()[:, None, None] * distance + bias
    torch.testing.assert_close(out, torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v))


def test_a_function_of_nothing_but_captured_numbers(seed) -> None:
    """It need not use the score; q and k then have no gradients."""
    q, k, v = (x.requires_grad_() for x in qkv(generator(seed), B=2, M=7, N=9, Hq=2, Hk=2))
    bias = normal(generator(seed), 7, 9).requires_grad_()
    out = flashtile.attention(q, k, v, score_mod=lambda score, b, h, i, j: bias[i, j])
    wanted = flashtile.attention(q * 0, k, v, bias=bias)
    torch.testing.assert_close(out, wanted)
    got = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
    same = torch.autograd.grad(wanted.square().sum(), (q, k, v, bias))
    torch.testing.assert_close(got, same)
    assert got[0].eq(0).all()
    constant = flashtile.attention(q, k, v, score_mod=lambda *given: torch.tensor(2.0))
    torch.testing.assert_close(constant, v.mean(1, keepdim=True).expand_as(out))


def test_captured_tensors_are_only_read(seed) -> None:
    """Even if one is the whole result of a single score, to which a bias is added in place."""
    q, number = torch.zeros(1, 1, 1, 4), torch.tensor(2.0)
    bias = torch.ones(1, 1)
    _, lse = flashtile.attention(
        q, q, q, bias=bias, score_mod=lambda score, b, h, i, j: number, return_lse=True
    )
    assert number == 2
    assert lse == 3


def test_heads_and_sequences_are_counted(seed) -> None:
    """Query heads, not key heads, and sequences of the whole batch, even in large ones."""
    q, k, v = qkv(generator(seed), B=40, M=3, N=4, Hq=6, Hk=2)
    numbers = normal(generator(seed), 40, 6)
    seen = flashtile.attention(
        q, k, v, score_mod=lambda score, b, h, i, j: score + numbers[b, h] * j
    )
    bias = numbers[:, :, None, None] * torch.arange(4)
    torch.testing.assert_close(seen, flashtile.attention(q, k, v, bias=bias))


def test_probabilities_and_lse(seed) -> None:
    g = generator(seed)
    q, k, v = qkv(g, B=2, M=19, N=27)
    made = OPTIONS["score function that hides"](g, Sizes(), torch.float32)
    out, lse, probs = flashtile.attention(q, k, v, **made, return_attn_probs=True)
    wanted = attention_reference(q, k, v, **made)
    torch.testing.assert_close(probs, wanted.probs.float())
    torch.testing.assert_close(lse, wanted.lse.float())
    torch.testing.assert_close(out, wanted.out.float())


def test_float8_and_latent_calls(seed) -> None:
    g = generator(seed)
    q, k, v, qv = (normal(g, 2, 9, 4, size) for size in (8, 8, 16, 16))
    made = OPTIONS["score function"](g, Sizes(M=9, N=9), torch.float32)
    wanted = attention_reference(q, k, v, qv=qv, **made, softmax_scale=0.2).out.float()
    out = flashtile.attention(q, k, v, qv=qv, **made, softmax_scale=0.2)
    torch.testing.assert_close(out, wanted)
    small = [x.to(torch.float8_e4m3fn) for x in (q, k, k)]
    wanted = attention_reference(*(x.float() for x in small), **made).out.float()
    out = flashtile.attention(*small, **made)
    torch.testing.assert_close(out.float(), wanted, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_no_scores(lengths, seed) -> None:
    s = Sizes(B=2, M=lengths[0], N=lengths[1])
    for name in FUNCTIONS:
        check_dense(s, name, torch.float32, "cpu", seed)
    bias = torch.zeros(*lengths)
    q, k = torch.zeros(1, lengths[0], 1, 4), torch.zeros(1, lengths[1], 1, 4)
    out = flashtile.attention(q, k, k, score_mod=lambda score, b, h, i, j: score + bias[i, j])
    assert out.eq(0).all()


class TestTransformations:
    """PyTorch's transformations, of the inputs and of what a function captures."""

    def setup_method(self) -> None:
        self.q, self.k, self.v = qkv(generator(0), B=2, M=5, N=6, Hq=2, Hk=2)

    def attend(self, slopes: Tensor, q: Tensor | None = None) -> Tensor:
        out = flashtile.attention(
            self.q if q is None else q, self.k, self.v,
            score_mod=lambda score, b, h, i, j: score * slopes.exp()[h] - slopes[h] * (i - j),
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    def test_vmap_and_grad(self) -> None:
        slopes = normal(generator(1), 3, 2)
        got = torch.vmap(self.attend)(slopes)
        torch.testing.assert_close(got, torch.stack([self.attend(x) for x in slopes]))
        more = torch.stack((self.q, 2 * self.q))
        got = torch.vmap(self.attend, in_dims=(None, 0))(slopes[0], more)
        torch.testing.assert_close(got, torch.stack([self.attend(slopes[0], x) for x in more]))
        got = torch.vmap(torch.func.grad(lambda x: self.attend(x).square().sum()))(slopes)
        leaf = slopes.clone().requires_grad_()
        total = sum(self.attend(x).square().sum() for x in leaf.unbind())
        torch.testing.assert_close(got, torch.autograd.grad(total, leaf)[0])

    @pytest.mark.filterwarnings("ignore:A model attribute `lifted_tensor_0` requires gradient")
    def test_export_without_dynamo(self) -> None:
        """The program is a part of the graph; captured parameters stay parameters."""

        class Layer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.slopes = torch.nn.Parameter(torch.tensor([0.5, 2.0]))

            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out: Tensor = flashtile.attention(
                    q, k, v, score_mod=lambda score, b, h, i, j: score - self.slopes[h] * j
                )
                return out

        layer, given = Layer(), (self.q, self.k, self.v)
        program = torch.export.export(layer, given, strict=False)
        torch.testing.assert_close(program.module()(*given), layer(*given))
        for x in (*program.parameters(), layer.slopes):
            x.data.mul_(2)
        torch.testing.assert_close(program.module()(*given), layer(*given))

    def test_checkpointing(self) -> None:
        slopes = normal(generator(1), 2).requires_grad_()
        out = torch.utils.checkpoint.checkpoint(self.attend, slopes, use_reentrant=False)
        got = torch.autograd.grad(out.sum(), slopes)
        torch.testing.assert_close(got, torch.autograd.grad(self.attend(slopes).sum(), slopes))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda s, b, h, i, j: s if i > j else -s, "__bool__ reads the value"),
        (lambda s, b, h, i, j: s * i.item(), "item reads the value"),
        (lambda s, b, h, i, j: s + float(torch.ones(3)[0]), "__float__ reads the value"),
        (lambda s, b, h, i, j: s + torch.ones(3, 4)[h].sum(), r"aten\.sum"),
        (lambda s, b, h, i, j: torch.stack((s, s)).amax(), r"aten\.stack"),
        (lambda s, b, h, i, j: torch.sort(s)[0], r"aten\.sort"),
        (lambda s, b, h, i, j: s + torch.ones(3, 4)[:, h], "slice"),
        (lambda s, b, h, i, j: s + torch.rand(()), "rand .* draws random numbers"),
        (lambda s, b, h, i, j: torch.nn.functional.dropout(s), "draws random numbers"),
        (lambda s, b, h, i, j: s + _counter.add_(1), "add_ .* changes a captured tensor"),
    ],
)
def test_what_cannot_be_traced_is_named(function, named) -> None:
    """And nothing has been changed."""
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=f"score_mod: .*{named}"):
        flashtile.attention(q, q, q, score_mod=function)
    assert _counter == 0


def test_a_function_without_a_derivative_is_named() -> None:
    q = torch.zeros(1, 3, 2, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"score_mod: .*heaviside"):
        flashtile.attention(q, q, q, score_mod=lambda s, b, h, i, j: torch.heaviside(s, s))


def test_operations_without_a_derivative_of_their_own(seed) -> None:
    """Integer arithmetic, comparisons, in-place operations, indices of indices, dtypes."""
    q, k, v = qkv(generator(seed), B=1, M=70, N=65, Hq=2, Hk=2)
    q.requires_grad_()
    buckets, table = torch.arange(65) % 4, normal(generator(seed), 2, 4, dtype=torch.bfloat16)

    def function(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i // 16 == j // 16) & ~((i - j).abs() > 5) | (i % 3 == 0)
        score += table[h, buckets[j]].float() * near
        score = torch.maximum(score, -score.detach()).clamp(max=3) + (score > 0).to(score.dtype)
        return torch.where(near.logical_not(), score.sigmoid(), torch.sqrt(score.abs() + 1))

    out = flashtile.attention(q, k, v, score_mod=function)
    wanted = attention_reference(q, k, v, score_mod=function, compute_dtype=torch.float32).out
    torch.testing.assert_close(out, wanted)
    dout = torch.randn_like(out)
    got, same = (torch.autograd.grad(x, q, dout) for x in (out, wanted))
    torch.testing.assert_close(got, same, atol=1e-4, rtol=1e-4)


def test_indices_one_by_one_and_numbers(seed) -> None:
    q, k, v = qkv(generator(seed), B=2, M=5, N=6, Hq=2, Hk=2)
    table = normal(generator(seed), 2, 3, 2, 6)
    bias = table[:, 1].unsqueeze(2) + table[0, -1, 1, 2]
    out = flashtile.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + table[b][1][h][j] + table[0, -1][1][2]
    )
    torch.testing.assert_close(out, flashtile.attention(q, k, v, bias=bias))


def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * (1 + b) - (i - j) * h / 8


CU = torch.tensor([0, 5, 10], dtype=torch.int32)
ENTRIES: dict[str, Callable[..., Any]] = {
    "flash_attn_func": lambda f, q, k, v, **o: f(q, k, v, **o),
    "flash_attn_kvpacked_func": lambda f, q, k, v, **o: f(q, torch.stack((k, v), 2), **o),
    "flash_attn_qkvpacked_func": lambda f, q, k, v, **o: f(torch.stack((q, k, v), 2), **o),
    "flash_attn_varlen_func": lambda f, q, k, v, **o: f(
        *(x.flatten(0, 1) for x in (q, k, v)), CU, CU, 5, 5, **o
    ).view(q.shape),
    "flash_attn_with_kvcache": lambda f, q, k, v, **o: f(q, k, v, **o),
    "attention_varlen": lambda f, q, k, v, **o: f(q, k, v, **o),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_function_takes_one(name, seed) -> None:
    q, k, v = qkv(generator(seed), B=2, M=5, N=5, Hq=2, Hk=2)
    out = ENTRIES[name](getattr(flashtile, name), q, k, v, causal=True, score_mod=relative)
    wanted = flashtile.attention(q, k, v, causal=True, score_mod=relative)
    torch.testing.assert_close(out, wanted)
    assert not torch.allclose(wanted, flashtile.attention(q, k, v, causal=True))


def test_what_counts_heads_and_sequences_of_a_part_refuses_one() -> None:
    """Sharded DTensors and caches over ranks: a function would get the numbers of a shard."""
    options = Options(5, 5, 1.0, score_mod="return s")
    q = torch.zeros(2, 5, 2, 8)
    assert dtensor._placements(Operands(q, q, q), options) == []
    assert "score_mod" not in decode.OPTIONS


class TestTraces:
    """A function is traced once, and again if it may have become another one."""

    def setup_method(self) -> None:
        flashtile.clear_caches()
        self.q, self.k, self.v = qkv(generator(0), B=1, M=6, N=6, Hq=2, Hk=2)

    def explained(self, function: ScoreMod) -> int:
        """How often the function's program has been traced."""
        flashtile.attention(self.q, self.k, self.v, score_mod=function)
        shown = flashtile.explain(self.q, self.k, self.v, score_mod=function).score_mod
        return int(shown.split("traced ")[1].split(" times")[0])

    def test_once(self) -> None:
        for _ in range(3):
            assert self.explained(lambda score, b, h, i, j: score + i) == 1

    def test_new_numbers_in_captured_tensors(self) -> None:
        """Another tensor of the same shape, and other values in the same tensor."""

        def add(table: Tensor) -> ScoreMod:
            return lambda score, b, h, i, j: score + table[i, j]

        for _ in range(3):
            table = torch.randn(6, 6)
            assert self.explained(add(table)) == 1
            for _ in range(2):
                out = flashtile.attention(self.q, self.k, self.v, score_mod=add(table))
                wanted = flashtile.attention(self.q, self.k, self.v, bias=table)
                torch.testing.assert_close(out, wanted)
                table.mul_(2)

    def test_variables_with_new_values(self) -> None:
        """Of an enclosing function, of the module, defaults, attributes, items."""
        global _factor
        factor, holder, numbers = 2.0, torch.nn.Module(), {"factor": 2.0}

        def enclosing(score, b, h, i, j):
            return score * factor

        def of_module(score, b, h, i, j):
            return score * _factor

        def default(score, b, h, i, j, factor=2.0):
            return score * factor

        def attribute(score, b, h, i, j):
            return score * holder.factor

        def item(score, b, h, i, j):
            return score * numbers["factor"]

        get = numbers.get

        def method(score, b, h, i, j):
            return score * get("factor")

        def own(score, b, h, i, j):
            return score * own.factor

        for new in (2.0, 3.0, 3, True, torch.tensor(0.5), torch.ones(2)[0]):
            factor = _factor = holder.factor = own.factor = numbers["factor"] = new
            default.__defaults__ = (new,)
            wanted = flashtile.attention(self.q * new, self.k, self.v)
            for function in (enclosing, of_module, default, attribute, item, method, own):
                for _ in range(2):
                    out = flashtile.attention(self.q, self.k, self.v, score_mod=function)
                    torch.testing.assert_close(out, wanted, msg=f"{function} {new}")

    def test_the_memo_of_decisions_knows_a_function(self, monkeypatch) -> None:
        checked = []
        describe = prepare.describe
        monkeypatch.setattr(prepare, "describe", lambda *call: checked.append(0) or describe(*call))
        for number in (1, 1, 2, 2):
            for _ in range(2):
                function = partial(lambda n, score, b, h, i, j: score * n, number)
                flashtile.attention(self.q, self.k, self.v, score_mod=function)
        assert len(checked) == 2

    def test_threads_trace_at_once(self) -> None:
        """Each its own functions, with their derivatives."""
        q = self.q.requires_grad_()

        def gradient(number: int) -> Tensor:
            def function(score, b, h, i, j):
                return score * number

            out = flashtile.attention(q, self.k, self.v, score_mod=function)
            return torch.autograd.grad(out.sum(), q)[0]

        numbers = range(1, 41)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(gradient, numbers))
        flashtile.clear_caches()
        for number, mine in zip(numbers, found, strict=True):
            torch.testing.assert_close(mine, gradient(number))

    def test_explain_shows_the_function(self) -> None:
        slopes = torch.ones(2)
        shown = str(
            flashtile.explain(
                self.q, self.k, self.v,
                score_mod=lambda score, b, h, i, j: score - slopes[h] * (i - j),
            )
        )  # fmt: skip
        for part in ("score_mod: 4 operations, traced 1 times", "values(0, (2,), h)", "sub.Tensor"):
            assert part in shown
        assert times_traced("") == 0


_factor: Any = 1.0
_counter = torch.zeros(())


def test_an_infinite_derivative_at_the_scores_of_padding(backend, seed):
    """Padding has scores of 0, where the derivative is infinite; no key there is visible."""

    def root(score, b, h, i, j):
        return score.abs().sqrt() * score.sign()

    sizes = Sizes(B=2, M=9, N=12, D=16)
    check_varlen(
        [9, 4], [12, 5], sizes, lambda *_: {"score_mod": root}, torch.float32, backend, seed
    )
