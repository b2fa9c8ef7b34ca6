"""Checkpoints compute again with the same exchanges; derivatives that do not exist raise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashtile.call import dispatch
from flashtile.distributed import ContextParallel, context, executor
from flashtile.problem import AttentionProblem
from flashtile.testing.wires import ThreadCommunicator, run_ranks

WAYS = ({"ulysses": 1, "stages": 1}, {"ulysses": 1, "stages": 2}, {"ulysses": 2})


def inputs(layout: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [layout.shard(torch.randn(1, 64, 4, 8, generator=g)).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("numbers", WAYS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool, numbers: dict[str, int]) -> None:
    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm, **numbers)
        layout = parallel.layout(seq_len=64, grain=4)

        def attend(*qkv: Tensor) -> Tensor:
            return parallel.attention(*qkv, layout, causal=True)

        sent, gradients = [], []
        for call in (attend, lambda *qkv: checkpoint(attend, *qkv, use_reentrant=reentrant)):
            for _ in range(2):  # the first call of a kind sends notes
                leaves, before = inputs(layout), comm.messages
                call(*leaves).sin().sum().backward()
                after = comm.messages
            sent.append(after - before)
            gradients.append([x.grad for x in leaves])
        with torch.no_grad():
            before = comm.messages
            attend(*leaves)
        forward = comm.messages - before
        assert sent[1] == sent[0] + forward
        for plain, again in zip(*gradients, strict=True):
            assert torch.equal(plain, again)

    run_ranks(2, run)


def test_a_generator_that_a_checkpoint_does_not_restore_is_refused() -> None:
    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        parallel.generator = torch.Generator().manual_seed(0)
        layout = parallel.layout(seq_len=64)

        def attend(*qkv: Tensor) -> Tensor:
            return parallel.attention(*qkv, layout, dropout_p=0.5)

        out = checkpoint(attend, *inputs(layout), use_reentrant=False)
        with pytest.raises(NotImplementedError, match=r"generator: got a torch\.Generator"):
            out.sum().backward()

    run_ranks(2, run)


def second_derivative(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    (dq,) = torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)
    dq.square().sum().backward()


def batched_gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    out = attend(q, k, v)
    torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)


def forward_mode(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        attend(dual, k.detach(), v.detach())


def mapped(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    torch.func.vmap(attend)(*(torch.stack([x.detach()] * 2) for x in (q, k, v)))


# The levels of forward mode belong to all threads, so only one rank can enter one.
@pytest.mark.parametrize(
    ("call", "only_rank", "message"),
    [
        (second_derivative, None, "second derivatives need one process"),
        (batched_gradients, None, "is_grads_batched: got True, want False"),
        (forward_mode, 1, "got a forward-mode tangent"),
        (mapped, None, "context parallelism: got a transform of torch.func, such as vmap"),
        (mapped, 1, "context parallelism: got a transform of torch.func, such as vmap"),
    ],
)
@pytest.mark.parametrize("numbers", [WAYS[0], WAYS[2]])
def test_refused_derivatives(
    call: Callable[..., None], message: str, only_rank: int | None, numbers: dict[str, int]
) -> None:
    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm, **numbers)
        layout = parallel.layout(seq_len=64)
        leaves = inputs(layout)
        parallel.attention(*leaves, layout)  # a plain call of the same kind is no permission
        parallel.attention(*(x.detach() for x in leaves), layout)
        refused = only_rank in (None, comm.rank)
        derive = call if refused else (lambda attend, *qkv: attend(*(x.double() for x in qkv)))
        with pytest.raises(NotImplementedError, match=message):
            derive(lambda *qkv: parallel.attention(*qkv, layout), *leaves)

    run_ranks(2, run, timeout=10)


@pytest.mark.parametrize("numbers", WAYS)
def test_the_backend_of_a_backward_has_gradients(
    numbers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's forward can mask packed documents by spans, its backward cannot."""
    asked: list[AttentionProblem] = []
    select = dispatch.select

    def recording(problem: AttentionProblem, name: str | None = None) -> str:
        asked.append(problem)
        return select(problem, name)

    recorded = SimpleNamespace(**vars(dispatch) | {"select": recording, "forced": lambda: None})
    for module in (context, executor):
        monkeypatch.setattr(module, "dispatch", recorded)

    def run(comm: ThreadCommunicator) -> Tensor:
        layout = ContextParallel.over(comm, **numbers).layout(seq_len=64, grain=4)
        out = layout.attend(*inputs(layout))
        assert isinstance(out, Tensor)
        return out

    # The first call of a kind asks whether there is a backend.
    outs = run_ranks(2, run)
    assert {problem.needs_grad for problem in asked} == {True, False}
    asked.clear()

    def differentiate(comm: ThreadCommunicator) -> None:
        outs[comm.rank].sum().backward()

    run_ranks(2, differentiate)
    assert len(asked) > 0
    assert all(problem.needs_grad for problem in asked)
