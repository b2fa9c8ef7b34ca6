"""A tiny random model of any transformers family: its configuration shrunken field by field, and
inputs made from the signature of its forward function."""

from __future__ import annotations

import dataclasses
import importlib
import re

import torch
from shrunken_fields import FIELDS
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

LENGTH = 12
VOCABULARY = 99
SPECIAL_TOKENS = 30  # token ids below are for padding, images and the like

# The first pattern that matches a field's whole name gives its value; None takes the default.
SIZES = (
    (r"(text_)?vocab_size|unpadded_vocab_size|vocab_size_per_layer_input|vocab_sizes?", VOCABULARY),
    (r"(swa_|encoder_|decoder_|t2u_(en|de)coder_|speech_encoder_|cross_|index_)?"
     r"(num_)?(attention_heads|attn_heads)|n(um)?_heads?|n_head|decoder_cross_attention_heads"
     r"|index_n_heads|encoder_attention_heads|num_head", 4),
    (r"(swa_|cross_|num_|n_)?(num_)?(key_value|kv)_heads", 2),
    (r"(swa_|global_|cross_)?head_dim|d_kv|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|dim_head"
     r"|index_head_dim|attention_head_dim|linear_(key|value)_head_dim|attention_key_value_head_dim",
     16),
    (r"(q|kv|o)_lora_rank", 32),
    (r"linear_num_key_heads|linear_num_value_heads", 4),
    (r"index_topk", 5),
    (r"(num_)?(hidden_|encoder_|decoder_|speech_encoder_|t2u_(en|de)coder_|text_)?(num_)?layers"
     r"|n_layers?|depth|num_hidden_groups|num_decoder_layers|num_encoder_layers|layers", 2),
    (r"((moe_|shared_|dense_|speech_encoder_|expert_|shared_experts?_|prefix_)*intermediate_size)"
     r"|(encoder_|decoder_|t2u_(en|de)coder_)?ffn_dim|d_ff|d_inner|mlp_dim|n_inner|ffn_hidden_size"
     r"|(encoder_|decoder_)?intermediate_size|dim_feedforward|encoder_feedforward_dim|dff", 96),
    (r"((en|de)coder_)?hidden_(size|dim)|d_model|n_embd|embed_dim|dim|emb_dim|text_hidden_size"
     r"|out_hidden_size|projection_dim|encoder_hidden_size|output_dim|image_text_hidden_size"
     r"|projector_hidden_size|mm_hidden_size|vision_output_dim|text_embed_dim|lm_hidden_size"
     r"|cross_hidden_size|backbone_hidden_size|model_in_dim|word_embed_proj_dim", 64),
    (r"embedding_size", 32),
    (r"rotary_dim", 8),
    (r"prediction_length", 6),
    (r"max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx"
     r"|max_sequence_length|max_seq_len|t2u_max_position_embeddings|max_length", 64),
    (r"(num_local_experts|n_routed_experts|num_experts|moe_num_experts|n_experts)", 4),
    (r"(num_experts_per_tok|moe_k|top_k_experts|num_selected_experts|moe_topk|top_k|topk_group"
     r"|n_group|n_shared_experts|num_expert_group)", 1),
    (r"sliding_window(_size)?|attention_chunk_size|window_size", 7),
    (r"image_size|input_size|pretrain_image_size|crop_size", 32),
    (r"patch_size", 8),
    (r"num_mel_bins", 16),
)  # fmt: skip
# The least that is shrunken where the whole of the table yields no model.
FEW_SIZES = tuple(
    (pattern, size) for pattern, size in SIZES if size in (VOCABULARY, 2) or "experts" in pattern
)


def families() -> list[str]:
    """Every model type in transformers' mappings from a configuration to a model."""
    names = [name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_\w*NAMES", name)]
    known = {family for name in names for family in getattr(modeling_auto, name)}
    return sorted(known & set(CONFIG_MAPPING.keys()))


def model_classes(family: str) -> list[type]:
    """The classes of a family, the ones with the most abilities first; at most one per mapping."""
    preferred = [
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_FOR_MASKED_LM_MAPPING",
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_MAPPING",
    ]
    others = [name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_\w*MAPPING", name)]
    classes = {}
    for name in dict.fromkeys(preferred + others):
        mapping = getattr(modeling_auto, name)
        if CONFIG_MAPPING[family] in mapping:
            found = mapping[CONFIG_MAPPING[family]]
            classes[found[0] if isinstance(found, tuple) else found] = None
    if not classes:  # no mapping has the family: the classes of its module
        module = importlib.import_module(
            CONFIG_MAPPING[family].__module__.replace(".configuration_", ".modeling_")
        )
        for kind in vars(module).values():
            is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
            if is_model and kind.config_class is CONFIG_MAPPING[family]:
                classes[kind] = None
        classes = dict.fromkeys(sorted(classes, key=lambda kind: "For" not in kind.__name__))
    return list(classes)[:3]


def shrunken(config_class: type, sizes=SIZES, special=None):
    """A configuration with small sizes, and with token ids that fit the small vocabulary."""
    special = iter(range(3, SPECIAL_TOKENS)) if special is None else special
    parts = part_classes(config_class)
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    arguments = {}
    for field in dataclasses.fields(config_class):
        if field.name in parts:
            arguments[field.name] = shrunken(parts[field.name], sizes, special)
        else:
            size = small(field, sizes, special)
            if size is not None:
                arguments[field.name] = size
    if defaults.get("num_key_value_heads", 0) == defaults.get("num_attention_heads"):
        arguments["num_key_value_heads"] = arguments.get("num_attention_heads")
    if "num_attention_heads" in arguments and defaults.get("head_dim", 0) is None:
        arguments["head_dim"] = 16
    arguments |= FIELDS.get(config_class.model_type or config_class.__name__, {})
    try:
        config = config_class(**arguments)
    except (TypeError, ValueError):  # some take their parts as dictionaries only
        plain = {n: x.to_dict() if n in parts else x for n, x in arguments.items()}
        config = config_class(**plain)
    fit_rotary_sections(config)
    return config


def fit_rotary_sections(config):
    """Multi-axis rotary embedding splits half of a head between time, height and width."""
    rope = getattr(config, "rope_parameters", None) or {}
    heads = getattr(config, "num_attention_heads", None)
    known = "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ())
    for parameters in (rope, *rope.values()):
        if not isinstance(parameters, dict) or not heads:
            continue
        if "mrope_section" in parameters or (known and parameters is rope):
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            half = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
            side = -(-half // 3)  # some families interleave the first two, which then are equal
            if half > 2 * side:
                parameters["mrope_section"] = [side, side, half - 2 * side]
            else:
                parameters["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def part_classes(config_class: type) -> dict[str, type]:
    """The classes of a configuration's parts, by the names of their fields."""
    names = getattr(config_class, "sub_configs", {})
    try:
        whole = config_class()
        parts = {name: type(getattr(whole, name, None)) for name in names}
    except Exception:  # some need all of their parts
        parts = dict(names)
    return {n: kind for n, kind in parts.items() if issubclass(kind, PreTrainedConfig)}


def small(field: dataclasses.Field, sizes, special):
    default = field.default
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if field.name in tokens:
        return tokens[field.name]
    if not isinstance(default, int) or isinstance(default, bool):
        return None
    if re.fullmatch(r"\w*token_(id|index)", field.name):
        return next(special) if default >= VOCABULARY else None
    for pattern, size in sizes:
        if re.fullmatch(pattern, field.name):
            return size if default > size or size == VOCABULARY else None
    return None


def randomise(model: torch.nn.Module) -> None:
    """Initialise so that every weight matters and attention is far from uniform."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and parameter.numel():
                fan_in = parameter[0].numel()
                sharper = 3 if re.search(r"q_proj|query|c_attn|qkv|q_b_proj", name) else 1
                parameter.normal_(0, min(1.0, sharper * fan_in**-0.5))
            elif not parameter.any() or "sink" in name:
                parameter.normal_(0, 0.3)
