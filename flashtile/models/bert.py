"""BERT, an encoder that is trained on masked words and sentence pairs, with the names of
``flash_attn.models.bert``.

Its config is a ``BertConfig`` of transformers, perhaps with these attributes of flash-attn:

* `use_flash_attn`: padding is removed before the layers, and the features of padding are 0.
  Otherwise padding tokens are computed like any other query.
* `dense_seq_output`: with labels, logits of words only where a label is not 0.
* `last_layer_subset`: the last layer computes only these tokens and the first token of each
  sequence.
* `pad_vocab_size_multiple`: there are as many words as the next multiple.
* `use_xentropy`: the loss is computed in float32.
* `position_embedding_type="rotary"`, with `rotary_emb_dim`, `rotary_emb_base`,
  `rotary_emb_scale_base` and `rotary_emb_interleaved`.

`fused_bias_fc`, `fused_mlp`, `fused_dropout_add_ln` and `mlp_checkpoint_lvl` change no result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bert_padding import pad_input, unpad_input
from ..call.checks import ignored
from ..losses.cross_entropy import CrossEntropyLoss
from ..modules.block import Block
from ..modules.embedding import BertEmbeddings
from ..modules.mha import MHA
from ..modules.mlp import Mlp
from .hugging_face import StateDict
from .transformers_config import copied

_KERNELS = ("fused_bias_fc", "fused_mlp", "fused_dropout_add_ln", "mlp_checkpoint_lvl")
_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_ROTARY = "rotary_emb_dim rotary_emb_base rotary_emb_scale_base rotary_emb_interleaved"
# Attributes of a config that the model does not support with other values than these.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", *_GELU_TANH),
    "position_embedding_type": ("absolute", "rotary"),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
# Parts of names, ours and those of transformers, which are replaced in this order.
_NAMES = (
    ("bert.emb_ln.", "bert.embeddings.LayerNorm."),
    ("bert.encoder.layers.", "bert.encoder.layer."),
    (".mixer.out_proj.", ".attention.output.dense."),
    (".norm1.", ".attention.output.LayerNorm."),
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
    (".norm2.", ".output.LayerNorm."),
    (".transform.layer_norm.", ".transform.LayerNorm."),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
# TensorFlow's names, which the first files of BERT have.
_TENSORFLOW = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
# What has a row for each word, and what a word has that is only there to fill up a multiple.
_OF_WORDS = {
    "bert.embeddings.word_embeddings.weight": 0.0,
    "cls.predictions.decoder.weight": 0.0,
    "cls.predictions.decoder.bias": -100.0,  # never predicted
}


def create_mixer_cls(
    config: Any, cross_attn: bool = False, return_residual: bool = False
) -> partial[MHA]:
    """The function that makes a layer's attention from `config.hidden_size`; cross_attn and
    return_residual as in `MHA`.
    """
    rotary = {}
    if getattr(config, "position_embedding_type", "absolute") == "rotary":
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = {"rotary_emb_dim": head_dim} | copied(config, _ROTARY)
    return partial(
        MHA,
        num_heads=config.num_attention_heads,
        cross_attn=cross_attn,
        dropout=config.attention_probs_dropout_prob,
        return_residual=return_residual,
        **rotary,
    )


def create_mlp_cls(
    config: Any, layer_idx: int | None = None, return_residual: bool = False
) -> partial[Mlp]:
    """The function that makes a layer's MLP from `config.hidden_size`; return_residual as in `Mlp`.
    All layers have the same.
    """
    return partial(
        Mlp,
        hidden_features=config.intermediate_size,
        activation=_gelu(config),
        return_residual=return_residual,
    )


def create_block(config: Any, layer_idx: int | None = None) -> Block:
    """One layer of a `BertEncoder`. With `last_layer_subset` the last one has cross-attention."""
    cross_attn = _attends_across(config, layer_idx)
    # The input of cross-attention that is returned would be the keys', not the queries'.
    return_residual = not cross_attn
    return Block(
        config.hidden_size,
        create_mixer_cls(config, cross_attn, return_residual),
        create_mlp_cls(config, layer_idx, return_residual),
        norm_cls=partial(nn.LayerNorm, eps=config.layer_norm_eps),
        prenorm=False,
        resid_dropout1=config.hidden_dropout_prob,
        resid_dropout2=config.hidden_dropout_prob,
        return_residual=return_residual,
    )


class BertEncoder(nn.Module):
    """The layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.use_flash_attn = getattr(config, "use_flash_attn", False)
        self.layers = nn.ModuleList(
            create_block(config, i) for i in range(config.num_hidden_layers)
        )

    def forward(
        self,
        hidden_states: Tensor,
        key_padding_mask: Tensor | None = None,
        subset_mask: Tensor | None = None,
    ) -> Tensor:
        """The features, (batch, seq, hidden_size); with subset_mask (total, hidden_size), without
        padding if `use_flash_attn` is set.

        Args:
            hidden_states: (batch, seq, hidden_size).
            key_padding_mask: (batch, seq) bool, True for tokens, False for padding.
            subset_mask: (batch, seq) bool, the tokens whose features are returned. With
                `use_flash_attn` and a key_padding_mask it needs `last_layer_subset`.
        """
        if key_padding_mask is None or not self.use_flash_attn:
            padding = {"key_padding_mask": key_padding_mask}
            for layer in self.layers:
                hidden_states = layer(hidden_states, mixer_kwargs=padding)
            return hidden_states if subset_mask is None else hidden_states[subset_mask]
        # (batch, seq, hidden_size) -> (total, hidden_size)
        packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(hidden_states, key_padding_mask)
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        *first, last = self.layers
        for layer in first:
            packed = layer(packed, mixer_kwargs=packing)
        if subset_mask is None:
            packed = last(packed, mixer_kwargs=packing)
            return pad_input(packed, indices, *hidden_states.shape[:2])
        lengths = (subset_mask & key_padding_mask).sum(-1, dtype=torch.int32)
        arguments = {
            "x_kv": packed,
            "cu_seqlens": F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            "max_seqlen": max_seqlen,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_k": max_seqlen,
        }
        return last(packed[subset_mask[key_padding_mask]], mixer_kwargs=arguments)


class BertPooler(nn.Module):
    """The feature of a sequence: a layer and tanh of its first token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, pool: bool = True) -> Tensor:
        """(batch, seq, hidden_size) -> (batch, hidden_size); without `pool` (..., hidden_size) of
        given tokens.
        """
        return self.dense(hidden_states[:, 0] if pool else hidden_states).tanh()


class BertPredictionHeadTransform(nn.Module):
    """The layer before the logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = _gelu(config)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The shape of hidden_states, (..., hidden_size)."""
        return self.layer_norm(self.transform_act_fn(self.dense(hidden_states)))


class BertLMPredictionHead(nn.Module):
    """From features to the logits of words."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, _padded_words(config))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., words)."""
        return self.decoder(self.transform(hidden_states))


class BertPreTrainingHeads(nn.Module):
    """The logits of words, and of whether two sentences follow each other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, sequence_output: Tensor, pooled_output: Tensor) -> tuple[Tensor, Tensor]:
        """(..., hidden_size) and (batch, hidden_size) -> (..., words) and (batch, 2)."""
        return self.predictions(sequence_output), self.seq_relationship(pooled_output)


class BertPreTrainedModel(nn.Module):
    """What the models have in common: a `config`, and `from_pretrained`. ValueError names a value
    of the config that the models do not support.
    """

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, values in _SUPPORTED.items():
            got = getattr(config, name, values[0])
            if got not in values:
                raise ValueError(f"{name}: got {got!r}, want one of {values}")
        ignored("BertConfig", **{name: getattr(config, name, None) for name in _KERNELS})
        self.config = config

    @classmethod
    def from_pretrained(cls, model_name: str, config: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Load a BERT of Hugging Face with transformers; KeyError if one is missing.

        Args:
            model_name: its name or folder.
            config: as in the constructor; its vocabulary may be padded.
            inputs, kwargs: of the constructor.
        """
        from transformers import BertForPreTraining as Theirs

        model = cls(config, *inputs, **kwargs)
        state = remap_state_dict(Theirs.from_pretrained(model_name).state_dict(), config)
        before = "" if hasattr(model, "bert") else "bert."
        model.load_state_dict({name: state[before + name] for name in model.state_dict()})
        return model


class BertModel(BertPreTrainedModel):
    """Embeddings, layers and a pooler: maps tokens to features, with `add_pooling_layer` sequences,
    too. The module describes `config`, which unlike in flash_attn is not changed.
    """

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        sizes = (config.hidden_size, _padded_words(config), config.max_position_embeddings)
        self.embeddings = BertEmbeddings(*sizes, config.type_vocab_size, config.pad_token_id)
        self.emb_drop = nn.Dropout(config.hidden_dropout_prob)
        self.emb_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.apply(partial(_initialize, std=config.initializer_range))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_tokens_mask: Tensor | None = None,
    ) -> Any:
        """transformers' ``BaseModelOutputWithPoolingAndCrossAttentions`` with `last_hidden_state`,
        (batch, seq, hidden_size), or (total, hidden_size) of the wanted tokens, and
        `pooler_output`, (batch, hidden_size) or None.

        Args:
            input_ids, position_ids, token_type_ids: (batch, seq) integers, as in `BertEmbeddings`.
            attention_mask: (batch, seq), nonzero for tokens, 0 for padding.
            masked_tokens_mask: (batch, seq) bool, the tokens whose features are wanted; see
                `BertEncoder.forward`.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        padding = None if attention_mask is None else attention_mask.bool()
        embedded = self.embeddings(input_ids, position_ids, token_type_ids)
        hidden = self.emb_drop(self.emb_ln(embedded))
        if masked_tokens_mask is None:
            hidden = wanted = self.encoder(hidden, padding)
        else:
            subset = masked_tokens_mask.clone()
            subset[:, 0] = True  # for the pooler
            subset = subset if padding is None else subset & padding
            rows = subset.flatten().nonzero().flatten()
            hidden = pad_input(self.encoder(hidden, padding, subset), rows, *input_ids.shape)
            wanted = hidden[masked_tokens_mask]
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=wanted,
            pooler_output=None if self.pooler is None else self.pooler(hidden),
        )


class BertForPreTraining(BertPreTrainedModel):
    """`BertModel` with the heads of its training. ValueError if `config`, which the module
    describes, has last_layer_subset without dense_seq_output, and as in `BertPreTrainedModel`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dense_seq_output = getattr(config, "dense_seq_output", False)
        self.last_layer_subset = getattr(config, "last_layer_subset", False)
        if self.last_layer_subset and not self.dense_seq_output:
            raise ValueError("last_layer_subset: got True, which needs dense_seq_output=True")
        loss: Any = nn.CrossEntropyLoss
        if getattr(config, "use_xentropy", False):
            loss = partial(CrossEntropyLoss, inplace_backward=True)
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.mlm_loss = loss(ignore_index=0)
        self.nsp_loss = loss(ignore_index=-1)
        self.apply(partial(_initialize, std=config.initializer_range))
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the logits share the weight of the word embeddings, unless the config says not to."""
        if getattr(self.config, "tie_word_embeddings", True):
            self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
    ) -> Any:
        """transformers' ``BertForPreTrainingOutput`` with `prediction_logits`, (batch, seq, words),
        or with `dense_seq_output` and labels (total, words) of the labels that are not 0;
        `seq_relationship_logits`, (batch, 2); and `loss`, the sum of both losses in float32
        (float64 for float64), None unless both labels are given.

        Args:
            input_ids, position_ids, token_type_ids, attention_mask: as in `BertModel.forward`.
            labels: (batch, seq) int64, the words to predict, 0 elsewhere and for padding.
            next_sentence_label: (batch,) int64, 0 or 1, or -1 for none.
        """
        from transformers.models.bert.modeling_bert import BertForPreTrainingOutput

        is_masked = None if labels is None else labels > 0
        wanted = is_masked if self.last_layer_subset else None
        outputs = self.bert(input_ids, position_ids, token_type_ids, attention_mask, wanted)
        hidden = outputs.last_hidden_state
        if self.dense_seq_output and not self.last_layer_subset and is_masked is not None:
            hidden = hidden[is_masked]
        words, follows = self.cls(hidden, outputs.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            targets = labels[is_masked] if self.dense_seq_output else labels
            dtype = torch.promote_types(words.dtype, torch.float32)
            of_words = self.mlm_loss(words.flatten(0, -2), targets.flatten())
            of_sentences = self.nsp_loss(follows, next_sentence_label.flatten())
            loss = of_words.to(dtype) + of_sentences.to(dtype)
        return BertForPreTrainingOutput(
            loss=loss, prediction_logits=words, seq_relationship_logits=follows
        )


def remap_state_dict(state_dict: StateDict, config: Any) -> StateDict:
    """Convert a state dict of transformers' ``BertForPreTraining`` to one of ours, with words
    padded as the config says. Weights that ours lacks keep their names. KeyError if a weight of
    attention is missing.
    """
    ours = _renamed(state_dict, (*_TENSORFLOW, *((theirs, ours) for ours, theirs in _NAMES)))
    for joined, parts in _projections(config):
        ours[joined] = torch.cat([ours.pop(part) for part in parts])
    for name, fill in _OF_WORDS.items() if _multiple(config) > 1 else ():
        missing = _padded_words(config) - ours[name].shape[0]
        ours[name] = F.pad(ours[name], (0, 0) * (ours[name].dim() - 1) + (0, missing), value=fill)
    return ours


def inv_remap_state_dict(state_dict: StateDict, config: Any) -> StateDict:
    """The inverse of `remap_state_dict`, with ``gamma`` and ``beta`` as names of the weights of
    norms; the number of words is `config.orig_vocab_size`, or else `config.vocab_size`.
    """
    ours = dict(state_dict)
    for name in _OF_WORDS if _multiple(config) > 1 else ():
        ours[name] = ours[name][: getattr(config, "orig_vocab_size", config.vocab_size)]
    for joined, parts in _projections(config):
        ours.update(zip(parts, ours.pop(joined).chunk(len(parts)), strict=True))
    return _renamed(ours, (*_NAMES, *((usual, old) for old, usual in _TENSORFLOW)))


def _renamed(state_dict: StateDict, parts: tuple[tuple[str, str], ...]) -> StateDict:
    """Replace parts of names, given as (old, new), in this order."""
    return {reduce(lambda x, y: x.replace(*y), parts, name): w for name, w in state_dict.items()}


def _projections(config: Any) -> Iterator[tuple[str, list[str]]]:
    """Our names of the projections before attention, and the weights that they are joined of, with
    our names of the layers and the rest of transformers'.
    """
    whole, apart = {"Wqkv": "query key value"}, {"Wq": "query", "Wkv": "key value"}
    for layer in range(config.num_hidden_layers):
        before = f"bert.encoder.layers.{layer}."
        for ours, theirs in (apart if _attends_across(config, layer) else whole).items():
            for kind in ("weight", "bias"):
                parts = [f"{before}attention.self.{part}.{kind}" for part in theirs.split()]
                yield f"{before}mixer.{ours}.{kind}", parts


def _attends_across(config: Any, layer_idx: int | None) -> bool:
    """Whether a layer's queries are of some of the tokens only."""
    is_last = layer_idx == config.num_hidden_layers - 1
    return is_last and getattr(config, "last_layer_subset", False)


def _gelu(config: Any) -> partial[Tensor]:
    return partial(F.gelu, approximate="tanh" if config.hidden_act in _GELU_TANH else "none")


def _multiple(config: Any) -> int:
    return getattr(config, "pad_vocab_size_multiple", 1)


def _padded_words(config: Any) -> int:
    return -(-config.vocab_size // _multiple(config)) * _multiple(config)


def _initialize(module: nn.Module, std: float) -> None:
    """Initialise a layer as BERT does."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])
