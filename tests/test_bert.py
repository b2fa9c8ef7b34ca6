"""BERT: transformers' results and gradients, with padding and without, of some words or of all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashtile.models import bert

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LENGTHS = (9, 1, 13, 6)
WORDS, SEQLEN = 61, 13
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
SUBSET = {"dense_seq_output": True, "last_layer_subset": True}


def config_of(**attributes):
    config = transformers.BertConfig(**SIZES)
    for name, value in attributes.items():  # as users of flash_attn add its own
        setattr(config, name, value)
    return config


def theirs(config):
    model = transformers.BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2).add_(parameter.dim() == 1)
        model.bert.embeddings.word_embeddings.weight[0] = 0.0  # of padding
    return model.double().eval()


def ours(their, config):
    model = bert.BertForPreTraining(config).double().eval()
    model.load_state_dict(bert.remap_state_dict(their.state_dict(), config))
    return model


def batch(masked=True):
    """Tokens, types and mask of sequences with padding behind them, labels of some tokens, and
    whether sentences follow each other."""
    ids = torch.randint(1, WORDS, (len(LENGTHS), SEQLEN))
    mask = torch.arange(SEQLEN) < torch.tensor(LENGTHS).unsqueeze(-1)
    labels = torch.randint(1, WORDS, ids.shape) * (torch.rand(ids.shape) < 0.5) * mask
    labels[0, 0], labels[1] = 5, 0  # a first token, and a sequence without any
    inputs = {"input_ids": ids, "token_type_ids": torch.randint(0, 2, ids.shape)}
    if masked:
        inputs["attention_mask"] = mask.long()
    return inputs, labels, torch.tensor([0, 1, 1, -1])


def plain_loss(logits, follows, labels, next_sentence_label):
    """The sum of both losses, of (total, words) and (total,) or of (batch, seq, ...)."""
    terms = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=0)
    return terms + F.cross_entropy(follows, next_sentence_label, ignore_index=-1)


def gradients(model):
    return {name: x.grad for name, x in model.named_parameters(remove_duplicate=False)}


def assert_equal_gradients(our, their):
    """A map of state dicts is one of gradients, too, which are shared where weights are."""
    wanted = bert.remap_state_dict(gradients(their), our.config)
    got = gradients(our)
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("masked", "use_flash_attn", "hidden_act"),
    [(False, True, "gelu"), (True, False, "gelu_new"), (True, True, "gelu")],
)
def test_results_of_transformers(masked, use_flash_attn, hidden_act, seed):
    config = config_of(use_flash_attn=use_flash_attn, hidden_act=hidden_act)
    their = theirs(config)
    our = ours(their, config)
    inputs, labels, follows = batch(masked)
    # The features of padding differ only where the layers see none.
    kept = torch.ones_like(labels) if not use_flash_attn else inputs.get("attention_mask")
    kept = torch.ones_like(labels).bool() if kept is None else kept.bool()

    got, wanted = our(**inputs), their(**inputs)
    assert got.loss is None and got.keys() == wanted.keys()
    for name in ("prediction_logits", "seq_relationship_logits"):
        rows = kept if name == "prediction_logits" else slice(None)
        torch.testing.assert_close(got[name][rows], wanted[name][rows])
    got, wanted = our.bert(**inputs), their.bert(**inputs)
    torch.testing.assert_close(got.pooler_output, wanted.pooler_output)
    torch.testing.assert_close(got[0][kept], wanted[0][kept])
    assert not got[0][~kept].any()

    our(**inputs, labels=labels, next_sentence_label=follows).loss.backward()
    result = their(**inputs)
    plain_loss(result[0], result[1], labels, follows).backward()
    assert_equal_gradients(our, their)


@pytest.mark.parametrize("rotary", [False, True])
def test_a_padded_batch_is_its_sequences(rotary, seed):
    extra = {"position_embedding_type": "rotary", "rotary_emb_dim": 4} if rotary else {}
    config = config_of(use_flash_attn=True, **extra)
    model = ours(theirs(config), config)
    rotation = model.bert.encoder.layers[0].mixer.rotary_emb
    assert rotation is None if not rotary else (rotation.dim, rotation.base) == (4, 10000.0)
    inputs, *_ = batch()
    together = model.bert(**inputs)
    for index, length in enumerate(LENGTHS):
        cut = {name: x[index, :length].unsqueeze(0) for name, x in inputs.items()}
        del cut["attention_mask"]
        alone = model.bert(**cut)
        torch.testing.assert_close(together[0][index, :length], alone[0][0])
        torch.testing.assert_close(together[1][index], alone[1][0])
        assert not together[0][index, length:].any()


@pytest.mark.parametrize("use_xentropy", [False, True])
@pytest.mark.parametrize("use_flash_attn", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "subset", [{"dense_seq_output": True}, SUBSET], ids=["dense", "last layer"]
)
def test_only_masked_words(subset, masked, use_flash_attn, use_xentropy, seed):
    """Logits, loss and gradients are those of all words at the labels that are not 0."""
    config = config_of(**subset, use_flash_attn=use_flash_attn, use_xentropy=use_xentropy)
    their = theirs(config)
    our = ours(their, config)
    assert our.bert.encoder.layers[-1].mixer.cross_attn == ("last_layer_subset" in subset)
    inputs, labels, follows = batch(masked)
    result = their(**inputs)
    wanted = result[0][labels > 0]
    loss = plain_loss(wanted, result[1], labels[labels > 0], follows)

    got = our(**inputs, labels=labels, next_sentence_label=follows)
    for name, x in {
        "prediction_logits": wanted,
        "seq_relationship_logits": result[1],
        "loss": loss,
    }.items():
        torch.testing.assert_close(got[name], x)
    assert our(**inputs, labels=labels).loss is None
    # Without labels, and for the features, all words.
    kept = inputs["attention_mask"].bool() if masked else torch.ones_like(labels).bool()
    torch.testing.assert_close(our(**inputs).prediction_logits[kept], result[0][kept])
    torch.testing.assert_close(our.bert(**inputs)[0][kept], their.bert(**inputs)[0][kept])

    got.loss.backward()
    loss.backward()
    assert_equal_gradients(our, their)


def test_first_tokens_that_are_padding(seed):
    """Their features are 0 in the pooler, also where the last layer has only some tokens."""
    inputs, labels, follows = batch()
    inputs = {name: x.flip(1) for name, x in inputs.items()}
    labels = labels.flip(1)
    whole = config_of(use_flash_attn=True, dense_seq_output=True)
    their = theirs(whole)
    wanted = ours(their, whole)(**inputs, labels=labels, next_sentence_label=follows)
    some = config_of(use_flash_attn=True, **SUBSET)
    got = ours(their, some)(**inputs, labels=labels, next_sentence_label=follows)
    for name in ("loss", "prediction_logits", "seq_relationship_logits"):
        torch.testing.assert_close(got[name], wanted[name])


@pytest.mark.parametrize("last_layer_subset", [False, True])
@pytest.mark.parametrize("multiple", [1, 8])
def test_weights_there_and_back(multiple, last_layer_subset, seed):
    config = config_of(last_layer_subset=last_layer_subset, pad_vocab_size_multiple=multiple)
    config.dense_seq_output = True
    their = theirs(config)
    before = their.state_dict()
    mapped = bert.remap_state_dict(before, config)
    state = bert.BertForPreTraining(config).state_dict()
    assert [(n, x.shape) for n, x in sorted(mapped.items())] == [
        (n, x.shape) for n, x in sorted(state.items())
    ]
    if multiple > 1:
        assert config.vocab_size == WORDS
        assert mapped["cls.predictions.decoder.bias"].tolist()[WORDS:] == 3 * [-100.0]
        assert not mapped["bert.embeddings.word_embeddings.weight"][WORDS:].any()
        config.orig_vocab_size = WORDS
    after = bert.inv_remap_state_dict(mapped, config)
    renamed = {
        name.replace("gamma", "weight").replace("beta", "bias"): x for name, x in after.items()
    }
    assert sum("gamma" in name for name in after) == 2 * config.num_hidden_layers + 2
    assert renamed.keys() == before.keys() - {"cls.predictions.decoder.bias"}
    assert all(torch.equal(x, before[name]) for name, x in renamed.items())
    # TensorFlow's names lead to the same.
    again = bert.remap_state_dict(after, config)
    assert again.keys() == mapped.keys()
    assert all(torch.equal(x, mapped[name]) for name, x in again.items())
    with pytest.raises(KeyError, match=r"encoder.layers.0.attention.self.query.weight"):
        bert.remap_state_dict({}, config)


def test_from_pretrained(tmp_path, seed):
    config = config_of(pad_vocab_size_multiple=8)
    their = theirs(config_of())
    their.save_pretrained(tmp_path)
    inputs, *_ = batch()
    our = bert.BertForPreTraining.from_pretrained(tmp_path, config).double().eval()
    logits = our(**inputs).prediction_logits
    torch.testing.assert_close(logits[..., :WORDS], their(**inputs).prediction_logits)
    assert (logits[..., WORDS:] == -100).all()
    model = (
        bert.BertModel.from_pretrained(tmp_path, config, add_pooling_layer=False).double().eval()
    )
    got = model(**inputs)
    torch.testing.assert_close(got.last_hidden_state, their.bert(**inputs).last_hidden_state)
    assert got.pooler_output is None


def test_a_new_model(seed):
    config = config_of(hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.5)
    model = bert.BertForPreTraining(config)
    words = model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.weight is words
    assert not words[0].any()
    weights = [x for x in model.parameters() if x.dim() > 1 and x.numel() > 500]
    assert all(abs(x.std() - 0.02) < 0.003 for x in weights)
    layer = model.bert.encoder.layers[0]
    rates = (model.bert.emb_drop.p, layer.dropout1.p, layer.dropout2.p, layer.mixer.dropout)
    assert rates == (0.25, 0.25, 0.25, 0.5)
    x = torch.randn(2, 3, 32)
    assert layer.mixer(x)[1] is layer.mlp(x)[1] is x  # as in flash_attn
    untied = bert.BertForPreTraining(config_of(tie_word_embeddings=False))
    assert (
        untied.cls.predictions.decoder.weight is not untied.bert.embeddings.word_embeddings.weight
    )
    half = bert.BertForPreTraining(config_of(use_flash_attn=True)).bfloat16()
    inputs, labels, follows = batch()
    assert half(**inputs, labels=labels, next_sentence_label=follows).loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act: got 'relu', want one of"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type: got 'relative_key'",
        ),
        ({"is_decoder": True}, "is_decoder: got True"),
        ({"add_cross_attention": True}, "add_cross_attention: got True"),
        ({"last_layer_subset": True}, "last_layer_subset: got True, which needs dense_seq_output"),
    ],
)
def test_errors(attributes, message):
    with pytest.raises(ValueError, match=message):
        bert.BertForPreTraining(config_of(**attributes))
