"""Fields of configurations, by model type, where smaller numbers alone give no model.

They apply to the configuration of a family and to the same configuration as a part of another one.
"""

from __future__ import annotations

from typing import Any

from transformers import ResNetConfig

LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}


def small_resnet() -> dict[str, Any]:
    """Fields that give a detector a small convolutional network instead of one of timm's."""
    backbone = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    return {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone}


FIELDS: dict[str, dict[str, Any]] = {
    # A linear layer and one with attention.
    "bailing_hybrid": LINEAR_AND_FULL,
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": LINEAR_AND_FULL | {"mamba_n_heads": 4, "mamba_d_state": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR_AND_FULL,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3_text": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "minicpm_ocr_text": LINEAR_AND_FULL,
    "qwen3_5_moe_text": LINEAR_AND_FULL,
    "qwen3_5_text": LINEAR_AND_FULL,
    "qwen3_next": LINEAR_AND_FULL,
    "qwen4_exp_text": LINEAR_AND_FULL,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"],
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "intermediate_size": 96},
    # One layer of each kind whose keys others share.
    "gemma3n_text": SLIDING_AND_FULL | {"num_kv_shared_layers": 0},
    "gemma4_text": {},
    # Convolutional codecs.
    "mimi": {"upsample_groups": 64},
    "kyutai_speech_to_text": {},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    # Detectors.
    "conditional_detr": small_resnet(),
    "dab-detr": small_resnet(),
    "deformable_detr": small_resnet(),
    "detr": small_resnet(),
    "table-transformer": small_resnet(),
    # Time series.
    "autoformer": {"prediction_length": 6, "context_length": 12, "label_length": 4},
    "informer": {"prediction_length": 6, "context_length": 12},
    "time_series_transformer": {"prediction_length": 6, "context_length": 12},
}
