"""Texts become token streams, once, and windows of them with the bounds of their documents."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import write_texts

from training.batches import (
    document_bounds,
    read_batch,
    training_windows,
    validation_windows,
)
from training.corpus import Stream, prepare, split_documents, text_files
from training.settings import DataSettings


def settings_for(folder: Path, **changes: object) -> DataSettings:
    values = {"text": str(folder / "text"), "prepared": str(folder / "prepared"), "context": 8}
    return DataSettings(**(values | {"vocab_size": 300, "validation_share": 0.2} | changes))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_streams_hold_every_document_once(tmp_path, tokenizer):
    texts = write_texts(tmp_path / "text", 9, 40)
    corpus = prepare(settings_for(tmp_path, tokenizer=tokenizer))
    found = []
    for stream in (corpus.train, corpus.validation):
        assert (stream.tokens[stream.starts] == corpus.tokenizer.end_of_document).all()
        for document in np.split(stream.tokens, stream.starts[1:]):
            found.append(corpus.tokenizer.decode(document[1:].tolist()))
    # The cut between the splits falls into one document.
    assert len("".join(found)) == len("".join(texts))
    assert len(set(found) & set(texts)) >= len(texts) - 1
    share = len(corpus.validation.tokens) / (
        len(corpus.train.tokens) + len(corpus.validation.tokens)
    )
    assert 0.1 < share < 0.3


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_bytes_per_token_add_up_to_the_text(tmp_path, tokenizer):
    texts = write_texts(tmp_path / "text", 3, 60)
    corpus = prepare(settings_for(tmp_path, tokenizer=tokenizer))
    sizes = corpus.tokenizer.bytes_per_token()
    read = sizes[corpus.train.tokens].sum() + sizes[corpus.validation.tokens].sum()
    assert read == len("".join(texts).encode())


def test_a_corpus_is_tokenised_once_and_again_when_the_text_changes(tmp_path):
    write_texts(tmp_path / "text", 3, 60)
    data = settings_for(tmp_path)
    first = prepare(data)
    (folder,) = (tmp_path / "prepared").iterdir()
    written = (folder / "train.tokens.npy").stat().st_mtime_ns
    assert prepare(data).fingerprint == first.fingerprint
    assert (folder / "train.tokens.npy").stat().st_mtime_ns == written
    (tmp_path / "text" / "000.txt").write_text("another text " * 40)
    assert prepare(data).fingerprint != first.fingerprint


def test_json_lines_are_grouped_into_documents(tmp_path):
    (tmp_path / "text").mkdir()
    rows = [
        {
            "book": book,
            "chapter": chapter,
            "text": f"{book} {chapter}:{verse} " + "and it was so " * 5,
        }
        for book in ("Ruth", "Job")
        for chapter in (1, 2)
        for verse in (1, 2, 3)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "text" / "verses.jsonl").write_text(lines)
    by_chapter = {"pattern": "*.jsonl", "group_by": ["book", "chapter"]}
    corpus = prepare(settings_for(tmp_path, validation_share=0.1, **by_chapter))
    # Four chapters, of which the cut between the splits may divide one.
    assert len(corpus.train.starts) + len(corpus.validation.starts) in (4, 5)
    single = prepare(settings_for(tmp_path, validation_share=0.1, pattern="*.jsonl"))
    assert len(single.train.starts) + len(single.validation.starts) in (12, 13)


def test_one_long_document_is_split_too():
    assert split_documents([100], share=0.25) == ([0], [75])


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("separator", ["\n\n", "<end>"])
def test_a_stream_of_chunks_is_the_shuffled_text(tmp_path, monkeypatch, separator, chunk):
    """Whatever is read and encoded together; the order is that of the texts held in memory."""
    monkeypatch.setattr("training.corpus.CHUNK", chunk)
    draw = random.Random(4)
    texts = ["x" * draw.randrange(1, 40) + str(number) for number in range(30)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "all.txt").write_text(separator.join([*texts[:9], "", *texts[9:], "  "]))
    corpus = prepare(settings_for(tmp_path, tokenizer="bytes", separator=separator))
    texts = [text + "\n" for text in texts]
    random.Random(0).shuffle(texts)
    found = corpus.tokenizer.decode([*corpus.train.tokens, *corpus.validation.tokens])
    assert found == "".join(texts)
    assert len(corpus.train.starts) + len(corpus.validation.starts) == 31  # one is cut


def test_texts_larger_than_memory_are_read_a_part_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("training.corpus.CHUNK", 1 << 12)
    (tmp_path / "text").mkdir()
    with (tmp_path / "text" / "all.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": "word " * 200}) + "\n" for _ in range(600))
    data = settings_for(tmp_path, pattern="*.jsonl")
    tracemalloc.start()
    corpus = prepare(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(corpus.train.starts) == 480
    assert peak < (tmp_path / "text" / "all.jsonl").stat().st_size / 2


def test_parquet_files_are_read_by_datasets(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.parquet").write_bytes(b"")
    data = settings_for(tmp_path, pattern="*.parquet")
    monkeypatch.setattr("training.corpus.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^data.pattern: 'a.parquet' needs the package datasets"):
        prepare(data)
    monkeypatch.undo()
    datasets = pytest.importorskip("datasets", reason="of the extra examples, from Python 3.11 on")
    rows = [{"text": f"{number} and so on " * 9} for number in range(8)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "text" / "a.parquet")
    corpus = prepare(data)
    assert len(corpus.train.starts) + len(corpus.validation.starts) in (8, 9)


def stream_of(lengths: list[int]) -> Stream:
    """Token i of the stream is i, so that windows can be read off."""
    starts = np.cumsum([0, *lengths[:-1]])
    return Stream(np.arange(sum(lengths), dtype=np.uint16), starts.astype(np.int64))


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order():
    stream, context = stream_of([1000]), 16
    per_epoch = 1000 // context - 1
    epochs = [
        training_windows(stream, context, 5, epoch * per_epoch, per_epoch) for epoch in (0, 1)
    ]
    for starts in epochs:
        ordered = np.sort(starts)
        assert (np.diff(ordered) == context).all()
        assert ordered[0] >= 0 and ordered[-1] + context + 1 <= 1000
    assert (epochs[0] != epochs[1]).any()
    pieces = [training_windows(stream, context, 5, first, 7) for first in range(0, 70, 7)]
    assert (np.concatenate(pieces) == np.concatenate(epochs)[:70]).all()
    assert (training_windows(stream, context, 6, 0, per_epoch) != epochs[0]).any()


def test_targets_are_the_tokens_that_follow():
    stream = stream_of([100])
    batch = read_batch(stream, np.array([3, 50]), context=10, packed=False)
    assert batch.input_ids.shape == (2, 10)
    assert torch.equal(batch.input_ids[0], torch.arange(3, 13))
    assert torch.equal(batch.targets, batch.input_ids + 1)
    assert batch.cu_seqlens is None and batch.attended == 10


def test_packed_windows_are_cut_at_documents_and_at_their_own_ends():
    stream = stream_of([4, 1, 9, 30, 56])  # documents begin at 0, 4, 5, 14, 44
    batch = read_batch(stream, np.array([2, 14, 30]), context=10, packed=True)
    # Window 2..11: the end of one document, all of the next, the begin of a third; window 14..23
    # begins with a document; window 30..39 lies inside one.
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 10, 20, 30]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.input_ids.tolist() == [*range(2, 12), *range(14, 24), *range(30, 40)]
    assert torch.equal(batch.targets, batch.input_ids + 1)
    assert batch.attended == pytest.approx((4 + 1 + 49 + 100 + 100) / 30)


def test_bounds_agree_with_a_scan_over_random_documents():
    draw = np.random.default_rng(11)
    stream = stream_of(draw.integers(1, 40, 60).tolist())
    starts = draw.integers(0, len(stream.tokens) - 33, 7)
    expected = [
        row * 32 + i
        for row, start in enumerate(starts)
        for i in range(32)
        if i == 0 or start + i in set(stream.starts.tolist())
    ]
    assert document_bounds(stream, starts, 32).tolist() == [*expected, 7 * 32]


def test_validation_reads_adjoining_windows_from_the_begin():
    assert validation_windows(stream_of([100]), 10, 4, 1).tolist() == [0, 10, 20, 30]
    assert validation_windows(stream_of([100]), 10, 99, 1).tolist() == list(range(0, 90, 10))
    assert validation_windows(stream_of([100]), 10, 99, 4).tolist() == list(range(0, 80, 10))


def test_too_little_to_validate_on_every_device_is_refused():
    with pytest.raises(ValueError, match=r"^data.validation_share: .* 9 windows .*; 10 are wanted"):
        validation_windows(stream_of([100]), 10, 99, 10)


def test_the_longest_document_of_a_batch_bounds_its_lengths():
    stream, starts = stream_of([70, 400, 90, 2000]), np.array([0, 300])
    assert np.diff(document_bounds(stream, starts, 300)).max() == 230
    assert read_batch(stream, starts, 300, packed=True).max_seqlen == 256
    assert read_batch(stream, np.array([342]), 128, packed=True).max_seqlen == 128
    assert read_batch(stream, np.array([600]), 300, packed=True).max_seqlen == 300
    assert read_batch(stream, starts, 300, packed=False).max_seqlen is None


def test_texts_may_be_in_several_folders(tmp_path):
    for name in ("plays/a.txt", "plays/b.txt", "plays/notes.md", "verses.jsonl"):
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text('{"text": "In the beginning"}\n')
    data = settings_for(tmp_path, pattern="plays/*.txt|*.jsonl|plays/a.*")
    assert [path.name for path in text_files(data)] == ["a.txt", "b.txt", "verses.jsonl"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "nowhere"}, "data.text: 'nowhere' is not a folder"),
        ({"pattern": "*.md"}, "data.pattern: no file"),
        ({"pattern": "*"}, "data.pattern: 'notes.rst' is not .txt, .jsonl or .parquet"),
        ({"context": 4000}, "data.context: 4000; the train split has"),
        ({"context": 80}, "data.context: 80; the validation split has"),
    ],
)
def test_what_cannot_be_read_is_refused_by_key(tmp_path, changes, message):
    write_texts(tmp_path / "text", 3, 60)
    (tmp_path / "text" / "notes.rst").write_text("not a text")
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        prepare(settings_for(tmp_path, **changes))
