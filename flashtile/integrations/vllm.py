"""An attention backend for vLLM: ``vllm serve MODEL --attention-backend CUSTOM``.

vLLM finds `register` by itself where flashtile is installed (entry point ``vllm.general_plugins``),
in all of its processes; with ``VLLM_PLUGINS`` set, add "flashtile" to it. Nothing else of vLLM
changes. The interface is that of vLLM 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..api import attention_varlen, attention_with_kvcache

_TYPES = AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER
_FLOAT8 = "fp8", "fp8_e4m3"


def register() -> None:
    """Make flashtile vLLM's CUSTOM backend, unless another plugin is."""
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        name = f"{FlashtileBackend.__module__}.{FlashtileBackend.__qualname__}"
        register_backend(AttentionBackendEnum.CUSTOM, name)


class FlashtileBackend(AttentionBackend):
    """What flashtile supports, as vLLM asks for it. Any page size works."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *_FLOAT8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashtileImpl]:
        return FlashtileImpl

    @staticmethod
    def get_builder_cls() -> type[FlashtileMetadataBuilder]:
        return FlashtileMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= 512

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _TYPES


@dataclass
class FlashtileMetadata:
    """The packed queries of one step, and where the keys of each request are.

    query_start_loc: (requests + 1,) int32. seq_lens: (requests,) int32, keys of each request.
    block_table: (requests, pages) int32. slot_mapping: (tokens,), where new keys go.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class FlashtileMetadataBuilder(AttentionMetadataBuilder):
    """Attention stays outside of CUDA graphs: vLLM captures what is between the layers."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashtileMetadata:
        """The metadata of one step."""
        common = common_attn_metadata
        if common.mm_req_doc_ranges is not None or common.rswa_prefix_lens is not None:
            raise NotImplementedError(
                "mm_req_doc_ranges, rswa_prefix_lens: got one, want None; flashtile has neither"
            )
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal: got a tensor, want a bool with flashtile")
        return FlashtileMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )


class FlashtileImpl(AttentionImpl):
    """The attention of one layer: it writes new keys to the cache and attends to the pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type not in _TYPES:
            raise NotImplementedError(f"attn_type: got {attn_type!r}, want one of {_TYPES}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = (-1, -1)
        if sliding_window is not None:
            left = sliding_window - 1  # vLLM counts the query itself
            self.window = (left, left if self._has_no_cache else 0)
        self.softcap = logits_soft_cap or 0.0
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.sink = sinks

    @property
    def _has_no_cache(self) -> bool:
        return self.attn_type != AttentionType.DECODER

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the new keys and values to their slots.

        Args:
            key, value: (tokens, kv_heads, head_size).
            kv_cache: (pages, kv_heads, page_size, 2 * head_size).
            slot_mapping: (tokens,) page * page_size + row; -1 is padding.
        """
        if self._has_no_cache:
            return
        k_cache, v_cache = self._caches(kv_cache)
        # Padding goes to page 0, which vLLM never gives to a request. Leaving it out would need
        # the number of real tokens on the host.
        slots = slot_mapping.clamp(min=0)
        page, row = slots // k_cache.shape[1], slots % k_cache.shape[1]
        for cache, new, scale in ((k_cache, key, layer._k_scale), (v_cache, value, layer._v_scale)):
            new = new[: len(slots)]
            if cache.dtype == torch.float8_e4m3fn:
                limit = torch.finfo(cache.dtype).max
                new = (new / scale).clamp(-limit, limit).to(cache.dtype)
                cache, new = cache.view(torch.uint8), new.view(torch.uint8)
            cache[page, row] = new

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashtileMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend and write to `output`.

        Args:
            query: (tokens, heads, head_size); key, value: (tokens, kv_heads, head_size), which
                only an encoder reads. Tokens may be padded.
            kv_cache: (pages, kv_heads, page_size, 2 * head_size).
            attn_metadata: None while vLLM measures memory.
            output: (tokens, heads, head_size), or with the last two dimensions joined.

        Returns:
            `output`.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "output_scale, output_block_scale: got one, want None; flashtile has neither"
            )
        if attn_metadata is None:
            return output.zero_()
        call, tokens = attn_metadata, attn_metadata.num_actual_tokens
        if self.slopes is not None:
            self.slopes = self.slopes.to(query.device)
        options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "window_size": self.window,
            "softcap": self.softcap,
            "alibi_slopes": self.slopes,
            "sink": self.sink,
            "out": output.view(-1, self.num_heads, self.head_size)[:tokens],
        }
        starts, longest = call.query_start_loc, call.max_query_len
        if self._has_no_cache:
            q, k, v = (x[:tokens] for x in (query, key, value))
            attention_varlen(q, k, v, starts, starts, longest, longest, **options)
            return output
        k_cache, v_cache = self._caches(kv_cache)
        if k_cache.dtype == torch.float8_e4m3fn:
            shape = len(call.seq_lens), self.num_kv_heads
            options["k_descale"] = layer._k_scale.float().expand(shape)
            options["v_descale"] = layer._v_scale.float().expand(shape)
        attention_with_kvcache(
            query[:tokens],
            k_cache,
            v_cache,
            cache_seqlens=call.seq_lens,
            page_table=call.block_table,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            causal=call.causal,
            **options,
        )
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the keys and the values, each (pages, page_size, kv_heads, head_size)."""
        want = self.num_kv_heads, 2 * self.head_size
        if kv_cache.dim() != 4 or (kv_cache.shape[1], kv_cache.shape[3]) != want:
            raise ValueError(
                f"kv_cache: got shape {tuple(kv_cache.shape)}, want (pages, {want[0]}, page_size, "
                f"{want[1]}), as in vLLM 0.33"
            )
        if self.kv_cache_dtype in _FLOAT8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k_cache, v_cache
