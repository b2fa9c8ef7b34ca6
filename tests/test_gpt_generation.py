"""Generation with the cache against computing the whole sequence again for each token."""

from __future__ import annotations

import pytest
import torch
from tiny_gpt import CONFIGS, EVERY_CONFIG, SMALL, build, tokens

from flashtile.models.generation import InferenceParams, sample
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel

MAX_LENGTH = 20


def recomputed(model, prompt, eos=None):
    """The likeliest continuation of one prompt (tokens,), without a cache."""
    ids = prompt.clone()
    while len(ids) < MAX_LENGTH and (eos is None or len(ids) == len(prompt) or ids[-1] != eos):
        ids = torch.cat((ids, model(ids[None]).logits[0, -1:].argmax(dim=-1)))
    return ids


@EVERY_CONFIG
def test_greedy_equals_recomputing(name, seed):
    model, prompts = build(name), tokens(3, 7)
    got = model.generate(prompts, MAX_LENGTH)
    assert torch.equal(got, torch.stack([recomputed(model, prompt) for prompt in prompts]))
    assert len(got.unique()) > 4


@EVERY_CONFIG
def test_prompts_of_different_lengths(name, seed):
    model, prompts, lengths = build(name), tokens(4, 9), torch.tensor([9, 1, 4, 7])
    got = model.generate(prompts, MAX_LENGTH, prompt_lengths=lengths)
    for row, prompt, length in zip(got, prompts, lengths, strict=True):
        assert torch.equal(row, recomputed(model, prompt[:length]))


@EVERY_CONFIG
def test_sequences_end_with_eos(name, seed):
    model, prompts, lengths = build(name), tokens(4, 6), torch.tensor([6, 3, 5, 6])
    free = model.generate(prompts, MAX_LENGTH, prompt_lengths=lengths)
    eos = int(free[0, 8])  # which the first row reaches early
    got = model.generate(prompts, MAX_LENGTH, prompt_lengths=lengths, eos_token_id=eos)
    want = [recomputed(model, prompt[:n], eos) for prompt, n in zip(prompts, lengths, strict=True)]
    assert len(want[0]) <= 9
    assert got.shape[1] == max(map(len, want))
    for row, sequence in zip(got, want, strict=True):
        assert torch.equal(row[: len(sequence)], sequence)
        assert (row[len(sequence) :] == eos).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"word_embed_proj_dim": 16},
        {"norm_head": True, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_the_first_token_is_of_the_whole_head(changes, seed):
    config = GPTConfig.gpt2(**SMALL, max_position_embeddings=24, **changes)
    model, prompts = GPTLMHeadModel(config, dtype=torch.float64).eval(), tokens(4, 9)
    with torch.no_grad():
        model.lm_head.weight.mul_(torch.linspace(0.1, 9.0, 61).unsqueeze(-1))
    got = model.generate(prompts, MAX_LENGTH, prompt_lengths=torch.tensor([9, 1, 4, 7]))
    for row, prompt, length in zip(got, prompts, (9, 1, 4, 7), strict=True):
        assert torch.equal(row, recomputed(model, prompt[:length]))


def test_generation_stops_when_all_have_ended(seed):
    model, prompts = build("llama"), tokens(1, 4)
    eos = int(model.generate(prompts, 5)[0, -1])
    calls = []
    model.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    got = model.generate(prompts, MAX_LENGTH, eos_token_id=eos)
    assert got.shape == (1, 5)
    assert len(calls) == 1


def test_nothing_to_generate(seed):
    model, prompts = build("gpt2"), tokens(2, 5)
    assert torch.equal(model.generate(prompts, 5), prompts)


def test_generation_records_no_gradient_and_leaves_no_trace(seed):
    model, prompts = build("llama"), tokens(2, 5)
    assert not model.generate(prompts, 9).requires_grad
    model(prompts, targets=prompts).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_sampled_sequence_repeats_with_its_generator(seed):
    model, prompts = build("llama"), tokens(2, 5)
    draws = [
        model.generate(
            prompts,
            MAX_LENGTH,
            top_k=10,
            top_p=0.95,
            temperature=2.0,
            generator=torch.Generator().manual_seed(n),
        )
        for n in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert all(torch.equal(draw[:, :5], prompts) for draw in draws)


def frequencies(probabilities, **options):
    """How often each token is drawn."""
    logits = torch.tensor(probabilities).log().expand(20_000, -1)
    drawn = sample(logits, generator=torch.Generator().manual_seed(0), **options)
    return torch.bincount(drawn, minlength=len(probabilities)) / len(logits)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"top_k": 1}, [0.0, 1.0, 0.0, 0.0]),
        ({"top_k": 0}, [0.2, 0.5, 0.1, 0.2]),
        ({"top_k": 9}, [0.2, 0.5, 0.1, 0.2]),
        ({"top_k": 0, "top_p": 1.0}, [0.2, 0.5, 0.1, 0.2]),
        ({"top_k": 0, "top_p": 0.3}, [0.0, 1.0, 0.0, 0.0]),
        ({"top_k": 0, "top_p": 0.85}, [2 / 9, 5 / 9, 0.0, 2 / 9]),
        ({"top_k": 3}, [2 / 9, 5 / 9, 0.0, 2 / 9]),
        ({"top_k": 0, "temperature": 0.5}, [4 / 34, 25 / 34, 1 / 34, 4 / 34]),
    ],
)
def test_sampling(options, want):
    torch.testing.assert_close(
        frequencies([0.2, 0.5, 0.1, 0.2], **options), torch.tensor(want), atol=0.015, rtol=0
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": -1}, "top_k: must not be negative"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"temperature": 0.0}, "temperature: must be positive"),
    ],
)
def test_bad_sampling(options, words):
    with pytest.raises(ValueError, match=words):
        sample(torch.zeros(1, 3), **options)


def test_bad_prompts():
    model, prompts = build("gpt2"), tokens(2, 5)
    for arguments, words in (
        ({"max_length": 4}, "max_length: 4 is less than the prompt's 5 tokens"),
        ({"prompt_lengths": torch.tensor([1, 2, 3])}, r"prompt_lengths: expected shape \(2,\)"),
        ({"prompt_lengths": torch.tensor([0, 5])}, "prompt_lengths: got 0 to 5, want 1 to 5"),
        ({"prompt_lengths": torch.tensor([1, 6])}, "prompt_lengths: got 1 to 6, want 1 to 5"),
        ({"cuda_graph": True}, "cuda_graph: needs a CUDA device, but input_ids is on cpu"),
        ({"max_length": 25}, "max_seqlen: 25 exceeds max_position_embeddings 24"),
    ):
        with pytest.raises(ValueError, match=words):
            model.generate(prompts, **{"max_length": MAX_LENGTH, **arguments})
    with pytest.raises(ValueError, match="input_ids: expected"):
        model.generate(prompts[:, :0], MAX_LENGTH)


def test_a_cache_of_the_user_s_own(seed):
    model, ids = build("gpt2"), tokens(2, 12)
    cache, pieces = InferenceParams(max_seqlen=12, max_batch_size=2), []
    for piece in ids.split((5, 1, 6), dim=1):
        pieces.append(model(piece, inference_params=cache).logits)
        cache.seqlen_offset += piece.shape[1]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_a_captured_step_generates_the_same(name, seed):
    model = build(name, dtype=torch.float32).cuda()
    prompts, lengths = tokens(4, 9).cuda(), torch.tensor([9, 1, 4, 7]).cuda()
    want = model.generate(prompts, MAX_LENGTH, prompt_lengths=lengths)
    got = model.generate(prompts, MAX_LENGTH, prompt_lengths=lengths, cuda_graph=True)
    assert torch.equal(got, want)
