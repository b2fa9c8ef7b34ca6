"""The calls that a model of Hugging Face makes in training and in serving, to compile their
kernels. Its ``config.json`` says which attention its layers need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import api

LENGTHS = (512, 1024, 4096, 16384)  # the tile of some kernels depends on the length
CAPACITY = 4096  # tokens of a sequence's cache
BATCHES = (1, 64)  # the keys of a few sequences are divided among programs
# New tokens of calls over a cache. Triton's kernels have other tiles for so many than for one.
NEW_TOKENS = {"decoding": 1, "chunked prefill": 128}
PURPOSES = {
    "training": ("training", "packed training"),
    "serving": ("prefill", *NEW_TOKENS),
    "both": ("training", "packed training", "prefill", *NEW_TOKENS),
}

Config = Mapping[str, Any]

# Models whose tokens see later ones.
BIDIRECTIONAL = (
    "albert", "bert", "camembert", "clip", "deberta", "distilbert", "electra", "esm", "modernbert",
    "mpnet", "roberta", "siglip", "vit", "xlm-roberta",
)  # fmt: skip
# What the config of a model has if its attention is none of ours, and why.
UNSUPPORTED = {
    "relative_attention_num_buckets": "it adds a relative position bias; run the model once "
    "instead",
    "is_encoder_decoder": "it has an encoder and a decoder; run the model once instead",
    "alibi": "it adds ALiBi slopes; run the model once instead",
}


class Layer(NamedTuple):
    """One kind of attention layer."""

    heads: int
    key_heads: int
    head_dim: int
    value_head_dim: int
    causal: bool = True
    window: int | None = None  # tokens that a token sees, with itself
    chunk: int = 0
    softcap: float = 0.0
    has_sink: bool = False

    def __str__(self) -> str:
        dims = str(self.head_dim)
        if self.value_head_dim != self.head_dim:
            dims += f" and {self.value_head_dim}"
        parts = [
            f"{self.heads} heads on {self.key_heads}",
            f"head dim {dims}",
            "causal" if self.causal else "full",
            f"window {self.window}" if self.window else "",
            f"chunks of {self.chunk}" if self.chunk else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            "sinks" if self.has_sink else "",
        ]
        return ", ".join(part for part in parts if part)

    @property
    def options(self) -> dict[str, Any]:
        """The options of `flashtile.attention`, without the sink's tensor."""
        options: dict[str, Any] = {"causal": self.causal}
        if self.window:
            side = self.window - 1
            options["window_size"] = (side, 0 if self.causal else side)
        if self.chunk:
            options["attention_chunk"] = self.chunk
        if self.softcap:
            options["softcap"] = self.softcap
        return options


def read_config(model: str) -> Config:
    """The config of a model: a path to a ``config.json`` or to its folder, or a name that
    transformers knows.

    Raises:
        ValueError: there is no such file, and transformers is missing or finds no such model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        config: Config = json.loads(path.read_text(encoding="utf-8"))
        return config
    if find_spec("transformers") is None:
        raise ValueError(
            f"model: got {model!r}, which is no file or folder with a config.json; to look up a "
            "name, install transformers (pip install 'flashtile[transformers]')"
        )
    from transformers import AutoConfig

    try:
        named: Config = AutoConfig.from_pretrained(model).to_dict()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: got {model!r}, which is no file or folder with a config.json, and no model "
            f"that transformers finds: {error}"
        ) from error
    return named


def text_config(config: Config) -> Config:
    """The part of the config that describes the language model, with the dtype of the whole."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    outer = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name)}
    return {**outer, **nested}


def dtype_of(config: Config) -> str:
    """The name of the dtype that the attention of a model runs in."""
    named = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = str(named).removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "bfloat16"


def layers_of(config: Config) -> list[Layer]:
    """The kinds of layers of a model, each once; `config` is that of its language model.

    Raises:
        ValueError: the model has no attention, or one that is not described by a config.
    """
    kind = config.get("model_type", "unknown")
    for name, reason in UNSUPPORTED.items():
        if config.get(name):
            raise ValueError(f"model: cannot tell what {kind!r} needs: {reason}")
    heads = config.get("num_attention_heads") or config.get("n_head")
    width = config.get("hidden_size") or config.get("n_embd")
    if not heads or not width:
        raise ValueError(
            f"model: cannot tell what {kind!r} needs: its config has no `num_attention_heads` and "
            "`hidden_size`"
        )
    if config.get("kv_lora_rank"):
        return [_latent_layer(config, heads)]
    head_dim = config.get("head_dim") or width // heads
    plain = Layer(
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        value_head_dim=config.get("v_head_dim") or head_dim,
        causal=kind not in BIDIRECTIONAL,
        softcap=config.get("attn_logit_softcapping") or 0.0,
        has_sink=kind == "gpt_oss",
    )
    return [_of_type(plain, name, config) for name in _layer_types(config)]


def _latent_layer(config: Config, heads: int) -> Layer:
    """Multi-head latent attention (DeepSeek), with keys and values of every head."""
    head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return Layer(heads, heads, head_dim, config["v_head_dim"])


def latent_decoding(config: Config) -> Layer | None:
    """The layer of a decoding step over latents; None without latents."""
    rank = config.get("kv_lora_rank")
    if not rank:
        return None
    return Layer(config["num_attention_heads"], 1, rank + config["qk_rope_head_dim"], rank)


def _layer_types(config: Config) -> list[str]:
    """The names of the kinds of layers, as transformers writes them."""
    named = config.get("layer_types")
    if named:
        return list(dict.fromkeys(name for name in named if name.endswith("_attention")))
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"]
    alternates = "gemma" in str(config.get("model_type"))
    return ["sliding_attention", *(["full_attention"] if alternates else [])]


def _of_type(plain: Layer, name: str, config: Config) -> Layer:
    if name == "sliding_attention":
        window = config.get("sliding_window") or config.get("local_attention")
        return plain._replace(window=window)
    if name == "chunked_attention":
        return plain._replace(chunk=config["attention_chunk_size"])
    if name == "full_attention":
        return plain
    raise ValueError(f"model: cannot tell what a layer of type {name!r} needs")


class Call(NamedTuple):
    """One call to make once."""

    layer: Layer
    dtype: str
    kind: str  # one of those in PURPOSES
    length: int  # of the sequences, or the capacity of the cache
    batch: int = 1
    page_size: int = 0  # 0: the cache is contiguous

    def __str__(self) -> str:
        size = f"{self.batch} x {self.length} tokens"
        pages = f" in pages of {self.page_size}" if self.page_size else ""
        return f"{self.kind}, {size}{pages}: {self.layer}, {self.dtype}"

    def run(self, device: str) -> None:
        """Make the call, and its backward if it has one."""
        if self.kind in NEW_TOKENS:
            self._extend(device, NEW_TOKENS[self.kind])
        elif self.kind == "packed training":
            self._attend_packed(device)
        else:
            self._attend(device)
        if device == "cuda":
            torch.cuda.synchronize()

    def _attend(self, device: str) -> None:
        train = self.kind == "training"
        q, k, v = (self._empty(device, x, train, self.length) for x in "qkv")
        sink = self._sink(device, train)
        out: Any = api.attention(q, k, v, sink=sink, **self.layer.options)
        if train:
            out.backward(torch.empty_like(out))

    def _attend_packed(self, device: str) -> None:
        q, k, v = (self._empty(device, x, True, self.length).flatten(0, 1) for x in "qkv")
        sink = self._sink(device, True)
        half = self.length // 2
        longest = self.length - half
        starts = torch.tensor([0, half, self.length], dtype=torch.int32, device=device)
        out: Any = api.attention_varlen(
            q, k, v, starts, starts, longest, longest, sink=sink, **self.layer.options
        )
        out.backward(torch.empty_like(out))

    def _extend(self, device: str, new: int) -> None:
        q, k, v = (self._empty(device, x, False, new) for x in "qkv")
        k_cache, v_cache = (self._empty(device, x, False, self.length) for x in "kv")
        options: dict[str, Any] = dict(self.layer.options, sink=self._sink(device, False))
        options["cache_seqlens"] = torch.ones(self.batch, dtype=torch.int32, device=device)
        if self.page_size:
            k_cache, v_cache = (
                x.reshape(-1, self.page_size, *x.shape[2:]) for x in (k_cache, v_cache)
            )
            pages = torch.arange(k_cache.shape[0], dtype=torch.int32, device=device)
            options["page_table"] = pages.view(self.batch, -1)
        if self.layer.value_head_dim < self.layer.head_dim:  # of latents, values are a view
            k.zero_()  # a check compares it with v, and NaN would differ
            v, v_cache = (x[..., : self.layer.value_head_dim] for x in (k, k_cache))
        api.attention_with_kvcache(q, k_cache, v_cache, k, v, **options)

    def _empty(self, device: str, name: str, has_grad: bool, length: int) -> Tensor:
        layer = self.layer
        heads = layer.heads if name == "q" else layer.key_heads
        dim = layer.value_head_dim if name == "v" else layer.head_dim
        dtype = getattr(torch, self.dtype)
        shape = (self.batch, length, heads, dim)
        return torch.empty(shape, device=device, dtype=dtype, requires_grad=has_grad)

    def _sink(self, device: str, has_grad: bool) -> Tensor | None:
        if not self.layer.has_sink:
            return None
        dtype = getattr(torch, self.dtype)
        return torch.zeros(self.layer.heads, device=device, dtype=dtype, requires_grad=has_grad)


def calls_of(config: Config, purpose: str, page_size: int) -> list[Call]:
    """The calls of a model; raises what `layers_of` raises."""
    config = text_config(config)
    dtype, layers = dtype_of(config), layers_of(config)
    calls = []
    for kind in PURPOSES[purpose]:
        if kind not in NEW_TOKENS:
            calls += [Call(x, dtype, kind, length) for x in layers for length in LENGTHS]
            continue
        latent = latent_decoding(config)
        calls += [
            Call(x, dtype, kind, CAPACITY, batch, page_size)
            for x in (layers if latent is None else [latent])
            if x.causal
            for batch in BATCHES
        ]
    return calls
