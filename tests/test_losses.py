"""The losses against their formulas in float64, and their gradients against PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from flashtile.losses.cross_entropy import CrossEntropyLoss, linear_cross_entropy

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"lse_square_scale": 0.01},
    "all": {
        "label_smoothing": 0.2,
        "lse_square_scale": 0.01,
        "logit_scale": 0.5,
        "ignore_index": 3,
    },
}
EVERY_OPTION = pytest.mark.parametrize("name", OPTIONS)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum"])


def by_hand(logits, target, reduction, **options):
    """The loss a token at a time, and the z-loss in it."""
    smoothing, scale = options.get("label_smoothing", 0.0), options.get("lse_square_scale", 0.0)
    losses, z_losses = [], []
    for row, t in zip(logits * options.get("logit_scale", 1.0), target.tolist(), strict=True):
        if t == options.get("ignore_index", -100):
            continue
        lse = row.exp().sum().log()
        z_losses.append(scale * lse**2)
        losses.append(
            (1 - smoothing) * (lse - row[t]) + smoothing * (lse - row.mean()) + z_losses[-1]
        )
    count = len(losses) if reduction == "mean" else 1
    return sum(losses) / count, sum(z_losses) / count


def inputs(vocab=11, tokens=17, ignored=-100):
    logits = 3 * torch.randn(tokens, vocab, dtype=torch.float64)
    target = torch.randint(0, vocab, (tokens,))
    target[::5] = ignored
    return logits.requires_grad_(), target


@EVERY_OPTION
@REDUCTIONS
def test_loss(name, reduction, seed):
    options = OPTIONS[name]
    logits, target = inputs(ignored=options.get("ignore_index", -100))
    loss_fn = CrossEntropyLoss(reduction=reduction, return_z_loss=True, **options)
    loss, z_loss = loss_fn(logits, target)
    want, want_z = by_hand(logits, target, reduction, **options)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(z_loss, torch.as_tensor(want_z, dtype=torch.float64))
    assert not z_loss.requires_grad
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(want, logits))


def test_loss_of_each_token(seed):
    logits, target = inputs(tokens=12)
    losses = CrossEntropyLoss(reduction="none", lse_square_scale=0.1)(
        logits.view(3, 4, 11), target.view(3, 4)
    )
    assert losses.shape == (3, 4)
    assert not losses[target.view(3, 4) == -100].any()
    total, _ = by_hand(logits, target, "sum", lse_square_scale=0.1)
    torch.testing.assert_close(losses.sum(), total)


def test_sixteen_bit_logits_are_added_up_in_float32(seed):
    logits, target = torch.randn(8, 5000, dtype=torch.bfloat16), torch.arange(8)
    loss = CrossEntropyLoss()(logits, target)
    assert loss.dtype == torch.float32
    want = F.cross_entropy(logits.double(), target)
    assert abs(loss.item() - want.item()) < 1e-5


@EVERY_OPTION
@REDUCTIONS
@pytest.mark.parametrize("chunk_tokens", [1, 5, 17, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_make_no_difference(name, reduction, chunk_tokens, with_bias, seed):
    options = OPTIONS[name]
    _, target = inputs(ignored=options.get("ignore_index", -100))
    loss_fn = CrossEntropyLoss(reduction=reduction, **options)
    hidden = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True) if with_bias else None
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    got = linear_cross_entropy(
        hidden, weight, target, loss_fn, bias=bias, chunk_tokens=chunk_tokens
    )
    want = loss_fn(F.linear(hidden, weight, bias), target)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(3 * got, leaves), torch.autograd.grad(3 * want, leaves)
    )
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, target, loss_fn, bias=bias)
    torch.testing.assert_close(without, want.detach())


def test_no_token_counts():
    """As in PyTorch, the mean of no elements is NaN and the sum is 0."""
    hidden, weight = torch.randn(3, 4), torch.randn(9, 4)
    target = torch.full((3,), -100)
    assert math.isnan(linear_cross_entropy(hidden, weight, target))
    assert math.isnan(CrossEntropyLoss()(hidden @ weight.t(), target))
    total = CrossEntropyLoss(reduction="sum")
    assert linear_cross_entropy(hidden, weight, target, total) == 0


def test_autocast(seed):
    hidden = torch.randn(2, 40, 16, requires_grad=True)
    weight = torch.randn(300, 16, requires_grad=True)
    target = torch.randint(0, 300, (2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, target, chunk_tokens=16)
        want = F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), target.flatten())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)
    gradients = torch.autograd.grad(got, (hidden, weight))
    truths = torch.autograd.grad(want, (hidden, weight))
    for gradient, truth in zip(gradients, truths, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, truth, rtol=2e-2, atol=2e-2 * truth.abs().max().item())


def test_memory_is_that_of_a_chunk(seed):
    """No tensor of all tokens times the vocabulary is made, forward or backward."""
    tokens, vocab, largest = 512, 3000, 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    with Largest():
        target = torch.randint(0, vocab, (tokens,))
        linear_cross_entropy(hidden, weight, target, chunk_tokens=32).backward()
    assert largest == 32 * vocab


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reduction": "average"}, "reduction: got 'average'"),
        ({"label_smoothing": 1.0}, "label_smoothing: got 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing: got -0.1"),
        ({"lse_square_scale": -1.0}, "lse_square_scale: must not be negative"),
    ],
)
def test_bad_options(arguments, words):
    with pytest.raises(ValueError, match=words):
        CrossEntropyLoss(**arguments)


def test_bad_calls():
    hidden, weight, target = torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.long)
    for loss in (CrossEntropyLoss(reduction="none"), CrossEntropyLoss(return_z_loss=True)):
        with pytest.raises(ValueError, match="want a loss that returns one number"):
            linear_cross_entropy(hidden, weight, target, loss)
    with pytest.raises(ValueError, match=r"target: expected shape \(4,\), got \(3,\)"):
        linear_cross_entropy(hidden, weight, target[:3])
    with pytest.raises(ValueError, match="chunk_tokens: must be positive"):
        linear_cross_entropy(hidden, weight, target, chunk_tokens=0)
