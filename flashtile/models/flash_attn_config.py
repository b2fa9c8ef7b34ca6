"""flash-attn's additions to a transformers ``GPT2Config``, as fields of a `GPTConfig`.

``flash_attn.models.gpt`` reads attributes that transformers' class does not declare. Attributes
that only choose a kernel change no result; they are named as `kernel_hints` says.
"""

from __future__ import annotations

from typing import Any

from ..kernel_hints import ignored

_KERNELS = (
    "use_flash_attn",
    "fused_mlp",
    "fused_bias_fc",
    "fused_dense_sqrelu_dense",
    "fused_dropout_add_ln",
    "mlp_checkpoint_lvl",
)
# Attributes that are fields of a `GPTConfig`: their names, the fields', and their defaults.
_SAME: tuple[tuple[str, str, Any], ...] = (
    ("n_head_kv", "num_kv_heads", None),
    ("head_dim", "head_dim", None),
    ("lm_head_bias", "lm_head_bias", False),
    ("norm_head", "norm_head", False),
    ("word_embed_proj_dim", "word_embed_proj_dim", None),
    ("prenorm", "prenorm", True),
    ("parallel_block", "parallel_block", False),
    ("parallel_block_tied_norm", "tied_norm", False),
    ("attn_dwconv", "dwconv", False),
    ("window_size", "window_size", (-1, -1)),
    ("residual_in_fp32", "residual_in_fp32", False),
    ("mup_embeddings_multiplier", "embedding_multiplier", 1.0),
    ("mup_output_multiplier", "output_multiplier", 1.0),
    ("mup_width_scale", "width_scale", 1.0),
    ("sequence_parallel", "sequence_parallel", True),
)
_GATED_MULTIPLE = 128  # flash-attn rounds the width of a gated MLP up to a multiple of this


def added_fields(config: Any, activation: str, gated: bool) -> dict[str, Any]:
    """Fields of a `GPTConfig` that depend on flash-attn's attributes of a ``GPT2Config``.

    Args:
        config: the ``GPT2Config``.
        activation: its activation under our name.
        gated: whether that activation is gated.

    Raises:
        ValueError: `GPTModel` does not support an attribute's value; the message names both.
    """
    ignored("GPT2Config", **{name: getattr(config, name, None) for name in _KERNELS})
    multiple = getattr(config, "pad_vocab_size_multiple", 1)
    width = config.n_inner
    if gated:
        step = getattr(config, "mlp_multiple_of", _GATED_MULTIPLE)
        wanted = 8 * config.hidden_size // 3 if width is None else width
        width = -(-wanted // step) * step
    fields = {field: getattr(config, name, default) for name, field, default in _SAME} | {
        "vocab_size": -(-config.vocab_size // multiple) * multiple,
        "intermediate_size": width,
        "norm": "rms_norm" if getattr(config, "rms_norm", False) else "layer_norm",
        "activation": activation,
        "attention_bias": _both(config, "qkv_proj_bias", "out_proj_bias"),
        "mlp_bias": _both(config, "mlp_fc1_bias", "mlp_fc2_bias"),
        "softmax_scale": _softmax_scale(config),
    }
    return fields | _positions(config)


def _softmax_scale(config: Any) -> float | None:
    """The factor on the scores, before it is divided by the number of a layer; None if usual."""
    head_dim = getattr(config, "head_dim", None) or config.n_embd // config.n_head
    multiplier = getattr(config, "mup_attn_multiplier", 1.0)
    if not config.scale_attn_weights:
        return multiplier
    if getattr(config, "mup_scale_qk_dot_by_d", False):
        return multiplier / head_dim
    return None if multiplier == 1.0 else multiplier * head_dim**-0.5


def _both(config: Any, first: str, second: str) -> bool:
    """One value for two attributes of flash-attn, which must agree."""
    choices = getattr(config, first, True), getattr(config, second, True)
    if choices[0] != choices[1]:
        raise ValueError(f"{first}, {second}: got {choices[0]} and {choices[1]}, want them equal")
    return choices[0]


def _positions(config: Any) -> dict[str, Any]:
    """The one position encoding of a model; flash-attn may combine three of them."""
    fraction = getattr(config, "rotary_emb_fraction", 0.0)
    ways = {
        "learned": ("n_positions", config.n_positions, config.n_positions > 0),
        "rotary": ("rotary_emb_fraction", fraction, fraction > 0),
        "alibi": ("use_alibi", True, getattr(config, "use_alibi", False)),
    }
    asked = [way for way, (_, _, is_asked) in ways.items() if is_asked]
    if len(asked) > 1:
        names = ", ".join(ways[way][0] for way in asked)
        values = ", ".join(f"{ways[way][0]}={ways[way][1]}" for way in asked)
        raise ValueError(
            f"{names}: got {values}; want only one position encoding (pass n_positions=0 with "
            "rotary or ALiBi)"
        )
    fields: dict[str, Any] = {"position": asked[0] if asked else "none"}
    if config.n_positions > 0:
        fields["max_position_embeddings"] = config.n_positions
    if fraction > 0:
        fields |= {
            "rotary_fraction": fraction,
            "rotary_base": getattr(config, "rotary_emb_base", 10000.0),
            "rotary_interleaved": getattr(config, "rotary_emb_interleaved", False),
            "rotary_scale_base": getattr(config, "rotary_emb_scale_base", None),
        }
    return fields
