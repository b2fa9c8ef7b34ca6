"""Generate text, one token at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..modules.inference import InferenceParams

__all__ = ["CapturedStep", "InferenceParams", "generate", "sample"]


def sample(
    logits: Tensor,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the next token of each row, (batch,) int64; ValueError names an argument out of range.

    Args:
        logits: (batch, vocab).
        top_k: draw from the `top_k` likeliest tokens; 1 takes the likeliest, 0 means no limit.
        top_p: draw from the smallest set of likeliest tokens whose probabilities add up to top_p
            (nucleus sampling, Holtzman et al. 2019, https://arxiv.org/abs/1904.09751); 0 means no
            limit.
        temperature: the logits are divided by this number.
        generator: random number generator on the device of logits.
    """
    if top_k < 0:
        raise ValueError(f"top_k: must not be negative, got {top_k}")
    if not 0.0 <= top_p <= 1.0:
        raise ValueError(f"top_p: got {top_p}, want 0 <= top_p <= 1")
    if temperature <= 0.0:
        raise ValueError(f"temperature: must be positive, got {temperature}")
    if top_k == 1:
        return logits.argmax(dim=-1)
    ranked, token = (logits.float() / temperature).sort(dim=-1, descending=True)
    if top_k > 0:
        ranked[:, top_k:] = -torch.inf
    probability = ranked.softmax(dim=-1)
    if top_p > 0.0:
        likelier = probability.cumsum(dim=-1) - probability
        probability = probability.masked_fill(likelier >= top_p, 0.0)
    choice = torch.multinomial(probability, 1, generator=generator)
    return token.gather(-1, choice).squeeze(-1)


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    max_length: int,
    *,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | None = None,
    prompt_lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
    cuda_graph: bool = False,
) -> Tensor:
    """Continue prompts until they have max_length tokens or end with eos_token_id. ValueError if
    the lengths do not fit together, or for cuda_graph without a CUDA device.

    Args:
        model: `GPTLMHeadModel`. Its training mode is left as it is, so call `eval()` first.
        input_ids: (batch, prompt) integers.
        max_length: largest number of tokens of a sequence, including its prompt.
        top_k, top_p, temperature, generator: as in `sample`; the likeliest token by default.
        eos_token_id: the token that ends a sequence.
        prompt_lengths: (batch,) integers, number of prompt tokens of each row; the rest of the row
            is padding. By default there is no padding.
        cuda_graph: capture the step for one token in a CUDA graph, which saves the time in which
            the host launches small kernels.

    Returns:
        (batch, length) int64, length <= max_length. Each row is its prompt, directly followed by
        its new tokens, and padded with eos_token_id (0 if None) to the length of the longest row.
    """
    if cuda_graph and input_ids.device.type != "cuda":
        raise ValueError(f"cuda_graph: needs a CUDA device, but input_ids is on {input_ids.device}")
    lengths, shortest = _lengths(input_ids, prompt_lengths, max_length)
    (batch, prompt), device = input_ids.shape, input_ids.device
    filler = 0 if eos_token_id is None else eos_token_id
    sequences = input_ids.new_full((batch, max_length), filler, dtype=torch.int64)
    is_prompt = torch.arange(prompt, device=device) < lengths.unsqueeze(-1)
    sequences[:, :prompt] = input_ids.where(is_prompt, filler)

    cache = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
    hidden = model.transformer(input_ids, inference_params=cache)
    last = hidden[torch.arange(batch, device=device), lengths.long() - 1]
    logits = model.logits(last, is_inference=True)
    # From here on a tensor holds the lengths, because a captured step must read the new ones.
    cache.lengths_per_sample = lengths.clone()

    def next_logits(token: Tensor) -> Tensor:
        return model(token.unsqueeze(-1), inference_params=cache).logits[:, -1]

    step: Callable[[Tensor], Tensor] = next_logits
    running = lengths < max_length
    for left in reversed(range(max_length - shortest)):
        end = lengths.clamp(max=max_length - 1).long().unsqueeze(-1)
        token = sample(logits, top_k, top_p, temperature, generator)
        token = token.where(running, sequences.gather(1, end).squeeze(-1))
        sequences.scatter_(1, end, token.unsqueeze(-1))
        lengths += running
        running &= lengths < max_length
        if eos_token_id is not None:
            running &= token != eos_token_id
        if left == 0 or (eos_token_id is not None and not running.any()):
            break
        # The step writes the last token of each row; a finished row rewrites it without effect.
        cache.lengths_per_sample.copy_(lengths - 1)
        if cuda_graph and not isinstance(step, CapturedStep):
            step = CapturedStep(step, token)
        logits = step(token)
    return sequences[:, : int(lengths.max())]


class CapturedStep:
    """A step of generation, captured as a CUDA graph and replayed for each token.

    The step reads the lengths from the cache's tensor, so nothing else changes between replays.

    Args:
        step: maps tokens (batch,) to logits (batch, vocab); a second call must have no effect.
        token: the first tokens, (batch,).
    """

    def __init__(self, step: Callable[[Tensor], Tensor], token: Tensor) -> None:
        self.token = token.clone()
        # The first run compiles kernels and allocates memory, which a capture does not allow.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(self.token)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = step(self.token)

    def __call__(self, token: Tensor) -> Tensor:
        """Logits (batch, vocab), overwritten by the next call."""
        self.token.copy_(token)
        self.graph.replay()
        return self.logits


def _lengths(
    input_ids: Tensor, prompt_lengths: Tensor | None, max_length: int
) -> tuple[Tensor, int]:
    """Length of each prompt, (batch,) int32, and the shortest."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: expected (batch, prompt), got {tuple(input_ids.shape)}")
    batch, prompt = input_ids.shape
    if prompt > max_length:
        raise ValueError(f"max_length: {max_length} is less than the prompt's {prompt} tokens")
    if prompt_lengths is None:
        return input_ids.new_full((batch,), prompt, dtype=torch.int32), prompt
    if prompt_lengths.shape != (batch,):
        got = tuple(prompt_lengths.shape)
        raise ValueError(f"prompt_lengths: expected shape ({batch},), got {got}")
    shortest, longest = (int(x) for x in prompt_lengths.aminmax())
    if shortest < 1 or longest > prompt:
        raise ValueError(
            f"prompt_lengths: got {shortest} to {longest}, want 1 to {prompt}, the width of "
            "input_ids"
        )
    return prompt_lengths.to(input_ids.device, torch.int32, copy=True), shortest
