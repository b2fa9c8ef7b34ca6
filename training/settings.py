"""The settings of a run: every key, its type and its meaning, checked before the run starts.

Hydra composes the YAML files of `training/config` and the overrides of the command line; the result
must fit the dataclasses below. A wrong value raises `ValueError` with the key's full name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashtile.models.gpt import GPTConfig

from . import experiments, hugging_face
from .attention import ATTENTIONS, ON_CUDA_ALONE, WITHOUT_DROPOUT
from .optimization import make_schedule

TOKENIZERS = ("bytes", "bpe")
ZERO = ("zero1", "zero2", "zero3")
STRATEGIES = ("auto", "ddp", "fsdp2", *ZERO)
LIBRARIES = ("flashtile", "transformers")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
ACCELERATORS = ("auto", "cpu", "cuda")


@dataclass
class DataSettings:
    text: str = MISSING  # folder that holds the texts
    pattern: str = "*.txt"  # which files of it, as in Path.glob; "A|B": those of A and of B
    separator: str | None = None  # divides a .txt file into documents; null: a file is a document
    group_by: list[str] = field(default_factory=list)  # rows alike in these are a document (.jsonl)
    prepared: str = MISSING  # folder for the tokenised texts, made once and used again
    tokenizer: str = "bpe"  # one of TOKENIZERS
    vocab_size: int = 2048  # of the BPE; bytes have 257
    validation_share: float = 0.05  # of the text, held out
    context: int = 256  # tokens in a window
    packed: bool = False  # attention stays inside documents


@dataclass
class OptimizerSettings:  # AdamW
    lr: float = MISSING  # at the peak of the schedule
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; vectors (biases, norms) do not decay
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no limit


@dataclass
class ScheduleSettings:
    name: str = "cosine"  # cosine, linear, constant, or a class of torch.optim.lr_scheduler
    warmup_steps: int = 0  # the learning rate rises linearly
    decay_steps: int | None = None  # the step that reaches the final share; null: the last one
    final_share: float = 0.1  # of the peak (cosine, linear)
    options: dict[str, Any] = field(default_factory=dict)  # arguments of PyTorch's class


@dataclass
class TrainerSettings:
    accelerator: str = "auto"  # one of ACCELERATORS
    devices: int = 1  # on each node
    num_nodes: int = 1
    context_parallel: int = 1  # devices that divide the tokens of each window; attn=flashtile
    strategy: str = "auto"  # one of STRATEGIES; auto: ddp when there are several devices
    precision: str = "32-true"  # one of PRECISIONS
    steps: int = MISSING  # of the optimizer
    batch_size: int = MISSING  # windows in a step, over all devices
    micro_batch_size: int = MISSING  # windows in one forward pass of one device
    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = 1  # steps
    validate_every: int = 100  # steps; the last step is validated always
    validation_windows: int = 64
    checkpoint_every: int | None = 500  # steps; the last step is kept too; null: keep none
    keep_checkpoints: int = 2
    peak_tflops: float | None = None  # of one device, for MFU; null: the known GPUs' bfloat16 peak
    ema_decay: float | None = None  # validate an average of the weights with this decay; null: none
    tensorboard: bool = False  # event files in run_dir/tensorboard, beside metrics.csv
    wandb: bool = False  # a run of Weights & Biases in run_dir/wandb, offline without WANDB_MODE


@dataclass
class SampleSettings:
    prompt: str = "\n"
    tokens: int = 200  # new ones, up to the context; 0: no sample
    temperature: float = 0.8
    top_k: int = 50


@dataclass
class Settings:
    model: dict[str, Any] = field(default_factory=dict)  # fields of GPTConfig
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    data_dir: str = ".data"  # where the groups of `data` look for texts
    attn: str = "flashtile"  # one of ATTENTIONS
    library: str = "flashtile"  # whose model, one of LIBRARIES; transformers: its GPT-2
    seed: int = 0
    run_dir: str = MISSING  # metrics, checkpoints, picture and sample
    resume: bool = True  # continue the run that run_dir holds, if it holds one


# The first entry of config/config.yaml: Hydra then knows every key and its type.
ConfigStore.instance().store(name="schema", node=Settings)
experiments.register()

# A resumed run may change these settings; all others would affect the loss curve.
FREE_ON_RESUME = {
    *("run_dir", "resume", "sample", "data_dir", "data.text", "data.prepared"),
    *("trainer.log_every", "trainer.validate_every", "trainer.validation_windows"),
    *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.peak_tflops"),
    *("trainer.tensorboard", "trainer.wandb"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes"),
    "trainer.context_parallel",
}


def read_settings(config: DictConfig) -> Settings:
    """The configuration as checked `Settings`; `ValueError` names the first key that is wrong."""
    try:
        settings = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'configuration'}: {error.msg}") from error
    assert isinstance(settings, Settings)
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Raise `ValueError`, naming the key, for a value that would make the run fail."""
    _check_choices(settings)
    _check_ranges(settings)
    _check_library(settings)
    _check_model(settings)
    _check_context_parallel(settings)
    trainer = settings.trainer
    replicas = trainer.devices * trainer.num_nodes // trainer.context_parallel
    together = trainer.micro_batch_size * replicas
    divided = " / trainer.context_parallel" if trainer.context_parallel > 1 else ""
    if trainer.batch_size % together:
        raise ValueError(
            f"trainer.batch_size: {trainer.batch_size} is not a multiple of {together}, that is "
            f"trainer.micro_batch_size x trainer.devices x trainer.num_nodes{divided}"
        )
    if trainer.validation_windows < together:
        raise ValueError(
            f"trainer.validation_windows: {trainer.validation_windows}; at least {together} are "
            "wanted, one forward pass on every device"
        )
    if settings.schedule.warmup_steps > trainer.steps:
        raise ValueError(
            f"schedule.warmup_steps: {settings.schedule.warmup_steps} is more than trainer.steps, "
            f"{trainer.steps}"
        )
    make_schedule(settings.schedule, settings.optimizer.lr, trainer.steps)
    if trainer.ema_decay is not None and trainer.strategy in ("fsdp2", *ZERO):
        raise ValueError("trainer.ema_decay: an average of sharded weights is not supported")


def _check_choices(settings: Settings) -> None:
    for key, value, choices in (
        ("attn", settings.attn, ATTENTIONS),
        ("library", settings.library, LIBRARIES),
        ("data.tokenizer", settings.data.tokenizer, TOKENIZERS),
        ("trainer.strategy", settings.trainer.strategy, STRATEGIES),
        ("trainer.precision", settings.trainer.precision, PRECISIONS),
        ("trainer.accelerator", settings.trainer.accelerator, ACCELERATORS),
    ):
        if value not in choices:
            raise ValueError(f"{key}: {value!r} is not one of {', '.join(choices)}")
    if settings.attn in ON_CUDA_ALONE and settings.trainer.accelerator == "cpu":
        raise ValueError(f"attn: {settings.attn} trains only on CUDA; trainer.accelerator is 'cpu'")
    if settings.attn == "sdpa-flash" and settings.data.packed:
        raise ValueError(
            "attn: sdpa-flash takes no mask, which hides other documents; data.packed is true "
            "(attn=varlen is the same kernel and knows documents)"
        )
    trainer = settings.trainer
    for key, asked, package in (
        ("trainer.tensorboard", trainer.tensorboard, "tensorboard"),
        ("trainer.wandb", trainer.wandb, "wandb"),
        ("library", settings.library == "transformers", "transformers"),
        ("trainer.strategy", trainer.strategy in ZERO, "deepspeed"),
    ):
        if asked and find_spec(package) is None:
            raise ValueError(
                f"{key}: the package {package} is not installed (pip install {package})"
            )


def _check_ranges(settings: Settings) -> None:
    data, optimizer, schedule = settings.data, settings.optimizer, settings.schedule
    trainer, sample = settings.trainer, settings.sample
    at_least_1 = [
        *("devices", "num_nodes", "steps", "batch_size", "micro_batch_size", "log_every"),
        *("validate_every", "keep_checkpoints", "context_parallel"),
    ]
    wanted: list[tuple[str, object, bool, str]] = [
        (f"trainer.{name}", getattr(trainer, name), getattr(trainer, name) >= 1, "at least 1")
        for name in at_least_1
    ]
    every = trainer.checkpoint_every
    betas_fit = len(optimizer.betas) == 2 and all(0 <= beta < 1 for beta in optimizer.betas)
    peak, decay = trainer.peak_tflops, trainer.ema_decay
    decay_steps, warmup = schedule.decay_steps, schedule.warmup_steps
    share = data.validation_share
    wanted += [
        ("data.context", data.context, data.context >= 2, "at least 2"),
        ("data.vocab_size", data.vocab_size, data.vocab_size >= 257, "at least 257: all bytes"),
        ("data.validation_share", share, 0 < share < 1, "between 0 and 1, both excluded"),
        ("optimizer.lr", optimizer.lr, optimizer.lr > 0, "more than 0"),
        ("optimizer.betas", optimizer.betas, betas_fit, "two numbers from 0 up to 1"),
        ("optimizer.eps", optimizer.eps, optimizer.eps > 0, "more than 0"),
        ("optimizer.weight_decay", optimizer.weight_decay, optimizer.weight_decay >= 0, ">= 0"),
        ("optimizer.grad_clip", optimizer.grad_clip, optimizer.grad_clip >= 0, ">= 0"),
        ("schedule.warmup_steps", warmup, warmup >= 0, ">= 0"),
        (
            "schedule.decay_steps",
            decay_steps,
            decay_steps is None or decay_steps > warmup,
            "more than schedule.warmup_steps",
        ),
        ("schedule.final_share", schedule.final_share, 0 <= schedule.final_share <= 1, "0 to 1"),
        ("trainer.checkpoint_every", every, every is None or every >= 1, "at least 1"),
        ("trainer.peak_tflops", peak, peak is None or peak > 0, "more than 0"),
        ("trainer.ema_decay", decay, decay is None or 0 <= decay < 1, "at least 0, less than 1"),
        ("sample.tokens", sample.tokens, sample.tokens >= 0, ">= 0"),
        ("sample.temperature", sample.temperature, sample.temperature > 0, "more than 0"),
        ("sample.top_k", sample.top_k, sample.top_k >= 1, "at least 1"),
        ("sample.prompt", sample.prompt, bool(sample.prompt), "at least one character"),
        ("seed", settings.seed, settings.seed >= 0, ">= 0"),
    ]
    for key, value, fits, what in wanted:
        if not fits:
            raise ValueError(f"{key}: {value!r}; wanted: {what}")


def _check_context_parallel(settings: Settings) -> None:
    trainer, ranks = settings.trainer, settings.trainer.context_parallel
    devices = trainer.devices * trainer.num_nodes
    if devices % ranks:
        raise ValueError(
            f"trainer.context_parallel: {ranks} does not divide {devices}, that is trainer.devices "
            "x trainer.num_nodes"
        )
    if ranks == 1:
        return
    if settings.attn != "flashtile":
        raise ValueError(
            f"attn: {settings.attn} sees only the tokens of its own device; "
            f"trainer.context_parallel is {ranks}"
        )
    if trainer.compile:
        raise ValueError(
            f"trainer.compile: got true, want false with trainer.context_parallel={ranks}"
        )
    if settings.data.context < ranks:
        raise ValueError(
            f"data.context: {settings.data.context} tokens are fewer than "
            f"trainer.context_parallel, {ranks}"
        )


def _check_library(settings: Settings) -> None:
    if settings.library != "transformers":
        return
    config = model_config(settings, vocab_size=settings.data.vocab_size)
    hugging_face.check(settings.attn)
    for key, value, wanted in (
        ("data.packed", settings.data.packed, False),
        ("trainer.context_parallel", settings.trainer.context_parallel, 1),
    ):
        if value != wanted:
            raise ValueError(f"{key}: {value!r}; library=transformers has only {wanted!r}")
    if settings.trainer.strategy == "fsdp2":
        raise ValueError("trainer.strategy: want auto or ddp with library=transformers")
    hugging_face.gpt2_config(config)


def _check_model(settings: Settings) -> None:
    known = {field.name for field in dataclasses.fields(GPTConfig)}
    if unknown := set(settings.model) - known:
        raise ValueError(
            f"model.{min(unknown)}: not a field of GPTConfig ({', '.join(sorted(known))})"
        )
    if "vocab_size" in settings.model:
        raise ValueError("model.vocab_size: decided by the tokenizer; set data.vocab_size")
    config = model_config(settings, vocab_size=settings.data.vocab_size)
    if config.position == "learned" and config.max_position_embeddings < settings.data.context:
        raise ValueError(
            f"model.max_position_embeddings: {config.max_position_embeddings} is less than "
            f"data.context, {settings.data.context}"
        )
    if settings.attn in WITHOUT_DROPOUT and config.attention_dropout:
        raise ValueError(
            f"model.attention_dropout: {config.attention_dropout}; attn={settings.attn} has none"
        )


def model_config(settings: Settings, vocab_size: int) -> GPTConfig:
    """The model's configuration; `ValueError` names the key of `model` that does not fit."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.model.items()
    }
    try:
        return GPTConfig(**fields, vocab_size=vocab_size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.{error}") from error


def differences(
    saved: dict[str, Any], settings: Settings, free: set[str] = FREE_ON_RESUME
) -> list[str]:
    """The keys, each with both values, in which a checkpoint's run and this one may not differ."""
    before, now = _flat(saved), _flat(dataclasses.asdict(settings))
    return [
        f"{key} ({before.get(key)!r} in the checkpoint, now {now.get(key)!r})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in free and key.split(".")[0] not in free
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        leaves |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return leaves
