"""Files of checkpoints that flash_attn reads."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from flashtile.models import checkpoints
from flashtile.models.gpt import GPTConfig


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_of_a_folder(tmp_path, shards):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="1GB" if shards == 1 else size // 2)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    state = checkpoints.state_dict_from_pretrained(str(tmp_path))
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)
    half = checkpoints.state_dict_from_pretrained(str(tmp_path), "cpu", torch.float16)
    assert {x.dtype for x in half.values()} == {torch.float16}
    for path in tmp_path.glob("model*.safetensors*"):
        path.unlink()
    torch.save(dict(model.state_dict()), tmp_path / "pytorch_model.bin")
    state = checkpoints.state_dict_from_pretrained(str(tmp_path))
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(OSError, match="which has neither"):
        checkpoints.state_dict_from_pretrained(str(tmp_path))


def test_files_of_meta(tmp_path, monkeypatch):
    folder = tmp_path / "7B"
    folder.mkdir()
    params = {"dim": 4096, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-6, "multiple_of": 256}
    (folder / "params.json").write_text(json.dumps(params))
    for rank in (5, 1, 4, 0, 3, 2):
        torch.save({"x": torch.tensor(rank)}, folder / f"consolidated.0{rank}.pth")
    config = checkpoints.config_from_checkpoint(tmp_path, "7B")
    # What Meta's 7B and, with another factor and shared key heads, its 70B have.
    assert (config.intermediate_size, config.vocab_size) == (11008, 32000)
    assert (config.num_key_value_heads, config.rms_norm_eps) == (32, 1e-6)
    assert not hasattr(config, "rotary_emb_base")
    params |= {"ffn_dim_multiplier": None, "vocab_size": 128}
    (folder / "params.json").write_text(json.dumps(params))
    config = checkpoints.config_from_checkpoint(tmp_path, "7B")
    assert (config.intermediate_size, config.vocab_size) == (11008, 128)
    (folder / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True}))
    with pytest.raises(ValueError, match="use_scaled_rope"):
        checkpoints.config_from_checkpoint(tmp_path, "7B")
    params |= {"dim": 8192, "n_heads": 64, "n_kv_heads": 8, "multiple_of": 4096}
    params |= {"ffn_dim_multiplier": 1.3, "rope_theta": 5e5}
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "tokenizer.model").touch()
    tokens = SimpleNamespace(vocab_size=lambda: 32016)
    library = SimpleNamespace(SentencePieceProcessor=lambda path: tokens)
    monkeypatch.setitem(sys.modules, "sentencepiece", library)
    config = checkpoints.config_from_checkpoint(tmp_path, "7B")
    assert (config.intermediate_size, config.num_key_value_heads) == (28672, 8)
    assert (config.rotary_emb_base, config.vocab_size) == (5e5, 32016)
    assert GPTConfig.from_transformers(config).rotary_base == 5e5
    states = checkpoints.state_dicts_from_checkpoint(tmp_path, "7B")
    assert [int(state["x"]) for state in states] == [*range(6)]


def test_files_of_hugging_face(tmp_path):
    LlamaConfig(hidden_size=64).save_pretrained(tmp_path / "7B-hf")
    assert checkpoints.config_from_checkpoint(tmp_path, "7B", "hf").hidden_size == 64
    with pytest.raises(ValueError, match="checkpoint_format: got 'gguf'"):
        checkpoints.config_from_checkpoint(tmp_path, "7B", "gguf")
