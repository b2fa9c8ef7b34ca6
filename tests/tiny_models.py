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

SEQ2SEQ = {
    **ENCODER_DECODER,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 256,
}
DENSE = ["dense", "dense"]
# Latent attention whose indexer chooses the keys of every query.
SPARSE = {
    **SMALL,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
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
    "pegasus_x": (
        "PegasusXConfig",
        {**SEQ2SEQ, "block_size": 8, "num_global_tokens": 4, "bos_token_id": 1},
    ),
    "bigbird_pegasus": ("BigBirdPegasusConfig", {**SEQ2SEQ, "bos_token_id": 1}),
    "nllb_moe": (
        "NllbMoeConfig",
        {**SEQ2SEQ, "num_experts": 2, "expert_capacity": 64, "router_ignore_padding_tokens": True},
    ),
    "doge": ("DogeConfig", {**GROUPED, "keep_window_size": 6}),
    "deepseek_v32": ("DeepseekV32Config", {**SPARSE, "index_topk": 5, "mlp_layer_types": DENSE}),
    "hy_v4": (
        "HYV4Config",
        {
            **SPARSE,
            "index_topk": 5,
            "mlp_layer_types": DENSE,
            "indexer_types": ["full", "shared"],
            "learnable_sink_init": 1.0,
        },
    ),
    "inkling2": (
        "Inkling2TextConfig",
        {
            **GROUPED,
            "unpadded_vocab_size": 97,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "sliding_window_size": 7,
            "rel_extent": 16,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "moe_intermediate_size": 32,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}
del CONFIGS["inkling2"][1]["intermediate_size"]


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
