"""FlashAttention's experiments: their names, their numbers, and a step of each on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny_runs import write_texts

from flashtile.losses.cross_entropy import CrossEntropyLoss
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel
from training.experiments import experiments
from training.hugging_face import HuggingFaceGPT2
from training.settings import Settings, model_config, read_settings
from training.train import CONFIG, Run

pytestmark = pytest.mark.slow
# The files of flash-attention's training/configs/experiment, without the two named base.
OWT = [f"owt/gpt2{size}{kind}" for size in ("s", "m", "l", "xl") for kind in ("", "-flash", "-hf")]
PILE = [
    *(f"pile/gpt3{size}-hf" for size in ("s", "m", "l", "xl", "-2.7B")),
    *(
        f"pile/gpt3{size}-flash{kind}"
        for size in ("s", "m", "l", "xl", "-2.7B")
        for kind in ("", "-8k", "-rotary", "-rotary-8k")
    ),
    *(f"pile/gpt3{size}-flash-rotary-30B" for size in ("s", "m", "l")),
    *("pile/gpt3xl-flash-rotary-60B", "pile/gpt3-2.7B-hf-hdim128", "pile/gpt3-2.7B-flash-hdim128"),
    *("pile/gpt3-2.7B-flash-hdim128-rotary", "pile/gpt3-2.7B-flash-hdim128-rotary-8k"),
]
ALL = experiments()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_texts(folder / "text", count=20, words=120)
    where = [f"data.text={folder / 'text'}", f"data.prepared={folder / 'prepared'}"]
    return [*where, "data.pattern=*.txt", f"run_dir={folder / 'run'}", "data.vocab_size=280"]


def composed(*changes: str) -> Any:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
        return compose("config", overrides=list(changes))


def test_the_names_are_those_of_flash_attention():
    assert sorted(ALL) == sorted(OWT + PILE)


@pytest.fixture(scope="module")
def groups(text):
    """A configuration of the groups that the experiments choose."""
    chosen = ["model=gpt2s", "data=classics", "schedule=linear", "trainer=gpu"]
    config = composed("experiment=none", *chosen, *text)
    OmegaConf.set_struct(config, False)
    return config


def settings_of(name: str, groups: Any, *, tiny: bool = False) -> Settings:
    """Merged as Hydra does, which takes a second for each."""
    own = {key: value for key, value in ALL[name].items() if key != "defaults"}
    size = OmegaConf.load(CONFIG / "size" / "tiny.yaml") if tiny else {}
    vocab = {"data": {"vocab_size": 280}}
    return read_settings(OmegaConf.merge(groups, own, size, vocab))


def test_the_numbers_are_those_of_flash_attention(groups):
    small, large = (
        settings_of(f"{name}-flash{kind}", groups)
        for name, kind in (("owt/gpt2s", ""), ("pile/gpt3-2.7B", "-rotary-8k"))
    )
    assert (small.attn, small.library, small.schedule.name) == ("flashtile", "flashtile", "linear")
    assert (small.trainer.batch_size, small.data.context) == (512, 1024)
    assert (small.trainer.steps, small.schedule.warmup_steps) == (400_000, 4000)
    assert small.optimizer.lr == 6e-4
    config = model_config(small, 50304)
    assert config == GPTConfig(
        vocab_size=50304,
        scale_attn_by_inverse_layer_idx=True,
        residual_in_fp32=True,
        **dict.fromkeys(("embedding_dropout", "residual_dropout", "attention_dropout"), 0.1),
    )
    assert (large.trainer.batch_size, large.trainer.micro_batch_size) == (128, 1)
    assert large.schedule.decay_steps == 300_000
    config = model_config(large, 50304)
    assert (config.position, config.rotary_dim, config.hidden_size) == ("rotary", 40, 2560)
    assert config.initializer_range == pytest.approx(0.0125, rel=1e-3)
    short = settings_of("pile/gpt3xl-flash-rotary-60B", groups)
    assert short.trainer.steps == short.schedule.decay_steps == 60_000
    theirs = settings_of("pile/gpt3m-hf", groups)
    assert (theirs.library, theirs.attn) == ("transformers", "eager")
    assert not theirs.model.get("residual_in_fp32")


@pytest.mark.parametrize("name", ALL)
def test_every_experiment_trains_a_step_on_a_cpu_when_it_is_small(name, groups):
    run = Run(settings_of(name, groups, tiny=True))
    loss, norm, _ = run.train_step()
    assert 0 < loss < 7 and norm > 0
    assert isinstance(run.module, HuggingFaceGPT2) == name.endswith(("-hf", "-hf-hdim128"))


@pytest.mark.parametrize("name", ["owt/gpt2m-hf", "pile/gpt3xl-flash-rotary-8k"])
def test_an_experiment_by_name_takes_another_attention_and_one_override_of_its_size(name, text):
    no_dropout = [f"model.{kind}_dropout=0" for kind in ("embedding", "residual", "attention")]
    config = composed(f"experiment={name}", "size=tiny", *text, *no_dropout)
    assert config.schedule.name == ("linear" if name.startswith("owt") else "cosine")
    losses = []
    for attn in ("eager", "sdpa", "flashtile"):
        config.attn = attn
        losses.append(Run(read_settings(config)).train_step()[0])
    torch.testing.assert_close(losses[1:], losses[:1] * 2)


def test_the_model_of_transformers_is_ours():
    config = GPTConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=3,
        num_heads=2,
        max_position_embeddings=16,
        scale_attn_by_inverse_layer_idx=True,
    )
    theirs = HuggingFaceGPT2(config, "eager", activation_checkpointing=False).eval()
    ours = GPTLMHeadModel.from_transformers(theirs.gpt2)
    tokens, targets = torch.randint(64, (2, 2, 16))
    given = {"targets": targets, "loss": CrossEntropyLoss(ignore_index=5)}
    torch.testing.assert_close(theirs(tokens, **given).loss, ours(tokens, **given).loss)
    assert theirs.num_parameters() == ours.num_parameters()
    assert theirs.num_parameters() == sum(p.numel() for p in theirs.parameters())
    assert theirs.flops_per_token(16) == ours.flops_per_token(16)
    torch.testing.assert_close(
        theirs.generate(tokens[:, :4], 8, top_k=1), ours.generate(tokens[:, :4], 8, top_k=1)
    )
