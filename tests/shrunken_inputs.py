"""Inputs for a tiny model of any transformers family, made from its signature or by hand."""

from __future__ import annotations

import inspect

import torch
from shrunken_models import LENGTH, SPECIAL_TOKENS, VOCABULARY


def tokens(length=LENGTH, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SPECIAL_TOKENS, VOCABULARY, (2, length), generator=generator)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def first(config, *names, default):
    """The first of the attributes that a configuration or one of its parts has."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for owner in (config, *parts):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                return value[-1]
    return default


def images(config):
    sides = getattr(getattr(config, "backbone_config", None) or config, "image_size", None)
    if not (isinstance(sides, (list, tuple)) and len(sides) == 2):
        sides = [first(config, "image_size", "input_size", default=32)] * 2
    return normal(2, first(config, "num_channels", "in_channels", "in_chans", default=3), *sides)


def videos(config):
    frames = first(config, "num_frames", "frames_per_clip", default=4)
    return images(config)[:, None].expand(-1, frames, -1, -1, -1).contiguous()


def patches(config):
    """Patches of two images in one row, the layout of the vision towers of Qwen's family."""
    channels = first(config, "in_channels", "num_channels", "in_chans", default=3)
    size = first(config, "patch_size", default=8)
    return normal(
        4 * 6 + 8 * 4, channels * first(config, "temporal_patch_size", default=1) * size**2
    )


GRID = torch.tensor([[1, 4, 6], [1, 8, 4]])  # time, height, width in patches

MAKERS = {
    "input_ids": lambda config: tokens(),
    "decoder_input_ids": lambda config: tokens(9, seed=5),
    "pixel_values": images,
    "pixel_values_videos": videos,
    "input_features": lambda config: normal(
        2, first(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=16), 64
    ),
    "input_values": lambda config: normal(2, 1600),
    "audio_values": lambda config: normal(2, 1600),
    "bbox": lambda config: torch.arange(2 * LENGTH * 4).view(2, LENGTH, 4) % 50,
    "hidden_states": lambda config: normal(2, LENGTH, first(config, "hidden_size", default=64)),
    "inputs_embeds": lambda config: normal(2, LENGTH, first(config, "hidden_size", default=64)),
    "latents": lambda config: normal(2, config.hidden_size, 8),
    "past_values": lambda config: normal(
        2,
        first(config, "context_length", default=64),
        first(config, "num_input_channels", default=1),
    ),
    "grid_thw": lambda config: GRID,
    "image_grid_thw": lambda config: GRID,
}


def with_tokens(**makers):
    """Inputs of a model that reads text and something else."""
    return lambda config: {
        "input_ids": tokens(),
        **{name: make(config) for name, make in makers.items()},
    }


def image_tokens(config, count):
    """Text with the tokens that an image's features replace, where no padding will be."""
    token = first(config, "image_token_index", "image_token_id", default=None)
    before, after = tokens().split([LENGTH // 2, LENGTH // 2], dim=1)
    return torch.cat([before, torch.full((2, count), token), after], dim=1)


def codes(config):
    """The codebooks of two pieces of music, one row for each codebook."""
    return tokens(9, seed=5).repeat_interleave(config.decoder.num_codebooks, dim=0)


def series(config):
    """Two time series with the features of their dates, and the dates to predict."""
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features
    future = config.prediction_length
    return {
        "past_values": normal(2, past),
        "past_time_features": normal(2, past, features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": normal(2, future),
        "future_time_features": normal(2, future, features),
    }


def mel(length, last=True):
    def make(config):
        bins = first(config, "num_mel_bins", "feature_size", "num_mels", default=16)
        return normal(2, length, bins) if last else normal(2, bins, length)

    return make


def grid_of(rows, *names):
    """Rows of patches of two images, and their sizes under the names given."""

    def make(config):
        size, channels = config.patch_size, first(config, "num_channels", "in_channels", default=3)
        return {rows: normal(4 * 6 + 8 * 4, channels, size, size)} | dict.fromkeys(names, GRID)

    return make


def temporal_patches(name):
    """Patches over two frames."""

    def make(config):
        size = 3 * getattr(config, name) * config.patch_size**2
        return {"pixel_values": normal(4 * 6 + 8 * 4, size), "grid_thw": GRID}

    return make


def siglip(config):
    """Patches of two images that differ in shape, padded to the longer row."""
    config = getattr(config, "vision_config", config)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {
        "pixel_values": normal(2, 16, config.num_channels * config.patch_size**2),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }


INPUTS = {
    "autoformer": series,
    "informer": series,
    "time_series_transformer": series,
    "jev": lambda config: {  # one prompt with two questions
        "input_ids": tokens()[:1],
        "marks": torch.tensor([[5, LENGTH - 1]]),
        "num_options": torch.tensor([[2, 5]]),
        "question_type_ids": torch.tensor([[0, 1]]),
    },
    "clap": with_tokens(
        input_features=lambda config: normal(2, 1, 64, 64),
        is_longer=lambda config: torch.zeros(2, 1, dtype=torch.bool),
    ),
    "xmod": lambda config: {
        "input_ids": tokens(),
        "lang_ids": torch.zeros(2, dtype=torch.long),
    },
    "pi0": lambda config: {
        "state": normal(2, config.max_state_dim),
        "noise": normal(2, config.chunk_size, config.max_action_dim),
        "timestep": torch.tensor([0.2, 0.7]),
        "input_ids": tokens(),
        "pixel_values": images(config)[:, None],
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
        "attention_mask": torch.ones(2, LENGTH, dtype=torch.long),
    },
    "pe_audio": with_tokens(input_values=lambda config: normal(2, 1, 3840)),
    "pe_audio_encoder": lambda config: {"input_values": normal(2, 1, 3840)},
    "neucodec": lambda config: {
        "input_values": normal(2, 1, 3200),
        "input_features": normal(2, 10, 160),
    },
    "xcodec2": lambda config: {
        "input_values": normal(2, 1, 3200),
        "input_features": normal(2, 10, 160),
    },
    "fun_asr_nano_encoder": lambda config: {
        "input_features": normal(2, 16, config.num_mel_bins * config.num_stacked_frames),
        "input_features_mask": torch.ones(2, 16, dtype=torch.bool),
    },
    "qwen3_asr_encoder": lambda config: {
        "input_features": normal(2, config.num_mel_bins, 200),
        "input_features_mask": torch.ones(2, 200, dtype=torch.long),
    },
    "audioflamingo3_encoder": lambda config: {
        "input_features": normal(2, config.num_mel_bins, 2 * config.max_source_positions),
        "input_features_mask": torch.ones(2, 2 * config.max_source_positions, dtype=torch.long),
    },
    "muse_glimmer_assistant": lambda config: {
        "noise_embeds": normal(2, 5, config.hidden_size),
        "context_hidden_states": normal(2, 9, 5 * config.hidden_size),
    },
    "mimi_encoder": lambda config: {"input_values": normal(2, 1, 3840)},
    "pocket_tts_audio_tokenizer_encoder": lambda config: {"input_values": normal(2, 1, 3840)},
    "gemma4_vision": lambda config: {
        "pixel_values": normal(2, 16, 3 * config.patch_size**2),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(
            2, -1, -1
        ),
    },
    "oneformer": lambda config: {
        "pixel_values": normal(2, 3, 64, 64),
        "task_inputs": tokens(config.task_seq_len),
    },
    "minicpm_ocr_vision": lambda config: {
        "pixel_values": normal(1, 3, config.patch_size, (16 + 24) * config.patch_size),
        "target_sizes": torch.tensor([[4, 4], [4, 6]]),
    },
    "minicpmv4_7_vision": lambda config: {
        "pixel_values": normal(1, 3, config.patch_size, (16 + 24) * config.patch_size),
        "target_sizes": torch.tensor([[4, 4], [4, 6]]),
    },
    "muse_glimmer_vision": temporal_patches("patch_temporal"),
    "muse_spark_vision": temporal_patches("patch_temporal"),
    "vibevoice_acoustic_tokenizer": lambda config: {"input_values": normal(2, 1, 3840)},
    "vibevoice_acoustic_tokenizer_encoder": lambda config: {"input_values": normal(2, 1, 3840)},
    "pocket_tts_audio_tokenizer": lambda config: {"input_values": normal(2, 1, 3840)},
    "clvp": with_tokens(input_features=lambda config: normal(2, 80, 64)),
    "tvp": lambda config: {  # its position embedding of columns has the shape of one row only
        "input_ids": tokens()[:1],
        "pixel_values": normal(1, config.num_frames, 3, *[config.max_img_size] * 2),
    },
    "xclip": with_tokens(pixel_values=videos),
    "blip-2": lambda config: {"input_ids": image_tokens(config, 4), "pixel_values": images(config)},
    "emu3": lambda config: {
        "input_ids": image_tokens(config, 4 * 5),
        "pixel_values": normal(2, 3, 8, 8),
        "image_sizes": torch.tensor([[8, 8], [8, 8]]),
    },
    "granite4_vision": lambda config: {  # an image as a whole and in two tiles
        "input_ids": image_tokens(config, 2 * 2 + 2 * 5),
        "pixel_values": normal(2, 3, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 64], [32, 64]]),
    },
    "instructblip": lambda config: {
        "input_ids": image_tokens(config, 4),
        "pixel_values": images(config),
        "qformer_input_ids": tokens(),
    },
    "instructblipvideo": lambda config: {
        "input_ids": image_tokens(config, 16),
        "pixel_values": videos(config),
        "qformer_input_ids": tokens(),
    },
    "fast_vlm": lambda config: {
        "input_ids": image_tokens(config, 4),
        "pixel_values": normal(2, 3, 64, 64),
    },
    "gemma3n": lambda config: {
        "input_ids": image_tokens(config, 4),
        "pixel_values": normal(2, 3, 64, 64),
    },
    "perception_lm": lambda config: {
        "input_ids": image_tokens(config, 16),
        "pixel_values": normal(2, 1, 3, 32, 32),
    },
    "omdet-turbo": lambda config: {
        "pixel_values": images(config),
        "classes_input_ids": tokens(),
        "classes_attention_mask": torch.ones(2, LENGTH, dtype=torch.long),
        "tasks_input_ids": tokens(9, seed=5),
        "tasks_attention_mask": torch.ones(2, 9, dtype=torch.long),
        "classes_structure": torch.tensor([1, 1]),
    },
    "grounding-dino": with_tokens(pixel_values=images),
    "mm-grounding-dino": with_tokens(pixel_values=images),
    "idefics": with_tokens(
        pixel_values=lambda config: images(config)[:, None],
        image_attention_mask=lambda config: torch.ones(2, LENGTH, 1, dtype=torch.long),
    ),
    "kosmos-2": with_tokens(
        pixel_values=images,
        image_embeds_position_mask=lambda config: (
            torch.arange(LENGTH).expand(2, -1) < config.latent_query_num
        ).long(),
    ),
    "lxmert": with_tokens(
        visual_feats=lambda config: normal(2, 5, config.visual_feat_dim),
        visual_pos=lambda config: normal(2, 5, config.visual_pos_dim),
    ),
    "siglip2": lambda config: {"input_ids": tokens(), **siglip(config)},
    "siglip2_vision_model": siglip,
    "seggpt": lambda config: {
        name: normal(2, 3, config.image_size[0] // 2, config.image_size[1])
        for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    },
    "timesfm": lambda config: {
        "past_values": normal(2, 64),
        "past_values_padding": torch.zeros(2, 64, dtype=torch.long),
        "freq": torch.tensor([[0], [1]]),
    },
    "timesfm2_5": lambda config: {"past_values": normal(2, 128)},
    "depth_pro": lambda config: {"pixel_values": normal(2, 3, 128, 128)},
    "efficientloftr": lambda config: {"pixel_values": normal(1, 2, 3, 64, 64)},
    "lightglue": lambda config: {"pixel_values": normal(1, 2, 3, 64, 64)},
    "superglue": lambda config: {"pixel_values": normal(1, 2, 3, 64, 64)},
    "pix2struct": lambda config: {
        "flattened_patches": torch.cat(
            [
                torch.arange(1, 9).float().view(1, 8, 1).expand(2, -1, 1),
                torch.ones(2, 8, 1),
                normal(2, 8, config.vision_config.patch_embed_hidden_size),
            ],
            dim=2,
        ),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        "decoder_input_ids": tokens(9, seed=5),
    },
    "gemma3n_audio": lambda config: {
        "audio_mel": normal(2, 64, config.input_feat_size),
        "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
    },
    "wav2vec2-bert": lambda config: {
        "input_features": normal(2, 16, config.feature_projection_input_dim)
    },
    "speech_to_text": lambda config: {
        "input_features": normal(2, 64, config.input_feat_per_channel),
        "decoder_input_ids": tokens(9, seed=5),
    },
    "blip_2_qformer": lambda config: {
        "query_embeds": normal(2, 6, config.hidden_size),
        "encoder_hidden_states": normal(2, 9, config.encoder_hidden_size),
    },
    "decision_transformer": lambda config: {
        "states": normal(2, 5, config.state_dim),
        "actions": normal(2, 5, config.act_dim),
        "rewards": normal(2, 5, 1),
        "returns_to_go": normal(2, 5, 1),
        "timesteps": torch.arange(5).expand(2, -1),
        "attention_mask": torch.ones(2, 5, dtype=torch.long),
    },
    "audio-spectrogram-transformer": lambda config: {
        "input_values": normal(2, config.max_length, config.num_mel_bins)
    },
    "speech-encoder-decoder": lambda config: {
        "input_values": normal(2, 1600),
        "decoder_input_ids": tokens(9, seed=5),
    },
    "voxtral_realtime": with_tokens(
        input_features=lambda config: normal(2, config.audio_config.num_mel_bins, 8 * LENGTH)
    ),
    "kyutai_speech_to_text": lambda config: {
        "input_ids": torch.stack(
            [tokens(seed=seed) % 50 for seed in range(config.num_codebooks + 1)], dim=2
        )
    },
    "musicgen": lambda config: {"input_ids": tokens(), "decoder_input_ids": codes(config)},
    "musicgen_melody": lambda config: {
        "input_ids": tokens(),
        "input_features": normal(2, 5, config.num_chroma),
        "decoder_input_ids": codes(config),
    },
    "mimi": lambda config: {"input_values": normal(2, 1, 3840)},
    "encodec": lambda config: {"input_values": normal(2, config.audio_channels, 3200)},
    "dac": lambda config: {"input_values": normal(2, 1, 3200)},
    "xcodec": lambda config: {"input_values": normal(2, 1, 3200)},
    "higgs_audio_v2_tokenizer": lambda config: {"input_values": normal(2, 1, 3200)},
    "kimi_k25_vision": grid_of("pixel_values", "grid_thw"),
    "video_llama_3_vision": lambda config: {
        **grid_of("pixel_values", "grid_thw")(config),
        "pixel_values": patches(config),
        "merge_sizes": torch.tensor([1, 2]),
    },
    "inkling2_vision": lambda config: {
        "pixel_values": normal(56, *[config.spatial_merge_size * config.patch_size] * 2, 3),
        "image_grid_thw": GRID,
    },
}


def candidates(model):
    """Candidate keyword arguments; the first that the model's forward function accepts are used."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    if config.model_type in INPUTS:
        by_hand = INPUTS[config.model_type](config)
        if by_hand.keys() <= parameters.keys():
            yield by_hand
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if "grid_thw" in parameters:
        rows = next(name for name in parameters if name in ("hidden_states", "pixel_values"))
        yield {rows: patches(config), "grid_thw": GRID}
    main = model.main_input_name
    main = [name for name in ([main] if isinstance(main, str) else main) if name in parameters]
    decoder = [name for name in ("decoder_input_ids",) if name in parameters]
    extras = [n for n in ("pixel_values", "bbox", "input_features") if n in parameters]
    for names in (
        main + decoder,
        main + required + decoder,
        main + required + decoder + extras,
        ["input_ids", *extras, *decoder] if "input_ids" in parameters else extras,
    ):
        if names and all(name in MAKERS for name in names):
            yield {name: MAKERS[name](config) for name in dict.fromkeys(names)}
    if "input_features" in parameters:
        for length in (3000, 128, 32):
            mel = first(config, "num_mel_bins", "feature_size", default=16)
            for shape in ((2, mel, length), (2, length, mel)):
                yield {"input_features": normal(*shape)} | {d: MAKERS[d](config) for d in decoder}
    if "pixel_values" in parameters:
        yield {"pixel_values": videos(config)}
        yield {"pixel_values": images(config)[:, None]}
        yield {"pixel_values": normal(2, 3, 64, 64)}
        yield {"pixel_values": normal(2, 3, 224, 224)}
