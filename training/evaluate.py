"""Loss, perplexity and bits per byte of a run's last checkpoint on the text that it held out.

`python -m training.evaluate RUN_DIR [key=value ...]`, with the keys of training.train; those that
affect neither the weights nor the text can differ from the run's. All of the held-out text counts,
unless `trainer.validation_windows` says otherwise. Averaged weights are evaluated if there are any.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import checkpoints
from .settings import FREE_ON_RESUME, Settings, read_settings
from .train import Run

# Beside what a resumed run may change.
FREE = FREE_ON_RESUME | {
    *("attn", "trainer.precision", "trainer.strategy", "trainer.compile"),
    *("trainer.batch_size", "trainer.micro_batch_size"),
}
EVERY_WINDOW = 1 << 62


def main(arguments: list[str] | None = None) -> None:
    """Print one line; a wrong argument gives one line too, and exit status 1."""
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed settings")
    asked = parser.parse_args(arguments)
    try:
        step, loss, bits = evaluate(asked.run, asked.overrides)
    except ValueError as error:
        sys.exit(f"configuration: {error}")
    print(
        f"step {step}: loss {loss:.4f} nats a token, perplexity {math.exp(loss):.2f}, "
        f"{bits:.4f} bits per byte"
    )


def evaluate(folder: Path, overrides: list[str]) -> tuple[int, float, float]:
    """(step, nats a token, bits a byte) of the last checkpoint in `folder`.

    Raises:
        ValueError: there is no checkpoint, or an override does not fit it; the message names it.
    """
    checkpoint = checkpoints.latest(folder / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"{folder} holds no checkpoint")
    saved: dict[str, Any] = checkpoints.described(checkpoint)["settings"]
    here = {"run_dir": str(folder), "trainer": {"validation_windows": EVERY_WINDOW}}
    try:
        config = OmegaConf.merge(
            OmegaConf.structured(Settings), saved, here, OmegaConf.from_dotlist(overrides)
        )
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'configuration'}: {error.msg}") from error
    assert isinstance(config, DictConfig)
    run = Run(read_settings(config), free=FREE)
    return run.step, *run.validate()


if __name__ == "__main__":
    main()
