"""GPT-2 as transformers has it, in place of ours: `library=transformers`, the `-hf` experiments."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flashtile.losses.cross_entropy import CrossEntropyLoss
from flashtile.models.gpt import CausalLMLoss, GPTConfig, GPTLMHeadModel

# What transformers calls an attention; it must first be told of flashtile's.
ATTENTIONS = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", "flashtile": "flashtile"}


class HuggingFaceGPT2(nn.Module):
    """transformers' GPT-2 with the interface that training.train uses of `GPTLMHeadModel`.

    Attributes:
        gpt2: the model of transformers.
        blocks: its layers.
    """

    def __init__(self, config: GPTConfig, attn: str, activation_checkpointing: bool) -> None:
        super().__init__()
        from transformers import GPT2LMHeadModel

        self.gpt2 = GPT2LMHeadModel(gpt2_config(config))
        self.attend_with(attn)
        if activation_checkpointing:
            self.gpt2.gradient_checkpointing_enable()
        sizes = GPTLMHeadModel(config, device="meta")
        self.num_parameters, self.flops_per_token = sizes.num_parameters, sizes.flops_per_token

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers."""
        return self.gpt2.transformer.h

    def attend_with(self, attn: str) -> None:
        """Use another of ATTENTIONS; `ValueError` if it is none of them."""
        check(attn)
        if attn == "flashtile":
            from flashtile.integrations import transformers as integration

            integration.register()
        self.gpt2.set_attn_implementation(ATTENTIONS[attn])

    def forward(
        self, input_ids: Tensor, *, targets: Tensor, loss: CrossEntropyLoss, **packing: None
    ) -> CausalLMLoss:
        """The loss, with PyTorch's cross-entropy of all logits at once."""
        logits = self.gpt2(input_ids, use_cache=False).logits
        ignored, reduction = loss.ignore_index, loss.reduction
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=ignored, reduction=reduction
        )
        return CausalLMLoss(losses)

    def generate(self, input_ids: Tensor, max_length: int, **options: Any) -> Tensor:
        """Continue prompts, with our model and these weights."""
        ours = GPTLMHeadModel.from_transformers(self.gpt2)
        return ours.generate(input_ids, max_length, **options)


def check(attn: str) -> None:
    """Raise `ValueError` if transformers does not have this attention."""
    if attn not in ATTENTIONS:
        names = ", ".join(ATTENTIONS)
        raise ValueError(f"attn: {attn!r}; library=transformers has {names}")


def gpt2_config(config: GPTConfig) -> Any:
    """The GPT2Config of transformers that is `config`.

    Raises:
        ValueError: `config` has an option that GPT-2 lacks; the message names it.
    """
    from transformers import GPT2Config

    gpt2 = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_position_embeddings,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.intermediate_size,
        embd_pdrop=config.embedding_dropout,
        resid_pdrop=config.residual_dropout,
        attn_pdrop=config.attention_dropout,
        layer_norm_epsilon=config.norm_eps,
        initializer_range=config.initializer_range,
        scale_attn_by_inverse_layer_idx=config.scale_attn_by_inverse_layer_idx,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    read = GPTConfig.from_transformers(gpt2)
    for field in dataclasses.fields(GPTConfig):
        asked, found = getattr(config, field.name), getattr(read, field.name)
        if asked != found:
            raise ValueError(
                f"model.{field.name}: {asked!r}; library=transformers has only {found!r}"
            )
    return gpt2
