"""Convert the weights of GPT-2 and Llama between Hugging Face's names and flashtile's.

One table of rules serves both directions: a weight of flashtile is one or several weights of
Hugging Face, joined along the output features, and transposed if theirs is a ``Conv1D`` (GPT-2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .gpt_config import GPTConfig

StateDict = dict[str, Tensor]


class _Rule(NamedTuple):
    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()  # output features of each, if there are several
    transposed: bool = False


def state_dict_from_transformers(state_dict: StateDict, config: GPTConfig) -> StateDict:
    """Convert a state dict of transformers to one that `GPTLMHeadModel` loads.

    Args:
        state_dict: state dict of a GPT2LMHeadModel, LlamaForCausalLM or MistralForCausalLM.
        config: configuration of our model.

    Raises:
        ValueError: a weight is missing, or `GPTLMHeadModel` has no parameter for a weight.
    """
    remaining, ours = dict(state_dict), {}
    for rule in _rules(config):
        missing = [name for name in rule.theirs if name not in remaining]
        if missing:
            raise ValueError(f"state_dict: {missing[0]!r} is missing, for {rule.ours!r}")
        parts = [remaining.pop(name) for name in rule.theirs]
        parts = [part.t() for part in parts] if rule.transposed else parts
        ours[rule.ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    head = remaining.pop("lm_head.weight", None)
    if head is None and not config.tie_word_embeddings:
        raise ValueError("state_dict: 'lm_head.weight' is missing, and the config does not tie it")
    ours["lm_head.weight"] = ours[_WORDS] if head is None else head
    # Old checkpoints hold causal masks and rotary frequencies, which are not weights.
    left = [name for name in remaining if not name.endswith(_NO_WEIGHTS)]
    if left:
        raise ValueError(f"state_dict: {left[0]!r} and {len(left) - 1} others fit no parameter")
    return ours


def state_dict_to_transformers(state_dict: StateDict, config: GPTConfig) -> StateDict:
    """Convert `GPTLMHeadModel`'s state dict to one that transformers loads.

    Args:
        state_dict: state dict of our model.
        config: configuration of our model, from `GPTConfig.from_transformers`.

    Raises:
        ValueError: the model is neither a GPT-2 nor a Llama.
    """
    theirs = {"lm_head.weight": state_dict["lm_head.weight"]}
    for rule in _rules(config):
        weight = state_dict[rule.ours]
        parts = weight.split(rule.sizes) if rule.sizes else (weight,)
        for name, part in zip(rule.theirs, parts, strict=True):
            theirs[name] = (part.t() if rule.transposed else part).contiguous()
    return theirs


_WORDS = "transformer.embeddings.word_embeddings.weight"
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def _rules(config: GPTConfig) -> Iterator[_Rule]:
    """The rules of the family that `config` belongs to."""
    kind = (config.position, config.norm, config.gated, config.parallel_block)
    if kind == ("learned", "layer_norm", False, False):
        return _gpt2_rules(config)
    if kind == ("rotary", "rms_norm", True, False):
        return _llama_rules(config)
    raise ValueError(
        f"config: got position={config.position!r}, norm={config.norm!r}, "
        f"activation={config.activation!r}, parallel_block={config.parallel_block}; want a GPT-2 "
        "(learned positions, layer_norm, plain MLP) or a Llama (rotary positions, rms_norm, gated "
        "MLP) of transformers"
    )


def _gpt2_rules(config: GPTConfig) -> Iterator[_Rule]:
    yield _Rule(_WORDS, ("transformer.wte.weight",))
    yield _Rule("transformer.embeddings.position_embeddings.weight", ("transformer.wpe.weight",))
    for layer in range(config.num_layers):
        ours, theirs = f"transformer.layers.{layer}", f"transformer.h.{layer}"
        for part in ("weight", "bias"):
            yield _Rule(f"{ours}.norm1.{part}", (f"{theirs}.ln_1.{part}",))
            yield _Rule(f"{ours}.norm2.{part}", (f"{theirs}.ln_2.{part}",))
            for our_name, their_name in (
                ("mixer.Wqkv", "attn.c_attn"),
                ("mixer.out_proj", "attn.c_proj"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                yield _Rule(
                    f"{ours}.{our_name}.{part}",
                    (f"{theirs}.{their_name}.{part}",),
                    transposed=part == "weight",
                )
    for part in ("weight", "bias"):
        yield _Rule(f"transformer.ln_f.{part}", (f"transformer.ln_f.{part}",))


def _llama_rules(config: GPTConfig) -> Iterator[_Rule]:
    heads = (config.num_heads, config.kv_heads, config.kv_heads)
    qkv_sizes = tuple(count * config.head_size for count in heads)
    attention_parts = ("weight", "bias") if config.attention_bias else ("weight",)
    mlp_parts = ("weight", "bias") if config.mlp_bias else ("weight",)
    yield _Rule(_WORDS, ("model.embed_tokens.weight",))
    for layer in range(config.num_layers):
        ours, theirs = f"transformer.layers.{layer}", f"model.layers.{layer}"
        yield _Rule(f"{ours}.norm1.weight", (f"{theirs}.input_layernorm.weight",))
        yield _Rule(f"{ours}.norm2.weight", (f"{theirs}.post_attention_layernorm.weight",))
        for part in attention_parts:
            qkv = tuple(f"{theirs}.self_attn.{name}_proj.{part}" for name in "qkv")
            yield _Rule(f"{ours}.mixer.Wqkv.{part}", qkv, qkv_sizes)
            yield _Rule(f"{ours}.mixer.out_proj.{part}", (f"{theirs}.self_attn.o_proj.{part}",))
        for part in mlp_parts:
            halves = tuple(f"{theirs}.mlp.{name}_proj.{part}" for name in ("up", "gate"))
            yield _Rule(f"{ours}.mlp.fc1.{part}", halves, 2 * (config.mlp_size,))
            yield _Rule(f"{ours}.mlp.fc2.{part}", (f"{theirs}.mlp.down_proj.{part}",))
    yield _Rule("transformer.ln_f.weight", ("model.norm.weight",))
