"""Masks that models read, change or leave out, and keywords that models pass to their attention."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("flashtile.integrations.transformers")

from tiny_models import assert_same, build, padding, run, tokens  # noqa: E402  # needs transformers
from transformers import masking_utils  # noqa: E402  # needs transformers

import flashtile  # noqa: E402  # needs transformers
from flashtile.call import converted_masks  # noqa: E402  # needs transformers
from flashtile.integrations import (  # noqa: E402  # needs transformers
    transformers_attend,
    transformers_masks,
)

pytestmark = pytest.mark.slow

NAME = integration.register()
attention_forward = integration.attention_forward

SEQ2SEQ = transformers.AutoModelForSeq2SeqLM


@pytest.fixture(autouse=True)
def one_thread():
    """The models are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", ["pegasus_x", "nllb_moe", "bigbird_pegasus"])
@torch.no_grad()
def test_decoder_whose_layers_say_they_are_not_causal(family):
    """The last one also has encoder layers that add the mask to their own scores."""
    model = build(family, SEQ2SEQ)
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=9, seed=5)}
    inputs["attention_mask"] = padding("right")
    assert_same(run(model, NAME, **inputs), run(model, "eager", **inputs))


@torch.no_grad()
def test_compiled_decoder_whose_layers_say_they_are_not_causal():
    model = build("pegasus_x", SEQ2SEQ, encoder_layers=1, decoder_layers=1)
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=9, seed=5)}
    inputs["use_cache"] = False
    want = run(model, "eager", **inputs)
    model.set_attn_implementation(NAME)
    assert_same(torch.compile(model, backend="eager")(**inputs).logits, want)


@torch.no_grad()
def test_causal_decoder_told_to_look_both_ways():
    model = build("llama", is_causal=False)
    assert_same(run(model, NAME, input_ids=tokens()), run(model, "eager", input_ids=tokens()))


@pytest.mark.parametrize("family", ["doge", "deepseek_v32", "hy_v4", "inkling2"])
@pytest.mark.parametrize("side", [None, "left"])
@torch.no_grad()
def test_models_that_read_the_mask_themselves(family, side):
    model = build(family)
    inputs = {"input_ids": tokens()}
    if side is not None:
        inputs["attention_mask"] = padding(side)
    real = inputs.get("attention_mask", torch.ones(3, 24))
    assert_same(run(model, NAME, **inputs), run(model, "eager", **inputs), real)


@torch.no_grad()
def test_a_part_that_adds_the_mask_without_a_model_type():
    """PP-DocLayoutV2 sorts the boxes that it found; the rest of its table is padding."""
    module = transformers.models.pp_doclayout_v2.modeling_pp_doclayout_v2
    config = module.PPDocLayoutV2ReadingOrderConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=48, num_hidden_layers=2
    )
    torch.manual_seed(0)
    model = module.PPDocLayoutV2ReadingOrder(config).eval()
    inputs = {"boxes": torch.arange(2 * 6 * 4).view(2, 6, 4) * 20.0}
    inputs["mask"] = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool()
    found = []
    for name in (NAME, "eager"):
        model.set_attn_implementation(name)
        found.append(model(**inputs))
    assert_same(*found)


def test_two_packed_masks_hide_what_either_hides():
    """A pattern holds one of them; two become the exact mask."""
    first, second = (torch.tensor([[0] * n + [1] * (8 - n)]) for n in (3, 5))
    packed = [masking_utils.packed_sequence_mask_function(x) for x in (first, second)]
    both = masking_utils.and_masks(*packed, masking_utils.causal_mask_function)
    mask = transformers_masks.attention_mask(1, 8, 8, mask_function=both)
    want = (first[:, :, None] == first[:, None]) & (second[:, :, None] == second[:, None])
    assert torch.equal(mask, want.tril()[:, None])
    again = masking_utils.and_masks(packed[0], *packed[:1])
    assert torch.equal(transformers_masks.recognise(again).segments, first)


def test_the_parts_of_a_mask_may_have_any_order():
    causal = masking_utils.causal_mask_function
    window = masking_utils.sliding_window_overlay(3)
    for parts in ((causal, window), (window, causal)):
        found = transformers_masks.recognise(masking_utils.and_masks(*parts))
        assert found == transformers_masks.Pattern(causal=True, window_size=(2, -1))


def test_windows_and_chunks_count_positions_from_the_shortest_on():
    Pattern = transformers_masks.Pattern
    for pattern in (Pattern(window_size=(0, -1)), Pattern(attention_chunk=1)):
        assert pattern.has_positions and pattern.hides(2) and not pattern.hides(1)
    assert not Pattern(causal=True).has_positions


@pytest.mark.parametrize("family", ["doge", "hy_v4"])
@torch.no_grad()
def test_packed_sequences_of_models_that_read_the_mask(family):
    model = build(family)
    positions = torch.cat([torch.arange(n) for n in (7, 1, 16)])[None]
    inputs = {"input_ids": tokens(1), "position_ids": positions, "use_cache": False}
    assert_same(run(model, NAME, **inputs), run(model, "eager", **inputs))


def layer(**attributes):
    module = torch.nn.Module()
    module.is_causal = True
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def heads(*shapes):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def plain(q, k, v, visible, sinks=None, bias=0.0):
    """(batch, seq_q, heads, head_dim) of plain attention over (batch, heads, seq, head_dim)."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5 + bias).masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks], dim=-1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def test_sink_of_every_query_with_gradients():
    leaves = heads((4, 5, 16), (4, 5, 16), (4, 5, 16), (4, 5, 1))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    results = []
    for attend in (
        lambda q, k, v, sinks: attention_forward(layer(), q, k, v, None, sinks=sinks)[0],
        lambda q, k, v, sinks: plain(q, k, v, causal, sinks),
    ):
        inputs = [x.clone().requires_grad_() for x in leaves]
        out = attend(*inputs)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_selected_keys():
    """`indices` of a sparse attention: the chosen keys, and of them those that the mask shows."""
    q, k, v = heads((4, 6, 16), (4, 9, 16), (4, 9, 16))
    indices = torch.rand(2, 6, 9, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :5]
    chosen = torch.zeros(2, 6, 9, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    chosen |= torch.zeros(6, 9, dtype=torch.bool).diagonal_scatter(torch.ones(6).bool(), 3)
    indices = torch.cat([indices, torch.arange(3, 9).expand(2, 6).unsqueeze(-1)], dim=-1)
    causal = torch.ones(6, 9, dtype=torch.bool).tril(3)
    want = plain(q, k, v, chosen & causal)
    masks = {
        "none": None,
        "bool": causal.expand(2, 1, 6, 9),
        "additive": torch.zeros(2, 1, 6, 9).masked_fill(~causal, torch.finfo(torch.float32).min),
    }
    for mask in masks.values():
        got, _ = attention_forward(layer(), q, k, v, mask, indices=indices.int())
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match=r"indices: got a tensor of shape \(2, 5, 3\)"):
        attention_forward(layer(), q, k, v, None, indices=indices[:, :5, :3])


def test_selected_keys_beside_a_bias_are_a_mask(monkeypatch):
    """Because NaN in keys that a bias of -inf hides reaches every row on a GPU."""
    problems = []

    def attend(*qkv, **options):
        problems.append(flashtile.explain(*qkv, **options).problem)
        return flashtile.attention(*qkv, **options)

    monkeypatch.setattr(transformers_attend, "attention", attend)
    monkeypatch.setattr(converted_masks, "CPU_TILE", (4, 4))
    indices = torch.arange(5).expand(2, 6, 5)
    q, k, v = heads((4, 6, 16), (4, 9, 16), (4, 9, 16))
    attention_forward(layer(), q, k, v, torch.rand(2, 1, 6, 9), indices=indices)
    assert [(x.block_tile, x.has_bias) for x in problems] == [((4, 4), True)]


def test_selected_blocks_of_keys():
    q, k, v = heads((4, 6, 16), (2, 9, 16), (2, 9, 16))
    blocks = torch.tensor([[2, 0, -1], [2, -1, -1]]).expand(2, 6, 2, 3).transpose(1, 2)
    chosen = torch.zeros(2, 4, 6, 9, dtype=torch.bool)
    chosen[:, :2, :, 0:4] = True
    chosen[..., 8:] = True
    visible = chosen & torch.ones(6, 9, dtype=torch.bool).tril(3)
    module = layer(indexer=layer(block_size=4))
    got, _ = attention_forward(module, q, k, v, None, block_indices=blocks)
    want = plain(q, *(x.repeat_interleave(2, dim=1) for x in (k, v)), visible)
    torch.testing.assert_close(got, want.nan_to_num(0.0))  # a row without a key is 0


@pytest.mark.parametrize("inference", [False, True])
def test_exact_mask_is_short_until_it_is_changed(inference):
    """A 4-D mask that the model asked for, unchanged and changed in place."""
    from flashtile.integrations.transformers_masks import attention_mask

    with torch.inference_mode(inference):
        q, k, v = heads((4, 6, 16), (4, 6, 16), (4, 6, 16))
        padded = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
        mask = attention_mask(2, 6, 6, attention_mask=padded, allow_is_causal_skip=False)
        assert mask.shape == (2, 1, 6, 6)
        for column in (None, 3):
            if column is not None:
                mask[..., column] = False
            got, _ = attention_forward(layer(), q, k, v, mask)
            want = plain(q, k, v, mask.expand(2, 4, 6, 6)).nan_to_num(0.0)
            torch.testing.assert_close(got, want)


def test_keywords_nobody_knows_are_refused_by_name():
    q, k, v = heads((4, 5, 16), (4, 5, 16), (4, 5, 16))
    with pytest.raises(TypeError, match="head_gate: got Tensor"):
        attention_forward(layer(), q, k, v, None, head_gate=torch.ones(4))
    harmless = {"output_attentions": False, "num_items_in_batch": 3, "head_gate": None}
    got, _ = attention_forward(layer(), q, k, v, None, **harmless)
    torch.testing.assert_close(got, attention_forward(layer(), q, k, v, None)[0])


@torch.no_grad()
def test_keywords_that_eager_attention_ignores_pass_through():
    model = build("llama")
    inputs = {"input_ids": tokens(), "image_sizes": torch.ones(3, 2)}
    assert_same(run(model, NAME, **inputs), run(model, "eager", **inputs))


def additive(visible):
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, float("-inf"))


@pytest.mark.parametrize("shape", [(6, 9), (1, 6, 9), (4, 6, 9), (2, 1, 1, 9), (1, 4, 6, 9)])
@pytest.mark.parametrize("floating", [False, True])
def test_masks_broadcast_as_in_plain_pytorch(shape, floating):
    q, k, v = heads((4, 6, 16), (4, 9, 16), (4, 9, 16))
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    visible[..., -1] = True
    mask = additive(visible) if floating else visible
    got, _ = attention_forward(layer(), q, k, v, mask)
    torch.testing.assert_close(got, plain(q, k, v, visible.expand(2, 4, 6, 9)))


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_changed_in_place_is_read_anew(inference):
    with torch.inference_mode(inference):
        q, k, v = heads((4, 6, 16), (4, 6, 16), (4, 6, 16))
        mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
        attention_forward(layer(), q, k, v, mask)
        mask[..., 2] = False
        got, _ = attention_forward(layer(), q, k, v, mask)
        torch.testing.assert_close(got, plain(q, k, v, mask.expand(2, 4, 6, 6)))


def test_padding_that_is_written_into_a_whole_mask_counts():
    q, k, v = heads((4, 6, 16), (4, 6, 16), (4, 6, 16))
    mask = transformers_masks.attention_mask(2, 6, 6)
    assert mask.shape == (2, 6) and transformers_masks.is_whole(mask)
    mask[1, :2] = False
    got, _ = attention_forward(layer(), q, k, v, mask)
    visible = torch.ones(6, 6, dtype=torch.bool).tril() & mask[:, None, None]
    torch.testing.assert_close(got, plain(q, k, v, visible).nan_to_num(0.0))


def test_a_mask_that_hides_nothing_is_none():
    both_ways = masking_utils.bidirectional_mask_function
    padded = torch.ones(2, 6, dtype=torch.bool)
    make = transformers_masks.attention_mask
    assert make(2, 6, 6, mask_function=both_ways, attention_mask=padded) is None
    padded[0, 0] = False
    assert torch.equal(make(2, 6, 6, mask_function=both_ways, attention_mask=padded), padded)


@pytest.mark.parametrize("keys", [6, 4], ids=["all", "cache slots"])
def test_a_mask_of_padding_that_somebody_else_made(keys):
    q, k, v = heads((4, keys, 16), (4, 6, 16), (4, 6, 16))
    mask = torch.ones(2, keys, dtype=torch.long)
    mask[1, :2] = 0
    got, _ = attention_forward(layer(), q, k, v, mask, is_causal=False)
    want = plain(q, k[:, :, :keys], v[:, :, :keys], mask[:, None, None].bool())
    real = mask.bool() if keys == 6 else torch.ones(2, keys, dtype=torch.bool)
    torch.testing.assert_close(got[real], want[real])


def test_packed_sequences_with_a_bias():
    q, k, v = heads((4, 6, 16), (4, 6, 16), (4, 6, 16))
    q, k, v = q[:1], k[:1], v[:1]
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    bias = torch.randn(1, 4, 6, 6, dtype=q.dtype)
    got, _ = attention_forward(
        layer(), q, k, v, None, is_causal=False, position_ids=positions, position_bias=bias
    )
    number = torch.tensor([1, 1, 2, 2, 2, 2])
    torch.testing.assert_close(got, plain(q, k, v, number[:, None] == number, bias=bias))


def test_a_document_ends_with_its_row():
    """Also where the next row begins with a document of the same number."""
    numbers = torch.tensor([[1, 1, 1], [1, 2, 0]], dtype=torch.int32)
    packed = transformers_attend.packing(numbers, 3, pack_queries=True)
    assert packed.cu_seqlens_k.tolist() == [0, 3, 4, 5]


def test_queries_and_keys_get_the_dtype_of_the_values():
    """With adapters a norm may leave them in float32."""
    q, k, v = (x.float() for x in heads((4, 6, 16), (4, 6, 16), (4, 6, 16)))
    got, _ = attention_forward(layer(), q, k, v.bfloat16(), None)
    want, _ = attention_forward(layer(), q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


def test_rows_that_an_additive_mask_hides_with_the_smallest_number():
    """Such rows see every key equally, as in eager attention: the scores are lost in rounding."""
    q, k, v = (x.float() for x in heads((4, 6, 16), (4, 6, 16), (4, 6, 16)))
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    visible[1, :, 3:] = False
    mask = torch.zeros(2, 1, 6, 6).masked_fill(~visible, torch.finfo(torch.float32).min)
    got, _ = attention_forward(layer(), q, k, v, mask)
    scores = q @ k.mT / 4 + mask
    torch.testing.assert_close(got, (scores.softmax(-1) @ v).transpose(1, 2))


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_a_model_with_its_own_attention_stays_eager(batch):
    """Loaded under our name, its layers still get the masks that they add to their scores."""
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    load = transformers.AutoModelForCausalLM.from_config
    eager = load(config, attn_implementation="eager").eval()
    ours = load(config, attn_implementation=NAME).eval()
    assert ours.config._attn_implementation == "eager"
    ours.load_state_dict(eager.state_dict())
    torch.testing.assert_close(ours(tokens()[:batch]).logits, eager(tokens()[:batch]).logits)


PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "chunk": masking_utils.chunked_causal_mask_function(4, torch.tensor([3, 0])),
    "both ways": masking_utils.bidirectional_mask_function,
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(4),
}


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("queries", [1, 3, 9])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_short_sequences_on_a_cpu_take_a_bias(pattern, queries, side, monkeypatch):
    """The results are those of packed sequences; with positions, 0 for queries at padding."""
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, {"left": slice(3), "right": slice(6, 9), "middle": slice(2, 5)}[side]] = False
    q, k, v = heads((4, queries, 8), (2, 9, 8), (2, 9, 8))
    function = PATTERNS[pattern]
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": 9, "q_offset": 9 - queries}
    seen = []
    attention = transformers_attend.attention
    monkeypatch.setattr(
        transformers_attend,
        "attention",
        lambda *x, **options: seen.append(options) or attention(*x, **options),
    )
    results = []
    for most in (0, 10**9):
        monkeypatch.setattr(transformers_attend, "HIDDEN_SCORES", most)
        mask = transformers_masks.attention_mask(
            **sizes, mask_function=function, attention_mask=keep.clone()
        )
        if mask.dim() == 4:
            pytest.skip("the exact mask")
        results.append(attention_forward(layer(), q, k, v, mask)[0])
    torch.testing.assert_close(*results)
    sees_none = side == "left" or pattern == "both ways" or (side == "middle" and queries < 5)
    if pattern == "window both ways" and queries == 9:  # those at padding see keys
        sees_none = False
    assert len(seen) == (pattern != "chunk" and sees_none)


@pytest.mark.parametrize(("heads", "has_bias"), [(2, True), (3, False)])
def test_a_bias_is_for_little_padding(heads, has_bias, monkeypatch):
    monkeypatch.setattr(transformers_attend, "HIDDEN_SCORES", 12)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]).bool()  # 3 rows, 2 sequences
    bias = transformers_attend.cheap_bias(mask, 3, heads, pack_queries=True, causal=True)
    assert (bias is not None) == has_bias
