"""Tiny random models of many families, for the tests of the transformers integration."""

from __future__ import annotations

import torch
import transformers

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
WINDOWED = {**GROUPED, "sliding_window": 7}
ENCODER_DECODER = {
    "vocab_size": 97,
    "d_model": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

CONFIGS = {
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", WINDOWED),
    "gemma2": (
        "Gemma2Config",
        {**WINDOWED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3TextConfig", WINDOWED),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 97,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **WINDOWED,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **GROUPED,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 7,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0],
        },
    ),
    "bert": ("BertConfig", SMALL),
    "albert": ("AlbertConfig", {**SMALL, "embedding_size": 32}),
    "modernbert": (
        "ModernBertConfig",
        {
            **SMALL,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "t5": (
        "T5Config",
        {**ENCODER_DECODER, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    ),
    "bart": (
        "BartConfig",
        {
            **ENCODER_DECODER,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "forced_eos_token_id": None,
        },
    ),
}


def build(family, auto=transformers.AutoModelForCausalLM, **changes):
    """A random model in evaluation mode whose attention is far from uniform."""
    class_name, arguments = CONFIGS[family]
    config = getattr(transformers, class_name)(**{**arguments, **changes})
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.normal_()
            elif parameter.dim() > 1 and any(
                part in name for part in ("q_proj", "query", "c_attn")
            ):
                parameter.mul_(8)
    return model


def tokens(batch=3, length=24, seed=1):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side, batch=3, length=24):
    """(batch, length) mask of rows with 0, 5 and 11 tokens of padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        pad = (0, 5, 11)[row % 3]
        start = {"left": 0, "middle": 4, "right": length - pad}[side]
        mask[row, start : start + pad] = 0
    return mask


def run(model, name, **inputs):
    """Logits, or hidden states of a model without a head."""
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name
    outputs = model(**inputs)
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def assert_same(got, want, tokens=None):
    if tokens is not None:
        got, want = got[tokens.bool()], want[tokens.bool()]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
