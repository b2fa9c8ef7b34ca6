"""Steps of `context_worker`: DTensors, and a step of training with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import flashtile
from flashtile.distributed import ContextParallel, Layout, global_mean


def dtensors(rank: int, world: int) -> None:
    """Tokens over one dimension of a mesh, heads over the other one."""
    by_heads = 2 if world == 4 else 1
    mesh = init_device_mesh("cpu", (world // by_heads, by_heads), mesh_dim_names=("cp", "tp"))
    context = ContextParallel(mesh["cp"])
    layout = context.layout(batch=2, seq_len=50, grain=4)
    torch.manual_seed(5)
    whole = [torch.randn(2, 50, heads, 8, dtype=torch.float64) for heads in (8, 4, 4)]
    placements = [Shard(1), Shard(2)]

    def placed(x: Tensor) -> DTensor:
        local = layout.shard(x).chunk(by_heads, 2)[mesh["tp"].get_local_rank()].contiguous()
        return DTensor.from_local(local, mesh, placements).requires_grad_()

    def gathered(x: Tensor | None) -> Tensor:
        assert isinstance(x, DTensor)
        return layout.unshard(x.redistribute(placements=[Shard(1), Replicate()]).to_local())

    qkv = [placed(x) for x in whole]
    out, lse = context.attention(*qkv, layout, causal=True, return_lse=True)
    assert list(out.placements) == placements
    assert list(lse.placements) == [Shard(2), Shard(1)]
    out.sin().sum().backward()
    leaves = [x.clone().requires_grad_() for x in whole]
    want = flashtile.attention(*leaves, causal=True)
    want.sin().sum().backward()
    torch.testing.assert_close(gathered(out), want)
    for x, leaf in zip(qkv, leaves, strict=True):
        torch.testing.assert_close(gathered(x.grad), leaf.grad)
    refused_placements(context, layout, [x.detach() for x in qkv])
    if world != 4:  # compiling takes seconds
        return
    torch._dynamo.reset()
    graph = torch.compile(
        lambda q, k, v: context.attention(q * 1, k * 1, v * 1, layout, causal=True),
        fullgraph=True,
        backend="aot_eager",
    )
    again = [x.detach().requires_grad_() for x in qkv]
    compiled = graph(*again)
    assert list(compiled.placements) == placements
    compiled.sin().sum().backward()
    torch.testing.assert_close(compiled.to_local(), out.to_local())
    for x, y in zip(again, qkv, strict=True):
        torch.testing.assert_close(x.grad.to_local(), y.grad.to_local())


def refused_placements(context: ContextParallel, layout: Layout, qkv: list[Any]) -> None:
    """What is not sharded as the layout says raises."""
    q, k, v = qkv
    mesh, local = q.device_mesh, q.to_local()
    with pytest.raises(TypeError, match="v: got a plain tensor, want a DTensor"):
        context.attention(q, k, v.to_local(), layout)
    with pytest.raises(TypeError, match="sink: got a DTensor, want this rank's own values"):
        context.attention(q, k, v, layout, sink=q)
    for placement in (Partial(), Shard(3)):
        x = DTensor.from_local(local, mesh, [Shard(1), placement])
        with pytest.raises(ValueError, match="want Replicate, or Shard of the tokens"):
            context.attention(x, x, x, layout)
    x = DTensor.from_local(local, mesh, [Replicate(), Replicate()], run_check=False)
    with pytest.raises(ValueError, match=r"q: got tokens sharded over the ranks \(\d,\), want"):
        context.attention(x, x, x, layout)
    with pytest.raises(ValueError, match=r"k: got .*, want .*, as q"):
        context.attention(q, x, x, layout)
    with pytest.raises(NotImplementedError, match="dropout_p: got q with"):
        context.attention(q, k, v, layout, dropout_p=0.5)
    with pytest.raises(NotImplementedError, match="score_mod: got q with"):
        context.attention(q, k, v, layout, score_mod=lambda s, b, h, i, j: s + h)


class Block(nn.Module):
    """An attention layer and a loss for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.double()

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3)
        return self.out(attend(q, k, v).flatten(-2)).square().sum(-1)


def a_step_of_fsdp(rank: int, world: int) -> None:
    """With FSDP2 over data times context, parameters after a step are those of one process."""
    groups = 2 if world == 4 else 1
    mesh = init_device_mesh("cpu", (groups, world // groups), mesh_dim_names=("data", "context"))
    context = ContextParallel(mesh["context"])
    torch.manual_seed(1)
    model, alone = Block(), Block()
    alone.load_state_dict(model.state_dict())
    documents = [[0, 9, 30, 41], [0, 2, 41]][:groups]
    inputs = [torch.randn(41, 16, dtype=torch.float64) for _ in documents]
    counted = [torch.rand(41) < 0.3 for _ in documents]  # tokens with a loss

    total = torch.zeros((), dtype=torch.float64)
    for cu, x, mask in zip(documents, inputs, counted, strict=True):
        ends = torch.tensor(cu, dtype=torch.int32)

        def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor = ends) -> Tensor:
            return flashtile.attention_varlen(q, k, v, ends, ends, causal=True)

        total = total + alone(x, attend)[mask].sum()
    loss = total / sum(int(mask.sum()) for mask in counted)
    loss.backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()

    everyone = mesh._flatten("everyone")
    fully_shard(model, mesh=everyone)
    mine = mesh["data"].get_local_rank()
    layout = context.layout(documents[mine], grain=4)
    losses = model(
        layout.shard(inputs[mine]), lambda q, k, v: context.attention(q, k, v, layout, causal=True)
    )
    has_loss = layout.shard(counted[mine])  # False for padding
    part = global_mean(losses[has_loss].sum(), has_loss.sum(), everyone)
    part.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    mean = part.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / world, loss.detach())
    for name, x in alone.named_parameters():
        shard = model.get_parameter(name)
        assert isinstance(shard, DTensor)
        torch.testing.assert_close(shard.full_tensor(), x.detach())
    assert global_mean(losses.detach().sum() * 0, 0) == 0
    of_context = global_mean(torch.tensor(1.0), 1, averaged_over=mesh["context"])
    assert of_context == 1 / groups
