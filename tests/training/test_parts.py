"""The parts of the harness one by one: attention by name, learning rate, seeds, metrics."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import settings
from torch.nn.attention.flex_attention import flex_attention

from flashtile import attention_varlen
from flashtile.testing import (
    assert_close,
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    floor_of,
    generator,
    qkv,
    rounding_variance,
)
from training import attention
from training.batches import Batch
from training.curves import smoothed
from training.metrics import Meter, MetricsFile, Row, TensorBoardFile, WandbFile, read_metrics
from training.optimization import make_schedule
from training.settings import ATTENTIONS, ScheduleSettings
from training.train import Run, derived_seed

pytestmark = pytest.mark.slow

WINDOWS, CONTEXT = 3, 32
DOCUMENTS = [20, 12, 32, 1, 30, 1]  # of three windows of 32, each cut at its ends
PLAIN = {  # what a GPT without a window, softcap or ALiBi asks for in evaluation
    **{"causal": True, "window_size": (-1, -1), "softcap": 0.0, "softmax_scale": None},
    **{"dropout_p": 0.0, "alibi_slopes": None},
}


@pytest.fixture(autouse=True)
def uncompiled_flex(monkeypatch):
    """Compiling takes longer than all the other tests, and a CPU cannot train with flex anyway."""
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)


@pytest.fixture(autouse=True)
def varlen_on_a_cpu(monkeypatch):
    """A stand-in for PyTorch's `varlen_attn`, which needs CUDA; it has the same signature."""

    def varlen_attn(*args: Any, scale: float, window_size: Any, enable_gqa: bool = False):
        assert enable_gqa == (args[0].shape[1] != args[1].shape[1])
        return attention_varlen(*args, softmax_scale=scale, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # on purpose
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "sdpa-cudnn"])
def test_every_attention_computes_the_same(name, packed):
    seed = int(os.environ["FLASHTILE_SEED"])
    q, k, v = qkv(generator(seed), WINDOWS, CONTEXT, CONTEXT, 4, 2, 16)
    reference, asked = attention_reference, {"cu_seqlens": None, "max_seqlen": None}
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        bounds = cu_seqlens(DOCUMENTS)
        reference = partial(attention_varlen_reference, **lengths_of_both(bounds))
        asked = {"cu_seqlens": bounds, "max_seqlen": CONTEXT}
    with torch.no_grad():
        out = attention.attention_named(name, CONTEXT)(q, k, v, **(PLAIN | asked))
    truth = reference(q, k, v, causal=True).out
    plain = reference(q, k, v, causal=True, compute_dtype=torch.float32).out
    variance = reference(q, k, v, causal=True, attend=rounding_variance(torch.float32)).out
    assert_close(name, out, truth, plain, floor=floor_of(variance), seed=seed)


def lengths_of_both(bounds: torch.Tensor) -> dict[str, object]:
    """The mask options of the reference for queries and keys of the same documents."""
    return {
        **{"cu_seqlens_q": bounds, "cu_seqlens_k": bounds},
        **{"max_seqlen_q": CONTEXT, "max_seqlen_k": CONTEXT},
    }


@pytest.mark.parametrize("name", ["sdpa", "varlen", "eager", "flex"])
@pytest.mark.parametrize(
    "change", [{"causal": False}, {"window_size": (4, 0)}, {"softcap": 5.0}, {"alibi_slopes": 1}]
)
def test_what_only_flashtile_computes_is_refused(name, change):
    q, k, v = qkv(generator(7), 1, 8, 8, 2, 2, 16)
    asked = PLAIN | {"cu_seqlens": None, "max_seqlen": None} | change
    with pytest.raises(ValueError, match="which only attn=flashtile supports"):
        attention.attention_named(name, 8)(q, k, v, **asked)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("sdpa-flash", "FLASH"), ("sdpa-cudnn", "CUDNN"), ("sdpa-math", "MATH")],
)
def test_sdpa_is_held_to_the_backend_of_its_name(monkeypatch, name, backend):
    q, k, v = qkv(generator(7), 1, 8, 8, 2, 2, 16)
    allowed = []

    def sdpa(q: torch.Tensor, *args: torch.Tensor, **options: Any) -> torch.Tensor:
        states = {
            "FLASH": torch.backends.cuda.flash_sdp_enabled(),
            "CUDNN": torch.backends.cuda.cudnn_sdp_enabled(),
            "MATH": torch.backends.cuda.math_sdp_enabled(),
        }
        allowed.extend(name for name, enabled in states.items() if enabled)
        return q

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", sdpa)
    asked = PLAIN | {"cu_seqlens": None, "max_seqlen": None}
    attention.attention_named(name, 8)(q, k, v, **asked)
    assert allowed == [backend]


def test_loss_curves_with_flashtile_sdpa_and_eager_agree(tmp_path):
    """The target of the harness on its smallest scale: 1e-3 in float32, without dropout."""
    plain = ["model.attention_dropout=0", "model.residual_dropout=0", "trainer.steps=12"]
    curves = {}
    for name in ("flashtile", "sdpa", "eager"):
        run = Run(settings(tmp_path, *plain, f"attn={name}", f"run_dir={tmp_path / name}"))
        curves[name] = [float(run.train_step()[0]) for _ in range(12)]
    for name in ("sdpa", "eager"):
        assert np.abs(np.subtract(curves[name], curves["flashtile"])).max() < 1e-3
    assert curves["flashtile"][-1] < curves["flashtile"][0] - 0.5


def cut(batch: Batch) -> int:
    """Where the second document of a packed batch begins; inside the window of another."""
    return 8 if batch.cu_seqlens is None else int(batch.cu_seqlens[1])


@pytest.mark.parametrize("packed", [True, False])
def test_a_loss_sees_other_documents_only_when_nothing_is_packed(tmp_path, packed):
    run = Run(settings(tmp_path, f"data.packed={packed}"))
    run.model.eval()
    batch = next(batch for batch in map(run.training_batch, range(99)) if cut(batch) < 16)
    second = cut(batch)
    first_changed, targets = batch.input_ids.clone(), batch.targets.clone()
    first_changed.view(-1)[0] = (first_changed.view(-1)[0] + 1) % 200
    targets.view(-1)[:second] = -100  # only the loss of the tokens after the first document
    with torch.no_grad():
        before = run.loss(replace(batch, targets=targets))
        after = run.loss(replace(batch, targets=targets, input_ids=first_changed))
    assert torch.equal(before, after) == packed


def rates(schedule: ScheduleSettings, steps: int) -> list[float]:
    """The learning rate of every step, at a peak of 2."""
    rate = make_schedule(schedule, 2.0, steps)
    return [rate(step) for step in range(steps)]


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_learning_rate_rises_to_the_peak_and_falls_to_its_share(name):
    found = rates(ScheduleSettings(name, warmup_steps=10, final_share=0.1), 110)
    assert found[0] == pytest.approx(0.2)
    assert found[9] == pytest.approx(2.0)
    assert found[59] == pytest.approx(1.1)
    assert found[109] == pytest.approx(0.2)
    assert np.diff(found[:10]).min() > 0 > np.diff(found[10:]).max()
    early = ScheduleSettings(name, warmup_steps=10, final_share=0.1, decay_steps=110)
    assert rates(early, 120)[:110] == found
    assert set(rates(early, 120)[110:]) == {found[109]}


def test_the_learning_rate_can_stay_and_only_rise():
    assert set(rates(ScheduleSettings("constant", warmup_steps=0), 5)) == {2.0}
    assert rates(ScheduleSettings("cosine", warmup_steps=5), 5)[-1] == 2.0


def test_a_scheduler_of_pytorch_counts_from_the_end_of_the_warmup():
    schedule = ScheduleSettings("StepLR", warmup_steps=2, options={"step_size": 3, "gamma": 0.5})
    assert rates(schedule, 10) == [1.0, 2.0, *[2.0] * 3, *[1.0] * 3, *[0.5] * 2]
    assert make_schedule(schedule, 2.0, 10)(7) == 1.0  # a resumed run begins here


def test_seeds_differ_for_every_step_and_index():
    seeds = {derived_seed(*key) for key in np.ndindex(3, 40, 40)}
    assert len(seeds) == 3 * 40 * 40
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_metrics_after_a_resume_have_no_step_twice(tmp_path):
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path, after_step=0)
    for step in range(1, 6):
        first.write(Row(step=step, tokens=step * 8, loss=1.5, mfu=0.25))
    second = MetricsFile(path, after_step=3)
    second.write(Row(step=4, tokens=32, loss=2.5))
    rows = read_metrics(path)
    assert [(row.step, row.tokens, row.loss) for row in rows] == [
        *((step, step * 8, 1.5) for step in (1, 2, 3)),
        (4, 32, 2.5),
    ]
    assert rows[0].mfu == 0.25 and math.isnan(rows[0].validation_loss)


def test_tensorboard_gets_the_same_numbers_and_forgets_what_a_resume_repeats(tmp_path):
    first = TensorBoardFile(tmp_path, after_step=0)
    for step in (1, 2, 3):
        first.write(Row(step=step, tokens=step * 8, loss=1.5, mfu=0.25))
    TensorBoardFile(tmp_path, after_step=2).write(Row(step=3, tokens=24, loss=2.5))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "mfu", "tokens"]  # no curve of NaN
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(1, 1.5), (2, 1.5), (3, 2.5)]


def test_weights_and_biases_gets_the_same_numbers_and_sends_none(tmp_path, monkeypatch):
    """A stand-in for the package, which is not among those of the tests."""
    logged, begun = [], {}

    def init(**options: object) -> SimpleNamespace:
        begun.update(options)
        return SimpleNamespace(log=lambda row, step: logged.append((row, step)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    WandbFile(tmp_path, {"seed": 3}).write(Row(step=2, tokens=16, loss=1.5))
    assert (begun["mode"], begun["dir"], begun["config"]) == ("offline", tmp_path, {"seed": 3})
    assert logged == [({"step": 2, "tokens": 16, "loss": 1.5}, 2)]


def test_the_meter_counts_only_while_it_runs(monkeypatch):
    now = iter([0.0, 2.0, 50.0, 52.0])
    monkeypatch.setattr("training.metrics.time.perf_counter", lambda: next(now))
    meter = Meter(torch.device("cpu"), devices=2, peak_tflops=0.5)
    meter.start()
    meter.count(tokens=300, flops=1e12)
    meter.stop()
    meter.start()
    meter.count(tokens=100, flops=1e12)
    meter.stop()
    speed, mfu = meter.read()
    assert speed == 100  # 400 tokens in 4 seconds
    assert mfu == 0.5  # 2e12 FLOPs in 4 seconds on 1e12 a second


def test_smoothing_is_the_mean_around_a_value():
    values = np.array([1.0, 3.0, 5.0, 9.0])
    assert smoothed(values, 1).tolist() == values.tolist()
    assert smoothed(values, 2).tolist() == [2.0, 4.0, 7.0, 9.0]
    assert smoothed(values, 3).tolist() == [2.0, 3.0, 17 / 3, 7.0]


def losses(folder: Path, *changes: str, steps: int = 3) -> list[float]:
    """The loss of the first steps."""
    run = Run(settings(folder, *changes))
    return [float(run.train_step()[0]) for _ in range(steps)]


def test_activation_checkpointing_changes_no_bit(tmp_path):
    """Dropout is on: what is recomputed draws the same mask."""
    assert losses(tmp_path, "trainer.activation_checkpointing=true") == losses(tmp_path)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_follows_float32(tmp_path, precision):
    exact = np.array(losses(tmp_path))
    error = np.abs(losses(tmp_path, f"trainer.precision={precision}") - exact).max()
    assert 0 < error < torch.finfo(torch.bfloat16).eps * exact.max()


def test_compiled_blocks_compute_the_same(tmp_path, monkeypatch):
    """Only traces; packed batches of changing lengths must not break it."""
    compile_block = torch.nn.Module.compile
    traced = partialmethod(compile_block, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    plain = ("model.attention_dropout=0", "model.residual_dropout=0")
    exact = np.array(losses(tmp_path, *plain))
    error = np.abs(losses(tmp_path, *plain, "trainer.compile=true") - exact).max()
    assert error < 16 * torch.finfo(torch.float32).eps * exact.max()


def test_a_gradient_that_is_not_finite_ends_the_run_before_a_checkpoint(tmp_path):
    run = Run(settings(tmp_path, "trainer.log_every=5"))
    with torch.no_grad():
        next(run.module.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 2: the norm of the gradient is nan"):
        run.train()
    assert not (tmp_path / "run" / "checkpoints").exists()
