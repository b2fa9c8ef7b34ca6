"""Configurations: their defaults, and errors that name the wrong field."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from flashtile.models.gpt import GPTConfig, GPTLMHeadModel, GPTModel


def test_resolved_sizes():
    gpt2 = GPTConfig.gpt2()
    assert (gpt2.kv_heads, gpt2.head_size, gpt2.mlp_size, gpt2.rotary_dim) == (12, 64, 3072, 0)
    llama = GPTConfig.llama(num_kv_heads=4, rotary_fraction=0.5)
    assert (llama.kv_heads, llama.head_size, llama.mlp_size, llama.rotary_dim) == (4, 64, 2048, 32)
    assert GPTConfig.llama(hidden_size=792).mlp_size == 2176  # 2112 rounded up
    assert GPTConfig(head_dim=50).head_size == 50
    assert GPTConfig(intermediate_size=5).mlp_size == 5


def test_round_trip_through_a_dictionary():
    config = GPTConfig.llama(num_kv_heads=3, window_size=[7, 0], residual_dropout=0)
    assert GPTConfig(**asdict(config)) == config
    assert replace(config, num_layers=2).window_size == (7, 0)
    assert hash(config) == hash(GPTConfig(**asdict(config)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size: must be positive, got 0"),
        ({"num_layers": -1}, "num_layers: must be positive, got -1"),
        ({"num_heads": 7}, "num_heads: 7 does not divide hidden_size 768"),
        ({"num_heads": 0}, "num_heads: must be positive"),
        ({"num_kv_heads": 5}, "num_kv_heads: 5 does not divide num_heads 12"),
        ({"num_kv_heads": 0}, "num_kv_heads: must be positive"),
        ({"head_dim": 0}, "head_dim: must be positive"),
        ({"intermediate_size": 0}, "intermediate_size: must be positive"),
        ({"position": "absolute"}, "position: got 'absolute', want one of learned, rotary"),
        ({"norm": "batch"}, "norm: got 'batch', want one of layer_norm, rms_norm"),
        ({"activation": "tanh"}, "activation: got 'tanh', want one of gelu"),
        ({"rotary_fraction": 1.5}, "rotary_fraction: got 1.5"),
        ({"rotary_fraction": 0.0}, "rotary_fraction: must be positive"),
        ({"position": "rotary", "head_dim": 5}, "rotary_fraction: 1.0 of head_dim 5"),
        ({"position": "rotary", "rotary_fraction": 0.01}, "rotary_fraction: 0.01 of head_dim 64"),
        ({"residual_dropout": 1.0}, "residual_dropout: got 1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout: got -0.1"),
        ({"embedding_dropout": 2.0}, "embedding_dropout: got 2.0"),
        ({"softcap": -1.0}, "softcap: must not be negative"),
        ({"softmax_scale": 0.0}, "softmax_scale: must be positive"),
        ({"norm_eps": float("nan")}, "norm_eps: must be positive, got nan"),
        ({"window_size": (-2, 0)}, "window_size: got .-2, 0., want -1 or more"),
    ],
)
def test_values_out_of_range(changes, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 2.5}, "num_layers: got 2.5, want int"),
        ({"num_layers": True}, "num_layers: got True, want int"),
        ({"num_kv_heads": "4"}, "num_kv_heads: got '4', want int | None"),
        ({"norm_eps": "1e-5"}, "norm_eps: got '1e-5', want float"),
        ({"norm_eps": None}, "norm_eps: got None, want float"),
        ({"mlp_bias": 1}, "mlp_bias: got 1, want bool"),
        ({"position": None}, "position: got None, want str"),
        ({"window_size": 7}, "window_size: got 7, want tuple"),
        ({"window_size": (1, 2, 3)}, "window_size: got .1, 2, 3., want two integers"),
        ({"window_size": (None, 0)}, "window_size: got .None, 0., want two integers"),
        ({"n_layer": 3}, "n_layer"),
    ],
)
def test_values_of_a_wrong_type(changes, words):
    with pytest.raises(TypeError, match=words):
        GPTConfig(**changes)


def test_from_gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = GPTConfig.from_transformers(transformers.GPT2Config(n_inner=100, attn_pdrop=0.3))
    assert config == GPTConfig.gpt2(
        intermediate_size=100,
        attention_dropout=0.3,
        residual_dropout=0.1,
        embedding_dropout=0.1,
    )


FLASH_ATTN = {
    "nothing": ({}, {}),
    "hints": ({"use_flash_attn": True, "fused_mlp": True, "fused_bias_fc": True}, {}),
    "rotary": (
        {"n_positions": 0, "rotary_emb_fraction": 0.5, "rotary_emb_base": 500.0},
        {"position": "rotary", "rotary_fraction": 0.5, "rotary_base": 500.0},
    ),
    "interleaved": (
        {"n_positions": 0, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": True},
        {"position": "rotary", "rotary_interleaved": True},
    ),
    "alibi": ({"n_positions": 0, "use_alibi": True}, {"position": "alibi"}),
    "no positions": ({"n_positions": 0}, {"position": "none"}),
    "heads": ({"n_head_kv": 4, "head_dim": 32}, {"num_kv_heads": 4, "head_dim": 32}),
    "norm": ({"rms_norm": True}, {"norm": "rms_norm"}),
    "window": ({"window_size": (3, 0)}, {"window_size": (3, 0)}),
    "parallel block": ({"parallel_block": True}, {"parallel_block": True}),
    "biases": (
        dict.fromkeys(("qkv_proj_bias", "out_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
        {"attention_bias": False, "mlp_bias": False},
    ),
    "float32 stream": ({"residual_in_fp32": True}, {"residual_in_fp32": True}),
    "scale of the layer": (
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_by_inverse_layer_idx": True},
    ),
    "no scale": ({"scale_attn_weights": False}, {"softmax_scale": 1.0}),
    "another scale": ({"mup_attn_multiplier": 0.5}, {"softmax_scale": 0.5 * 64**-0.5}),
    "scale of muP": (
        {"mup_attn_multiplier": 8.0, "mup_scale_qk_dot_by_d": True},
        {"softmax_scale": 0.125},
    ),
    "vocabulary": ({"pad_vocab_size_multiple": 64}, {"vocab_size": 50304}),
    "fast gelu": ({"activation_function": "gelu_fast"}, {}),
    "gated": (
        {"activation_function": "swiglu", "n_inner": 100},
        {"activation": "swiglu", "intermediate_size": 128},
    ),
    "gated in steps": (
        {"activation_function": "geglu", "n_inner": 100, "mlp_multiple_of": 8},
        {"activation": "geglu", "intermediate_size": 104},
    ),
    "norms after the branches": (
        {"prenorm": False, "word_embed_proj_dim": 512, "attn_dwconv": True},
        {"prenorm": False, "word_embed_proj_dim": 512, "dwconv": True},
    ),
    "one norm for two branches": (
        {"parallel_block": True, "parallel_block_tied_norm": True, "sequence_parallel": False},
        {"parallel_block": True, "tied_norm": True, "sequence_parallel": False},
    ),
    "another head": (
        {"lm_head_bias": True, "norm_head": True, "activation_function": "sqrelu"},
        {"lm_head_bias": True, "norm_head": True, "activation": "sqrelu"},
    ),
    "factors of muP": (
        {
            "mup_embeddings_multiplier": 2.0,
            "mup_output_multiplier": 3.0,
            "mup_width_scale": 0.5,
            "activation_function": "glu",
        },
        {
            "embedding_multiplier": 2.0,
            "output_multiplier": 3.0,
            "width_scale": 0.5,
            "activation": "glu",
            "intermediate_size": 2048,
        },
    ),
    "gated in steps, of the default width": (
        {"activation_function": "swiglu", "mlp_multiple_of": 1000},  # 8 / 3 * 768 = 2048
        {"activation": "swiglu", "intermediate_size": 3000},
    ),
}


@pytest.mark.parametrize("case", FLASH_ATTN)
def test_from_flash_attn_s_gpt2(case):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    added, wanted = FLASH_ATTN[case]
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPTConfig.from_transformers(transformers.GPT2Config(**plain, **added))
    assert config == GPTConfig.gpt2(**wanted)


@pytest.mark.parametrize("make", [GPTConfig.from_transformers, GPTLMHeadModel])
@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"prenorm": False, "parallel_block": True}, "prenorm: got False with parallel_block"),
        ({"prenorm": False, "residual_in_fp32": True}, "prenorm: got False with parallel_block or"),
        ({"parallel_block_tied_norm": True}, "tied_norm: got True, want False"),
        ({"qkv_proj_bias": False}, "qkv_proj_bias, out_proj_bias: got False and True"),
        ({"mlp_fc2_bias": False}, "mlp_fc1_bias, mlp_fc2_bias: got True and False"),
        ({"rotary_emb_fraction": 0.5}, "n_positions, rotary_emb_fraction: got n_positions=1024"),
        (
            {"n_positions": 0, "use_alibi": True, "rotary_emb_fraction": 1.0},
            "rotary_emb_fraction, use_alibi",
        ),
        ({"activation_function": "silu"}, "activation_function: got 'silu'"),
        ({"n_head_kv": 5}, "num_kv_heads: 5 does not divide num_heads 12"),
    ],
)
def test_additions_of_flash_attn_that_this_model_lacks(make, added, words):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(ValueError, match=words):
        make(transformers.GPT2Config(n_layer=1, vocab_size=64, **added))


def test_from_llama_and_mistral():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = transformers.LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=True)
    config = GPTConfig.from_transformers(theirs)
    assert config == GPTConfig.llama(
        vocab_size=32000,
        hidden_size=64,
        num_layers=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=11008,
        max_position_embeddings=2048,
        norm_eps=1e-6,
        attention_bias=True,
        tie_word_embeddings=True,
    )
    theirs = transformers.MistralConfig(**sizes, sliding_window=5)
    assert GPTConfig.from_transformers(theirs).window_size == (4, 0)


def test_from_an_older_transformers():
    """Before version 5 the base of the rotation was a field beside rope_scaling."""
    old = SimpleNamespace(
        model_type="llama",
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        max_position_embeddings=32,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        rope_theta=500.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        initializer_range=0.02,
    )
    assert GPTConfig.from_transformers(old).rotary_base == 500.0
    old.rope_scaling = {"type": "linear", "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type 'linear', want 'default'"):
        GPTConfig.from_transformers(old)


@pytest.mark.parametrize("make", [GPTConfig.from_transformers, GPTModel, GPTLMHeadModel])
def test_unknown_models(make):
    with pytest.raises(ValueError, match="config: got model_type 'bert', want one of gpt2, llama"):
        make(SimpleNamespace(model_type="bert"))
    with pytest.raises(ValueError, match="config: got model_type 'dict'"):
        make({})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_cross_attention": True}, "add_cross_attention: got True"),
        ({"activation_function": "mish"}, "activation_function: got 'mish', want one of gelu"),
    ],
)
def test_options_of_gpt2_that_this_model_lacks(changes, words):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(ValueError, match=words):
        GPTConfig.from_transformers(transformers.GPT2Config(**changes))
