"""Outside dispatch modes a training call skips the registered ops, with the same results."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile.testing import cu_seqlens, generator, normal, qkv


class Recorder(TorchDispatchMode):
    """Records the names of the ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def inputs(**given):
    """q, k, v and more operands, all with gradients."""
    g = generator(0)
    q, k, v = qkv(g, B=2, M=5, N=7, Hq=4, Hk=2, D=8, dtype=torch.float32)
    more = {"bias": lambda: normal(g, 1, 4, 5, 7), "sink": lambda: normal(g, 4)}
    tensors = [q, k, v, *(more[name]() for name in given if name in more)]
    return [x.requires_grad_() for x in tensors]


def gradients(options, loss, mode=None):
    """Gradients of `loss(out, lse)`; the forward runs under `mode`, if there is one."""
    leaves = inputs(**options)
    extra = dict(zip((n for n in ("bias", "sink") if n in options), leaves[3:], strict=True))
    others = {n: x for n, x in options.items() if n not in extra}
    if mode is None:
        out, lse = flashtile.attention(*leaves[:3], **extra, **others, return_lse=True)
    else:
        with mode:
            out, lse = flashtile.attention(*leaves[:3], **extra, **others, return_lse=True)
    return torch.autograd.grad(loss(out, lse), leaves)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "bias": 1}, {"sink": 1, "softcap": 3.0}, {"bias": 1, "sink": 1}],
    ids=str,
)
@pytest.mark.parametrize(
    "loss",
    [
        lambda out, lse: out.sum(),
        lambda out, lse: lse.sum(),
        lambda out, lse: (out * lse[0, 0, 0]).sum(),
    ],
    ids=["out", "lse", "both"],
)
def test_gradients_are_those_through_the_ops(options, loss):
    recorder = Recorder()
    through_ops = gradients(options, loss, recorder)
    assert "flashtile.attention_forward.default" in recorder.names
    for x, y in zip(gradients(options, loss), through_ops, strict=True):
        assert torch.equal(x, y)


def test_packed_sequences():
    q, k, v = (x.flatten(0, 1).detach().requires_grad_() for x in inputs()[:3])
    cu_q, cu_k = cu_seqlens([5, 5]), cu_seqlens([7, 7])
    found = []
    for mode in (Recorder(), None):
        with mode or torch.enable_grad():
            out = flashtile.attention_varlen(q, k, v, cu_q, cu_k, 5, 7)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_a_dispatch_mode_around_the_backward_sees_its_op():
    q, k, v = inputs()
    out = flashtile.attention(q, k, v)
    with Recorder() as recorder:
        torch.autograd.grad(out.sum(), (q, k, v))
    assert "flashtile.attention_backward.default" in recorder.names


def test_batched_gradients():
    q, k, v = inputs()
    out = flashtile.attention(q, k, v)
    douts = normal(generator(1), 3, *out.shape)
    batched = torch.autograd.grad(out, (q, k, v), douts, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for dout in douts]
    for name, x, parts in zip("qkv", batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(parts), msg=lambda m, name=name: f"{name}: {m}")


def test_only_some_inputs_need_gradients():
    q, k, v = inputs()
    out = flashtile.attention(q, k.detach(), v)
    dq, dv = torch.autograd.grad(out.sum(), (q, v))
    whole = torch.autograd.grad(flashtile.attention(q, k, v).sum(), (q, k, v))
    assert torch.equal(dq, whole[0]) and torch.equal(dv, whole[2])


def test_an_input_changed_in_place_is_noticed():
    q, k, v = inputs()
    out = flashtile.attention(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_on_saved_tensors_see_them():
    q, k, v = inputs()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        out = flashtile.attention(q, k, v)
    out.sum().backward()
    assert {x.data_ptr() for x in (q, k, v)} <= {x.data_ptr() for x in packed}
