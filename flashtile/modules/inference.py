"""The keys and values that a model keeps while it generates: one cache for each layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class InferenceParams:
    """The state that the layers of a model share during generation, with flash-attn's names.

    The caller advances it: after each call of the model, add the number of new tokens to
    `seqlen_offset`, or to `lengths_per_sample` in place.

    Args:
        max_seqlen: capacity of the cache of one sequence, in tokens.
        max_batch_size: largest number of sequences.
        seqlen_offset: number of tokens already in the cache, the same for all sequences.
        batch_size_offset: index of the first sequence of a call in the cache.
        key_value_memory_dict: layer_idx -> (max_batch_size, max_seqlen, 2, kv_heads, head_dim),
            filled in by the layers.
        lengths_per_sample: (batch,) int32, number of tokens already in the cache of each sequence.
            Replaces `seqlen_offset` if given; the host never reads it.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Tensor] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Empty the cache, whose memory stays, and set its capacity."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()

    @property
    def lengths(self) -> int | Tensor:
        """Tokens in the cache: an int, or (batch,) int32."""
        return self.seqlen_offset if self.lengths_per_sample is None else self.lengths_per_sample

    def cache(self, layer_idx: int, k: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (batch, max_seqlen, kv_heads, head_dim) each.

        The first call allocates them, in the dtype and on the device of `k`, the new keys
        (batch, seq, kv_heads, head_dim). ValueError if max_batch_size or max_seqlen is too small.
        """
        batch, new, heads, head_dim = k.shape
        end = self.batch_size_offset + batch
        if end > self.max_batch_size:
            raise ValueError(
                f"inference_params: max_batch_size is {self.max_batch_size}, got {batch} sequences "
                f"from number {self.batch_size_offset} on"
            )
        if self.lengths_per_sample is None and self.seqlen_offset + new > self.max_seqlen:
            raise ValueError(
                f"inference_params: {self.seqlen_offset} tokens in the cache and {new} new ones "
                f"are more than max_seqlen {self.max_seqlen}"
            )
        if layer_idx not in self.key_value_memory_dict:
            shape = (self.max_batch_size, self.max_seqlen, 2, heads, head_dim)
            self.key_value_memory_dict[layer_idx] = k.new_zeros(shape)
        memory = self.key_value_memory_dict[layer_idx][self.batch_size_offset : end]
        return memory[:, :, 0], memory[:, :, 1]

    def positions(self, seqlen: int, device: torch.device) -> Tensor:
        """Positions of `seqlen` new tokens, (1 or batch, seqlen) int64."""
        new = torch.arange(seqlen, device=device)
        if self.lengths_per_sample is None:
            return (new + self.seqlen_offset).unsqueeze(0)
        return new + self.lengths_per_sample.unsqueeze(-1)
