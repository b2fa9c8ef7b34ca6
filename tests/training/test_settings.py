"""A wrong configuration is refused before anything starts, by the name of its key."""

from __future__ import annotations

import re

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from tiny_runs import REPOSITORY, command, config, settings

from training.settings import ATTENTIONS, differences, read_settings
from training.train import CONFIG

pytestmark = pytest.mark.slow

# What a group's own files leave open.
OPEN = ["run_dir=runs/x", "data.text=text"]


COMMAND = re.compile(r"-m training\.train (?!--)((?:[^`#\n\\]|\\\n)+)")


@pytest.mark.parametrize("page", ["training", "context-parallel-models"])
def test_the_commands_of_the_manual_are_valid(page):
    text = (REPOSITORY / "docs" / f"{page}.md").read_text(encoding="utf-8")
    commands = [found.replace("\\", "").split() for found in COMMAND.findall(text)]
    assert commands
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
        for overrides in commands:
            read_settings(compose("config", overrides=[*overrides, "run_dir=runs/x"]))


@pytest.mark.parametrize(
    "group", ["model", "data", "optimizer", "schedule", "trainer", "experiment", "size"]
)
def test_every_file_of_every_group_is_valid(group):
    names = sorted(path.stem for path in (CONFIG / group).glob("*.yaml"))
    assert names
    for name in names:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
            read_settings(compose("config", overrides=[f"{group}={name}", *OPEN]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attn=flash", "attn: 'flash' is not one of flashtile, sdpa, sdpa-flash, sdpa-cudnn"),
        ("attn=flex", "attn: flex trains only on CUDA; trainer.accelerator is 'cpu'"),
        ("attn=varlen", "attn: varlen trains only on CUDA"),
        ("attn=sdpa-flash", "attn: sdpa-flash takes no mask, which hides other documents"),
        ("seed=-1", "seed: -1"),
        ("data.tokenizer=words", "data.tokenizer: 'words' is not one of"),
        ("data.vocab_size=200", "data.vocab_size: 200; wanted: at least 257"),
        ("data.context=1", "data.context: 1; wanted: at least 2"),
        ("data.validation_share=1.5", "data.validation_share: 1.5"),
        ("optimizer.lr=0", "optimizer.lr: 0.0; wanted: more than 0"),
        ("optimizer.lr=???", "optimizer.lr: "),
        ("optimizer.betas=[0.9]", "optimizer.betas: [0.9]"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas: [0.9, 1.0]"),
        ("schedule.name=square", "schedule.name: 'square' is not one of cosine, linear, constant"),
        ("schedule.name=LambdaLR", "schedule.options: "),
        ("+schedule.options.gamma=1", "schedule.options: cosine has none, got {'gamma': 1}"),
        ("schedule.decay_steps=2", "schedule.decay_steps: 2; wanted: more than schedule.warmup"),
        ("schedule.warmup_steps=7", "schedule.warmup_steps: 7 is more than trainer.steps, 6"),
        ("schedule.final_share=2", "schedule.final_share: 2.0"),
        ("trainer.steps=0", "trainer.steps: 0; wanted: at least 1"),
        ("trainer.batch_size=3", "trainer.batch_size: 3 is not a multiple of 2"),
        ("trainer.devices=3", "trainer.batch_size: 4 is not a multiple of 6"),
        ("trainer.validation_windows=1", "trainer.validation_windows: 1; at least 2"),
        ("trainer.precision=fp8", "trainer.precision: 'fp8' is not one of"),
        ("trainer.strategy=zero", "trainer.strategy: 'zero' is not one of"),
        ("trainer.accelerator=tpu", "trainer.accelerator: 'tpu' is not one of"),
        ("trainer.peak_tflops=0", "trainer.peak_tflops: 0.0"),
        ("trainer.checkpoint_every=0", "trainer.checkpoint_every: 0; wanted: at least 1"),
        ("trainer.ema_decay=1", "trainer.ema_decay: 1.0; wanted: at least 0, less than 1"),
        ("sample.top_k=0", "sample.top_k: 0"),
        ("sample.prompt=''", "sample.prompt: ''"),
        ("+model.hidden=16", "model.hidden: not a field of GPTConfig"),
        ("+model.vocab_size=300", "model.vocab_size: decided by the tokenizer"),
        ("model.num_heads=3", "model.num_heads"),
        ("model.num_layers=two", "model.num_layers"),
        ("model.activation=tanhh", "model.activation"),
    ],
)
def test_a_wrong_value_is_refused_by_key(tmp_path, change, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        settings(tmp_path, change)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("trainer.context_parallel=0",), "trainer.context_parallel: 0; wanted: at least 1"),
        (("trainer.devices=3",), "trainer.context_parallel: 2 does not divide 3"),
        (("attn=sdpa",), "attn: sdpa sees only the tokens of its own device"),
        (("trainer.compile=true",), "trainer.compile: got true, want false"),
        (
            ("trainer.devices=8", "trainer.context_parallel=8", "data.context=7"),
            "data.context: 7 tokens are fewer than trainer.context_parallel, 8",
        ),
        (
            ("trainer.devices=12", "trainer.context_parallel=4"),
            "trainer.batch_size: 4 is not a multiple of 6, that is trainer.micro_batch_size x "
            "trainer.devices x trainer.num_nodes / trainer.context_parallel",
        ),
    ],
)
def test_context_parallelism_is_refused_by_key(tmp_path, changes, message):
    together = ("trainer.devices=2", "trainer.context_parallel=2")
    settings(tmp_path, *together)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        settings(tmp_path, *together, *changes)


def test_a_learned_table_must_reach_the_context(tmp_path):
    changes = ["model.position=learned", "+model.max_position_embeddings=8"]
    with pytest.raises(ValueError, match=r"^model\.max_position_embeddings: 8 is less than"):
        settings(tmp_path, *changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attn=varlen", "attn: 'varlen'; library=transformers has eager, sdpa, flex, flashtile"),
        ("data.packed=true", "data.packed: True; library=transformers has only False"),
        ("trainer.strategy=fsdp2", "trainer.strategy: want auto or ddp with library=transformers"),
        ("+model.num_kv_heads=1", "model.num_kv_heads: 1; library=transformers has only None"),
        ("+model.position=rotary", "model.position: 'rotary'; library=transformers has only 'lear"),
    ],
)
def test_what_transformers_lacks_is_refused_by_key(change, message):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
        theirs = compose("config", overrides=["experiment=owt/gpt2s-hf", *OPEN, change])
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_settings(theirs)


@pytest.mark.parametrize("attn", ["flex", "varlen"])
def test_dropout_is_refused_where_attention_has_none(tmp_path, attn):
    changes = [f"attn={attn}", "trainer.accelerator=cuda"]
    with pytest.raises(ValueError, match=rf"^model\.attention_dropout: 0\.1; attn={attn} has none"):
        settings(tmp_path, *changes)


@pytest.mark.parametrize(
    ("change", "package"),
    [
        ("trainer.tensorboard=true", "tensorboard"),
        ("trainer.wandb=true", "wandb"),
        ("trainer.strategy=zero2", "deepspeed"),
        ("library=transformers", "transformers"),
    ],
)
def test_a_package_is_asked_for_only_where_it_is_needed(tmp_path, monkeypatch, change, package):
    monkeypatch.setattr("training.settings.find_spec", lambda name: None)
    settings(tmp_path)
    message = f"^{re.escape(change.split('=')[0])}: the package {package} is not installed"
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, change)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1"])
def test_sharded_weights_are_not_averaged(tmp_path, monkeypatch, strategy):
    monkeypatch.setattr("training.settings.find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"^trainer\.ema_decay: an average of sharded weights"):
        settings(tmp_path, "trainer.ema_decay=0.9", f"trainer.strategy={strategy}")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("trainer.stepz=3", "trainer.stepz"),
        ("trainer.steps=many", "trainer.steps"),
        ("data.packed=often", "data.packed"),
        ("seed=one", "seed"),
        ("schedule=square", "schedule/square"),
    ],
)
def test_hydra_refuses_unknown_keys_and_wrong_types(tmp_path, change, key):
    with pytest.raises(HydraException, match=re.escape(key)):
        config(tmp_path, change)


def test_the_command_says_what_is_wrong_in_one_line_and_writes_nothing(tmp_path):
    result = command(tmp_path, "trainer.batch_size=3")
    assert result.returncode == 1
    assert result.stderr.startswith("configuration: trainer.batch_size: 3 is not a multiple of 2")
    assert not list((tmp_path / "run").glob("*"))


def test_only_what_shapes_the_curve_must_stay_the_same_on_resume(tmp_path):
    from dataclasses import asdict

    before = asdict(settings(tmp_path))
    free = ["trainer.devices=2", "trainer.validate_every=1", "sample.tokens=9", "run_dir=other"]
    assert not differences(before, settings(tmp_path, *free))
    bent = settings(tmp_path, "optimizer.lr=1e-3", "model.num_layers=1", "trainer.steps=7")
    assert differences(before, bent) == [
        "model.num_layers (2 in the checkpoint, now 1)",
        "optimizer.lr (0.01 in the checkpoint, now 0.001)",
        "trainer.steps (6 in the checkpoint, now 7)",
    ]


def test_there_is_an_attention_for_every_name():
    from training.attention import attention_named

    assert all(callable(attention_named(name, 8)) for name in ATTENTIONS)
