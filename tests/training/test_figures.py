"""`training.figures`: what it counts, takes turns with, and says when memory runs out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashtile.models.gpt import GPTConfig, GPTLMHeadModel
from training import figures
from training.figures import Plan, Point

pytestmark = pytest.mark.slow
PLAN = Plan(("eager", "flashtile"), "cpu", vocab_size=64, rounds=2, steps=1, deadline=float("inf"))


def small_model(**changes: int) -> GPTConfig:
    return GPTConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, **changes)


def test_flops_are_counted_as_in_the_readme_of_flash_attention():
    """It reports 169,000 tokens/s for GPT3-1.3B on eight A100, and up to 189 TFLOP/s on each."""
    config = GPTConfig(vocab_size=50304, hidden_size=2048, num_layers=24, num_heads=16)
    tflops = figures.counted_flops(config, 2048) * 169_000 / 8 / 1e12
    assert tflops == pytest.approx(189, rel=0.01)


def test_a_step_in_parts_is_the_whole_step():
    models = []
    for micro_batch in (4, 3):
        torch.manual_seed(0)
        model = GPTLMHeadModel(small_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(64, (4, 17))
        figures.train_step(model, optimizer, tokens, micro_batch)
        models.append(model)
    for whole, parts in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(whole, parts)


def test_memory_grows_as_the_attention_says(monkeypatch):
    """Eager attention keeps every score; flashtile none."""
    monkeypatch.setattr(figures, "model_config", lambda point, vocab: small_model())
    memory = {}
    for context in (256, 1024):
        for row in figures.measure(Point("memory", "tiny", context, 1), PLAN):
            assert not row.note and row.tokens_per_second > 0
            memory[row.attn, context] = row.peak_memory_mib
    assert memory["eager", 1024] > 10 * memory["eager", 256]
    assert memory["flashtile", 1024] < 5 * memory["flashtile", 256]


def test_an_attention_that_runs_out_of_memory_takes_fewer_windows(monkeypatch):
    largest = {"eager": 2, "flashtile": 0}

    def attention_named(name: str, context: int):
        def attend(q, k, v, **options):
            if len(q) > largest[name]:
                raise torch.OutOfMemoryError("no memory left")
            return v

        return attend

    monkeypatch.setattr(figures, "attention_named", attention_named)
    monkeypatch.setattr(figures, "model_config", lambda point, vocab: small_model())
    eager, flashtile = figures.measure(Point("speed", "tiny", 16, 5), PLAN)
    assert (eager.micro_batch, eager.note) == (2, "") and eager.seconds > 0
    assert flashtile.note == "out of memory" and flashtile.seconds != flashtile.seconds


def test_the_model_of_transformers_takes_turns_too(monkeypatch):
    monkeypatch.setattr(figures, "model_config", lambda point, vocab: small_model())
    plan = replace(PLAN, attentions=("eager", "flashtile", "sdpa-cudnn"))
    eager, flashtile, cudnn = figures.measure(Point("memory", "gpt2s-hf", 512, 1), plan)
    assert eager.peak_memory_mib > 2 * flashtile.peak_memory_mib > 0
    assert cudnn.note.startswith("failed: attn: 'sdpa-cudnn'; library=transformers has eager")


def test_the_command_writes_rows_pictures_and_a_table(tmp_path, monkeypatch, capsys):
    """Without new processes; one attention cannot run, which its row says."""

    def process(target, args):
        return SimpleNamespace(start=lambda: target(*args), join=lambda: None, exitcode=0)

    monkeypatch.setattr(figures, "get_context", lambda kind: SimpleNamespace(Process=process))
    sizes = ["--models", "tiny-cpu", "--contexts", "16", "--batch-tokens", "32"]
    chosen = ["--attn", "eager", "sdpa", "sdpa-cudnn", "--steps", "1", "--rounds", "1"]
    where = ["--device", "cpu", "--vocab-size", "64", "--folder", str(tmp_path)]
    figures.main([*sizes, *chosen, *where])
    rows = figures.read_csv(tmp_path / "figures.csv")
    assert [(row.figure, row.context, row.windows, row.attn) for row in rows] == [
        (figure, context, windows, attn)
        for figure, context, windows in (*(("speed", 16, 2), ("memory", 16, 1)),)
        for attn in ("eager", "sdpa", "sdpa-cudnn")
    ]
    for row in rows:
        assert row.note.startswith("failed: ") == (row.attn == "sdpa-cudnn")
        assert (row.peak_memory_mib > 0) == (row.attn != "sdpa-cudnn")
    for name in ("speed.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out.split("\n\n")[-1].strip()
    assert "x eager" in table and table.count("tiny-cpu") == 6

    (tmp_path / "speed.png").unlink()
    figures.main(["--rows", str(tmp_path / "figures.csv"), "--folder", str(tmp_path)])
    assert (tmp_path / "speed.png").is_file()
    assert capsys.readouterr().out.strip() == table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss"], "'loss' is neither speed nor memory"),
        (["memory", "--models", "gpt2m"], "--models gpt2m: pass --contexts; memory has none"),
        (["--device", "mps"], "--device mps: want cpu or cuda:N"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        figures.parse(arguments)
    assert message in capsys.readouterr().err
