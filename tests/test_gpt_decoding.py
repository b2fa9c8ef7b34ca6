"""flash_attn's functions for generating text."""

from __future__ import annotations

import pytest
import torch
from tiny_gpt import build, tokens

from flashtile.models import decoding
from flashtile.models.decoding import decode, decode_speculative, sample_speculative

LENGTH = 18


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decode(name, seed, capsys):
    model, prompts = build(name), tokens(3, 7)
    greedy = model.generate(prompts, LENGTH)
    sequences, scores = decode(prompts, model, LENGTH, enable_timing=True)
    assert torch.equal(sequences, greedy)
    assert "Prompt processing + decoding time: " in capsys.readouterr().out
    whole = model(greedy).logits
    for number, logits in enumerate(scores):
        torch.testing.assert_close(logits, whole[:, 6 + number])
    taught = tokens(3, 12)
    sequences, scores = decode(prompts, model, LENGTH, teacher_outputs=taught, vocab_size=50)
    assert torch.equal(sequences[:, 7:12], taught[:, 7:]) and len(scores) == LENGTH - 7
    assert scores[0].shape == (3, 50) and (sequences[:, 12:] < 50).all()
    eos = int(greedy[0, 9])
    ended = decode(prompts[:1], model, LENGTH, eos_token_id=eos).sequences
    assert torch.equal(ended, greedy[:1, : ended.shape[1]]) and ended[0, -1] == eos
    assert decode(prompts, model, 3).sequences.shape == (3, 8)  # always one more
    with pytest.raises(ValueError, match="cg: needs a CUDA device, but input_ids is on cpu"):
        decode(prompts, model, LENGTH, cg=True)


def test_generate_with_flash_attn_s_options(seed):
    model, prompts = build("gpt2"), tokens(2, 5)
    greedy = model.generate(prompts, LENGTH)
    assert torch.equal(model.generate(prompts, LENGTH, 1, 0.0, 1.0, output_scores=True), greedy)
    output = model.generate(prompts, LENGTH, return_dict_in_generate=True)
    assert torch.equal(output.sequences, greedy) and output.scores is None
    output = model.generate(prompts, LENGTH, output_scores=True, return_dict_in_generate=True)
    assert len(output.scores) == LENGTH - 5
    with pytest.raises(NotImplementedError):
        decoding.GenerationMixin().allocate_inference_cache(1, 2)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("lookahead", [1, 3, 20])
def test_drafted_tokens_are_the_model_s_own(name, lookahead, seed, capsys):
    """Whether the other model drafts well, badly or not at all."""
    model, prompt = build(name), tokens(1, 7)
    greedy = model.generate(prompt, LENGTH)
    whole = model(greedy).logits
    alike = build(name)
    with torch.no_grad():
        alike.lm_head.weight.add_(0.1 * torch.randn_like(alike.lm_head.weight))
    for draft in (model, alike, build("alibi")):
        sequences, scores = decode_speculative(
            prompt, model, draft, LENGTH, lookahead, enable_timing=True
        )
        assert torch.equal(sequences, greedy)
        torch.testing.assert_close(scores, whole[:, 6:-1])
        assert "time: " in capsys.readouterr().out
    drawn = decode_speculative(prompt, model, alike, LENGTH, lookahead, top_k=5, vocab_size=50)
    assert drawn.sequences.shape == (1, LENGTH) and (drawn.sequences[:, 7:] < 50).all()
    for bad in ({"input_ids": tokens(2, 4)}, {"eos_token_id": 3}):
        with pytest.raises(ValueError, match="input_ids, eos_token_id: want one prompt and None"):
            decode_speculative(
                **{"input_ids": prompt, **bad}, model=model, model_draft=model, max_length=9
            )


def test_the_distribution_of_accepted_tokens():
    """The first token is distributed as the model's own, whatever the draft."""
    rows, vocab = 40000, 6
    logits, draft = torch.randn(1, 3, vocab), torch.randn(1, 2, vocab)
    drawn = torch.stack(
        [torch.multinomial(draft[0, i].softmax(-1), rows, replacement=True) for i in range(2)], 1
    )
    many = [x.expand(rows, -1, -1) for x in (logits, draft)]
    found, valid = sample_speculative(*many, drawn, top_k=0)
    assert found.shape == (rows, 3) and set(valid.tolist()) == {1, 2, 3}
    for place in range(3):  # the numbers of valid tokens are drawn from the same distributions
        here = found[valid > place, place]
        share = here.bincount(minlength=vocab) / len(here)
        torch.testing.assert_close(share, logits[0, place].softmax(-1), atol=0.03, rtol=0)


def test_filters():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 1.0]])
    kept = logits.clone()
    decoding.modify_logits_for_top_k_filtering(kept, 2)
    assert torch.equal(kept.isfinite(), logits >= logits.topk(2)[0][:, -1:])
    kept = logits.clone()
    decoding.modify_logits_for_top_p_filtering(kept, 0.8)
    wanted = torch.tensor([[False, True, True, False], [False, False, True, False]])
    assert torch.equal(kept.isfinite(), wanted)
    for p in (0.0, 1.0):
        decoding.modify_logits_for_top_p_filtering(logits, p)
    assert logits.isfinite().all()
