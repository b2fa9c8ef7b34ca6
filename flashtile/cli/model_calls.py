"""The calls that a model makes in training and in serving, to compile their kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import api
from .model_layers import Config, Layer, dtype_of, latent_decoding, layers_of, text_config

LENGTHS = (512, 1024, 4096, 16384)  # the tile of some kernels depends on the length
CAPACITY = 4096  # tokens of a sequence's cache
BATCHES = (1, 64)  # the keys of a few sequences are divided among programs
PURPOSES = {
    "training": ("training", "packed training"),
    "serving": ("prefill", "decoding"),
    "both": ("training", "packed training", "prefill", "decoding"),
}


class Call(NamedTuple):
    """One call to make once."""

    layer: Layer
    dtype: str
    kind: str  # one of those in PURPOSES
    length: int  # of the sequences, or in decoding the capacity of the cache
    batch: int = 1
    page_size: int = 0  # 0: the cache is contiguous

    def __str__(self) -> str:
        size = f"{self.batch} x {self.length} tokens"
        pages = f" in pages of {self.page_size}" if self.page_size else ""
        return f"{self.kind}, {size}{pages}: {self.layer}, {self.dtype}"

    def run(self, device: str) -> None:
        """Make the call, and its backward if it has one."""
        if self.kind == "decoding":
            self._decode(device)
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

    def _decode(self, device: str) -> None:
        q, k, v = (self._empty(device, x, False, 1) for x in "qkv")
        k_cache, v_cache = (self._empty(device, x, False, self.length) for x in "kv")
        options: dict[str, Any] = dict(self.layer.options, sink=self._sink(device, False))
        options["cache_seqlens"] = torch.ones(self.batch, dtype=torch.int32, device=device)
        if self.page_size:
            k_cache, v_cache = (
                x.reshape(-1, self.page_size, *x.shape[2:]) for x in (k_cache, v_cache)
            )
            pages = torch.arange(k_cache.shape[0], dtype=torch.int32, device=device)
            options["page_table"] = pages.view(self.batch, -1)
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
        if kind != "decoding":
            calls += [Call(x, dtype, kind, length) for x in layers for length in LENGTHS]
            continue
        latent = latent_decoding(config)
        decoding = layers if latent is None else [latent]
        calls += [
            Call(x, dtype, kind, CAPACITY, batch, page_size)
            for x in decoding
            if x.causal
            for batch in BATCHES
        ]
    return calls
