"""Token embeddings, with the names of ``flash_attn.modules.embedding``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GPT2Embeddings(nn.Module):
    """Word embeddings plus learned position embeddings.

    Args:
        embed_dim: number of features of a token.
        vocab_size: rows of `word_embeddings`.
        max_position_embeddings: rows of `position_embeddings`; 0 for models that encode positions
            in another way.
        padding_idx: a token whose embedding is zero and gets no gradient.
        word_embed_proj_dim: features of a word, which `project_in` maps to embed_dim (OPT-350m).
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.max_position_embeddings = max_position_embeddings
        words = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(
            vocab_size, words, padding_idx, device=device, dtype=dtype
        )
        self.project_in: nn.Module | None = None
        if word_embed_proj_dim is not None:
            self.project_in = nn.Linear(words, embed_dim, bias=False, device=device, dtype=dtype)
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(
                max_position_embeddings, embed_dim, device=device, dtype=dtype
            )

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Embed tokens.

        Args:
            input_ids: (..., seq) integers.
            position_ids: broadcasts to the shape of input_ids; ``0, 1, ..., seq - 1`` by default.

        Returns:
            (..., seq, embed_dim).

        Raises:
            ValueError: position_ids is None and there are more tokens than positions.
        """
        embedded = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embedded = self.project_in(embedded)
        if self.max_position_embeddings <= 0:
            return embedded
        if position_ids is None:
            seqlen = input_ids.shape[-1]
            if seqlen > self.max_position_embeddings:
                raise ValueError(
                    f"input_ids: {seqlen} tokens in a row, but max_position_embeddings is "
                    f"{self.max_position_embeddings}"
                )
            position_ids = torch.arange(seqlen, device=input_ids.device)
        return embedded + self.position_embeddings(position_ids)
