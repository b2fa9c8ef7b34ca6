"""Positions, lengths and masks as users pass them: in one row, in part, in a wrong shape, changed
behind PyTorch's back, and in compiled models."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("flashtile.integrations.transformers")

from test_integrations_transformers_masks import (  # noqa: E402  # needs transformers
    attention_forward,
    heads,
    layer,
    one_thread,
    plain,
)
from tiny_models import assert_same, build, run, tokens  # noqa: E402  # needs transformers
from transformers import masking_utils  # noqa: E402  # needs transformers

from flashtile.integrations import (  # noqa: E402  # needs transformers
    transformers_attend,
    transformers_masks,
)

NAME = integration.register()
LENGTHS = (5, 1, 10, 8)
RESTARTS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
ENDS = torch.tensor((0, *LENGTHS)).cumsum(0).int()
BERT = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}

__all__ = ["one_thread"]  # a fixture


def alone(model, ids, lengths=LENGTHS):
    """The logits of documents, each computed by itself."""
    return torch.cat([run(model, "eager", input_ids=x) for x in ids.split(lengths, dim=1)], dim=1)


def numbered(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_positions_of_one_row_are_those_of_every_row(use_cache):
    model, ids = build("llama"), tokens(3)
    inputs = {"input_ids": ids, "position_ids": RESTARTS, "use_cache": use_cache}
    assert_same(run(model, NAME, **inputs), run(model, "eager", **inputs))


@pytest.mark.parametrize("hidden_scores", [0, 10**9])
@torch.no_grad()
def test_a_mask_of_one_row_is_that_of_every_row(hidden_scores, monkeypatch):
    monkeypatch.setattr(transformers_attend, "HIDDEN_SCORES", hidden_scores)
    model, ids = build("llama"), tokens(3)
    mask = torch.ones(1, ids.shape[1], dtype=torch.long)
    mask[0, :4] = 0
    got = run(model, NAME, input_ids=ids, attention_mask=mask)
    want = run(model, "eager", input_ids=ids, attention_mask=mask.expand(3, -1))
    assert_same(got, want, mask.expand(3, -1))
    q, k, v = heads((4, 6, 16), (4, 6, 16), (4, 6, 16))
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]])
    got, _ = attention_forward(layer(), q, k, v, mask, is_causal=False)
    torch.testing.assert_close(got, plain(q, k, v, mask[:, None, None].bool()))


@pytest.mark.parametrize("shape", [(2, 24), (4, 24), (3, 1, 24)])
def test_masks_with_other_rows_are_refused(shape):
    model = build("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=r"attention_mask: got .*want \(3, tokens\)"):
        model(input_ids=tokens(3), attention_mask=torch.ones(shape, dtype=torch.long))


@pytest.mark.parametrize("width", [20, 30])
def test_masks_of_too_few_or_too_many_tokens_are_refused(width):
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT, num_attention_heads=4, attn_implementation=NAME)
    model = transformers.BertModel(config)
    mask = torch.ones(3, width, dtype=torch.long)
    mask[0, 15:] = 0
    with pytest.raises(ValueError, match=f"attention_mask: got {width} tokens for 24 queries"):
        model(input_ids=tokens(3), attention_mask=mask)
    q, k, v = heads((4, 9, 16), (4, 9, 16), (4, 9, 16))
    with pytest.raises(ValueError, match="attention_mask: got 7 tokens for 9 queries and 9 keys"):
        attention_forward(layer(), q, k, v, torch.ones(2, 7, dtype=torch.long))
    # The encoder's padding in cross attention, made by transformers for fewer keys.
    both_ways = masking_utils.bidirectional_mask_function
    padded = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    mask = transformers_masks.attention_mask(2, 3, 7, 0, 0, both_ways, padded)
    with pytest.raises(ValueError, match="attention_mask: got 7 tokens for 3 queries and 9 keys"):
        attention_forward(layer(), q[:, :, :3], k, v, mask)


def test_masks_of_scores_that_do_not_fit_are_refused_by_name():
    q, k, v = heads((4, 6, 16), (4, 9, 16), (4, 9, 16))
    with pytest.raises(TypeError, match=r"attention_mask: got torch.int64 in 4 dimensions"):
        attention_forward(layer(), q, k, v, torch.ones(2, 1, 6, 9, dtype=torch.long))
    for shape in ((2, 6, 9), (2, 1, 5, 9), (2, 1, 6, 8), (1, 2, 1, 6, 9)):
        with pytest.raises(ValueError, match=r"attention_mask: got a tensor of shape \("):
            attention_forward(layer(), q, k, v, torch.ones(shape, dtype=torch.bool))


def ways_to_change(x):
    x = x.clone()
    yield x, x.data
    array = x.numpy().copy()
    yield torch.from_numpy(array), array


@torch.no_grad()
def test_positions_may_change_behind_pytorchs_back():
    model, ids = build("llama"), tokens(1)
    want = alone(model, ids, (14, 10))
    for positions, other in ways_to_change(RESTARTS):
        run(model, NAME, input_ids=ids, position_ids=positions)
        other[:] = torch.cat([torch.arange(14), torch.arange(10)])
        assert_same(run(model, NAME, input_ids=ids, position_ids=positions), want)


@pytest.mark.parametrize("shape", [(2, 1, 6, 6), (2, 6)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float64])
def test_masks_may_change_behind_pytorchs_back(shape, dtype, monkeypatch):
    if (len(shape), dtype) in ((4, torch.long), (2, torch.float64)):
        pytest.skip("no mask of this dtype")
    monkeypatch.setattr(transformers_attend, "HIDDEN_SCORES", 0)
    q, k, v = heads((4, 6, 16), (4, 6, 16), (4, 6, 16))
    shows, hides = (0.0, -torch.inf) if dtype.is_floating_point else (1, 0)
    want = plain(q, k, v, torch.arange(6) != 2)
    for mask, other in ways_to_change(torch.full(shape, shows, dtype=dtype)):
        attention_forward(layer(), q, k, v, mask, is_causal=False)
        other[..., 2] = hides
        got, _ = attention_forward(layer(), q, k, v, mask, is_causal=False)
        torch.testing.assert_close(got, want)


def test_a_mask_that_generate_made_is_read_anew_in_every_step():
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[0, 0] = False
    mask = transformers_masks.attention_mask(2, 6, 6, attention_mask=keep)
    q, k, v = heads((4, 6, 16), (4, 6, 16), (4, 6, 16))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for column in (0, 1):
        mask.data[1, column] = False
        step = transformers_masks.attention_mask(2, 6, 6, attention_mask=mask)
        got, _ = attention_forward(layer(), q, k, v, step)
        want = plain(q, k, v, causal & mask[:, None, None])
        torch.testing.assert_close(got[mask], want[mask])


def test_layers_of_one_step_share_what_they_learn(monkeypatch):
    calls = []
    for name in ("documents_of_positions", "packing"):
        original = getattr(transformers_attend, name)
        counting = lambda *x, make=original: calls.append(make) or make(*x)  # noqa: E731
        monkeypatch.setattr(transformers_attend, name, counting)
    model = build("llama")
    with torch.no_grad():
        for _ in range(2):
            run(model, NAME, input_ids=tokens(1), position_ids=RESTARTS)
    assert model.config.num_hidden_layers == 2 and len(calls) == 4


@pytest.mark.parametrize("bias", [0, 10**9], ids=["packed", "bias"])
@pytest.mark.parametrize("window", [None, 4])
def test_more_queries_than_keys_are_aligned_to_the_bottom_right(bias, window, monkeypatch):
    monkeypatch.setattr(transformers_attend, "HIDDEN_SCORES", bias)
    q, k, v = heads((4, 50, 16), (4, 12, 16), (4, 12, 16))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:], mask[1, :4] = 0, 0
    visible = torch.ones(50, 12, dtype=torch.bool).tril(12 - 50)
    if window is not None:
        visible &= torch.ones(50, 12, dtype=torch.bool).triu(12 - 50 - window + 1)
    got, _ = attention_forward(layer(), q, k, v, mask, sliding_window=window)
    want = plain(q, k, v, visible & mask[:, None, None].bool())
    torch.testing.assert_close(got, want.nan_to_num(0.0))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_lengths_without_the_longest(family):
    model, ids = build(family), tokens(1)
    lengths = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
    # Rotary positions are relative, so that they need not start over.
    got = run(model, NAME, input_ids=ids, **lengths)
    assert_same(got, alone(model, ids))


@pytest.mark.parametrize("given", ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"])
def test_some_of_the_lengths_are_refused(given):
    q, k, v = (x[:1] for x in heads((4, 24, 16), (4, 24, 16), (4, 24, 16)))
    missing = "cu_seq_lens_k" if given == "cu_seq_lens_q" else "cu_seq_lens_q"
    with pytest.raises(ValueError, match=f"{missing}: got None with others of"):
        attention_forward(layer(), q, k, v, None, **{given: ENDS})


@pytest.mark.parametrize("form", ["padding", "scores", "additive"])
def test_lengths_and_a_mask_both_hide(form):
    q, k, v = (x[:1] for x in heads((4, 24, 16), (4, 24, 16), (4, 24, 16)))
    same = numbered(LENGTHS)[:, None] == numbered(LENGTHS)
    visible = torch.rand(1, 1, 24, 24, generator=torch.Generator().manual_seed(1)) < 0.7
    visible |= torch.eye(24, dtype=torch.bool)
    if form == "padding":
        visible = (torch.arange(24) != 8)[None, None, None]
    masks = {
        "padding": visible[:, 0, 0].long(),
        "scores": visible,
        "additive": torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, -torch.inf),
    }
    lengths = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
    got, _ = attention_forward(layer(), q, k, v, masks[form], is_causal=False, **lengths)
    torch.testing.assert_close(got, plain(q, k, v, visible & same).nan_to_num(0.0))


@pytest.mark.parametrize(
    ("family", "how", "padded"),
    [
        ("llama", "position_ids", False),
        ("llama", "position_ids", True),
        ("mistral", "position_ids", False),
        ("mistral", "cu_seq_lens", False),
        ("llama", "cu_seq_lens", True),
    ],
)
@pytest.mark.slow
@torch.no_grad()
def test_compiled_models_keep_documents_apart(family, how, padded):
    """As the model that is not compiled does; Mistral's mask has its 4-D form in a graph."""
    model, ids = build(family, num_hidden_layers=1), tokens(1)
    inputs = {"input_ids": ids, "position_ids": RESTARTS}
    want = alone(model, ids)
    real = torch.ones_like(ids)
    if padded:
        real[:, -3:] = 0
        inputs["attention_mask"] = real
    if how == "cu_seq_lens":
        inputs |= {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
    assert_same(run(model, NAME, **inputs), want, real)
    torch._dynamo.reset()
    got = torch.compile(model, backend="aot_eager")(**inputs).logits
    assert_same(got, want, real)
