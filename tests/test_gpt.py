"""The GPT: packed and padded batches, recomputation, the loss, exchanged attention, bad calls."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from plain_layers import check_against_plain, plain_attention, plain_block, plain_slopes
from tiny_gpt import CONFIGS, EVERY_CONFIG, SMALL, build, tokens
from torch import nn

from flashtile.losses.cross_entropy import CrossEntropyLoss
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel, GPTModel

pytestmark = pytest.mark.slow

LENGTHS = (9, 1, 0, 14)  # of documents
CU_SEQLENS = torch.tensor([0, 9, 10, 10, 24], dtype=torch.int32)


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


@EVERY_CONFIG
def test_the_model_is_its_layers(name, seed):
    ids = tokens(2, 11)

    def plain(model):
        x = F.embedding(ids, model.embeddings.word_embeddings.weight)
        if name == "gpt2":
            x = x + model.embeddings.position_embeddings.weight[: ids.shape[1]]
        for layer in model.layers:
            x = plain_block(layer, x).sum(0)
        return model.ln_f(x)

    # Positions of which no token reads the embedding have the gradient 0 all the same.
    check_against_plain(build(name).transformer, plain, (), lambda model: model(ids))


@EVERY_CONFIG
def test_packed_documents_equal_padded_rows(name, seed):
    model, packed = build(name), tokens(sum(LENGTHS))
    padded = torch.zeros(len(LENGTHS), 14, dtype=torch.long)
    real = torch.arange(14) < torch.tensor(LENGTHS).unsqueeze(1)
    padded[real] = packed
    targets = tokens(sum(LENGTHS))
    padded_targets = torch.full_like(padded, -100)
    padded_targets[real] = targets

    want = model(padded).logits[real]
    got = model(packed, cu_seqlens=CU_SEQLENS, max_seqlen=24).logits
    torch.testing.assert_close(got, want)

    loss = model(packed, targets=targets, cu_seqlens=CU_SEQLENS, max_seqlen=24).loss
    loss.backward()
    packed_gradients = gradients(model)
    padded_loss = model(padded, targets=padded_targets).loss
    torch.testing.assert_close(loss, padded_loss)
    padded_loss.backward()
    torch.testing.assert_close(packed_gradients, gradients(model))


@EVERY_CONFIG
def test_tokens_see_neither_later_tokens_nor_other_documents(name, seed):
    model, ids = build(name), tokens(24)
    before = model(ids, cu_seqlens=CU_SEQLENS, max_seqlen=24).logits
    ids[9] = (ids[9] + 1) % 61  # the one token of the second document
    ids[20] = (ids[20] + 1) % 61
    after = model(ids, cu_seqlens=CU_SEQLENS, max_seqlen=24).logits
    changed = (after != before).any(dim=-1)
    assert changed.nonzero().flatten().tolist() == [9, 20, 21, 22, 23]


@EVERY_CONFIG
def test_targets_give_the_loss_of_the_logits(name, seed):
    model, ids, targets = build(name), tokens(2, 10), tokens(2, 10)
    targets[0, 3:6] = -100
    for loss in (None, CrossEntropyLoss(reduction="sum", lse_square_scale=0.01)):
        output = model(ids, targets=targets, loss=loss)
        assert output == (output.loss,)
        (logits,) = model(ids)
        torch.testing.assert_close(output.loss, (loss or CrossEntropyLoss())(logits, targets))


@EVERY_CONFIG
def test_recomputed_blocks_make_no_difference(name, seed):
    """With dropout: the second time must drop the same."""
    model, ids, targets = build(name).train(), tokens(2, 10), tokens(2, 10)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        if hasattr(module, "attend"):
            module.dropout = 0.2
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    model.transformer.layers[1].register_forward_pre_hook(count)
    results = []
    for recompute in (False, True):
        model.transformer.activation_checkpointing = recompute
        torch.manual_seed(seed)
        loss = model(ids, targets=targets).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    assert calls == 3
    torch.testing.assert_close(results[0], results[1])


def sdpa(
    q, k, v, *, causal, window_size, softcap, softmax_scale, dropout_p, alibi_slopes, **packed
):
    assert packed == {"cu_seqlens": None, "max_seqlen": None}
    slopes = None if alibi_slopes is None else plain_slopes(q.shape[2])
    return plain_attention(
        q,
        k,
        v,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        softmax_scale=softmax_scale,
        slopes=slopes,
    )


@EVERY_CONFIG
def test_attention_can_be_exchanged(name, seed):
    model, ids = build(name), tokens(2, 9)
    want = model(ids).logits
    for block in model.transformer.layers:
        block.mixer.attend = sdpa
    torch.testing.assert_close(model(ids).logits, want)
    torch.manual_seed(seed)
    ours = GPTLMHeadModel(CONFIGS[name])
    torch.manual_seed(seed)
    theirs = GPTLMHeadModel(CONFIGS[name], attend=sdpa)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize(
    ("name", "packed", "recompute"), [("gpt2", False, False), ("llama", True, True)]
)
def test_compiled_without_a_graph_break(name, packed, recompute, seed):
    torch.compiler.reset()
    model = build(name, activation_checkpointing=recompute).train()
    arguments = {"cu_seqlens": CU_SEQLENS, "max_seqlen": 24} if packed else {}
    shape = (24,) if packed else (2, 12)
    ids, targets = tokens(*shape), tokens(*shape)
    want = model(ids, targets=targets, **arguments).loss
    want.backward()
    want_gradients = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(ids, targets=targets, **arguments).loss
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(model), want_gradients)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_autocast(name, seed):
    model, ids, targets = build(name, dtype=torch.float32), tokens(2, 20), tokens(2, 20)
    want = model(ids, targets=targets).loss
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids).logits.dtype == torch.bfloat16
        loss = model(ids, targets=targets).loss
    assert loss.dtype == torch.float32
    assert abs(loss - want) < 0.02 * want
    loss.backward()
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32, name
        assert gradient.isfinite().all(), name


def test_every_choice_reaches_the_layers(seed):
    told = {}

    def attend(q, k, v, **options):
        told.update(options)
        return q

    config = GPTConfig.llama(
        **SMALL,
        rotary_fraction=0.5,
        rotary_base=77.0,
        rotary_interleaved=True,
        norm_eps=0.125,
        window_size=(3, -1),
        softcap=2.0,
        softmax_scale=0.3,
        embedding_dropout=0.1,
        residual_dropout=0.2,
        attention_dropout=0.4,
    )
    model = GPTModel(config, attend=attend).train()
    model(tokens(1, 5))
    assert told == {
        "causal": True,
        "window_size": (3, -1),
        "softcap": 2.0,
        "softmax_scale": 0.3,
        "dropout_p": 0.4,
        "alibi_slopes": None,
        "cu_seqlens": None,
        "max_seqlen": None,
    }
    assert (model.drop_f.p, model.ln_f.eps) == (0.2, 0.125)
    for index, layer in enumerate(model.layers):
        rotary = layer.mixer.rotary_emb
        assert (rotary.dim, rotary.base, rotary.interleaved) == (4, 77.0, True)
        # What stands before the first layer are the embeddings.
        assert (layer.dropout1.p, layer.dropout2.p) == (0.2 if index else 0.1, 0.2)
        assert (layer.norm1.eps, layer.norm2.eps) == (0.125, 0.125)
        assert layer.mixer.layer_idx == index


@pytest.mark.parametrize("name", ["llama", "gpt-neox"])
def test_the_last_branches_are_dropped_too(name, seed):
    model = build(name).transformer.train()
    model.drop_f.p = 1.0
    last = []
    model.layers[-1].register_forward_hook(lambda *call: last.extend(call[-1]))
    got = model(tokens(2, 9))
    torch.testing.assert_close(got, model.ln_f(last[-1]))


def test_a_tiny_model_learns(seed):
    """It repeats a sequence by heart after a few steps."""
    model = GPTLMHeadModel(CONFIGS["llama"])
    ids = tokens(1, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(ids[:, :-1], targets=ids[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert torch.equal(model.eval().generate(ids[:, :3], 17), ids)


def test_new_weights(seed):
    config = GPTConfig(vocab_size=500, hidden_size=128, num_layers=8, num_heads=4)
    model = GPTLMHeadModel(config)
    layer = model.transformer.layers[3]
    for weight, std in (
        (model.lm_head.weight, 0.02),
        (layer.mixer.Wqkv.weight, 0.02),
        (layer.mlp.fc1.weight, 0.02),
        (layer.mixer.out_proj.weight, 0.02 / 4),
        (layer.mlp.fc2.weight, 0.02 / 4),
    ):
        assert abs(weight.std() / std - 1) < 0.05
    assert not layer.mlp.fc1.bias.any()
    ids = torch.arange(400).view(2, 200)
    loss = model(ids, targets=ids.flip(1)).loss
    assert abs(loss - math.log(500)) < 0.2


def test_parameter_names_are_flash_attn_s():
    names = set(build("gpt2").state_dict())
    assert names == {
        "transformer.embeddings.word_embeddings.weight",
        "transformer.embeddings.position_embeddings.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
        *(
            f"transformer.layers.{layer}.{name}.{part}"
            for layer in range(2)
            for name in ("norm1", "norm2", "mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2")
            for part in ("weight", "bias")
        ),
    }


def test_counting():
    tied, untied = build("gpt2"), build("llama")
    words = 61 * 32
    assert tied.num_parameters() - tied.num_parameters(embeddings=False) == 24 * 32
    assert untied.num_parameters() - untied.num_parameters(embeddings=False) == words
    weights = 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48) + words + 5 * 32  # the last are norms
    assert untied.num_parameters(embeddings=False) == weights
    assert untied.flops_per_token(9) == 6 * weights + 12 * 2 * 32 * 5
    windowed = build("alibi")
    seen = (sum(range(1, 8)) + 7 * 3) / 10
    assert windowed.flops_per_token(10) == pytest.approx(
        6 * windowed.num_parameters(embeddings=False) + 12 * 2 * 32 * seen
    )


def test_last_tokens_alone(seed):
    model, ids = build("llama"), tokens(2, 9)
    last = model(ids, num_last_tokens=2).logits
    torch.testing.assert_close(last, model(ids).logits[:, -2:])


def test_bad_calls():
    model, ids = build("gpt2"), tokens(2, 9)
    long = {"cu_seqlens": torch.tensor([0, 30], dtype=torch.int32), "max_seqlen": 30}
    for inputs, arguments, words in (
        (ids[0], {}, r"input_ids: expected \(batch, seq\), got shape \(9,\)"),
        (ids, {"cu_seqlens": CU_SEQLENS, "max_seqlen": 9}, r"input_ids: expected \(total,\) with"),
        (tokens(24), {"cu_seqlens": CU_SEQLENS}, "cu_seqlens, max_seqlen: pass both or none"),
        (tokens(1, 25), {}, "25 tokens in a row, but max_position_embeddings is 24"),
        (tokens(30), long, "max_seqlen: 30 exceeds max_position_embeddings 24"),
        (ids, {"targets": ids[:, 1:]}, r"target: expected shape \(2, 9\), got \(2, 8\)"),
    ):
        with pytest.raises(ValueError, match=words):
            model(inputs, **arguments)
    with pytest.raises(TypeError):
        GPTModel(CONFIGS["gpt2"], dtype="float33")
