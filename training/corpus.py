"""A folder of texts of any size, tokenised once into files that are mapped into memory.

The texts are read as a stream, several times; of each document only its length is held. Each split
is one stream of tokens. Every document in it begins with the end-of-document token, so that its
first token has a context and the end of a document is predicted too. The positions at which
documents begin are stored beside the stream.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .settings import DataSettings
from .tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

SPLITS = ("train", "validation")
CHUNK = 1 << 20  # characters or bytes that are read or encoded together


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
        if path.suffix not in (".txt", ".jsonl", ".parquet"):
            raise ValueError(f"data.pattern: {path.name!r} is not .txt, .jsonl or .parquet")
        if path.suffix == ".parquet" and find_spec("datasets") is None:
            raise ValueError(
                f"data.pattern: {path.name!r} needs the package datasets (pip install datasets)"
            )
    return files


def documents(files: list[Path], data: DataSettings) -> Iterator[str]:
    """The documents of the files, one at a time, without those that are empty."""
    for path in files:
        if path.suffix == ".txt":
            with path.open(encoding="utf-8", errors="replace") as file:
                for part in _parts(file, data.separator):
                    if part.strip():
                        yield part.strip() + "\n"
        elif not data.group_by:
            yield from (row["text"] for row in _rows(path) if row["text"])
        else:
            key = operator.itemgetter(*data.group_by)
            for _, group in itertools.groupby(_rows(path), key):
                yield "\n".join(row["text"] for row in group)


def _parts(file: TextIO, separator: str | None) -> Iterator[str]:
    """The text of a file, divided by `separator`."""
    if not separator:
        yield file.read()
        return
    left = ""
    while chunk := file.read(CHUNK):
        *whole, left = (left + chunk).split(separator)
        yield from whole
    yield left


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        # Only such files need the package datasets.
        from datasets import load_dataset

        files = {"data_files": str(path), "split": "train"}
        yield from load_dataset("parquet", **files, streaming=True)
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from (json.loads(line) for line in file if line.strip())


def split_documents(lengths: Sequence[int], share: float) -> tuple[list[int], list[int]]:
    """Hold out the last `share` of the documents in a fixed shuffled order.

    The document in which the cut falls is itself cut, so that one long file can be split too.

    Args:
        lengths: characters of each document.
        share: of all characters.

    Returns:
        The numbers of the documents in that order, and how many characters of each document (not in
        that order) are not held out.
    """
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    left = round(sum(lengths) * (1 - share))
    cuts = [0] * len(lengths)
    for number in order:
        cuts[number] = min(left, lengths[number])
        left -= cuts[number]
    return order, cuts


def _fingerprint(data: DataSettings, files: list[Path]) -> str:
    shape = (data.separator, data.group_by, data.tokenizer, data.vocab_size, data.validation_share)
    digest = hashlib.sha256(repr(shape).encode())
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def _write_whole(folder: Path, data: DataSettings, files: list[Path]) -> None:
    """Tokenise into a temporary folder and rename it, so that an existing folder is complete."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    lengths = [len(text) for text in documents(files, data)]
    order, cuts = split_documents(lengths, data.validation_share)

    def parts(split: str) -> Iterator[str]:
        """What each document has in a split, in the order of the files."""
        for text, cut in zip(documents(files, data), cuts, strict=True):
            yield text[:cut] if split == "train" else text[cut:]

    if data.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        tokenizer = BPETokenizer.train(filter(None, parts("train")), data.vocab_size)
    tokenizer.save(partial)
    for split in SPLITS:
        _write_stream(partial, split, tokenizer, parts(split), order)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster; its folder has the same content
        if not folder.is_dir():
            raise
        shutil.rmtree(partial)


def _write_stream(
    folder: Path, split: str, tokenizer: Tokenizer, texts: Iterator[str], order: list[int]
) -> None:
    """Write the tokens of `texts` that are not empty, in another order than they come in."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    lengths: list[int] = []
    unordered = folder / f"{split}.unordered"
    with unordered.open("wb") as file:
        for batch in _batches(texts):
            for text, ids in zip(batch, tokenizer.encode(batch), strict=True):
                tokens = np.array([tokenizer.end_of_document, *ids] if text else [], dtype)
                tokens.tofile(file)
                lengths.append(len(tokens))
    begins = np.cumsum([0, *lengths], dtype=np.int64)
    order = [number for number in order if lengths[number]]
    starts = np.cumsum([0, *(lengths[number] for number in order)], dtype=np.int64)
    np.save(folder / f"{split}.starts.npy", starts[: max(1, len(order))])
    path, total = folder / f"{split}.tokens.npy", int(starts[-1])
    if total == 0:  # no file of that size can be mapped
        np.save(path, np.zeros(0, dtype))
    else:
        read = np.memmap(unordered, dtype, "r")
        written = np.lib.format.open_memmap(path, "w+", dtype, (total,))
        for start, number in zip(starts, order, strict=False):
            tokens = read[begins[number] : begins[number + 1]]
            written[start : start + len(tokens)] = tokens
        written.flush()
    unordered.unlink()


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in lists of about CHUNK characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= CHUNK:
            yield batch
            batch, size = [], 0
    yield batch


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
