"""What the layers of a transformers model decide once for each step, and when they decide anew."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("flashtile.integrations.transformers")

from tiny_models import assert_same, build, padding, run, tokens  # noqa: E402  # needs transformers

from flashtile.call import memo  # noqa: E402  # needs transformers
from flashtile.integrations import transformers_attend  # noqa: E402  # needs transformers

pytestmark = pytest.mark.slow

NAME = integration.register()
STEPS = 10


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Take the paths of a GPU, with the arithmetic of a CPU on one thread."""
    monkeypatch.setattr(transformers_attend, "is_on_cpu", lambda x: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of the functions of `transformers_attend` that read a mask."""
    seen = {"_route": [], "options_of": [], "left_padding": [], "packing": []}
    for name, made in seen.items():
        original = getattr(transformers_attend, name)

        def counting(*arguments, made=made, original=original):
            made.append(arguments)
            return original(*arguments)

        monkeypatch.setattr(transformers_attend, name, counting)
    return seen


def generated(model, name, **options):
    """The logits of greedy decoding, for left-padded prompts unless `options` has others."""
    model.set_attn_implementation(name)
    options = {"input_ids": tokens(), "attention_mask": padding("left"), **options}
    made = model.generate(
        **options,
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(made.logits)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_decoding_is_prepared(family, cache, padded, monkeypatch):
    """Every call of a step has all its operands as arguments, so that a GPU repeats its launches;
    with a static cache it is the same call in every step."""
    decisions = {}

    class Remembering:
        def get(self, key, default=None):
            return decisions.get(key, default)

        def __setitem__(self, key, found):
            decisions[key] = found

    monkeypatch.setattr(memo, "decisions", Remembering())
    mask = padding("left") if padded else torch.ones(3, 24, dtype=torch.long)
    generated(build(family), NAME, attention_mask=mask, cache_implementation=cache)
    decoding = [found for found in decisions.values() if found.problem.M == 1]
    assert decoding and all(found.pick is not None for found in decoding)
    if cache == "static":  # of layers with and without a window, and the step that fills the cache
        assert len(decoding) <= 3


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("inference", [False, True])
def test_layers_share_one_decision(cache, inference, calls):
    with torch.inference_mode(inference), torch.no_grad():
        generated(build("llama", num_hidden_layers=4), NAME, cache_implementation=cache)
    assert len(calls["_route"]) == STEPS  # one prefill, and nine steps of one token
    assert len(calls["left_padding"]) == STEPS - 1
    assert len(calls["packing"]) == 1


@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_beam_search(cache):
    model = build("llama")
    options = {"num_beams": 3, "cache_implementation": cache}
    want, got = (generated(model, name, **options) for name in ("eager", NAME))
    assert_same(got, want)


@pytest.mark.parametrize("cache", [None, "static"])
def test_decoding_with_gradients(cache):
    """Attention over a cache has none: such a step takes another way."""
    model = build("llama")
    gradients = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        model.zero_grad()
        past = transformers.DynamicCache(config=model.config)
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=40)
        mask = padding("left")
        with torch.no_grad():
            model(tokens()[:, :23], attention_mask=mask[:, :23], past_key_values=past)
        model(tokens()[:, 23:], attention_mask=mask, past_key_values=past).logits.sum().backward()
        gradients.append(model.model.layers[1].self_attn.q_proj.weight.grad.clone())
    assert gradients[0].abs().max() > 0
    assert_same(gradients[1], gradients[0])


def visible():
    """A mask for single scores of three sequences, that is neither causal nor padding."""
    mask = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(5)) > 0.4
    return mask | torch.eye(24, dtype=torch.bool)


def hide_a_key(mask, *_):
    mask[..., 3] = False


def logits(model, name, mask):
    return run(model, name, input_ids=tokens(), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("kinds", [1, 2])
@torch.no_grad()
def test_users_masks_are_read_once_in_a_step(kinds, calls):
    """From the second step on: the first one shows which model they come from."""
    model, mask = build("gemma2", num_hidden_layers=4), visible()
    hidden = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)

    def given(mask):
        both = {"full_attention": mask, "sliding_attention": mask.clone()}
        return mask if kinds == 1 else both

    want = logits(model, "eager", given(hidden))
    for _ in range(3):
        calls["options_of"].clear()
        assert_same(logits(model, NAME, given(mask)), want)
    assert len(calls["options_of"]) == kinds


@torch.no_grad()
def test_users_masks_may_change_behind_pytorchs_back_between_steps():
    model, other, mask = build("llama"), build("llama"), visible()
    shared = mask.numpy()
    for column in range(4):
        shared[..., column] = False
        shared[..., column + 10] = True
        assert_same(logits(model, NAME, mask), logits(other, "sdpa", mask))
        mask.data[..., column + 10] = False
        assert_same(logits(model, NAME, mask), logits(other, "sdpa", mask))


@pytest.mark.parametrize("inference", [False, True])
@torch.no_grad()
def test_users_masks_may_change_within_a_step(inference):
    """In a way that PyTorch counts, or with masks of which it counts no change."""
    results = []
    for name in ("sdpa", NAME):
        model = build("llama", num_hidden_layers=3)
        logits(model, name, visible())
        with torch.inference_mode(inference):
            mask = visible()
            handle = model.model.layers[1].register_forward_pre_hook(partial(hide_a_key, mask))
            results.append(logits(model, name, mask))
            handle.remove()
    assert_same(*results)


@torch.no_grad()
def test_a_layer_that_the_user_calls_reads_its_mask_anew():
    results = []
    hidden = torch.randn(3, 24, 64)
    for name in (NAME, "sdpa"):
        model, mask, x = build("llama"), visible(), hidden
        angles = model.model.rotary_emb(hidden, torch.arange(24)[None])
        for _ in range(2):
            logits(model, name, mask)
        for column, layer in enumerate(model.model.layers):
            mask.data[..., column] = False
            x = layer(x, attention_mask=mask, position_embeddings=angles)
        results.append(x)
    assert_same(*results)


@torch.no_grad()
def test_a_model_has_one_hook_and_compiles_with_it():
    model, mask = build("llama"), visible()
    want = logits(model, "sdpa", mask)
    for _ in range(3):
        logits(model, NAME, mask)
    assert len(model.model._forward_pre_hooks) == 1
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(input_ids=tokens(), attention_mask=mask, use_cache=False).logits
    assert_same(got, want)


@pytest.mark.parametrize("users", [False, True])
@torch.no_grad()
def test_nothing_of_a_step_outlives_it(users, monkeypatch):
    """Not even until the garbage collector runs."""
    masks = []
    once = transformers_attend.once

    def remembering(made, *arguments):
        masks.append(weakref.ref(made))
        return once(made, *arguments)

    model, mask = build("llama"), visible() if users else padding("left")
    logits(model, NAME, mask)
    monkeypatch.setattr(transformers_attend, "once", remembering)
    logits(model, NAME, mask)
    assert masks and all(found() is None for found in masks)
