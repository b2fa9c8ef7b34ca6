"""The processes of a run and what they share, with Lightning Fabric."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from flashtile.models.gpt import GPTLMHeadModel

from .hugging_face import HuggingFaceGPT2
from .settings import ZERO, TrainerSettings


def launch(trainer: TrainerSettings, grad_clip: float) -> Fabric:
    """Start the processes; every one of them returns from here. `grad_clip` is for ZeRO."""
    strategy: str | Strategy = trainer.strategy
    if trainer.strategy == "fsdp2":
        strategy = ModelParallelStrategy(
            lambda model, mesh: shard(model, mesh["data_parallel"], trainer.precision),
            data_parallel_size=trainer.devices * trainer.num_nodes,
            tensor_parallel_size=1,
        )
    if trainer.strategy in ZERO:
        from .zero import Zero  # DeepSpeed is an extra

        strategy = Zero(ZERO.index(trainer.strategy) + 1, grad_clip)
    fabric = Fabric(
        accelerator=trainer.accelerator,
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=strategy,
        precision=trainer.precision,  # type: ignore[arg-type]  # one of PRECISIONS, a plain str
    )
    fabric.launch()
    return fabric


def shard(model: GPTLMHeadModel, mesh: DeviceMesh, precision: str) -> GPTLMHeadModel:
    """Apply FSDP2 to every block, and then to the rest of the model."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":  # halves the gathered bytes; gradients are summed in float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # in place
    register_fsdp_forward_method(model, "generate")
    return model


def blocks_of(model: GPTLMHeadModel | HuggingFaceGPT2) -> nn.ModuleList:
    """The layers of the model."""
    return model.transformer.layers if isinstance(model, GPTLMHeadModel) else model.blocks


def over_processes(fabric: Fabric, tensor: Tensor, operation: str) -> Tensor:
    """The "sum" or the "mean" of `tensor` over all processes."""
    result = fabric.all_reduce(tensor, reduce_op=operation)
    assert isinstance(result, Tensor)  # Fabric reduces collections too
    return result


def whole(tensor: Tensor) -> Tensor:
    """`tensor` itself, or the full tensor if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
