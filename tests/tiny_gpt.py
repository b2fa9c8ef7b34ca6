"""Tiny random GPTs of several kinds, for the tests of the models."""

from __future__ import annotations

import pytest
import torch

from flashtile.models.gpt import GPTConfig, GPTLMHeadModel

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SMALL, max_position_embeddings=24),
    "llama": GPTConfig.llama(**SMALL, num_kv_heads=2, intermediate_size=48),
    "alibi": GPTConfig.gpt2(**SMALL, position="alibi", window_size=(6, 0), softcap=4.0),
    "gpt-neox": GPTConfig.gpt2(
        **SMALL, position="rotary", rotary_fraction=0.25, parallel_block=True, activation="gelu"
    ),
    "no positions": GPTConfig.llama(
        **SMALL, position="none", activation="geglu", attention_bias=True, mlp_bias=True
    ),
}
EVERY_CONFIG = pytest.mark.parametrize("name", CONFIGS)


def build(name, **keywords):
    """A model whose attention is far from uniform, in float64 and evaluation mode."""
    model = GPTLMHeadModel(CONFIGS[name], **{"dtype": torch.float64, **keywords})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1).add_(0.05)
    return model.eval()


def tokens(*shape):
    return torch.randint(0, 61, shape)
