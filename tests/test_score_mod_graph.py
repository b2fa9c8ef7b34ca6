"""Score functions in ``torch.compile(fullgraph=True)`` and `torch.export`: one graph that has the
results of eager calls, also after anything that a function depends on has changed.
"""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile import BlockMask
from flashtile.problem import Operands, Options
from flashtile.testing import cu_seqlens

pytestmark = pytest.mark.slow
B, H, D = 2, 4, 8
HIDDEN = -float("inf")


@pytest.fixture(autouse=True)
def without_graphs(seed):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def dense(n, dtype=torch.float32):
    return {name: torch.randn(B, n, H, D, dtype=dtype) for name in "qkv"}


def by_distance(q, k, v, table, slopes):
    """Computes slopes before the function and reads them in it."""
    slopes = slopes.exp()

    def function(score, b, h, i, j):
        return score + table[h, (j - i).clamp(-3, 3) + 3] - slopes[h] * (i - j).abs()

    return flashtile.attention(2 * q, k, v, score_mod=function, return_lse=True)


def documents(q, k, v, document, slopes):
    """A mask function, as FlexAttention has, in a score function."""

    def visible(b, h, i, j):
        return (document[b, i] == document[b, j]) & (i >= j)

    def function(score, b, h, i, j):
        return torch.where(visible(b, h, i, j), score + slopes[h] * j, HIDDEN)

    return flashtile.attention(q, k, v, score_mod=function, return_lse=True)


def sizes(q, k, v, slopes):
    """Reads sizes that change, in arithmetic with integers and, where they are known, floats."""
    n = q.shape[1]

    def function(score, b, h, i, j):
        return score + slopes[h] * (n - 1 - j) / n - (i + n) * score / k.shape[1]

    return flashtile.attention(q, k, v, score_mod=function)


def packed(q, k, v, lengths, n, slopes):
    def function(score, b, h, i, j):
        return score * 0.5 + slopes[h] * (j - i) + b

    options = {"score_mod": function, "return_lse": True}
    return flashtile.attention_varlen(q, k, v, lengths, lengths, n, n, **options)


def padded(q, k, v, used, slopes):
    def function(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    options = {"seqused_q": used, "seqused_k": used}
    return flashtile.attention_varlen(q, k, v, score_mod=function, **options)


def measured(q, k, v, slopes):
    def function(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    names = ("max_logit", "entropy", "column_sum")
    out, lse, probs, statistics = flashtile.attention(
        q, k, v, score_mod=function, return_attn_probs=True, return_stats=names
    )
    return out, lse, probs, *statistics


def prepared(q, k, v, table, slopes):
    """Computes with captured tensors in the function, and makes a tensor of numbers there."""

    def function(score, b, h, i, j):
        near = torch.tensor([0.5, 0.25, 0.125])[(i - j).clamp(0, 2)]
        score = torch.nn.functional.prelu(score, slopes[:1])
        return score * near + (table.softmax(1) @ table.mT).sum(1)[h]

    return flashtile.attention(q, k, v, score_mod=function)


def half(q, k, v, slopes):
    def function(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    q, k, v, slopes = (x.bfloat16() for x in (q, k, v, slopes))
    return flashtile.attention(q, k, v, score_mod=function)


def float8(q, k, v, slopes):
    def function(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    given = (x.bfloat16() for x in (q, k, v))
    return flashtile.attention_fp8(*given, score_mod=function, smooth_k=False, emulate=True)


def recomputed(q, k, v, slopes):
    def layer(q, k, v):
        return flashtile.attention(2 * q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * i)

    return checkpoint(layer, q, k, v, use_reentrant=False)


def with_options(q, k, v, sink, slopes):
    def function(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    options = {"causal": True, "window_size": (5, 0), "softcap": 3.0, "sink": sink}
    return flashtile.attention(q, k, v, score_mod=function, **options)


def slopes():
    return {"slopes": torch.randn(H)}


def table():
    return {"table": torch.randn(H, 7)}


def flat(n):
    q, k, v = torch.randn(3, n + 5, H, D)
    return {"q": q, "k": k, "v": v, "lengths": cu_seqlens([5, n]), "n": n}


CALLS = {
    "by distance": (by_distance, lambda n: dense(n) | table() | slopes()),
    "documents": (
        documents,
        lambda n: dense(n) | {"document": torch.randint(3, (B, 20))} | slopes(),
    ),
    "sizes": (sizes, lambda n: dense(n) | slopes()),
    "sizes, float64": (
        sizes,
        lambda n: dense(n, torch.float64) | {"slopes": torch.randn(H, dtype=torch.float64)},
    ),
    "packed": (packed, lambda n: flat(n) | slopes()),
    "padded": (padded, lambda n: dense(n) | {"used": torch.tensor([3, n]).int()} | slopes()),
    "statistics": (measured, lambda n: dense(n) | slopes()),
    "prepared": (prepared, lambda n: dense(n) | table() | slopes()),
    "16 bits": (half, lambda n: dense(n) | slopes()),
    "float8": (float8, lambda n: dense(n) | slopes()),
    "recomputed": (recomputed, lambda n: dense(n) | slopes()),
    "options": (with_options, lambda n: dense(n) | {"sink": torch.randn(H)} | slopes()),
}


def outputs_and_gradients(function, arguments):
    leaves = {
        name: x.detach().clone().requires_grad_(x.is_floating_point())
        if isinstance(x, torch.Tensor)
        else x
        for name, x in arguments.items()
    }
    results = function(**leaves)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    wanted = [x for x in leaves.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    loss = sum(x.float().sin().sum() for x in results if x.requires_grad)
    return [x.detach() for x in results] + list(torch.autograd.grad(loss, wanted))


def assert_equal(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def compiled_and_count(function, **options):
    counted = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counted, fullgraph=True, **options), counted


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_all_lengths(name):
    function, make = CALLS[name]
    compiled, counted = compiled_and_count(function, dynamic=True)
    graphs = []
    for n in (9, 14):
        call = make(n)
        wanted = outputs_and_gradients(function, call)
        assert all(x.isfinite().all() for x in wanted)
        assert_equal(outputs_and_gradients(compiled, call), wanted)
        graphs.append(counted.frame_count)
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("name", ["by distance", "documents", "packed"])
def test_lengths_that_are_not_dynamic(name):
    function, make = CALLS[name]
    compiled, _ = compiled_and_count(function, dynamic=False)
    for n in (9, 14):
        call = make(n)
        wanted = outputs_and_gradients(function, call)
        assert_equal(outputs_and_gradients(compiled, call), wanted)


def test_a_marked_length():
    compiled, counted = compiled_and_count(sizes)
    for n in (9, 14):
        call = dense(n) | slopes()
        for name in "qkv":
            torch._dynamo.mark_dynamic(call[name], 1)
        assert_equal(compiled(**call), sizes(**call))
    assert counted.frame_count == 1


@pytest.mark.parametrize("is_paged", [False, True])
def test_cache(is_paged):
    def function(q, k_cache, v_cache, k, v, lengths, pages, slopes):
        def alibi(score, b, h, i, j):
            return score - slopes[h] * (lengths[b] + i - j)

        options = {"cache_seqlens": lengths, "page_table": pages, "causal": True}
        return flashtile.attention_with_kvcache(
            q, k_cache, v_cache, k, v, score_mod=alibi, **options
        )

    compiled, _ = compiled_and_count(function, dynamic=True)
    for n in (2, 5):
        q, k, v = torch.randn(3, B, n, H, D)
        caches = torch.randn(2, *((8, 8) if is_paged else (B, 32)), H, D)
        pages = torch.arange(8, dtype=torch.int32).view(B, 4) if is_paged else None
        others = (k, v, torch.tensor([3, 11], dtype=torch.int32), pages, torch.randn(H))
        mine, other = caches.clone(), caches.clone()
        assert_equal(compiled(q, *mine, *others), function(q, *other, *others))
        assert_equal(mine, other)


def test_a_block_mask_from_outside():
    masks = {
        n: BlockMask.from_function(lambda b, h, i, j: (i >= j) | (j < 3), (n, n), tile_size=(8, 8))
        for n in (9, 14)
    }

    def function(q, k, v, slopes, mask):
        def bent(score, b, h, i, j):
            return score + slopes[h] * (j - i)

        return flashtile.attention(q, k, v, score_mod=bent, block_mask=mask)

    compiled, _ = compiled_and_count(function)
    for n, mask in masks.items():
        call = dense(n) | slopes()
        wanted = outputs_and_gradients(functools.partial(function, mask=mask), call)
        got = outputs_and_gradients(functools.partial(compiled, mask=mask), call)
        assert_equal(got, wanted)


def test_under_autocast():
    compiled, _ = compiled_and_count(prepared)
    call = dense(9) | table() | slopes()
    with torch.autocast("cpu"):
        assert_equal(compiled(**call), prepared(**call))


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler, g++")
def test_inductor():
    compiled = torch.compile(by_distance, fullgraph=True, dynamic=True)
    for n in (9, 14):
        call = dense(n) | table() | slopes()
        got, wanted = (outputs_and_gradients(f, call) for f in (compiled, by_distance))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, slopes):
            last = q.shape[1] - 1 if strict else 0  # without `strict` a size would be a constant

            def function(score, b, h, i, j):
                return score + slopes[h] * (last - j)

            return flashtile.attention(q, k, v, score_mod=function)

    length = torch.export.Dim("length", min=3, max=64)
    given = [tuple((dense(n) | slopes()).values()) for n in (9, 14)]
    shapes = ({1: length}, {1: length}, {1: length}, None)
    program = torch.export.export(Module(), given[0], dynamic_shapes=shapes, strict=strict)
    assert any("flashtile" in str(node.target) for node in program.graph.nodes)
    assert_equal(program.module()(*given[1]), Module()(*given[1]))


# Each of these changes something that a function depends on and calls again. A call gets the
# function, so that the same graph may serve all of them or not.

FACTOR = 1.0
CAPTURED = torch.zeros(H)


def of_globals(score, b, h, i, j):
    return score * FACTOR + CAPTURED[h]


def twice(score):
    return score * 2


def thrice(score):
    return score * 3


inner = twice


def of_a_function(score, b, h, i, j):
    return inner(score)


def changes_globals(monkeypatch):
    yield of_globals
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    yield of_globals
    monkeypatch.setitem(globals(), "CAPTURED", torch.randn(H))
    yield of_globals
    CAPTURED.mul_(3)
    yield of_globals
    yield of_a_function
    monkeypatch.setitem(globals(), "inner", thrice)
    yield of_a_function


def changes_a_closure(monkeypatch):
    factor, captured = 0.5, torch.randn(H)

    def function(score, b, h, i, j):
        return score * factor + captured[h]

    for factor in (0.5, 0.75, 2, 3):  # noqa: B007  # read by the function
        yield function
    captured = torch.randn(H)
    yield function
    captured.mul_(2)
    yield function
    captured = torch.arange(H)
    yield function
    captured = torch.randn(H + 1, dtype=torch.bfloat16)
    yield function


def makes_closures(monkeypatch):
    def made(factor, captured):
        return lambda score, b, h, i, j: score * factor + captured[h]

    for factor in (0.5, 0.75, 1, 2, True):
        yield made(factor, torch.randn(H))


def changes_defaults(monkeypatch):
    def function(score, b, h, i, j, factor=0.5, *, other=1.0):
        return score * factor + other * i

    yield function
    function.__defaults__ = (0.25,)
    yield function
    function.__kwdefaults__ = {"other": 2.0}
    yield function

    def with_arguments(score, b, h, i, j, factor, captured):
        return score * factor + captured[h]

    for factor in (0.5, 1.5, 2):
        yield functools.partial(with_arguments, factor=factor, captured=torch.randn(H))


def changes_the_code(monkeypatch):
    def function(score, b, h, i, j):
        return score * 2

    def other(score, b, h, i, j):
        return score * 3

    yield from (function, other, function)
    function.__code__ = other.__code__
    yield function
    yield None
    yield function


def changes_a_module(monkeypatch):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("captured", torch.randn(H))
            self.weight = torch.nn.Parameter(torch.randn(H))
            self.factor, self.numbers = 0.5, [1.0, {"other": 2}]

        def forward(self, score, b, h, i, j):
            score = score * self.factor + self.captured[h] + self.weight[h] * self.numbers[0]
            return score + self.numbers[1]["other"] * j

    module = Module()
    yield module
    yield module.forward
    module.factor = 0.75
    yield module
    module.captured = torch.randn(H)
    yield module
    module.captured.mul_(2)
    yield module
    with torch.no_grad():
        module.weight.mul_(2)
    yield module
    module.numbers[0] = 3.0
    yield module
    module.numbers[1]["other"] = 5
    yield module
    module.weight = torch.nn.Parameter(torch.randn(H))
    yield module


def changes_the_state_of_pytorch(monkeypatch):
    def function(score, b, h, i, j):
        return score + (i * 0.1 + j / 3).sin()

    yield function
    torch.set_default_dtype(torch.float64)
    try:
        yield function
    finally:
        torch.set_default_dtype(torch.float32)
    yield function


def changes_what_needs_a_gradient(monkeypatch):
    captured = torch.randn(H)

    def function(score, b, h, i, j):
        return score + captured[h]

    yield function
    captured.requires_grad_()
    yield function
    captured.requires_grad_(False)
    yield function


CHANGES = [
    changes_globals, changes_a_closure, makes_closures, changes_defaults, changes_the_code,
    changes_a_module, changes_the_state_of_pytorch, changes_what_needs_a_gradient,
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda f: f.__name__)
@torch._dynamo.config.patch(recompile_limit=32)
def test_a_change_is_seen(changes, dynamic, monkeypatch):
    q, k, v = dense(7).values()
    call = functools.partial(flashtile.attention, q, k, v)
    compiled, _ = compiled_and_count(lambda function: call(score_mod=function), dynamic=dynamic)
    monkeypatch.setitem(globals(), "CAPTURED", torch.randn(H))
    seen = []
    for function in changes(monkeypatch):
        wanted, got = call(score_mod=function), compiled(function)
        assert_equal(got, wanted)
        assert got.requires_grad == wanted.requires_grad
        seen.append(wanted)
    assert any(not x.equal(seen[0]) for x in seen[1:]) or changes is changes_what_needs_a_gradient


def test_new_values_in_captured_tensors_need_no_new_graph():
    """Not baked in, and with gradients of each tensor that was captured."""

    def layer(q, k, v, captured):
        return flashtile.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * captured[h])

    compiled, counted = compiled_and_count(layer)
    for _ in range(3):
        call = dense(9) | {"captured": torch.randn(H)}
        wanted = outputs_and_gradients(layer, call)
        assert_equal(outputs_and_gradients(compiled, call), wanted)
    assert counted.frame_count == 1


def test_gradients_of_a_module_that_has_the_function():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(H, 9))
            self.register_buffer("scale", torch.rand(H))

        def score(self, score, b, h, i, j):
            return score * self.scale[h] + self.weight[h, j]

        def forward(self, q, k, v):
            return flashtile.attention(q, k, v, score_mod=self.score)

    layer = Layer()
    compiled, _ = compiled_and_count(layer)
    given = dense(9).values()
    results = []
    for call in (compiled, layer.forward):
        out = call(*given)
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), layer.weight)])
    assert_equal(*results)


def test_a_window_is_still_recognised():
    """The graph has the window in place of the function."""

    def local(score, b, h, i, j):
        return torch.where((i >= j) & (i - j <= 3), score, HIDDEN)

    operands = []

    def record(graph, inputs):
        nodes = (node for node in graph.graph.nodes if "attention_forward" in str(node.target))
        operands.extend(node.args for node in nodes)
        return graph

    def call(q, k, v):
        return flashtile.attention(q, k, v, score_mod=local)

    given = dense(9)
    compiled = torch.compile(call, backend=record, fullgraph=True, dynamic=False)
    assert_equal(compiled(**given), call(**given))
    options = Options(*operands[0][len(Operands._fields) :])
    assert (options.score_mod, options.window_left, options.window_right) == ("", 3, 0)


def reads_a_value(score, b, h, i, j):
    return score if i > j else -score


def reads_an_item(score, b, h, i, j):
    return score * i.item()


def draws(score, b, h, i, j):
    return score + torch.rand(())


def writes(score, b, h, i, j):
    CAPTURED.add_(1)
    return score + CAPTURED[h]


def is_a_row(score, b, h, i, j):
    return score + CAPTURED


def is_an_index(score, b, h, i, j):
    return i


def is_a_pair(score, b, h, i, j):
    return score, score


def has_a_slice(score, b, h, i, j):
    return score + CAPTURED.expand(3, H)[:, h].sum()


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (reads_a_value, "branching"),
        (reads_an_item, "a number that has been read from a tensor"),
        (draws, "draws random numbers"),
        (writes, "changes a captured tensor"),
        (is_a_row, r"a result of shape \(4,\)"),
        (is_an_index, "a result of dtype torch.int64"),
        (is_a_pair, "a result of type tuple"),
        (has_a_slice, r"the index \[slice"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_cannot_be_traced_is_refused(function, named):
    """By name with `fullgraph`; otherwise the graph ends and the call raises its own error."""
    call = functools.partial(flashtile.attention, *dense(7).values(), score_mod=function)
    before = CAPTURED.clone()
    with pytest.raises(RuntimeError, match=named):
        torch.compile(call, backend="aot_eager", fullgraph=True)()
    with pytest.raises((NotImplementedError, TypeError, ValueError)) as eager:
        call()
    torch._dynamo.reset()
    with pytest.raises(eager.type) as ended:
        torch.compile(lambda: call() * 2, backend="aot_eager")()
    assert str(ended.value) == str(eager.value)
    assert_equal(CAPTURED, before)


calls = []


def counts(score, b, h, i, j):
    calls.append(1)
    return score * 2


def ends_the_graph(score, b, h, i, j):
    torch._dynamo.graph_break()
    return score * 2


@pytest.mark.parametrize("function", [counts, ends_the_graph])
def test_what_only_flashtile_can_trace_ends_the_graph(function):
    call = functools.partial(flashtile.attention, *dense(7).values())
    compiled = torch.compile(lambda f: 2 * call(score_mod=f), backend="aot_eager")
    for _ in range(2):
        assert_equal(compiled(function), 2 * call(score_mod=function))
    with pytest.raises(RuntimeError):
        torch.compile(lambda f: call(score_mod=f), fullgraph=True)(function)


def test_a_number_that_was_read_from_a_tensor():
    """A graph may have such numbers; then it may not be right for one value only."""

    def layer(q, k, v, length):
        n = length.item()
        return flashtile.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (n - j))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled, _ = compiled_and_count(layer)
        for n in (3, 5, 4):
            call = dense(7) | {"length": torch.tensor(n)}
            assert_equal(compiled(**call), layer(**call))
