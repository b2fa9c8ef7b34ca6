"""Generate a sample of text with a trained model."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric

from .settings import Settings
from .tokenizer import Tokenizer


def write_sample(fabric: Fabric, model: Any, tokenizer: Tokenizer, settings: Settings) -> str:
    """The prompt of `settings.sample` with the model's continuation, up to the context.

    The empty string if the settings ask for no tokens.
    """
    asked = settings.sample
    if asked.tokens == 0:
        return ""
    [ids] = tokenizer.encode([asked.prompt])
    prompt = torch.tensor([[tokenizer.end_of_document, *ids]], device=fabric.device)
    length = min(prompt.shape[1] + asked.tokens, settings.data.context)
    generator = torch.Generator(fabric.device).manual_seed(settings.seed)
    model.eval()
    with fabric.autocast(), torch.compiler.set_stance("force_eager"):
        written = model.generate(
            prompt,
            length,
            top_k=asked.top_k,
            temperature=asked.temperature,
            eos_token_id=tokenizer.end_of_document,
            generator=generator,
        )
    return tokenizer.decode(written[0].tolist())
