"""Runs small enough for a test: seconds, on random text, with every kind of randomness on."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import processes
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from training.metrics import read_metrics
from training.settings import Settings, read_settings
from training.train import CONFIG

REPOSITORY = Path(__file__).resolve().parents[2]
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "training.train")
WORDS = ["thou", "art", "the", "king", "of", "naples,", "and", "caliban", "speaks", "in", "verse"]


def write_texts(folder: Path, count: int, words: int) -> list[str]:
    """Write files of random words below `folder`, of unequal lengths; returns their texts."""
    draw = random.Random(3)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(draw.choices(WORDS, k=words + number)) + "\n" for number in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return texts


def overrides(folder: Path, *changes: str) -> list[str]:
    """The command line of a run of six steps in `folder`/run; `changes` come last, so they rule."""
    if not (folder / "text").exists():
        write_texts(folder / "text", count=30, words=20)
    return [
        *(f"data.text={folder / 'text'}", "data.pattern=*.txt", "data.packed=true"),
        *(f"data.prepared={folder / 'prepared'}", "data.context=16", "data.vocab_size=280"),
        *("data.validation_share=0.2", "schedule.warmup_steps=2", "optimizer.lr=1e-2"),
        *("model.hidden_size=16", "model.num_layers=2", "model.num_heads=2"),
        *("+model.attention_dropout=0.1", "+model.residual_dropout=0.1"),
        *("trainer.steps=6", "trainer.batch_size=4", "trainer.micro_batch_size=2"),
        *("trainer.validate_every=3", "trainer.validation_windows=4", "trainer.checkpoint_every=2"),
        *("sample.tokens=4", f"run_dir={folder / 'run'}"),
        *changes,
    ]


def config(folder: Path, *changes: str) -> DictConfig:
    """What Hydra composes from that command line."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
        return compose("config", overrides=overrides(folder, *changes))


def settings(folder: Path, *changes: str) -> Settings:
    """The same, checked."""
    return read_settings(config(folder, *changes))


def command(folder: Path, *changes: str, program: tuple[str, ...] = ("-m", "training.train")):
    """Run `program` with that command line in a new process; its result, output as text."""
    return processes.python(*program, *overrides(folder, *changes), folder=folder, seconds=120)


def commands_for_two_gpus() -> list[list[str]]:
    """What each line of docs/training.md passes to the training command under torchrun."""
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    return [line.split() for line in re.findall(rf"^{' '.join(TORCHRUN)} (.+)$", page, re.M)]


def two_processes(folder: Path, *changes: str) -> Path:
    """Run the training command under torchrun; the folder of the run."""
    program = ("-m", "torch.distributed.run", *TORCHRUN[1:])
    result = command(folder, *changes, program=program)
    assert result.returncode == 0, result.stderr[-4000:]
    return folder / "run"


def rows_without_speed(run_dir: Path) -> list[tuple[float, ...]]:
    """What metrics.csv says of the computation itself."""
    return [
        (row.step, row.tokens, row.loss, row.learning_rate, row.gradient_norm)
        + ((row.validation_loss, row.validation_bits_per_byte) if row.step % 3 == 0 else ())
        for row in read_metrics(run_dir / "metrics.csv")
    ]


def assert_same_curve(run_dir: Path, expected: Path) -> None:
    """At every third step, up to rounding in float32."""
    found, wanted = (np.array(rows_without_speed(run)[2::3]) for run in (run_dir, expected))
    allowed = 64 * np.finfo(np.float32).eps * wanted[:, 2].max()
    assert np.abs(found - wanted).max() < allowed


def checkpoint_tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint written by one process or by DDP, by name."""
    path = run_dir / "checkpoints" / f"step-{step:08d}" / "state"
    found: dict[str, torch.Tensor] = {}

    def collect(tree: object, name: str) -> None:
        if isinstance(tree, torch.Tensor):
            found[name] = tree
        elif isinstance(tree, dict):
            for key, value in tree.items():
                collect(value, f"{name}/{key}")

    collect(torch.load(path), "")
    return found


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and not trivially: there are parameters and two moments of each."""
    assert left.keys() == right.keys()
    assert sum("exp_avg" in name for name in left) > 10
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different
