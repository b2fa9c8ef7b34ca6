"""Train a GPT: `python -m training.train [group=choice] [key=value]`; see docs/training.md.

All randomness is a function of the seed, the step and the index in the step's batch: the order of
the data, and the state of PyTorch's generators before each forward pass (and with it flashtile's
dropout offsets). So a resumed run, or one on more devices, repeats the same numbers; with context
parallelism up to rounding.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flashtile.cli.machine import provenance
from flashtile.losses.cross_entropy import CrossEntropyLoss
from flashtile.models.gpt import GPTLMHeadModel

from . import checkpoints
from .attention import attention_named
from .batches import Batch, read_batch, training_windows, validation_windows
from .corpus import Corpus, prepare
from .curves import draw_loss
from .devices import blocks_of, launch, over_processes, whole
from .hugging_face import HuggingFaceGPT2
from .metrics import (
    NAN,
    Meter,
    MetricsFile,
    Row,
    TensorBoardFile,
    WandbFile,
    forget_peak_memory,
    peak_memory_mib,
    read_metrics,
)
from .optimization import make_optimizer, make_schedule
from .sample import write_sample
from .sequences import IGNORED, Sequences
from .settings import FREE_ON_RESUME, ZERO, Settings, differences, model_config, read_settings

CONFIG = Path(__file__).parent / "config"


@hydra.main(version_base="1.3", config_path=str(CONFIG), config_name="config")
def main(config: DictConfig) -> None:
    """Run the command; a wrong configuration prints one line and gives exit status 1."""
    try:
        settings = read_settings(config)
        run = Run(settings)
    except ValueError as error:
        sys.exit(f"configuration: {error}")
    try:
        run.train()
    except KeyboardInterrupt:
        if run.fabric.is_global_zero:
            print(run.interrupted(), file=sys.stderr)
        sys.exit(130)  # as a shell reports Ctrl-C


class Run:
    """One training run, from the step that its folder has reached to the last."""

    def __init__(self, settings: Settings, free: set[str] = FREE_ON_RESUME) -> None:
        """Launch the processes, read the text, build the model and restore the last checkpoint.

        Args:
            settings: of the run.
            free: the keys in which they may differ from those of the checkpoint.

        Raises:
            ValueError: the text, the devices or the checkpoint do not fit; the message names the
                key.
        """
        self.settings = settings
        self.folder = Path(settings.run_dir)
        self.fabric = launch(settings.trainer, settings.optimizer.grad_clip)
        context_parallel = settings.trainer.context_parallel
        self.sequences = Sequences(
            self.fabric, context_parallel, model_config(settings, settings.data.vocab_size)
        )
        with self.fabric.rank_zero_first():
            self.corpus: Corpus = prepare(settings.data)
        self.held_out = validation_windows(
            self.corpus.validation,
            settings.data.context,
            settings.trainer.validation_windows,
            together=settings.trainer.micro_batch_size * self.sequences.replicas,
        )
        self.bytes_per_token = self.fabric.to_device(
            torch.from_numpy(self.corpus.tokenizer.bytes_per_token())
        )
        forget_peak_memory(self.fabric.device)
        with self.fabric.device:  # drawing a billion random numbers is fast there
            self.module = build_model(settings, self.corpus)
        if settings.trainer.compile:  # a block at a time: compiled once for all the layers
            for block in blocks_of(self.module):
                block.compile()
        if settings.trainer.strategy in ZERO:  # they share what they divide
            optimizer = make_optimizer(self.module, settings.optimizer)
            self.model, self.optimizer = self.fabric.setup(self.module, optimizer)
        else:
            self.model = self.fabric.setup_module(self.module)
            self.optimizer = self.fabric.setup_optimizers(
                make_optimizer(self.module, settings.optimizer)
            )
        self.average: AveragedModel | None = None
        if settings.trainer.ema_decay is not None:
            averaging = get_ema_multi_avg_fn(settings.trainer.ema_decay)
            self.average = AveragedModel(self.module, multi_avg_fn=averaging)
        self.rate = make_schedule(settings.schedule, settings.optimizer.lr, settings.trainer.steps)
        self.step = 0
        self.restore(free)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        state = {"model": self.model, "optimizer": self.optimizer}
        return state if self.average is None else state | {"average": self.average}

    def train(self) -> None:
        """Train to the last step, then draw the curve and write a sample."""
        trainer, fabric = self.settings.trainer, self.fabric
        name = f"{self.module.num_parameters() / 1e6:.1f} M parameters, attn={self.settings.attn}"
        fabric.print(f"{name}, {fabric.world_size} x {fabric.device.type}, {self.folder}")
        meter = Meter(fabric.device, fabric.world_size, trainer.peak_tflops)
        files = self.open_files() if fabric.is_global_zero else []
        every = trainer.checkpoint_every
        with progress_bar(enabled=fabric.is_global_zero) as bar:
            task = bar.add_task("", total=trainer.steps, completed=self.step, note="")
            meter.start()
            while self.step < trainer.steps:
                loss, norm, flops = self.train_step()
                meter.count(trainer.batch_size * self.settings.data.context, flops)
                last = self.step == trainer.steps
                validates = last or self.step % trainer.validate_every == 0
                saves = every is not None and (last or self.step % every == 0)
                if validates or saves or self.step % trainer.log_every == 0:
                    meter.stop()
                    row = self.measure(loss, norm, meter, validates)
                    for file in files:
                        file.write(row)
                    bar.update(task, completed=self.step, note=str(row))
                    if validates:
                        fabric.print(f"step {self.step} of {trainer.steps}: {row}")
                    if saves:
                        self.save()
                    meter.start()
        self.finish(name)

    def open_files(self) -> list[MetricsFile | TensorBoardFile | WandbFile]:
        """Open the files for the rows. provenance.jsonl records machine, versions and command."""
        files: list[MetricsFile | TensorBoardFile | WandbFile] = [
            MetricsFile(self.folder / "metrics.csv", after_step=self.step)
        ]
        if self.settings.trainer.tensorboard:
            files.append(TensorBoardFile(self.folder / "tensorboard", after_step=self.step))
        if self.settings.trainer.wandb:
            files.append(WandbFile(self.folder, dataclasses.asdict(self.settings)))
        command = shlex.join(["python", "-m", "training.train", *sys.argv[1:]])
        start = {"first_step": self.step, "devices": self.fabric.world_size}
        line = provenance(str(self.fabric.device), command) | start
        with (self.folder / "provenance.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return files

    def train_step(self) -> tuple[Tensor, Tensor, float]:
        """One step of the optimizer: mean loss, gradient norm, model FLOPs of all devices."""
        settings, fabric, trainer = self.settings, self.fabric, self.settings.trainer
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        self.model.train()
        passes = trainer.batch_size // (trainer.micro_batch_size * self.sequences.replicas)
        total, flops = torch.zeros((), device=fabric.device), 0.0
        for i in range(passes):
            index = self.sequences.replica * passes + i
            torch.manual_seed(derived_seed(settings.seed, self.step, index))
            batch = self.training_batch(index)
            with self.without_sync() if i < passes - 1 else nullcontext():
                loss = self.loss(batch) / passes
                fabric.backward(loss)
            total += loss.detach()
            flops += batch.targets.numel() * self.module.flops_per_token(round(batch.attended))
        limit = settings.optimizer.grad_clip or float("inf")
        # It is checked for NaN when it is logged, because reading it waits for the device.
        norm = fabric.clip_gradients(
            self.model, self.optimizer, max_norm=limit, error_if_nonfinite=False
        )
        self.optimizer.step()
        if norm is None:  # DeepSpeed clips in its step
            zero: Any = fabric.strategy
            norm = torch.as_tensor(zero.gradient_norm(), device=fabric.device)
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.module)
        self.step += 1
        return over_processes(fabric, total, "mean"), whole(norm), flops * self.sequences.replicas

    def without_sync(self) -> AbstractContextManager[object]:
        """In this block a backward adds to the gradients of this process alone."""
        if self.settings.trainer.strategy in ZERO:  # its step, not its backward, ends a sum
            return nullcontext()
        return self.fabric.no_backward_sync(self.model)

    def training_batch(self, index: int) -> Batch:
        """Micro-batch number `index` of this step's batch, on the device."""
        data, trainer = self.settings.data, self.settings.trainer
        first = self.step * trainer.batch_size + index * trainer.micro_batch_size
        starts = training_windows(
            self.corpus.train, data.context, self.settings.seed, first, trainer.micro_batch_size
        )
        batch = read_batch(self.corpus.train, starts, data.context, data.packed)
        return batch.to(self.fabric.device)

    def loss(self, batch: Batch) -> Tensor:
        """The mean cross-entropy of the next tokens, in nats; with context parallelism this
        process's share of it."""
        if self.sequences.ranks == 1:
            return self.loss_of(self.model, batch, "mean")
        part, block = self.sequences.own_part(batch)
        with block:
            return self.sequences.share_of_mean(self.loss_of(self.model, part, "sum"), batch)

    def loss_of(self, model: nn.Module, batch: Batch, reduction: str) -> Tensor:
        """The mean or the sum of the cross-entropy over the tokens of `batch`."""
        return model(
            batch.input_ids,
            targets=batch.targets,
            loss=CrossEntropyLoss(ignore_index=IGNORED, reduction=reduction),
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        ).loss

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """(nats a token, bits a byte) of the held-out text, each window read once.

        Of the averaged weights, if there are any.
        """
        data, trainer, fabric = self.settings.data, self.settings.trainer, self.fabric
        stream, starts = self.corpus.validation, self.held_out
        together = trainer.micro_batch_size * self.sequences.replicas
        model = self.model if self.average is None else self.average
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)  # nats, tokens, bytes
        for first in range(0, len(starts), together):
            mine = first + self.sequences.replica * trainer.micro_batch_size
            chosen = starts[mine : mine + trainer.micro_batch_size]
            batch = read_batch(stream, chosen, data.context, data.packed).to(fabric.device)
            part, block = self.sequences.own_part(batch)
            with block, fabric.autocast():
                sums[0] += self.loss_of(model, part, "sum")
            targets = part.targets[part.targets != IGNORED]
            sums[1] += targets.numel()
            sums[2] += self.bytes_per_token[targets].sum()
        nats, tokens, text_bytes = over_processes(fabric, sums, "sum").tolist()
        return nats / tokens, nats / np.log(2) / text_bytes

    def measure(self, loss: Tensor, norm: Tensor, meter: Meter, validates: bool) -> Row:
        """The row of this step; `FloatingPointError` when its gradient was not finite."""
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.step}: the norm of the gradient is {norm:.3g}")
        speed, mfu = meter.read()
        validation_loss, bits = self.validate() if validates else (NAN, NAN)
        trainer = self.settings.trainer
        return Row(
            step=self.step,
            tokens=self.step * trainer.batch_size * self.settings.data.context,
            loss=loss.item(),
            validation_loss=validation_loss,
            validation_bits_per_byte=bits,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            gradient_norm=float(norm),
            tokens_per_second=speed,
            mfu=mfu,
            peak_memory_mib=peak_memory_mib(self.fabric.device),
        )

    def save(self) -> None:
        """Write a checkpoint of this step."""
        run = {
            "step": self.step,
            "text": self.corpus.fingerprint,
            "settings": dataclasses.asdict(self.settings),
        }
        keep = self.settings.trainer.keep_checkpoints
        checkpoints.save(self.fabric, self.folder / "checkpoints", self.state, run, keep)

    def interrupted(self) -> str:
        """What is left of a run that Ctrl-C has stopped, and how to go on."""
        stopped = f"stopped after step {self.step} of {self.settings.trainer.steps}"
        checkpoint = checkpoints.latest(self.folder / "checkpoints")
        if checkpoint is None:
            every = self.settings.trainer.checkpoint_every
            return f"{stopped}, without a checkpoint (trainer.checkpoint_every={every})"
        step = checkpoints.described(checkpoint)["step"]
        return f"{stopped}; the same command goes on after step {step}, from {checkpoint}"

    def restore(self, free: set[str]) -> None:
        """Continue the run in the folder, if there is one with the same settings but for `free`."""
        checkpoint = checkpoints.latest(self.folder / "checkpoints")
        if checkpoint is None:
            return
        if not self.settings.resume:
            raise ValueError(
                f"run_dir: {self.folder} holds a run; resume=true continues it, another run_dir "
                "starts anew"
            )
        run = checkpoints.described(checkpoint)
        changed = differences(run["settings"], self.settings, free)
        if run["text"] != self.corpus.fingerprint:
            changed.append("data.text (not the text of the checkpoint)")
        if changed:
            raise ValueError(f"{', '.join(changed)}: differs from the run in {self.folder}")
        checkpoints.load(self.fabric, checkpoint, self.state)
        self.step = run["step"]

    def finish(self, name: str) -> None:
        """Draw the loss and write a sample of text."""
        # All processes generate, because the parameters may be spread over them.
        average = self.average
        model = self.module if average is None else average.module
        text = write_sample(self.fabric, model, self.corpus.tokenizer, self.settings)
        if not self.fabric.is_global_zero:
            return
        rows = read_metrics(self.folder / "metrics.csv")
        draw_loss(rows, self.folder / "loss.png", name)
        print(f"curve: {self.folder / 'loss.png'}")
        if text:
            (self.folder / "sample.txt").write_text(text, encoding="utf-8")
            print(f"sample: {self.folder / 'sample.txt'}\n\n{text}")


def build_model(settings: Settings, corpus: Corpus) -> GPTLMHeadModel | HuggingFaceGPT2:
    """The model with its initial weights, which depend only on the seed and the library."""
    # Rows up to a multiple of 64 keep the last matrix product on the tensor cores' fast path.
    vocab_size = -(-corpus.tokenizer.vocab_size // 64) * 64
    torch.manual_seed(settings.seed)
    config, recomputes = (
        model_config(settings, vocab_size),
        settings.trainer.activation_checkpointing,
    )
    if settings.library == "transformers":
        return HuggingFaceGPT2(config, settings.attn, recomputes)
    attend = attention_named(settings.attn, settings.data.context)
    return GPTLMHeadModel(config, attend=attend, activation_checkpointing=recomputes)


def derived_seed(seed: int, step: int, index: int) -> int:
    """A different seed for every forward pass of a run."""
    return int(np.random.SeedSequence([seed, step, index]).generate_state(1, np.uint64)[0] >> 1)


def progress_bar(enabled: bool) -> Progress:
    """A progress bar in a terminal; elsewhere the lines of each validation are enough."""
    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        disable=not enabled or not sys.stdout.isatty(),
    )


if __name__ == "__main__":
    main()
