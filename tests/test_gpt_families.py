"""Weights of other families of models, and of processes that share a model: the maps give what
those of FlashAttention's repository give (`flash_attn_weights.json`, which names its source), and
models what those of transformers give.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

from flashtile.integrations import flash_attn
from flashtile.models import families, hugging_face, shards
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
FACTS = json.loads((Path(__file__).parent / "flash_attn_weights.json").read_text())

WORDS = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0}
SIZES = {**WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = {**SIZES, "ffn_dim": 48, "max_position_embeddings": 24, "pad_token_id": 1}
NEOX = {**SIZES, "intermediate_size": 48}
GPTJ = {**WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
NEW = {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}
MODELS = {
    "opt": ("OPTConfig", {**OPT, "word_embed_proj_dim": 32}),
    "opt, 350m": (
        "OPTConfig",
        {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "gptj": ("GPTJConfig", {**GPTJ, "rotary_dim": 4}),
    "gpt_neox": ("GPTNeoXConfig", NEOX),
    "gpt_neox, sequential": ("GPTNeoXConfig", {**NEOX, "use_parallel_residual": False}),
    "falcon, 7b": ("FalconConfig", SIZES),
    "falcon, 40b": ("FalconConfig", NEW),
    "falcon, 11b": ("FalconConfig", {**NEW, "num_ln_in_parallel_attn": 1}),
    "falcon, sequential": (
        "FalconConfig",
        {**SIZES, "multi_query": False, "bias": True, "parallel_attn": False},
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", GPTJ),
}
# Their rotation computes in float32 in a float64 model too.
TOLERANCES = {"gptj": {"atol": 1e-5, "rtol": 1e-6}}


def theirs(name):
    kind, arguments = MODELS[name]
    config = getattr(transformers, kind)(**arguments)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3).add_(parameter.dim() == 1)
    return model


def counted(shapes):
    """Weights that hold 0, 1, 2, ... one after the other."""
    state, first = {}, 0
    for name, shape in shapes.items():
        after = first + math.prod(shape)
        state[name] = torch.arange(first, after, dtype=torch.float64).view(shape)
        first = after
    return state


def summed(state):
    def of(x):
        return int((x.flatten() * (torch.arange(x.numel()) % 97 + 1)).sum())

    return {name: [list(x.shape), of(x)] for name, x in state.items()}


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, seed):
    their = theirs(name)
    our = GPTLMHeadModel.from_transformers(their)
    ids = torch.randint(2, 61, (2, 13))
    torch.testing.assert_close(our(ids).logits, their(ids).logits, **TOLERANCES.get(name, {}))
    # The same through flash_attn's functions, with padded words.
    family = their.config.model_type
    config = families.CONVERSIONS[family](their.config)
    config.pad_vocab_size_multiple = 8
    remapped = hugging_face.remap(their.state_dict(), config, family=family)
    padded = GPTLMHeadModel(config, dtype=torch.float64).eval()
    padded.load_state_dict(remapped)
    torch.testing.assert_close(padded(ids).logits[..., :61], our(ids).logits)
    there = hugging_face.state_dict_to_transformers(our.state_dict(), our.config, family)
    for key, x in their.state_dict().items():
        first = 2 if "embed_positions" in key else 0  # OPT's positions of padding are lost
        key = key.replace(".ln_attn.", ".input_layernorm.")  # the older name of two
        key = key.replace(".ln_mlp.", ".post_attention_layernorm.")
        assert torch.equal(there[key][first:], x[first:])


@pytest.mark.parametrize("path", FACTS["remaps"])
def test_maps_of_state_dicts(path):
    module, name = path.split(".")
    facts = FACTS["remaps"][path]
    with flash_attn.install():
        function = getattr(importlib.import_module(f"flash_attn.models.{module}"), name)
    made = function(counted(facts["given"]), transformers.GPT2Config(**facts["config"]))
    assert summed(made) == facts["made"]
    model = GPTLMHeadModel(transformers.GPT2Config(**facts["config"]))
    assert made.keys() == model.state_dict().keys()


def test_a_llama_there_and_back():
    facts = FACTS["remaps"]["llama.remap_state_dict_hf_llama"]
    config = transformers.GPT2Config(**{**facts["config"], "pad_vocab_size_multiple": 1})
    state = counted(facts["given"])
    made = hugging_face.remap_state_dict_hf_llama(state, config)
    back = hugging_face.inv_remap_state_dict_hf_llama(made, config)
    assert all(torch.equal(x, state[name]) for name, x in back.items())


@pytest.mark.parametrize("number", FACTS["shards"])
def test_parts_of_processes(number):
    facts = FACTS["shards"][number]
    config = transformers.GPT2Config(**facts["config"])
    world = len(facts["made"])
    parts = [
        shards.shard_state_dict_tp(counted(facts["given"]), config, world, rank)
        for rank in range(world)
    ]
    assert [summed(part) for part in parts] == facts["made"]
    whole = shards.combine_state_dicts_tp(parts, config)
    assert summed(whole) == summed(counted(facts["given"]))
    with pytest.raises(ValueError, match="vocab_size: got 64, want a multiple of the 5 processes"):
        shards.shard_state_dict_tp(counted(facts["given"]), config, 5, 0)


def test_configs_of_families():
    llama = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2
    )
    config = GPTConfig.from_transformers(families.llama_config_to_gpt2_config(llama))
    assert (config.position, config.norm, config.activation) == ("rotary", "rms_norm", "swiglu")
    assert config.rotary_interleaved and config.kv_heads == 2 and not config.attention_bias
    llama.model_type = "baichuan"  # whose class transformers lacks
    config = GPTConfig.from_transformers(llama)
    assert config.position == "rotary" and not config.rotary_interleaved and not config.norm_head
    llama.vocab_size, llama.hidden_size = 80000, 6000
    config = GPTConfig.from_transformers(llama)
    assert config.position == "alibi" and config.norm_head
    btlm = transformers.GPT2Config(n_positions=24, activation_function="swiglu", n_inner=100)
    btlm.model_type, btlm.position_embedding_type = "btlm", "alibi"
    btlm.mup_width_scale, btlm.mup_scale_qk_dot_by_d = 0.1, True
    btlm.mup_embeddings_scale, btlm.mup_output_alpha = 14.6, 2.2
    config = GPTConfig.from_transformers(btlm)
    assert (config.position, config.intermediate_size) == ("alibi", 100)
    assert (config.width_scale, config.embedding_multiplier) == (0.1, 14.6)
    assert (config.output_multiplier, config.softmax_scale) == (2.2, 1 / 64)
    for family, kind, changes, words in (
        ("falcon", "FalconConfig", {"alibi": True}, "alibi: got True, want False"),
        ("opt", "OPTConfig", {"layerdrop": 0.1}, "layerdrop: got 0.1, want 0.0"),
        ("gpt_bigcode", "GPTBigCodeConfig", {"multi_query": False}, "multi_query: got False"),
        ("gpt_neox", "GPTNeoXConfig", {"rope_parameters": SCALED}, "got rope_type 'linear'"),
    ):
        with pytest.raises(ValueError, match=words):
            families.CONVERSIONS[family](getattr(transformers, kind)(**changes))


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25}
