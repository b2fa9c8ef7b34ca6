"""Fields of configurations, by model type, for which smaller numbers are not enough.

They apply to the configuration of a family and to the same configuration as a part of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import (
    DacConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    DINOv3ViTConfig,
    PreTrainedConfig,
    ResNetConfig,
    SwinConfig,
    TimmWrapperConfig,
    VitDetConfig,
)

VOCABULARY = 99

LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}


SMALL_CODEC = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
RESNET_STAGES = ("stage2", "stage3", "stage4")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def small_vit(kind: type = Dinov2Config, **fields: Any) -> PreTrainedConfig:
    """A vision transformer whose four layers are the four stages that depth models read."""
    return kind(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        **fields,
    )


def depth_model(**fields: Any) -> dict[str, Any]:
    return {
        "backbone_config": small_vit(reshape_hidden_states=False),
        "patch_size": 8,
        "reassemble_hidden_size": 64,
        "neck_hidden_sizes": [16, 16, 16, 16],
        "fusion_hidden_size": 16,
        **fields,
    }


def small_rt_detr(stages: Sequence[str] = RESNET_STAGES) -> dict[str, Any]:
    """Fields of the detectors in the line of RT-DETR."""
    return {
        "backbone_config": small_resnet(stages),
        "encoder_in_channels": [16, 32, 32],
        "decoder_in_channels": [64, 64, 64],
        "num_queries": 20,
    }


def small_swin(**fields: Any) -> SwinConfig:
    return SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 4, 4],
        window_size=4,
        **{"out_features": ["stage1", "stage2", "stage3", "stage4"]} | fields,
    )


def small_resnet(stages: Sequence[str] = RESNET_STAGES) -> ResNetConfig:
    return ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=list(stages),
    )


def with_resnet() -> dict[str, Any]:
    """Fields that give a detector a small convolutional network instead of one of timm's."""
    return {"use_timm_backbone": False, "backbone": None, "backbone_config": small_resnet()}


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
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "intermediate_size": 96},
    # Vision towers of timm's.
    "fast_vlm": {
        "image_token_index": 20,
        "vision_config": TimmWrapperConfig(
            architecture="fastvit_t8",
            hidden_size=128,
            model_args={"layers": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 64]},
        ),
    },
    "gemma3n": {"image_token_id": 20, "vision_soft_tokens_per_image": 4},
    "gemma3n_vision": {"architecture": "test_efficientnet", "hidden_size": 256},
    "perception_lm": {
        "image_token_id": 20,
        "vision_config": TimmWrapperConfig(
            architecture="vit_pe_core_tiny_patch16_384",
            model_args={
                "embed_dim": 64,
                "depth": 2,
                "num_heads": 4,
                "img_size": [32, 32],
                "patch_size": 8,
                "ref_feat_shape": [4, 4],
                "global_pool": "",
            },
        ),
    },
    "timm_backbone": {"backbone": "test_resnet"},
    # One layer of each kind whose keys others share.
    "gemma3n_text": SLIDING_AND_FULL | {"num_kv_shared_layers": 0},
    # Convolutional codecs.
    "kyutai_speech_to_text": {"num_codebooks": 4, "codebook_vocab_size": 50},
    "mimi": {"upsample_groups": 64},
    # The decoders' padding is the token after the last of the vocabulary.
    "musicgen_decoder": {"pad_token_id": VOCABULARY, "bos_token_id": VOCABULARY},
    "musicgen_melody_decoder": {"pad_token_id": VOCABULARY, "bos_token_id": VOCABULARY},
    "neucodec": {"quantization_dim": 128},
    "xcodec": {
        "acoustic_model_config": DacConfig(
            hidden_size=64,
            encoder_hidden_size=16,
            decoder_hidden_size=64,
            downsampling_ratios=[8, 5, 4, 2],
            upsampling_ratios=[8, 5, 4, 2],
        )
    },
    "xcodec2": {"quantization_dim": 128},
    # Detectors.
    "conditional_detr": with_resnet(),
    "dab-detr": with_resnet(),
    "deformable_detr": with_resnet(),
    "detr": with_resnet(),
    "table-transformer": with_resnet(),
    # Time series.
    "autoformer": {"prediction_length": 6, "context_length": 12, "label_length": 4},
    "informer": {"prediction_length": 6, "context_length": 12},
    "time_series_transformer": {"prediction_length": 6, "context_length": 12},
    # Sizes that follow from others.
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 96,
    },
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [96, 96]},
    "efficientloftr": {
        "stage_num_blocks": [1, 1, 1, 1],
        "out_features": [16, 16, 32, 64],
        "num_attention_heads": 8,
        "initializer_range": 1.0,  # of batch norm: images that differ from one place to the next
    },
    "emu3_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 2],
        "attn_resolutions": [1],
        "codebook_size": 16,
    },
    "eomt": {"num_blocks": 1, "num_queries": 10, "mlp_ratio": 2},
    "eomt_dinov3": {"num_blocks": 1, "num_queries": 10},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4},
    "granite_speech5_encoder": {"context_size": 16},
    "glm5_next_text": LINEAR_AND_FULL | {"index_topk": 16, "qk_rope_head_dim": 0},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96},
    "exaone4_5_vision": {"window_size": 32, "fullatt_block_indexes": [1]},
    "qwen2_5_vl_vision": {"window_size": 32, "fullatt_block_indexes": [1]},
    "gemma4_text": SLIDING_AND_FULL
    | {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[1, 0]],
        "spatial_target_layers": [1, 2, 3, 4],
        "image_grid_pinpoints": [[32, 64]],
    },
    "granite4_vision_text": {"num_hidden_layers": 5},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "emu3": {
        "vocabulary_map": {"<image>": 3, "<|extra_200|>": 4}
        | {f"<|visual token {code:06}|>": 30 + code for code in range(16)}
    },
    "FunAsrNanoAdaptorConfig": {"hidden_size": 64, "intermediate_size": 16},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
    | SLIDING_AND_FULL,
    "qwen4_exp_text": LINEAR_AND_FULL
    | {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 101,
        "split_ngram_parts": 2,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "step3p5": {"sliding_window": 7} | SLIDING_AND_FULL,
    "speecht5": {"num_mel_bins": 80},
    "blip-2": {"image_token_index": 20, "num_query_tokens": 4},
    "instructblip": {"image_token_index": 20, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 20, "image_token_index": 20, "num_query_tokens": 4},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "muse_spark_audio": {
        "patch_sizes": [16, 4],
        "hidden_sizes": [32, 64],
        "depths": [1, 1],
        "num_hidden_layers": 2,
    },
    "lw_detr_vit": {"num_windows": 4, "image_size": 64, "out_features": ["stage1", "stage2"]},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 64},
    "mimi_decoder": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "paddleocr_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "vitmatte": {
        "backbone_config": VitDetConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=64,
            patch_size=16,
            out_features=["stage2"],
        ),
        "fusion_hidden_sizes": [64, 32, 16, 8],
        "convstream_hidden_sizes": [16, 16, 16],
    },
    "perceiver": {"num_latents": 16, "d_latents": 64, "num_self_attends_per_block": 2},
    "vibevoice_acoustic_tokenizer": SMALL_CODEC,
    "vibevoice_acoustic_tokenizer_decoder": SMALL_CODEC,
    "vibevoice_acoustic_tokenizer_encoder": SMALL_CODEC,
    "align_vision_model": {"image_size": 64},
    "kosmos-2": {"latent_query_num": 4},
    "sam3_vision_model": {
        "fpn_hidden_size": 64,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "seggpt": {"image_size": [64, 32]},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "luke": {"entity_vocab_size": 50},
    "blt": {"encoder_hash_byte_group_vocab": 101, "use_cache": False},  # its cache fails
    "blt_local_decoder": {"hidden_size_global": 64},
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "Nemotron3DiarizationHeadConfig": {"audio_hidden_size": 64},
    "nemotron_h_omni": {"vision_hidden_size": 64, "image_token_id": 20, "audio_token_id": 21},
    "radio": {"video_temporal_patch_size": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "tvp": {
        "backbone_config": small_resnet(["stage4"]),
        "max_img_size": 128,
        "visual_prompt_size": 8,
        "num_frames": 2,
    },
    "xlstm": {"num_heads": 4, "chunk_size": 16},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    # Depth models and segmentation: four stages of a small backbone.
    "depth_anything": depth_model(),
    "prompt_depth_anything": depth_model(),
    "zoedepth": depth_model(bottleneck_features=16),
    "tipsv2_dpt": depth_model(
        backbone_config=small_vit(Dinov2WithRegistersConfig, reshape_hidden_states=False)
    ),
    "chmv2": depth_model(
        backbone_config=small_vit(DINOv3ViTConfig, return_class_token=True),
        post_process_channels=[16, 16, 16, 16],
        head_hidden_size=16,
        number_output_channels=16,
    ),
    "depth_pro": {
        **{f"{part}_model_config": small_vit() for part in ("image", "patch", "fov")},
        "patch_size": 32,
        "intermediate_hook_ids": [3, 1],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_feature_dims": [16, 16, 16],
        "merge_padding_value": 1,
        "fusion_hidden_size": 16,
        "use_fov_model": True,
    },
    "upernet": {"backbone_config": small_swin(), "auxiliary_in_channels": 64, "hidden_size": 32},
    "mask2former": {"backbone_config": small_swin(), "num_queries": 10},
    "maskformer": {"backbone_config": small_swin(), "num_queries": 10},
    "oneformer": {"backbone_config": small_swin(), "num_queries": 10},
    "grounding-dino": {"backbone_config": small_swin(), "num_queries": 10},
    "mm-grounding-dino": {"backbone_config": small_swin(), "num_queries": 10},
    "omdet-turbo": {
        "backbone_config": small_swin(out_features=["stage2", "stage3", "stage4"]),
        "apply_layernorm_after_vision_backbone": False,
        "image_size": 64,
        "encoder_in_channels": [32, 64, 128],
        "vision_features_channels": [32, 32, 32],
        "encoder_hidden_dim": 32,
        "decoder_hidden_dim": 32,
        "text_projection_in_dim": 64,
        "text_projection_out_dim": 64,
        "class_embed_dim": 64,
        "task_encoder_hidden_dim": 96,
        "num_queries": 20,
    },
    "d_fine": small_rt_detr(),
    "rt_detr": small_rt_detr(),
    "rt_detr_v2": small_rt_detr(),
    "deimv2": small_rt_detr(),
    "lw_detr": {"projector_scale_factors": [1.0]},
    "pp_doclayout_v2": small_rt_detr() | {"class_thresholds": [0.5, 0.5], "class_order": [1, 0]},
    "pp_doclayout_v3": small_rt_detr(["stage1", *RESNET_STAGES]) | {"x4_feat_dim": 16},
    "pp_doclayout_v4": small_rt_detr(),
}
