"""Generate text with the names, arguments and results of ``flash_attn.utils.generation``."""

from __future__ import annotations

import time
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.checks import ignored
from ..modules.inference import InferenceParams
from .generation import CapturedStep, generate, sample


class DecoderOutput(NamedTuple):
    """Generated tokens, and the logits from which they were drawn."""

    sequences: Tensor
    scores: Any


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Set all but the `top_k` largest logits (..., vocab) to -inf, in place."""
    smallest = logits.topk(top_k)[0][..., -1:]
    logits.masked_fill_(logits < smallest, -torch.inf)


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Set the logits (..., vocab) of the least likely tokens, whose probabilities add up to at most
    ``1 - top_p``, to -inf, in place; nothing if top_p is 0 or 1.
    """
    if 0.0 < top_p < 1.0:
        ascending, token = logits.sort(dim=-1)
        unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        logits.masked_fill_(unlikely.scatter(-1, token, unlikely), -torch.inf)


@torch.inference_mode()
def decode(
    input_ids: Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
) -> DecoderOutput:
    """Continue prompts of one length until max_length, or until all rows draw eos_token_id at once:
    sequences (batch, length), and for each new token its logits (batch, vocab).

    Args:
        input_ids: (batch, prompt).
        model, max_length, top_k, top_p, temperature: as in `generation.generate`.
        teacher_outputs: (batch, length), tokens to take instead of drawn ones.
        vocab_size: leave out the logits of padding words.
        tensor_parallel: not needed; the model knows its process group.
        cg: capture the step for one token in a CUDA graph.
        enable_timing: print the time.
    """
    ignored("decode", tensor_parallel=tensor_parallel > 1)
    if cg and input_ids.device.type != "cuda":
        raise ValueError(f"cg: needs a CUDA device, but input_ids is on {input_ids.device}")
    start, length = time.perf_counter(), input_ids.shape[1]
    cache = InferenceParams(max(max_length, length), input_ids.shape[0])
    given = 0 if teacher_outputs is None else teacher_outputs.shape[1]
    sequences, scores, step = [input_ids], [], None

    def next_logits(token: Tensor) -> Tensor:
        return model(token.unsqueeze(1), inference_params=cache).logits[:, -1]

    logits = model(input_ids, inference_params=cache, num_last_tokens=1).logits[:, -1]
    while True:
        scores.append(logits[..., :vocab_size])
        token = sample(scores[-1], top_k, top_p, temperature)
        if teacher_outputs is not None and length < given:
            token = teacher_outputs[:, length]
        sequences.append(token.unsqueeze(1))
        is_end = eos_token_id is not None and bool((token == eos_token_id).all())
        if length >= max_length - 1 or is_end:
            break
        cache.seqlen_offset = length
        if cg and cache.lengths_per_sample is None:
            cache.lengths_per_sample = token.new_full(token.shape, length, dtype=torch.int32)
            step = CapturedStep(next_logits, token)
        if step is not None and cache.lengths_per_sample is not None:
            cache.lengths_per_sample.fill_(length)
            logits = step(token).clone()
        else:
            logits = next_logits(token)
        length += 1
    if enable_timing:
        _print_time(start, input_ids)
    return DecoderOutput(torch.cat(sequences, dim=1), tuple(scores))


def sample_speculative(
    logits: Tensor,
    logits_draft: Tensor,
    tokens_draft: Tensor,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens so that the result is distributed as the model's own tokens
    (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192, algorithm 1). The result: tokens
    (batch, drafted + 1), and how many of them are valid, (batch,).

    Args:
        logits: (batch, drafted + 1, vocab) of the model.
        logits_draft: (batch, drafted, vocab), from which tokens_draft (batch, drafted) were drawn.
        top_k, top_p, temperature: as in `generation.sample`.
    """
    p, q = (_probabilities(x, top_k, top_p, temperature) for x in (logits, logits_draft))
    p_of, q_of = (
        x.gather(-1, tokens_draft.long().unsqueeze(-1)).squeeze(-1) for x in (p[:, :-1], q)
    )
    accepted = torch.rand_like(q_of) * q_of < p_of
    count = accepted.int().cumprod(dim=-1).sum(dim=-1, keepdim=True)  # before the first rejected
    rest = torch.cat(((p[:, :-1] - q).clamp(min=0.0), p[:, -1:]), dim=1)
    at = rest.gather(1, count.unsqueeze(-1).expand(-1, -1, rest.shape[-1])).squeeze(1)
    tokens = torch.cat((tokens_draft, torch.zeros_like(count)), dim=1)
    return tokens.scatter(1, count, torch.multinomial(at, 1)), count.squeeze(1) + 1


def _probabilities(logits: Tensor, top_k: int, top_p: float, temperature: float) -> Tensor:
    logits = logits.float() / temperature
    if top_k > 0:
        modify_logits_for_top_k_filtering(logits, min(top_k, logits.shape[-1]))
    modify_logits_for_top_p_filtering(logits, top_p)
    return logits.softmax(dim=-1)


@torch.inference_mode()
def decode_speculative(
    input_ids: Tensor,
    model: Any,
    model_draft: Any,
    max_length: int,
    speculative_lookahead: int = 3,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
    debug: bool = False,
) -> DecoderOutput:
    """`decode` of one prompt, with tokens that a smaller model drafts and `model` checks together:
    sequences (1, max_length) and their logits (1, new tokens, vocab).

    Args:
        input_ids: (1, prompt); ValueError for several prompts.
        model_draft: model with the same words.
        speculative_lookahead: number of tokens to draft.
        eos_token_id: None, else ValueError.
        cg, debug: not needed; they change nothing.
    """
    ignored("decode_speculative", tensor_parallel=tensor_parallel > 1, cg=cg, debug=debug)
    if input_ids.shape[0] != 1 or eos_token_id is not None:
        raise ValueError("input_ids, eos_token_id: want one prompt and None")
    start, options = time.perf_counter(), (top_k, top_p, temperature)
    cache, cache_draft = (InferenceParams(max_length, 1) for _ in range(2))
    sequence, scores = input_ids, []
    while sequence.shape[1] < max_length:
        known = sequence.shape[1]
        drafted, logits_draft = input_ids[:, :0], []
        for _ in range(min(speculative_lookahead, max_length - known - 1)):
            new = torch.cat((sequence, drafted), dim=1)[:, cache_draft.seqlen_offset :]
            found = model_draft(new, inference_params=cache_draft, num_last_tokens=1).logits
            logits_draft.append(found[..., :vocab_size])
            cache_draft.seqlen_offset += new.shape[1]
            token = sample(logits_draft[-1][:, -1], *options)
            drafted = torch.cat((drafted, token.unsqueeze(1)), dim=1)
        new = torch.cat((sequence, drafted), dim=1)[:, cache.seqlen_offset :]
        count = drafted.shape[1] + 1
        logits = model(new, inference_params=cache, num_last_tokens=count).logits[..., :vocab_size]
        if logits_draft:
            tokens, valid = sample_speculative(
                logits, torch.cat(logits_draft, dim=1), drafted, *options
            )
            count = int(valid)
        else:
            tokens = sample(logits[:, -1], *options).unsqueeze(1)
        sequence = torch.cat((sequence, tokens[:, :count]), dim=1)
        scores.append(logits[:, :count])
        # The caches keep what was accepted; nobody has seen the newest token.
        cache.seqlen_offset = sequence.shape[1] - 1
        cache_draft.seqlen_offset = min(cache_draft.seqlen_offset, sequence.shape[1] - 1)
    if enable_timing:
        _print_time(start, input_ids)
    return DecoderOutput(sequence, torch.cat(scores, dim=1))


def _print_time(start: float, x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    took = 1000 * (time.perf_counter() - start)
    print(f"Prompt processing + decoding time: {took:.0f}ms")


# Arguments that only flash_attn's generation has, not `generation.generate`.
OPTIONS = signature(decode).parameters.keys() - signature(generate).parameters.keys()
OPTIONS |= {"return_dict_in_generate", "output_scores"}


class GenerationMixin:
    """`decode` as a method of a model."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Tensor]:
        """The model's memory; to be defined by the model."""
        raise NotImplementedError

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The sequences of `decode`, or with return_dict_in_generate its result, whose scores are
        None without output_scores.
        """
        output = decode(input_ids, self, max_length, top_k, top_p, temperature, **kwargs)
        output = output if output_scores else output._replace(scores=None)
        return output if return_dict_in_generate else output.sequences
