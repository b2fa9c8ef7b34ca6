"""Read the files of checkpoints: those of Hugging Face, and Meta's of Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def state_dict_from_pretrained(
    model_name: str, device: Any = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The weights of a model of Hugging Face as its files have them.

    Args:
        model_name: a folder, or a name on the Hub; OSError if there are no weights.
        device, dtype: of the result; those of the files by default, on the CPU.
    """
    from safetensors.torch import load_file
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    for kind in ("model.safetensors", "pytorch_model.bin"):
        for name in (kind, f"{kind}.index.json"):
            path = cached_file(model_name, name, _raise_exceptions_for_missing_entries=False)
            if path is None:
                continue
            is_index = name.endswith(".json")
            paths = get_checkpoint_shard_files(model_name, path)[0] if is_index else [path]
            state: dict[str, Tensor] = {}
            for part in paths:
                is_safe = str(part).endswith(".safetensors")
                state |= load_file(part) if is_safe else torch.load(part, "cpu", weights_only=True)
            return {name: x.to(device=device, dtype=dtype) for name, x in state.items()}
    raise OSError(
        f"model_name: got {model_name!r}, which has neither model.safetensors nor pytorch_model.bin"
    )


def config_from_meta_checkpoint(checkpoint_path: Any, model_name: str) -> Any:
    """transformers' ``LlamaConfig`` of Meta's files in checkpoint_path/model_name. The size of the
    vocabulary is that of ``tokenizer.model``, if it is there (needs sentencepiece), or that of
    ``params.json``, or 32,000. ValueError if the file asks for scaled rotary positions.
    """
    from transformers import LlamaConfig

    folder = Path(checkpoint_path) / model_name
    params = json.loads((folder / "params.json").read_text())
    if params.get("use_scaled_rope"):
        raise ValueError("use_scaled_rope: got True, want False; scaled rotary is not supported")
    # A gated MLP has three matrices where another has two, so 2/3 of the width, rounded up.
    width = int((params.get("ffn_dim_multiplier") or 1) * (8 * params["dim"] // 3))
    multiple = params.get("multiple_of", 1)
    vocab_size = max(params.get("vocab_size", -1), 0) or 32_000
    tokenizer = folder / "tokenizer.model"
    if tokenizer.is_file():
        from sentencepiece import SentencePieceProcessor

        vocab_size = SentencePieceProcessor(str(tokenizer)).vocab_size()
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=params["dim"],
        intermediate_size=-(-width // multiple) * multiple,
        num_attention_heads=params["n_heads"],
        num_hidden_layers=params["n_layers"],
        num_key_value_heads=params.get("n_kv_heads"),
        rms_norm_eps=params["norm_eps"],
    )
    if "rope_theta" in params:
        config.rotary_emb_base = params["rope_theta"]
    return config


def config_from_hf_checkpoint(checkpoint_path: Any, model_name: str) -> Any:
    """transformers' ``LlamaConfig`` of checkpoint_path/model_name-hf."""
    from transformers import LlamaConfig

    return LlamaConfig.from_pretrained(Path(checkpoint_path) / f"{model_name}-hf" / "config.json")


def config_from_checkpoint(
    checkpoint_path: Any, model_name: str, checkpoint_format: str = "meta"
) -> Any:
    """`config_from_meta_checkpoint` or `config_from_hf_checkpoint`, by checkpoint_format ("meta" or
    "hf").
    """
    if checkpoint_format not in ("meta", "hf"):
        raise ValueError(f"checkpoint_format: got {checkpoint_format!r}, want 'meta' or 'hf'")
    read = config_from_meta_checkpoint if checkpoint_format == "meta" else config_from_hf_checkpoint
    return read(checkpoint_path, model_name)


def state_dicts_from_checkpoint(checkpoint_path: Any, model_name: str) -> list[dict[str, Tensor]]:
    """The weights of each process of tensor parallelism, in order, from Meta's files."""
    paths = sorted((Path(checkpoint_path) / model_name).glob("consolidated.*.pth"))
    return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
