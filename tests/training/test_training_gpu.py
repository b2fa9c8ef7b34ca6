"""On a GPU: every attention trains the same curve, and memory is measured.

Wants the packages of the extra `train`, and a C compiler, which Triton and FlexAttention call.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spread_runs import NO_DROPOUT
from tiny_runs import assert_same_curve, commands_for_two_gpus, settings, two_processes

from flashtile.models.gpt import GPTConfig
from flashtile.testing import assert_close
from training import figures
from training.figures import Point
from training.settings import ATTENTIONS
from training.train import Run

pytestmark = pytest.mark.gpu
PLAIN = (  # the smallest head dim that all of them take is 16
    *("model.hidden_size=64", "model.attention_dropout=0", "model.residual_dropout=0"),
    *("data.context=128", "data.validation_share=0.5", "trainer.accelerator=cuda"),
)


def losses(folder: Path, *changes: str) -> torch.Tensor:
    """The loss of the first steps, float32."""
    run = Run(settings(folder, *PLAIN, *changes))
    return torch.stack([run.train_step()[0].cpu() for _ in range(4)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "eager"])
def test_every_attention_trains_in_bfloat16_as_the_textbook_does_in_float32(tmp_path, name, packed):
    if name == "sdpa-flash" and packed:
        pytest.skip("sdpa-flash takes no mask, which hides other documents")
    changes = (f"data.packed={packed}", "trainer.precision=bf16-mixed")
    exact = losses(tmp_path, "attn=eager", f"data.packed={packed}")
    plain = losses(tmp_path, "attn=eager", *changes)
    found = losses(tmp_path, f"attn={name}", *changes)
    assert not torch.equal(found, exact)  # it was bfloat16
    assert_close("losses", found, exact, plain, dtype=torch.bfloat16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
@pytest.mark.parametrize("given", commands_for_two_gpus(), ids=" ".join)
def test_two_gpus_follow_the_curve_of_one(tmp_path, given):
    """The commands of docs/training.md as they stand, in small sizes, in float32 and over NCCL."""
    changes = (
        *(*NO_DROPOUT, "model.hidden_size=64"),
        *("trainer.precision=32-true", "trainer.log_every=1"),
    )
    Run(settings(tmp_path / "one", "trainer=gpu", *changes)).train()
    found = two_processes(tmp_path / "two", *given, *changes)
    assert_same_curve(found, tmp_path / "one" / "run")


def test_the_figures_measure_every_attention(monkeypatch):
    """Memory is that of each one's own steps: eager's scores do not count for the others."""
    small = GPTConfig(hidden_size=64, num_layers=2, num_heads=2, vocab_size=512)
    monkeypatch.setattr(figures, "model_config", lambda point, vocab: small)
    names = ("eager", "sdpa-flash", "sdpa-cudnn", "flex", "flashtile")
    plan = figures.Plan(names, "cuda", 512, rounds=2, steps=1, deadline=float("inf"))
    rows = {row.attn: row for row in figures.measure(Point("speed", "tiny", 1024, 4), plan)}
    assert [row.note for row in rows.values()] == [""] * len(names)
    for name in names[1:]:
        assert rows[name].peak_memory_mib < rows["eager"].peak_memory_mib / 2
