"""Configs of other families as a ``GPT2Config`` with flash-attn's additional attributes, with the
names of ``flash_attn.models.{llama,opt,falcon,gptj,gpt_neox,bigcode,btlm,baichuan}``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .transformers_config import copied, rope, want

# Names of attributes, for `copied`.
_EVERY = "vocab_size bos_token_id eos_token_id initializer_range "
_SIZES = "n_embd=hidden_size n_layer=num_hidden_layers n_head=num_attention_heads "
_DROPOUTS = "resid_pdrop embd_pdrop attn_pdrop "
_GPT2 = "n_embd n_layer n_head n_inner activation_function layer_norm_epsilon " + _DROPOUTS
_LLAMA = _SIZES + "n_inner=intermediate_size layer_norm_epsilon=rms_norm_eps pad_token_id "

_NO_DROPOUT = dict.fromkeys(_DROPOUTS.split(), 0.0)
_BIASES = ("qkv_proj_bias", "out_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_OF_LLAMA = {
    "n_positions": 0,
    "activation_function": "swiglu",
    "rms_norm": True,
    "tie_word_embeddings": False,
    **_NO_DROPOUT,
    **dict.fromkeys(_BIASES, False),
}


def _converted(config: Any, names: str, **others: Any) -> Any:
    from transformers import GPT2Config

    arguments: dict[str, Any] = copied(config, _EVERY + names) | others
    return GPT2Config(**arguments)


def llama_config_to_gpt2_config(llama_config: Any) -> Any:
    """Of a LlamaConfig; the weights' rotary pairs become neighbours, as in Meta's own files."""
    return _converted(
        llama_config,
        _LLAMA + "n_head_kv=num_key_value_heads",
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=True,
        rotary_emb_base=rope(llama_config, "rope_theta", 10000.0),
        **_OF_LLAMA,
    )


def baichuan_config_to_gpt2_config(baichuan_config: Any) -> Any:
    """Of a Baichuan config. As in flash_attn, models of fewer than 5000 features have rotary
    positions and the others ALiBi, and those of more than 70000 words a normalised head.
    """
    rotary = baichuan_config.hidden_size < 5000
    return _converted(
        baichuan_config,
        _LLAMA,
        rotary_emb_fraction=float(rotary),
        use_alibi=not rotary,
        use_flash_attn=not rotary,
        norm_head=baichuan_config.vocab_size > 70000,
        **_OF_LLAMA,
    )


def opt_config_to_gpt2_config(opt_config: Any) -> Any:
    """Of an OPTConfig; raises ValueError for layerdrop and norms without weights."""
    want(opt_config, "layerdrop", 0.0)
    want(opt_config, "layer_norm_elementwise_affine", True)
    width = opt_config.word_embed_proj_dim
    return _converted(
        opt_config,
        _SIZES + "n_positions=max_position_embeddings n_inner=ffn_dim activation_function "
        "resid_pdrop=dropout embd_pdrop=dropout attn_pdrop=attention_dropout "
        "initializer_range=init_std prenorm=do_layer_norm_before",
        word_embed_proj_dim=None if width == opt_config.hidden_size else width,
    )


def falcon_config_to_gpt2_config(falcon_config: Any) -> Any:
    """Of a FalconConfig; raises ValueError for ALiBi, which Falcon scales in its own way."""
    want(falcon_config, "alibi", False)
    is_new = getattr(falcon_config, "new_decoder_architecture", False)
    one_norm = getattr(falcon_config, "num_ln_in_parallel_attn", None) == 1 or not is_new
    heads = falcon_config.num_attention_heads
    if is_new:
        heads = falcon_config.num_kv_heads
    elif falcon_config.multi_query:
        heads = 1
    return _converted(
        falcon_config,
        _SIZES + "resid_pdrop=hidden_dropout attn_pdrop=attention_dropout layer_norm_epsilon "
        "parallel_block=parallel_attn",
        n_positions=0,
        n_inner=getattr(falcon_config, "ffn_hidden_size", 4 * falcon_config.hidden_size),
        n_head_kv=heads,
        activation_function="gelu",
        embd_pdrop=0.0,
        parallel_block_tied_norm=falcon_config.parallel_attn and one_norm,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        rotary_emb_base=rope(falcon_config, "rope_theta", 10000.0),
        tie_word_embeddings=True,
        lm_head_bias=False,
        **dict.fromkeys(_BIASES, falcon_config.bias),
    )


def gptj_config_to_gpt2_config(gptj_config: Any) -> Any:
    """Of a GPTJConfig."""
    return _converted(
        gptj_config,
        _GPT2,
        n_positions=0,
        parallel_block=True,
        parallel_block_tied_norm=True,
        rotary_emb_fraction=gptj_config.rotary_dim / (gptj_config.n_embd // gptj_config.n_head),
        rotary_emb_interleaved=True,
        tie_word_embeddings=False,
        qkv_proj_bias=False,
        out_proj_bias=False,
        lm_head_bias=True,
    )


def gpt_neox_config_to_gpt2_config(gpt_neox_config: Any) -> Any:
    """Of a GPTNeoXConfig."""
    return _converted(
        gpt_neox_config,
        _SIZES + "n_inner=intermediate_size activation_function=hidden_act "
        "layer_norm_epsilon=layer_norm_eps parallel_block=use_parallel_residual "
        "tie_word_embeddings",
        n_positions=0,
        parallel_block_tied_norm=False,
        rotary_emb_fraction=rope(gpt_neox_config, "partial_rotary_factor", 0.25),
        rotary_emb_base=rope(gpt_neox_config, "rope_theta", 10000.0),
        **_NO_DROPOUT,
    )


def bigcode_config_to_gpt2_config(bigcode_config: Any) -> Any:
    """Of a GPTBigCodeConfig with one key head, which the state dict repeats for all query heads."""
    want(bigcode_config, "multi_query", True)
    return _converted(bigcode_config, _GPT2 + "n_positions scale_attn_weights")


def btlm_config_to_gpt2_config(btlm_config: Any) -> Any:
    """Of a BTLM config."""
    has_alibi = btlm_config.position_embedding_type == "alibi"
    return _converted(
        btlm_config,
        _SIZES + _DROPOUTS + "n_inner activation_function layer_norm_epsilon "
        "mup_width_scale mup_scale_qk_dot_by_d "
        "mup_embeddings_multiplier=mup_embeddings_scale mup_output_multiplier=mup_output_alpha",
        mlp_multiple_of=1,
        n_positions=0 if has_alibi else btlm_config.n_positions,
        use_alibi=has_alibi,
        use_flash_attn=has_alibi,
    )


# model_type -> function, for all but GPT-2 and Llama, whose configs a `GPTConfig` reads itself.
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "opt": opt_config_to_gpt2_config,
    "falcon": falcon_config_to_gpt2_config,
    "gptj": gptj_config_to_gpt2_config,
    "gpt_neox": gpt_neox_config_to_gpt2_config,
    "gpt_bigcode": bigcode_config_to_gpt2_config,
    "btlm": btlm_config_to_gpt2_config,
    "baichuan": baichuan_config_to_gpt2_config,
}
