"""Statistics that calls return beside their results, against the definition of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import Statistics, attention, attention_varlen, attention_with_kvcache
from flashtile.testing import assert_close, attention_reference, generator, normal

ALL = Statistics._fields
B, M, N, Hq, Hk, D = 2, 270, 283, 4, 2, 16  # more than one tile of queries and of keys


def inputs(*needing_grad: str) -> tuple[Tensor, Tensor, Tensor]:
    g = generator(7)
    shapes = {"q": (B, M, Hq, D), "k": (B, N, Hk, D), "v": (B, N, Hk, D)}
    made = {name: normal(g, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    for name in needing_grad:
        made[name].requires_grad_()
    return made["q"], made["k"], made["v"]


def definition(
    q: Tensor, k: Tensor, softcap: float = 0.0, sink: Tensor | None = None, bias: Any = 0
):
    """The statistics of causal attention, from all of its scores."""
    S = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(Hq // Hk, 2)) / D**0.5
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    hidden = torch.arange(N) > torch.arange(M)[:, None] + N - M
    hidden = hidden | (torch.as_tensor(bias) == -torch.inf)
    largest = S.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    S = (S + bias).masked_fill(hidden, -torch.inf)
    if sink is not None:
        S = torch.cat((sink.view(1, -1, 1, 1).expand(B, Hq, M, 1), S), -1)
    P = S.softmax(-1)
    H = -(P * torch.where(P > 0, P, 1.0).log()).sum(-1)
    return Statistics(largest, H, P[..., S.shape[-1] - N :].sum(2))


def assert_same(found: Statistics, wanted: Statistics) -> None:
    for name, x, want in zip(ALL, found, wanted, strict=True):
        torch.testing.assert_close(x, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sink": True}, {"bias": True}], ids=str)
def test_definition_and_gradient_of_entropy(options) -> None:
    q, k, v = inputs("q", "k")
    leaves, g = [q, k], generator(8)
    if "sink" in options:
        options = {"sink": normal(g, Hq, dtype=torch.float64).requires_grad_()}
        leaves.append(options["sink"])
    if "bias" in options:
        bias = normal(g, B, Hq, M, N, dtype=torch.float64)
        bias[..., :3] = -torch.inf
        options = {"bias": bias.requires_grad_()}
        leaves.append(bias)
    out, found = attention(q, k, v, causal=True, **options, return_stats=ALL)
    torch.testing.assert_close(out, attention(q, k, v, causal=True, **options))
    wanted = definition(q, k, **options)
    assert_same(found, wanted)
    dH = normal(g, B, Hq, M, dtype=torch.float64)
    gradients = (torch.autograd.grad(x.entropy, leaves, dH) for x in (found, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num())
    assert not found.max_logit.requires_grad and not found.column_sum.requires_grad


def test_a_loss_of_output_and_entropy() -> None:
    """The gradients of both uses of the operands add up."""
    q, k, v = inputs("q", "k", "v")
    out, lse, found = attention(q, k, v, causal=True, return_lse=True, return_stats=("entropy",))
    total = out.sum() + lse.sum() + 0.3 * found.entropy.sum()
    apart = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), retain_graph=True)
    of_entropy = torch.autograd.grad(found.entropy.sum(), (q, k), retain_graph=True)
    together = torch.autograd.grad(total, (q, k, v))
    for whole, part, extra in zip(together, apart, (*of_entropy, 0.0), strict=True):
        torch.testing.assert_close(whole, part + 0.3 * extra)


def test_packed_and_padded() -> None:
    q, k, v = inputs()
    wanted = definition(q, k)
    lengths = [torch.arange(B + 1, dtype=torch.int32) * n for n in (M, N)]
    packed = (x.flatten(0, 1) for x in (q, k, v))
    *_, found = attention_varlen(*packed, *lengths, M, N, causal=True, return_stats=ALL)
    unpacked = Statistics(
        found.max_logit,
        found.entropy.unflatten(1, (B, M)).transpose(0, 1),
        found.column_sum.unflatten(1, (B, N)).transpose(0, 1),
    )
    assert_same(unpacked, wanted)
    used = torch.full((B,), N, dtype=torch.int32)
    *_, found = attention_varlen(q, k, v, seqused_k=used, causal=True, return_stats=ALL)
    assert_same(found, wanted)


@pytest.mark.parametrize("page_size", [None, 16])
def test_cache(page_size) -> None:
    """After the append; slots that hold nothing have no part in it."""
    q, k, v = inputs()
    slots = 320
    caches = [torch.full((B, slots, Hk, D), 9.0, dtype=torch.float64) for _ in range(2)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:, :13] = x[:, :13]
    table = None
    if page_size is not None:
        table = torch.arange(B * slots // page_size, dtype=torch.int32).flip(0).view(B, -1)
        caches = [x.view(-1, page_size, Hk, D).flip(0) for x in caches]
    _, found = attention_with_kvcache(
        q, *caches, k[:, 13:], v[:, 13:], cache_seqlens=torch.full((B,), 13, dtype=torch.int32),
        page_table=table, causal=True, return_stats=ALL,
    )  # fmt: skip
    assert found.column_sum.shape == (B, Hq, slots) and (found.column_sum[..., N:] == 0).all()
    assert_same(found._replace(column_sum=found.column_sum[..., :N]), definition(q, k))


def test_rows_and_keys_that_see_nothing() -> None:
    q, k, v = inputs("q")
    _, found = attention(q, k[:, :5], v[:, :5], causal=True, return_stats=ALL)
    dead = M - 5
    assert (found.entropy[..., :dead] == 0).all() and (found.entropy[..., dead] == 0).all()
    assert torch.autograd.grad(found.entropy.sum(), q)[0][:, :dead].abs().max() == 0
    _, found = attention(q, k[:, :0], v[:, :0], return_stats=ALL)
    assert (found.max_logit == -torch.inf).all() and (found.entropy == 0).all()
    assert found.column_sum.shape == (B, Hq, 0)


def with_gradients(leaves: list[Tensor], out: Tensor, lse: Tensor, entropy: Any) -> list[Tensor]:
    """The output, and the gradients of a loss that reads all that has one."""
    total = sum(x.double().square().sum() for x in (out, entropy) if x is not None)
    return [out, *torch.autograd.grad(total + lse.double().sum(), leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("names", [ALL, ("column_sum",)], ids=["all", "columns"])
def test_on_a_gpu(dtype, names, seed: int) -> None:
    """By the rule, with the backends of the device."""
    given = [x.to(dtype) for x in inputs()]

    def by_definition(compute_dtype: torch.dtype) -> tuple[list[Tensor], Statistics]:
        leaves = [x.to(compute_dtype).requires_grad_() for x in given]
        result = attention_reference(*leaves, causal=True, compute_dtype=compute_dtype)
        stats = definition(*leaves[:2])
        entropy = stats.entropy if "entropy" in names else None
        return with_gradients(leaves, result.out, result.lse, entropy), stats

    leaves = [x.cuda().requires_grad_() for x in given]
    out, lse, stats = attention(*leaves, causal=True, return_lse=True, return_stats=names)
    found = with_gradients(leaves, out, lse, stats.entropy)
    (truth, wanted), (plain, _) = by_definition(torch.float64), by_definition(dtype)
    for name, *results in zip(("out", "dq", "dk", "dv"), found, truth, plain, strict=True):
        assert_close(name, *(x.detach().cpu() for x in results), dtype=dtype, seed=seed)
    for name, x, want in zip(ALL, stats, wanted, strict=True):
        assert (x is not None) == (name in names)
        if x is not None:  # sums are exact in float32
            torch.testing.assert_close(x.double().cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    q, k, v = (x.to("cuda", torch.bfloat16) for x in inputs())
    attention(q, k, v, causal=True, return_stats=ALL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, found = attention(q, k, v, causal=True, return_stats=ALL)
    q.mul_(0.5)
    graph.replay()
    assert_same(found, attention(q, k, v, causal=True, return_stats=ALL)[1])


def test_compiled() -> None:
    q, k, v = inputs("q", "k")

    def call(q: Tensor, k: Tensor) -> Statistics:
        return attention(q, k, v, causal=True, return_stats=ALL)[-1]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(q, k), call(q, k)
    assert_same(found, wanted)
    gradients = (torch.autograd.grad(x.entropy.sum(), (q, k)) for x in (found, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_statistic() -> None:
    q, k, v = inputs()
    _, found = attention(q, k, v, causal=True, return_stats=["column_sum"])
    assert found.max_logit is None and found.entropy is None
    torch.testing.assert_close(found.column_sum, definition(q, k).column_sum)
    assert attention(q, k, v, return_stats=frozenset())[1] == Statistics()


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("entropy", TypeError, "return_stats: got 'entropy', want a tuple of some of"),
        (("entropi",), ValueError, "return_stats: got 'entropi', want some of 'max_logit'"),
        (True, TypeError, "return_stats: got True, want a tuple of some of"),
    ],
)
def test_bad_names(names, error, message) -> None:
    with pytest.raises(error, match=message):
        attention(*inputs(), return_stats=names)


def test_what_has_no_derivative() -> None:
    """What would silently be a constant raises."""
    q, k, v = inputs("q")
    _, found = attention(q, k, v, return_stats=ALL)
    with pytest.raises(NotImplementedError, match="the entropy can be differentiated only once"):
        torch.autograd.grad(found.entropy.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.column_sum.sum().backward()

    def entropy(q: Tensor) -> Tensor:
        return attention(q, k, v, return_stats=("entropy",))[1].entropy

    q = q.detach()
    for transformed in (
        lambda: torch.func.jvp(entropy, (q,), (q,)),
        lambda: torch.func.grad(lambda x: entropy(x).sum())(q),
    ):
        with pytest.raises(NotImplementedError, match="return_stats: got a call inside a trans"):
            transformed()


def test_nothing_is_appended_under_a_transform() -> None:
    q, k, v = inputs()
    caches = [torch.zeros(B, 320, Hk, D, dtype=torch.float64) for _ in range(2)]

    def step(q: Tensor) -> Tensor:
        new = k[:, :5], v[:, :5]
        return attention_with_kvcache(q, *caches, *new, cache_seqlens=13, return_stats=ALL)[0].sum()

    with pytest.raises(NotImplementedError, match="return_stats: got a call inside a trans"):
        torch.func.grad(step)(q)
    assert all((x == 0).all() for x in caches)


def test_what_has_no_statistics() -> None:
    q, k, v = inputs()
    caches = [torch.zeros(B, 64, Hk, D, dtype=torch.float64) for _ in range(2)]
    before = [x.clone() for x in caches]
    given = {"cache_seqlens": 13, "shared_prefix_len": 8, "return_stats": ALL}
    with pytest.raises(NotImplementedError, match="return_stats: cannot be combined with shared"):
        attention_with_kvcache(q, *caches, k[:, :5], v[:, :5], **given)
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))
    with pytest.raises(NotImplementedError, match="return_stats: got batch_invariant=True"):
        attention(q, k, v, batch_invariant=True, return_stats=ALL)
    x = flashtile.quantize_qkv(*(t.float() for t in inputs()))
    with pytest.raises(NotImplementedError, match="return_stats: got keys in float8"):
        attention(*x[:3], return_stats=ALL)
