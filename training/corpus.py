"""A folder of texts, tokenised once into files that are mapped into memory.

Each split is one stream of tokens. Every document in it begins with the end-of-document token, so
that its first token has a context and the end of a document is predicted too. The positions at
which documents begin are stored beside the stream.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .settings import DataSettings
from .tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Stream:
    """One split: `tokens` (n,) unsigned integers, `starts` (documents,) int64, rising from 0."""

    tokens: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """The text of a run. `fingerprint` identifies the text and its tokenisation."""

    train: Stream
    validation: Stream
    tokenizer: Tokenizer
    fingerprint: str


def prepare(data: DataSettings) -> Corpus:
    """The corpus of `data`, tokenised now if `data.prepared` does not hold it yet.

    `ValueError` names the key when there is no text, or too little for the context.
    """
    files = text_files(data)
    fingerprint = _fingerprint(data, files)
    folder = Path(data.prepared) / fingerprint
    if not folder.is_dir():
        _write_whole(folder, data, files)
    corpus = _load(folder, data)
    for split in SPLITS:
        stream = getattr(corpus, split)
        if len(stream.tokens) < 2 * data.context:
            raise ValueError(
                f"data.context: {data.context}; the {split} split has {len(stream.tokens)} tokens "
                "and two contexts are the least"
            )
    return corpus


def text_files(data: DataSettings) -> list[Path]:
    """The files that `data` names, in the order of their names."""
    folder = Path(data.text)
    if not folder.is_dir():
        raise ValueError(f"data.text: {data.text!r} is not a folder")
    found = {path for pattern in data.pattern.split("|") for path in folder.glob(pattern)}
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise ValueError(f"data.pattern: no file of {data.text!r} fits {data.pattern!r}")
    for path in files:
        if path.suffix not in (".txt", ".jsonl"):
            raise ValueError(f"data.pattern: {path.name!r} is neither .txt nor .jsonl")
    return files


def documents(path: Path, data: DataSettings) -> Iterator[str]:
    """The documents of one file, without those that are empty."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        if not data.group_by:
            yield from (row["text"] for row in rows if row["text"])
            return
        for _, group in itertools.groupby(rows, lambda row: [row[key] for key in data.group_by]):
            yield "\n".join(row["text"] for row in group)
        return
    parts = text.split(data.separator) if data.separator else [text]
    yield from (part.strip() + "\n" for part in parts if part.strip())


def split_documents(texts: list[str], share: float) -> dict[str, list[str]]:
    """The documents in a fixed shuffled order, cut in two: the last `share` is held out.

    The document in which the cut falls is itself cut, so that one long file can be split too.
    """
    texts = list(texts)
    random.Random(0).shuffle(texts)
    left = round(sum(map(len, texts)) * (1 - share))
    parts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in texts:
        cut = min(left, len(text))
        left -= cut
        for split, part in zip(SPLITS, (text[:cut], text[cut:]), strict=True):
            if part:
                parts[split].append(part)
    return parts


def _fingerprint(data: DataSettings, files: list[Path]) -> str:
    shape = (data.separator, data.group_by, data.tokenizer, data.vocab_size, data.validation_share)
    digest = hashlib.sha256(repr(shape).encode())
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:16]


def _write_whole(folder: Path, data: DataSettings, files: list[Path]) -> None:
    """Tokenise into a temporary folder and rename it, so that an existing folder is complete."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    texts = [document for path in files for document in documents(path, data)]
    parts = split_documents(texts, data.validation_share)
    if data.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        tokenizer = BPETokenizer.train(parts["train"], data.vocab_size)
    tokenizer.save(partial)
    for split, texts in parts.items():
        _write_stream(partial, split, tokenizer, texts)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster; its folder has the same content
        if not folder.is_dir():
            raise
        shutil.rmtree(partial)


def _write_stream(folder: Path, split: str, tokenizer: Tokenizer, texts: list[str]) -> None:
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    end = [tokenizer.end_of_document]
    encoded = [np.array(end + ids, dtype) for ids in tokenizer.encode(texts)]
    lengths = [len(ids) for ids in encoded]
    np.save(folder / f"{split}.tokens.npy", np.concatenate(encoded or [np.zeros(0, dtype)]))
    np.save(folder / f"{split}.starts.npy", np.cumsum([0, *lengths[:-1]], dtype=np.int64))


def _load(folder: Path, data: DataSettings) -> Corpus:
    streams = {
        split: Stream(
            tokens=np.load(folder / f"{split}.tokens.npy", mmap_mode="r"),
            starts=np.load(folder / f"{split}.starts.npy"),
        )
        for split in SPLITS
    }
    tokenizer = ByteTokenizer() if data.tokenizer == "bytes" else BPETokenizer.load(folder)
    return Corpus(**streams, tokenizer=tokenizer, fingerprint=folder.name)
