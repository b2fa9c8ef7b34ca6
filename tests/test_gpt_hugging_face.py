"""Models of transformers and of flashtile with the same weights give the same results."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_gpt import CONFIGS, build
from torch.nn import functional as F

from examples.demo import inputs
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel
from flashtile.models.hugging_face import state_dict_from_transformers, state_dict_to_transformers
from flashtile.testing import assert_close

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tiny_models = pytest.importorskip("tiny_models")  # imports transformers

FAMILIES = {
    "gpt2": ("gpt2", {}),
    "gpt2, exact gelu": ("gpt2", {"activation_function": "gelu", "n_inner": 40}),
    "gpt2, scaled by layers": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, not scaled": ("gpt2", {"scale_attn_weights": False}),
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24, "rope_theta": 500.0}),
    "mistral": ("mistral", {}),
}
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


class RMSNorm(torch.nn.Module):
    """That of transformers' Llama, but in the dtype of the model: theirs computes in float32."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


def in_float64(model):
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.__class__ = RMSNorm
    return model


def theirs(name):
    family, changes = FAMILIES[name]
    model = in_float64(tiny_models.build(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are not all alike
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@EVERY_FAMILY
def test_logits_and_gradients(name, seed):
    their, ids = theirs(name), tiny_models.tokens()
    our = GPTLMHeadModel.from_transformers(their)
    assert not our.training
    want, got = their(ids).logits, our(ids).logits
    torch.testing.assert_close(got, want)
    want.square().mean().backward()
    got.square().mean().backward()
    our_gradients = {key: x.grad for key, x in our.named_parameters()}
    our_gradients.setdefault("lm_head.weight", our.lm_head.weight.grad)
    found = state_dict_to_transformers(our_gradients, our.config)
    for key, parameter in their.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad)


@EVERY_FAMILY
def test_greedy_texts(name, seed):
    their, ids = theirs(name), tiny_models.tokens()
    our = GPTLMHeadModel.from_transformers(their)
    want = their.generate(ids, max_length=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(our.generate(ids, 40), want)


@EVERY_FAMILY
def test_state_dicts_there_and_back(name, seed):
    their = theirs(name)
    state = their.state_dict()
    config = GPTConfig.from_transformers(their.config)
    there = state_dict_from_transformers(state, config)
    back = state_dict_to_transformers(there, config)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], x) for key, x in state.items())
    other = copy.deepcopy(their)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(back)
    ids = tiny_models.tokens()
    assert torch.equal(other(ids).logits, their(ids).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_of_ours_becomes_one_of_theirs(name, seed):
    our, ids = build(name), tiny_models.tokens()[:, :20] % 61
    state = state_dict_to_transformers(our.state_dict(), our.config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=24
        )
    else:
        config = transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
        )
    their = in_float64(transformers.AutoModelForCausalLM.from_config(config).eval())
    their.load_state_dict(state)
    torch.testing.assert_close(our(ids).logits, their(ids).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_a_folder(name, seed, tmp_path):
    their, ids = theirs(name).float(), tiny_models.tokens()
    their.save_pretrained(tmp_path)
    their.config.pad_vocab_size_multiple = 64  # an attribute of flash_attn's
    our = GPTLMHeadModel.from_pretrained(str(tmp_path), their.config, dtype=torch.float64)
    logits = our.eval()(ids).logits
    their = in_float64(their)
    torch.testing.assert_close(logits[..., : their.config.vocab_size], their(ids).logits)
    if name == "gpt2":
        assert logits.shape[-1] % 64 == 0
        assert not logits[..., their.config.vocab_size :].any()


def test_our_copy_is_our_own(seed):
    their, ids = theirs("llama, tied"), tiny_models.tokens()
    our = GPTLMHeadModel.from_transformers(their)
    before = our(ids).logits
    with torch.no_grad():
        for parameter in their.parameters():
            parameter.zero_()
    assert torch.equal(our(ids).logits, before)
    assert our.lm_head.weight is our.transformer.embeddings.word_embeddings.weight


def test_checkpoints_as_they_are_stored(seed):
    """Without the tied head, and in old files with masks, which are no weights."""
    their = theirs("gpt2")
    state = their.state_dict()
    config = GPTConfig.from_transformers(their.config)
    want = state_dict_from_transformers(state, config)
    del state["lm_head.weight"]
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    got = state_dict_from_transformers(state, config)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], x) for key, x in want.items())


def test_state_dicts_that_do_not_fit():
    their = theirs("llama")
    state, config = their.state_dict(), GPTConfig.from_transformers(their.config)
    with pytest.raises(ValueError, match=r"'more' and 0 others fit no parameter"):
        state_dict_from_transformers({**state, "more": torch.ones(1)}, config)
    for key in ("lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        less = {name: x for name, x in state.items() if name != key}
        with pytest.raises(ValueError, match=f"{key}.* is missing"):
            state_dict_from_transformers(less, config)
    with pytest.raises(ValueError, match="want a GPT-2 "):
        state_dict_to_transformers(build("gpt-neox").state_dict(), CONFIGS["gpt-neox"])


@pytest.mark.slow
def test_smollm2(seed):
    """A trained model of 135 million weights on English text."""
    pytest.importorskip("gguf", reason="gguf, which reads the model, is not installed")
    try:
        path = inputs.find_model()
    except inputs.MissingInputError as missing:
        pytest.skip(str(missing))
    their, tokenizer = inputs.load(path, "cpu")
    text = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer"
    ids = tokenizer(text, return_tensors="pt").input_ids
    our = GPTLMHeadModel.from_transformers(their)
    with torch.no_grad():
        got, plain = our(ids).logits, their(ids).logits
    sequence = our.generate(ids, ids.shape[1] + 8)
    assert torch.equal(sequence, their.generate(ids, max_new_tokens=8, do_sample=False))
    with torch.no_grad():
        truth = their.double()(ids).logits
    assert_close("logits", got, truth, plain)
