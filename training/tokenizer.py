"""Text to token ids and back: bytes as they are, or a byte-level BPE trained on the text itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endofdocument|>"


class ByteTokenizer:
    """A token is a byte; 256 ends a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 are shown as the replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def bytes_per_token(self) -> np.ndarray:
        """(vocab_size,) int64: how many bytes of text each token stands for."""
        return np.array([1] * 256 + [0])

    def save(self, folder: Path) -> None:
        """Write no file: bytes need no vocabulary."""


class BPETokenizer:
    """Byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2)."""

    def __init__(self, trained: tokenizers.Tokenizer) -> None:
        self._trained = trained
        self.vocab_size = trained.get_vocab_size()
        self.end_of_document = trained.token_to_id(END_OF_DOCUMENT)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn up to `vocab_size` tokens, the 256 bytes and the end of a document among them."""
        trained = tokenizers.Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train_from_iterator(texts, trainer)
        return cls(trained)

    @classmethod
    def load(cls, folder: Path) -> BPETokenizer:
        """The tokenizer that `save` wrote."""
        return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [encoding.ids for encoding in self._trained.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without the ends of documents."""
        return self._trained.decode(list(ids))

    def bytes_per_token(self) -> np.ndarray:
        """(vocab_size,) int64: how many bytes of text each token stands for."""
        # The byte-level alphabet writes every byte as one character.
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, i in self._trained.get_vocab().items():
            sizes[i] = 0 if token == END_OF_DOCUMENT else len(token)
        return sizes

    def save(self, folder: Path) -> None:
        """Keep the trained merges as tokenizer.json."""
        self._trained.save(str(folder / "tokenizer.json"))


Tokenizer = ByteTokenizer | BPETokenizer
