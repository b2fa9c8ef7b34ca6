"""Whole runs: what is left of a run after it was stopped, spread over processes, or killed."""

from __future__ import annotations

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import processes
import pytest
import torch
from spread_runs import DIVIDED, GROUPS, NO_DROPOUT
from tiny_runs import (
    assert_same_curve,
    assert_same_tensors,
    checkpoint_tensors,
    command,
    commands_for_two_gpus,
    overrides,
    rows_without_speed,
    settings,
    two_processes,
)

from training import checkpoints, evaluate
from training.metrics import read_metrics
from training.train import Run

pytestmark = pytest.mark.slow
NEEDS_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"
)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of an uninterrupted run; its checkpoints are those of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    Run(settings(folder, "trainer.keep_checkpoints=3")).train()
    return folder


def test_a_run_leaves_metrics_a_picture_a_sample_and_checkpoints(whole_run):
    run = whole_run / "run"
    rows = read_metrics(run / "metrics.csv")
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.tokens for row in rows] == [64 * step for step in range(1, 7)]
    assert all(row.tokens_per_second > 0 and row.peak_memory_mib > 0 for row in rows)
    assert [row.step for row in rows if not math.isnan(row.validation_loss)] == [3, 6]
    assert rows[-1].loss < rows[0].loss
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "sample.txt").read_text().startswith("\n")
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000006"]
    [start] = map(json.loads, (run / "provenance.jsonl").read_text().splitlines())
    assert start["torch"] == torch.__version__
    assert (start["first_step"], start["devices"]) == (0, 1)


def test_a_run_can_keep_no_checkpoint_and_write_for_tensorboard(tmp_path):
    Run(
        settings(
            tmp_path,
            *("trainer.checkpoint_every=null", "trainer.tensorboard=true", "trainer.steps=2"),
        )
    ).train()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert len(list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))) == 1


def test_outside_a_terminal_a_line_for_each_validation_says_how_far_the_run_is(tmp_path, capsys):
    Run(settings(tmp_path, "trainer.steps=2", "trainer.validate_every=1")).train()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": loss")[0] for line in lines[1:3]] == ["step 1 of 2", "step 2 of 2"]


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path, whole_run, step):
    shutil.copytree(whole_run, tmp_path / "copy")
    for path in (tmp_path / "copy" / "run" / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    torch.manual_seed(99)  # the state that a new process would not have
    run = Run(settings(tmp_path / "copy"))
    assert run.step == step
    run.train()
    expected, resumed = whole_run / "run", tmp_path / "copy" / "run"
    assert_same_tensors(checkpoint_tensors(resumed, 6), checkpoint_tensors(expected, 6))
    assert rows_without_speed(resumed) == rows_without_speed(expected)
    assert (resumed / "sample.txt").read_text() == (expected / "sample.txt").read_text()


def weights(module: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def test_what_is_validated_and_kept_is_the_average_of_the_weights(tmp_path):
    changes = ("trainer.ema_decay=0.75", "trainer.steps=4")
    run = Run(settings(tmp_path, *changes))
    run.train_step()
    average = weights(run.module)
    for _ in range(3):
        run.train_step()
        average = 0.75 * average + 0.25 * weights(run.module)
    assert run.average is not None
    torch.testing.assert_close(weights(run.average), average)
    run.save()
    found = run.validate()
    resumed = Run(settings(tmp_path, *changes))
    assert resumed.average is not None and resumed.average.n_averaged == 4
    assert torch.equal(weights(resumed.average), weights(run.average))
    assert resumed.validate() == found
    run.average = None
    assert run.validate() != found
    torch.nn.utils.vector_to_parameters(average, run.module.parameters())
    assert run.validate() == pytest.approx(found)


def test_a_finished_run_is_evaluated(whole_run, capsys):
    run = str(whole_run / "run")
    evaluate.main([run, "trainer.validation_windows=4"])
    last = read_metrics(whole_run / "run" / "metrics.csv")[-1]
    loss, bits = last.validation_loss, last.validation_bits_per_byte
    text = f"loss {loss:.4f} nats a token, perplexity {math.exp(loss):.2f}, {bits:.4f} bits"
    assert f"step 6: {text} per byte" in capsys.readouterr().out
    every = evaluate.evaluate(whole_run / "run", [])
    assert every[1] != loss
    others = ["attn=eager", "trainer.micro_batch_size=1"]
    assert evaluate.evaluate(whole_run / "run", others) == pytest.approx(every, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.hidden_size=32", r"^model.hidden_size \(16 in the checkpoint, now 32\): differs"),
        ("trainer.precision=fp8", "^trainer.precision: 'fp8' is not one of"),
        ("trainer.stepz=3", "^.*trainer.*: Key 'stepz' not in"),
        ("run_dir=elsewhere", "^elsewhere"),
    ],
)
def test_what_does_not_fit_a_run_is_refused_when_it_is_evaluated(whole_run, change, message):
    folder = whole_run / "run" if "run_dir" not in change else Path("elsewhere")
    with pytest.raises(ValueError, match=message):
        evaluate.evaluate(folder, [change])


def test_a_finished_run_is_not_trained_again(tmp_path, whole_run):
    shutil.copytree(whole_run, tmp_path / "copy")
    before = (tmp_path / "copy" / "run" / "metrics.csv").read_text()
    Run(settings(tmp_path / "copy")).train()
    assert (tmp_path / "copy" / "run" / "metrics.csv").read_text() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("resume=false", "^run_dir: .* holds a run; resume=true continues it"),
        ("model.hidden_size=32", r"^model.hidden_size \(16 in the checkpoint, now 32\): differs"),
        ("seed=1", r"^seed \(0 in the checkpoint, now 1\): differs from the run in"),
    ],
)
def test_another_run_is_not_continued(tmp_path, whole_run, change, message):
    shutil.copytree(whole_run, tmp_path / "copy")
    with pytest.raises(ValueError, match=message):
        Run(settings(tmp_path / "copy", change))


def test_a_run_on_another_text_is_not_continued(tmp_path, whole_run):
    shutil.copytree(whole_run, tmp_path / "copy")
    (tmp_path / "copy" / "text" / "000.txt").write_text("another text")
    with pytest.raises(ValueError, match=r"^data.text \(not the text of the checkpoint\)"):
        Run(settings(tmp_path / "copy"))


def test_too_little_held_out_text_is_refused(tmp_path):
    many = ("trainer.batch_size=64", "trainer.micro_batch_size=64", "trainer.validation_windows=64")
    with pytest.raises(ValueError, match=r"^data.validation_share: .* \d+ windows of data.context"):
        Run(settings(tmp_path, *many))


def test_two_processes_are_one_bit_for_bit(tmp_path, whole_run):
    """Two gloo processes do the two micro-batches that one process does one after the other."""
    result = command(tmp_path, "trainer.devices=2", "trainer.strategy=ddp")
    assert result.returncode == 0, result.stderr
    run, expected = tmp_path / "run", whole_run / "run"
    assert_same_tensors(checkpoint_tensors(run, 6), checkpoint_tensors(expected, 6))
    assert rows_without_speed(run) == rows_without_speed(expected)


@pytest.mark.parametrize("group", ["pytorch", pytest.param("deepspeed", marks=NEEDS_DEEPSPEED)])
def test_spread_runs_follow_the_curve_of_one_process_and_are_resumed(tmp_path, group):
    """Gradients are added in another order: the curves agree to rounding, not in each bit."""
    runs = GROUPS[group]
    for name, (changes, _) in runs.items():
        Run(settings(tmp_path / "one" / name, *changes)).train()
        overrides(tmp_path / "two" / name)  # writes the texts
    processes.run(
        "training/spread_runs.py", 2, tmp_path / "rendezvous", str(tmp_path / "two"), group
    )
    for name in runs:
        one, two = (tmp_path / folder / name / "run" for folder in ("one", "two"))
        assert_same_curve(two, one)
        names = sorted(path.name for path in (two / "checkpoints").iterdir())
        assert names == ["step-00000004", "step-00000006"]


def test_the_command_for_two_gpus_follows_the_curve_of_one_process(tmp_path):
    """The last of them, on a CPU; test_training_gpu.py runs all of them on two GPUs."""
    *_, given = commands_for_two_gpus()
    assert given == ["trainer=ddp", DIVIDED]
    changes = (*NO_DROPOUT, "trainer.precision=32-true", "trainer.steps=3", "trainer.log_every=1")
    Run(settings(tmp_path / "one", *changes)).train()
    found = two_processes(tmp_path / "two", *given, "trainer.accelerator=cpu", *changes)
    assert_same_curve(found, tmp_path / "one" / "run")


KILLED_WHILE_WRITING = """
import os, signal
from pathlib import Path
from lightning_fabric import Fabric
from training import train

save = Fabric.save

def save_half(fabric, path, state):
    save(fabric, path, state)
    if "step-00000004" in str(path):
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

Fabric.save = save_half
train.main()
"""


def test_a_run_killed_while_it_writes_resumes_from_the_last_whole_checkpoint(tmp_path, whole_run):
    (tmp_path / "killed.py").write_text(KILLED_WHILE_WRITING)
    result = command(tmp_path, program=(str(tmp_path / "killed.py"),))
    assert result.returncode == -9, result.stderr
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000002",
        "step-00000004.partial",
    ]
    run = Run(settings(tmp_path))
    assert run.step == 2
    run.train()
    expected = whole_run / "run"
    assert_same_tensors(checkpoint_tensors(tmp_path / "run", 6), checkpoint_tensors(expected, 6))
    assert rows_without_speed(tmp_path / "run") == rows_without_speed(expected)
    assert not list(folder.glob("*.partial"))


INTERRUPTED = """
import os, signal, sys
from training import train

# A shell's background process ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
train_step = train.Run.train_step

def stop(run):
    if run.step == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return train_step(run)

train.Run.train_step = stop
train.main()
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=1", "; the same command goes on after step 2, from run/checkpoints/step-00000002"),
        ("trainer.checkpoint_every=5", ", without a checkpoint (trainer.checkpoint_every=5)"),
    ],
)
def test_ctrl_c_says_how_to_go_on(tmp_path, change, message):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    result = command(tmp_path, change, "run_dir=run", program=(str(tmp_path / "interrupted.py"),))
    assert result.returncode == 130, result.stderr
    assert result.stderr.splitlines()[-1] == f"stopped after step 3 of 6{message}"
    assert "Traceback" not in result.stderr


class Killed(Exception):
    """Stands for SIGKILL at a moment between two system calls."""


@pytest.mark.parametrize("moment", ["mkdir", "rename", "rmtree"])
def test_at_every_moment_the_newest_whole_checkpoint_is_complete(tmp_path, monkeypatch, moment):
    run = Run(settings(tmp_path, "trainer.keep_checkpoints=1"))
    state = {"model": run.model, "optimizer": run.optimizer}
    folder = tmp_path / "run" / "checkpoints"

    def save(step: int) -> None:
        checkpoints.save(run.fabric, folder, state, {"step": step}, keep=1)

    save(1)
    owner = shutil if moment == "rmtree" else Path

    def killed(path: Path, *args: object, **kwargs: object) -> None:
        if moment == "rmtree":
            (path / "run.json").unlink()  # the first file is gone
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, killed)
        with pytest.raises(Killed):
            save(2)
    whole = [path for path in folder.iterdir() if path.suffix != ".partial"]
    assert all((path / "run.json").exists() for path in whole)
    newest = checkpoints.latest(folder)
    assert newest is not None
    assert checkpoints.described(newest) == {"step": 2 if moment == "rmtree" else 1}
    checkpoints.load(run.fabric, newest, state)
    save(3)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
