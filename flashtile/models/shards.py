"""The parts of a state dict that the processes of a group have, and the whole of such parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers.tensor_parallel import get_dim_for_local_rank
from .gpt_config import GPTConfig
from .hugging_face import StateDict

Shares = tuple[int, list[Tensor]]  # a dimension, and each process's indices of it


def shard_state_dict_tp(
    state_dict: StateDict, config: Any, world_size: int, rank: int
) -> StateDict:
    """Keep what one of several processes has of the state dict of a `GPTLMHeadModel`; returns it.

    Args:
        state_dict: of a model without process group; changed in place.
        config: of the model.
        world_size, rank: number of processes, and number of this one; ValueError if words or
            positions cannot be divided equally.
    """
    config = GPTConfig.from_transformers(config)
    for name in list(state_dict):
        shares = _shares(name, config, world_size)
        if shares is not None:
            dim, indices = shares
            x = state_dict[name]
            state_dict[name] = x.index_select(dim, indices[rank].to(x.device))
        elif rank != 0 and name.endswith((".out_proj.bias", ".fc2.bias")):
            del state_dict[name]  # which only the first process has
    return state_dict


def combine_state_dicts_tp(state_dicts: list[StateDict], config: Any) -> StateDict:
    """The inverse of `shard_state_dict_tp`: the whole of all processes' state dicts, in order."""
    config, whole = GPTConfig.from_transformers(config), dict(state_dicts[0])
    for name in whole:
        shares = _shares(name, config, len(state_dicts))
        if shares is not None:
            dim, indices = shares
            x = torch.cat([state_dict[name] for state_dict in state_dicts], dim)
            whole[name] = x.index_select(dim, torch.cat(indices).argsort().to(x.device))
    return whole


def _shares(name: str, config: GPTConfig, world: int) -> Shares | None:
    """How a parameter is divided; None if it is not."""
    heads = config.kv_heads * (config.num_heads // config.kv_heads + 2)
    group = heads // config.kv_heads - 2  # query heads of a key head
    if name.endswith("word_embeddings.weight") or name.startswith("lm_head."):
        return 0, _equal("vocab_size", config.vocab_size, world)
    if name.endswith("position_embeddings.weight"):
        return 1, _equal("hidden_size", config.hidden_size, world)
    if ".Wqkv." in name:
        rows = torch.arange(heads * config.head_size).view(heads, -1)
        parts = rows.split([group * config.kv_heads, config.kv_heads, config.kv_heads])
        sizes = [[unit * n for n in _sizes(config.kv_heads, world)] for unit in (group, 1, 1)]
        split = [part.split(size) for part, size in zip(parts, sizes, strict=True)]
        return 0, [torch.cat(of_rank).flatten() for of_rank in zip(*split, strict=True)]
    if name.endswith("out_proj.weight"):
        features = torch.arange(config.num_heads * config.head_size)
        unit = group * config.head_size
        return 1, list(features.split([unit * n for n in _sizes(config.kv_heads, world)]))
    if ".mlp.fc1." in name:
        halves = torch.arange((1 + config.gated) * config.mlp_size).view(1 + config.gated, -1)
        return 0, [part.flatten() for part in halves.split(_sizes(config.mlp_size, world), dim=1)]
    if name.endswith(".mlp.fc2.weight"):
        return 1, list(torch.arange(config.mlp_size).split(_sizes(config.mlp_size, world)))
    return None


def _sizes(size: int, world: int) -> list[int]:
    return [get_dim_for_local_rank(size, world, rank) for rank in range(world)]


def _equal(name: str, size: int, world: int) -> list[Tensor]:
    if size % world:
        raise ValueError(f"{name}: got {size}, want a multiple of the {world} processes")
    return list(torch.arange(size).split(size // world))
