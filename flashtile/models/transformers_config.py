"""Configs of transformers as fields of a `GPTConfig`: a Llama's, and a GPT-2's, perhaps with
flash-attn's additions.

``flash_attn.models.gpt`` reads attributes that transformers' ``GPT2Config`` does not declare.
Attributes that only choose a kernel change no result; `checks.ignored` names them.
"""

from __future__ import annotations

from typing import Any

from ..call.checks import ignored

_KERNELS = """
    use_flash_attn fused_mlp fused_bias_fc fused_dense_sqrelu_dense fused_dropout_add_ln
    mlp_checkpoint_lvl
"""
GATED = ("swiglu", "geglu", "glu")
_GATED_MULTIPLE = 128  # flash-attn rounds the width of a gated MLP up to a multiple of this
# Activations of a GPT2Config, some of which only flash-attn accepts -> ours.
_GPT2_ACTIVATIONS = {
    **{name: name for name in ("gelu", "relu", "sqrelu", *GATED)},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_approx"), "gelu_tanh"),
}
_LLAMA_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}

# Names of fields, for `copied`; the last four lines are flash-attn's.
_GPT2 = """
    hidden_size=n_embd num_layers=n_layer num_heads=n_head norm_eps=layer_norm_epsilon
    scale_attn_by_inverse_layer_idx tie_word_embeddings initializer_range
    embedding_dropout=embd_pdrop residual_dropout=resid_pdrop attention_dropout=attn_pdrop
    num_kv_heads=n_head_kv head_dim lm_head_bias norm_head word_embed_proj_dim prenorm
    parallel_block tied_norm=parallel_block_tied_norm dwconv=attn_dwconv window_size
    residual_in_fp32 sequence_parallel width_scale=mup_width_scale
    embedding_multiplier=mup_embeddings_multiplier output_multiplier=mup_output_multiplier
"""
_ROTARY = """
    rotary_fraction=rotary_emb_fraction rotary_base=rotary_emb_base
    rotary_interleaved=rotary_emb_interleaved rotary_scale_base=rotary_emb_scale_base
"""
_LLAMA = """
    vocab_size hidden_size num_layers=num_hidden_layers num_heads=num_attention_heads
    num_kv_heads=num_key_value_heads intermediate_size max_position_embeddings
    norm_eps=rms_norm_eps tie_word_embeddings attention_dropout initializer_range
"""


def copied(config: Any, names: str) -> dict[str, Any]:
    """The attributes of `config` that it has: `names` are ours, or ours=theirs."""
    pairs = [name.partition("=") for name in names.split()]
    known = {ours: theirs or ours for ours, _, theirs in pairs}
    return {ours: getattr(config, name) for ours, name in known.items() if hasattr(config, name)}


def want(config: Any, name: str, wanted: Any) -> None:
    """Raise ValueError if `config` has an attribute of another value."""
    if getattr(config, name, wanted) != wanted:
        raise ValueError(f"{name}: got {getattr(config, name)!r}, want {wanted!r}")


def rope(config: Any, name: str, default: float) -> float:
    """`rope_theta` or `partial_rotary_factor`, which releases of transformers keep in different
    places, and Meta's files and older GPT-NeoX under other names. ValueError if the frequencies are
    scaled.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_parameters: got rope_type {kind!r}, want 'default'")
    other = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}[name]
    return getattr(config, other, given.get(name, getattr(config, name, default)))


def llama_fields(config: Any) -> dict[str, Any]:
    """Fields for a LlamaConfig or MistralConfig."""
    window = getattr(config, "sliding_window", None)  # counts the query itself
    fields = copied(config, _LLAMA) | copied(config, "head_dim attention_bias mlp_bias")
    for name in (pair.split("=") for pair in _LLAMA.split()):
        if name[0] not in fields:
            raise ValueError(f"{name[-1]}: got a {type(config).__name__} without it, want a number")
    return fields | {
        "rotary_base": rope(config, "rope_theta", 10000.0),
        "rotary_fraction": rope(config, "partial_rotary_factor", 1.0),
        "activation": _activation("hidden_act", config, _LLAMA_ACTIVATIONS),
        "window_size": (-1, -1) if window is None else (window - 1, 0),
    }


def gpt2_fields(config: Any) -> dict[str, Any]:
    """Fields for a GPT2Config. ValueError names an attribute with a value that `GPTModel` does not
    support.
    """
    ignored("GPT2Config", **{name: getattr(config, name, None) for name in _KERNELS.split()})
    want(config, "add_cross_attention", False)
    activation = _activation("activation_function", config, _GPT2_ACTIVATIONS)
    multiple = getattr(config, "pad_vocab_size_multiple", 1)
    width = config.n_inner
    if activation in GATED:
        step = getattr(config, "mlp_multiple_of", _GATED_MULTIPLE)
        wanted = 8 * config.hidden_size // 3 if width is None else width
        width = -(-wanted // step) * step
    fields = {
        "vocab_size": -(-config.vocab_size // multiple) * multiple,
        "intermediate_size": width,
        "norm": "rms_norm" if getattr(config, "rms_norm", False) else "layer_norm",
        "activation": activation,
        "attention_bias": _both(config, "qkv_proj_bias", "out_proj_bias"),
        "mlp_bias": _both(config, "mlp_fc1_bias", "mlp_fc2_bias"),
        "softmax_scale": _softmax_scale(config),
    }
    return copied(config, _GPT2) | fields | _positions(config)


def _activation(name: str, config: Any, names: dict[str, str]) -> str:
    """flashtile's name of an activation."""
    value = getattr(config, name)
    if value not in names:
        raise ValueError(f"{name}: got {value!r}, want one of {', '.join(names)}")
    return names[value]


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
    ways = {
        "n_positions": ("learned", max(config.n_positions, 0)),
        "rotary_emb_fraction": ("rotary", getattr(config, "rotary_emb_fraction", 0.0)),
        "use_alibi": ("alibi", getattr(config, "use_alibi", False)),
    }
    asked = {name: value for name, (_, value) in ways.items() if value}
    if len(asked) > 1:
        values = ", ".join(f"{name}={value}" for name, value in asked.items())
        raise ValueError(
            f"{', '.join(asked)}: got {values}; want only one position encoding (pass "
            "n_positions=0 with rotary or ALiBi)"
        )
    fields: dict[str, Any] = {"position": ways[next(iter(asked))][0] if asked else "none"}
    if "n_positions" in asked:
        fields["max_position_embeddings"] = config.n_positions
    return fields | copied(config, _ROTARY if "rotary_emb_fraction" in asked else "")
