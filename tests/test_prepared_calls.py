"""A backend prepares calls that are made often: when, and for which tensors."""

from __future__ import annotations

import pytest
import torch

from flashtile import autograd
from flashtile.backend_interface import PreparedBackward, PreparedForward
from flashtile.backends import cpu
from flashtile.problem import AttentionProblem, Operands, Options


def qkv():
    """q of five tokens, k and v of seven."""
    return [torch.randn(1, tokens, 2, 8) for tokens in (5, 7, 7)]


def test_a_forward_is_prepared_once_when_it_occurs_often():
    made = []

    class Backend:
        def forward(self, problem, operands):
            made.append("forward")
            return operands

        def prepared_forward(self, problem, operands):
            made.append("prepared")
            return lambda operands: made.append("run") or operands

    options = Options(5, 7, 1.0, backend="cpu")
    problem = AttentionProblem.of(Operands(*qkv()), options)
    forward = PreparedForward(problem, Backend())
    for _ in range(5):
        operands = Operands(*qkv())
        assert all(x is y for x, y in zip(forward.run(operands), operands, strict=True))
    assert made == ["forward", "forward", "forward", "prepared", "run", "run"]


def test_a_forward_that_cannot_be_prepared_runs_as_any_other(monkeypatch):
    problem = AttentionProblem.of(Operands(*qkv()), Options(5, 7, 1.0, backend="cpu"))
    asked = []
    monkeypatch.setattr(cpu, "prepared_forward", lambda *call: asked.append(call))
    forward = PreparedForward(problem, cpu)
    for _ in range(6):
        operands = Operands(*qkv())
        wanted = cpu.forward(problem, operands)
        assert all(map(torch.equal, forward.run(operands), wanted))
    assert len(asked) == 1


def test_a_prepared_call_saves_the_state_of_its_dropout():
    """Which is no argument of the call, so nothing else of the call tells that it is there."""
    options = Options(5, 7, 1.0, dropout_p=0.5, backend="cpu")
    leaves = [x.requires_grad_() for x in qkv()]
    operands = Operands(*leaves, rng_state=torch.tensor([3, 5]))
    problem = AttentionProblem.of(operands, options)
    forward = PreparedForward(problem, cpu)

    def gradients(forward):
        out, _ = autograd.attend(problem, operands, forward, wants_lse=False)
        return torch.autograd.grad(out.sum(), leaves)

    wanted = gradients(None)
    for _ in range(5):
        assert all(map(torch.equal, gradients(forward), wanted))


class WritesDown:
    """A backend that writes down what it is asked for; it cannot prepare calls with a dlse."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def backward(self, problem, operands, out, lse, dout, dlse):
        self.made.append("backward")
        return operands

    def prepared_backward(self, problem, tensors):
        self.made.append("prepared")
        if tensors[-1] is not None:
            return None
        return lambda tensors: self.made.append("run") or Operands(*tensors[:-4])


@pytest.fixture
def prepared_backward():
    """A backward of `WritesDown`, and a function that calls it."""
    backend = WritesDown()
    problem = AttentionProblem.of(Operands(*qkv()), Options(5, 7, 1.0, backend="cpu"))
    backward = PreparedBackward(problem, backend)

    def call(dout, dlse=None):
        operands = Operands(*qkv())
        wanted = [x for x in operands if x is not None]
        backend.made.clear()
        tensors = (*operands, torch.empty(2), torch.empty(2), dout, dlse)
        got = backward(tensors, tuple(x for x in tensors if x is not None))
        assert all(x is y for x, y in zip(got, wanted, strict=False))
        return backend.made

    return call


def test_a_backward_is_prepared_for_the_strides_and_alignment_of_its_gradient(prepared_backward):
    """The second call of a kind in a row prepares it."""
    x, wide = torch.empty(4, 8), torch.empty(4, 16)[:, :8]
    later = torch.empty(40)[1:33].view(4, 8)
    for other in (x, wide, later, x):
        assert prepared_backward(other) == ["backward"]
        assert prepared_backward(other) == ["backward", "prepared"]
        for _ in range(3):
            assert prepared_backward(other) == ["run"]
    assert prepared_backward(x, torch.empty(3)) == ["backward"]
    assert prepared_backward(torch.empty(4, 8)) == ["run"]


def test_a_backward_that_cannot_be_prepared_is_not_always_tried_again(prepared_backward):
    x, dlse = torch.empty(4, 8), torch.empty(3)
    tries = [prepared_backward(x, dlse).copy() for _ in range(20)]
    assert tries == [["backward"]] + [["backward", "prepared"]] * 4 + [["backward"]] * 15
