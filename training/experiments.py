"""FlashAttention's experiments by their names, such as `experiment=owt/gpt2s-flash`.

The numbers are those of flash-attention's `training/configs/experiment`: sizes, learning rates,
schedules, batches, and the micro-batches for GPUs with 80 GB. The text is `data=classics` instead
of OpenWebText and The Pile. `attn=` chooses another attention.

| name | is |
|---|---|
| `owt/gpt2{s,m,l,xl}-flash` | GPT-2 on 1,024 tokens, attn=flashtile |
| `owt/gpt2{s,m,l,xl}` | attn=eager |
| `owt/gpt2{s,m,l,xl}-hf` | the GPT-2 of transformers, attn=eager |
| `pile/gpt3{s,m,l,xl,-2.7B}-{flash,hf}` | GPT-3's sizes on 2,048 tokens |
| `pile/gpt3-2.7B-{flash,hf}-hdim128` | 20 heads of 128 instead of 32 of 80 |
| `...-flash-rotary` | half of each head is rotated, and no position is learned |
| `...-flash-8k`, `...-flash-rotary-8k` | 8,192 tokens |
| `pile/gpt3{s,m,l}-flash-rotary-30B`, `pile/gpt3xl-flash-rotary-60B` | 60,000 steps |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass(frozen=True)
class Size:
    """A model and what its size decides; micro-batches are windows on a GPU with 80 GB."""

    layers: int
    hidden: int
    heads: int
    lr: float
    flash: int  # micro-batch with attention that keeps no scores
    hf: int  # micro-batch in transformers
    eager: int = 0  # micro-batch of our model with eager attention (OpenWebText)

    @property
    def large(self) -> bool:
        """Whether a step has a million tokens (The Pile)."""
        return self.hidden >= 2048


OPENWEBTEXT = {
    "s": Size(12, 768, 12, 6e-4, flash=64, hf=8, eager=16),
    "m": Size(24, 1024, 16, 1.5e-4, flash=64, hf=4, eager=8),
    "l": Size(36, 1280, 20, 1.5e-4, flash=32, hf=2, eager=4),
    "xl": Size(48, 1600, 25, 1.5e-4, flash=16, hf=1, eager=2),
}
PILE = {
    "s": Size(12, 768, 12, 6e-4, flash=32, hf=8),
    "m": Size(24, 1024, 16, 3e-4, flash=32, hf=4),
    "l": Size(24, 1536, 16, 2.5e-4, flash=16, hf=2),
    "xl": Size(24, 2048, 16, 2e-4, flash=8, hf=2),
    "-2.7B": Size(32, 2560, 32, 1.6e-4, flash=4, hf=1),
    "-2.7B hdim128": Size(32, 2560, 20, 1.6e-4, flash=4, hf=1),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "-8k": {"context": 8192},
    "-rotary": {"rotary": True},
    "-rotary-8k": {"rotary": True, "context": 8192},
}


def experiments() -> dict[str, dict[str, Any]]:
    """Each experiment's configuration by name."""
    found = {}
    for name, size in OPENWEBTEXT.items():
        found[f"owt/gpt2{name}"] = openwebtext(size, size.eager) | {"attn": "eager"}
        found[f"owt/gpt2{name}-flash"] = ours(openwebtext(size, size.flash))
        found[f"owt/gpt2{name}-hf"] = theirs(openwebtext(size, size.hf))
    for key, size in PILE.items():
        name, _, heads = key.partition(" ")
        end = f"-{heads}" if heads else ""
        found[f"pile/gpt3{name}-hf{end}"] = theirs(pile(size, size.hf))
        for suffix, changes in VARIANTS.items():
            if not heads or suffix != "-8k":  # flash-attention has none of this name
                found[f"pile/gpt3{name}-flash{end}{suffix}"] = ours(pile(size, **changes))
        if "2.7B" not in name:
            tokens = "60B" if size.large else "30B"
            short = ours(pile(size, rotary=True, steps=60_000))
            found[f"pile/gpt3{name}-flash-rotary-{tokens}"] = short
    return found


def ours(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what flash-attention's own models have, and its attention."""
    model = config["model"] | {"residual_in_fp32": True}
    if model["hidden_size"] == 2560:
        model["initializer_range"] = (2 / (5 * 2560)) ** 0.5
    return config | {"model": model, "attn": "flashtile"}


def theirs(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration in transformers."""
    return config | {"library": "transformers", "attn": "eager"}


def openwebtext(size: Size, micro_batch: int) -> dict[str, Any]:
    """GPT-2 on windows of 1,024 tokens, 512 a step."""
    return experiment(
        size,
        schedule="linear",
        data={"context": 1024},
        trainer={
            "steps": 400_000,
            "batch_size": 512,
            "micro_batch_size": micro_batch,
            "validate_every": 1000,
        },
    )


def pile(
    size: Size, micro_batch: int = 0, *, context: int = 2048, rotary: bool = False, steps: int = 0
) -> dict[str, Any]:
    """GPT-3 on half a million tokens a step, or a million; all of the schedule in `steps`."""
    whole = 400_000 if size.large else 800_000
    windows = 2048 / context  # a window of 2,048 tokens counts as one
    found = experiment(
        size,
        schedule="cosine",
        data={"context": context},
        trainer={
            "steps": steps or whole,
            "batch_size": int((512 if size.large else 256) * windows),
            "micro_batch_size": max(1, int((micro_batch or size.flash) * windows)),
            "validate_every": 1000 if size.large else 2000,
        },
    )
    found["schedule"]["decay_steps"] = steps or whole * 3 // 4
    if rotary:
        found["model"] |= {"position": "rotary", "rotary_fraction": 0.5}
    return found


def experiment(
    size: Size, schedule: str, data: dict[str, Any], trainer: dict[str, Any]
) -> dict[str, Any]:
    """What all have in common: GPT-2 with dropout of 0.1, AdamW with PyTorch's betas."""
    dropout = dict.fromkeys(("embedding_dropout", "residual_dropout", "attention_dropout"), 0.1)
    return {
        "defaults": [
            {"override /model": "gpt2s"},
            {"override /data": "classics"},
            {"override /optimizer": "adamw"},
            {"override /schedule": schedule},
            {"override /trainer": "gpu"},
        ],
        "model": {
            "hidden_size": size.hidden,
            "num_layers": size.layers,
            "num_heads": size.heads,
            "scale_attn_by_inverse_layer_idx": True,
            **dropout,
        },
        "data": data | {"packed": False},
        "optimizer": {"lr": size.lr, "betas": [0.9, 0.999]},
        "schedule": {"warmup_steps": trainer["steps"] // 100},
        "trainer": trainer,
        "seed": 1111,
    }


def register() -> None:
    """Let Hydra find the experiments beside those in config/experiment."""
    for path, node in experiments().items():
        folder, name = path.split("/")
        ConfigStore.instance().store(
            name, node, group=f"experiment/{folder}", package="_global_", provider="training"
        )
