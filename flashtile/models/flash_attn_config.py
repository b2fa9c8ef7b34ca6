"""flash-attn's additions to a transformers ``GPT2Config``, as fields of a `GPTConfig`.

``flash_attn.models.gpt`` reads attributes that transformers' class does not declare. An attribute
that changes the model is honoured or raises an error. Attributes that only choose a kernel
(``use_flash_attn``, ``fused_mlp``, ``fused_bias_fc``, ``fused_dropout_add_ln``,
``mlp_checkpoint_lvl``) or divide the work among processes (``sequence_parallel``) change no result
and are ignored.
"""

from __future__ import annotations

from typing import Any

# Attributes that change the model but have no field in `GPTConfig`, with their neutral values.
_NOT_HERE: dict[str, Any] = {
    "attn_dwconv": False,
    "lm_head_bias": False,
    "mup_embeddings_multiplier": 1.0,
    "mup_output_multiplier": 1.0,
    "mup_width_scale": 1.0,
    "norm_head": False,
    "parallel_block_tied_norm": False,
    "prenorm": True,
    "rotary_emb_scale_base": None,
    "word_embed_proj_dim": None,
}
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
    refused = {
        name: getattr(config, name, neutral)
        for name, neutral in _NOT_HERE.items()
        if getattr(config, name, neutral) != neutral
    }
    if refused:
        values = ", ".join(f"{name}={value!r}" for name, value in refused.items())
        neutral = ", ".join(f"{name}={_NOT_HERE[name]!r}" for name in refused)
        raise ValueError(f"{', '.join(refused)}: got {values}; this model has {neutral} only")
    multiple = getattr(config, "pad_vocab_size_multiple", 1)
    width = config.n_inner
    if gated:
        step = getattr(config, "mlp_multiple_of", _GATED_MULTIPLE)
        wanted = 8 * config.hidden_size // 3 if width is None else width
        width = -(-wanted // step) * step
    fields = {
        "vocab_size": -(-config.vocab_size // multiple) * multiple,
        "num_kv_heads": getattr(config, "n_head_kv", None),
        "head_dim": getattr(config, "head_dim", None),
        "intermediate_size": width,
        "norm": "rms_norm" if getattr(config, "rms_norm", False) else "layer_norm",
        "activation": activation,
        "attention_bias": _both(config, "qkv_proj_bias", "out_proj_bias"),
        "mlp_bias": _both(config, "mlp_fc1_bias", "mlp_fc2_bias"),
        "parallel_block": getattr(config, "parallel_block", False),
        "window_size": getattr(config, "window_size", (-1, -1)),
        "softmax_scale": _softmax_scale(config),
        "residual_in_fp32": getattr(config, "residual_in_fp32", False),
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
        }
    return fields
