"""Token embeddings, with the names of ``flash_attn.modules.embedding``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.tensor_parallel import Group, summed


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
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.max_position_embeddings = max_position_embeddings
        words = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, words, padding_idx, **where)
        self.project_in: nn.Module | None = None
        if word_embed_proj_dim is not None:
            self.project_in = nn.Linear(words, embed_dim, bias=False, **where)
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **where)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The embeddings, (..., seq, embed_dim).

        Args:
            input_ids: (..., seq) integers.
            position_ids: broadcasts to the shape of input_ids; ``0, 1, ..., seq - 1`` by default.
                ValueError if there are fewer positions than tokens.
        """
        embedded = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embedded = self.project_in(embedded)
        if self.max_position_embeddings > 0:
            positions = _positions(input_ids, position_ids, self.max_position_embeddings)
            embedded = embedded + self.position_embeddings(positions)
        return embedded


class BertEmbeddings(GPT2Embeddings):
    """`GPT2Embeddings` plus learned embeddings of token types.

    Args:
        type_vocab_size: rows of `token_type_embeddings`; 0 for none.

    The other arguments are those of `GPT2Embeddings`.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, vocab_size, max_position_embeddings, padding_idx, **where)
        self.type_vocab_size = type_vocab_size
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **where)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """`GPT2Embeddings.forward`; token_type_ids (..., seq), 0 by default."""
        embedded = super().forward(input_ids, position_ids)
        if self.type_vocab_size > 0:
            types = input_ids.new_zeros(()) if token_type_ids is None else token_type_ids
            embedded = embedded + self.token_type_embeddings(types)
        return embedded


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each process of a group has some tokens, and 0 for the others.

    Args:
        num_embeddings, args, kwargs: as in ``torch.nn.Embedding``, over all processes; ValueError
            if the tokens cannot be divided equally.
        padding_idx: None with several processes, else ValueError.
        process_group: of torch.distributed, or None.
    """

    def __init__(
        self,
        num_embeddings: int,
        *args: Any,
        process_group: Group | None = None,
        padding_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        rows = _equal_part("num_embeddings", num_embeddings, process_group)
        if rows < num_embeddings and padding_idx is not None:
            raise ValueError("padding_idx: want None with several processes")
        super().__init__(rows, *args, **kwargs, padding_idx=padding_idx)  # type: ignore[misc]
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """(...) integers -> (..., features), to be added up over the processes."""
        if self.process_group is None:
            return super().forward(input)
        row = input - self.process_group.rank() * self.num_embeddings
        is_here = (row >= 0) & (row < self.num_embeddings)
        return super().forward(row.where(is_here, 0)).masked_fill(~is_here.unsqueeze(-1), 0.0)


class ColumnParallelEmbedding(nn.Embedding):
    """An embedding of which each process of a group has some features.

    Args:
        num_embeddings, embedding_dim, args, kwargs: as in ``torch.nn.Embedding``, over all
            processes; ValueError if the features cannot be divided equally.
        process_group: of torch.distributed, or None.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        process_group: Group | None = None,
        **kwargs: Any,
    ) -> None:
        features = _equal_part("embedding_dim", embedding_dim, process_group)
        super().__init__(num_embeddings, features, *args, **kwargs)
        self.process_group = process_group


class ParallelGPT2Embeddings(nn.Module):
    """`GPT2Embeddings` of which each process of a group has some tokens, and some features of the
    positions.

    Args:
        process_group: of torch.distributed.
        sequence_parallel: the result is this process's part of the rows.

    The other arguments are those of `GPT2Embeddings`.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: Group,
        padding_idx: int | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype, "process_group": process_group}
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.max_position_embeddings = max_position_embeddings
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, embed_dim, padding_idx=padding_idx, **where
        )
        if max_position_embeddings > 0:
            self.position_embeddings = ColumnParallelEmbedding(
                max_position_embeddings, embed_dim, **where
            )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        combine_batch_seqlen_dim: bool = False,
    ) -> Tensor:
        """The embeddings, (batch, seq, embed_dim), or (batch * seq, embed_dim); with
        sequence_parallel this process's part of the first dimension.

        Args:
            input_ids, position_ids: as in `GPT2Embeddings.forward`, the same in all processes.
            combine_batch_seqlen_dim: the rows that the processes share are the tokens of all
                sequences, not the sequences.
        """
        embedded = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            positions = _positions(input_ids, position_ids, self.max_position_embeddings)
            at = self.position_embeddings(positions)
            before = self.process_group.rank() * at.shape[-1]
            after = embedded.shape[-1] - at.shape[-1] - before
            embedded = embedded + F.pad(at, (before, after))
        if combine_batch_seqlen_dim:
            embedded = embedded.flatten(0, 1)
        return summed(embedded, self.process_group, self.sequence_parallel)


def _positions(input_ids: Tensor, position_ids: Tensor | None, limit: int) -> Tensor:
    if position_ids is not None:
        return position_ids
    seqlen = input_ids.shape[-1]
    if seqlen > limit:
        raise ValueError(
            f"input_ids: {seqlen} tokens in a row, but max_position_embeddings is {limit}"
        )
    return torch.arange(seqlen, device=input_ids.device)


def _equal_part(name: str, size: int, process_group: Group | None) -> int:
    world = 1 if process_group is None else process_group.size()
    if size % world:
        raise ValueError(f"{name}: got {size}, want a multiple of the {world} processes")
    return size // world
