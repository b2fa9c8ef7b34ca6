"""Convert the weights of several families between their names and flashtile's.

One table serves both directions: a weight of flashtile is one or several weights of theirs, joined
along the output features, transposed if theirs is a ``Conv1D`` (GPT-2), and with other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .gpt_config import GPTConfig

StateDict = dict[str, Tensor]
Rows = Callable[[GPTConfig], Tensor]  # which of their rows are ours


class Family(NamedTuple):
    """The names of a family's weights, without ``.weight`` and ``.bias``."""

    layers: str  # before the names of a layer, with its number
    of_layers: dict[str, str]  # of a layer: ours -> theirs, several to be joined
    others: dict[str, str]
    projected: Rows | None = None  # rows of the projection to queries, keys and values
    conv1d: bool = False


def _by_group(config: GPTConfig) -> Tensor:
    """Rows that have each key head after its query heads, then its value head."""
    heads, kv_heads, head_dim = config.num_heads, config.kv_heads, config.head_size
    rows = torch.arange((heads + 2 * kv_heads) * head_dim).view(kv_heads, -1, head_dim)
    return torch.cat((rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()))


def _one_kv_head(config: GPTConfig) -> Tensor:
    """One key and one value head, repeated for all."""
    queries, head_dim = config.num_heads * config.head_size, config.head_size
    rows = torch.arange(queries + 2 * head_dim)
    k, v = rows[queries:].split(head_dim)
    return torch.cat((rows[:queries], k.repeat(config.kv_heads), v.repeat(config.kv_heads)))


def _neighbours(config: GPTConfig) -> Tensor:
    """Rotary pairs as neighbours, where the config has them so, instead of in two halves."""
    heads, kv_heads, head_dim = config.num_heads, config.kv_heads, config.head_size
    rows = torch.arange((heads + 2 * kv_heads) * head_dim).view(-1, head_dim)
    if config.rotary_interleaved:
        rotated = rows[: heads + kv_heads].view(-1, 2, head_dim // 2).transpose(1, 2).flatten(1)
        rows = torch.cat((rotated, rows[heads + kv_heads :]))
    return rows.flatten()


def _of_layers(*names: str) -> dict[str, str]:
    ours = ("norm1", "norm2", "mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2")
    return dict(zip(ours, names, strict=True))


def _others(words: str, positions: str, ln_f: str, lm_head: str = "lm_head") -> dict[str, str]:
    return {
        "transformer.embeddings.word_embeddings": words,
        "transformer.embeddings.position_embeddings": positions,
        "transformer.ln_f": ln_f,
        "lm_head": lm_head,
    }


_QKV = "{0}.q_proj {0}.k_proj {0}.v_proj"
_LLAMA = ("input_layernorm", "post_attention_layernorm")
_LLAMA_MLP = ("mlp.up_proj mlp.gate_proj", "mlp.down_proj")
_GPT2 = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj")
_OF_GPT2_LAYERS = _of_layers(*_GPT2, "mlp.c_fc", "mlp.c_proj")
_NEOX_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_OF_FALCON_LAYERS = _of_layers(
    *_LLAMA, "self_attention.query_key_value", "self_attention.dense", *_NEOX_MLP
)
_OF_GPT2 = _others("transformer.wte", "transformer.wpe", "transformer.ln_f")
_OF_LLAMA = _others("model.embed_tokens", "", "model.norm")
_OPT = "model.decoder."
_OPT_NORMS = ("self_attn_layer_norm", "final_layer_norm")
_MEGATRON = "language_model.encoder."

FAMILIES = {
    "gpt2": Family("transformer.h.", _OF_GPT2_LAYERS, _OF_GPT2, conv1d=True),
    "gpt_bigcode": Family("transformer.h.", _OF_GPT2_LAYERS, _OF_GPT2, _one_kv_head),
    "btlm": Family(
        "transformer.h.",
        _of_layers(*_GPT2, "mlp.c_fc mlp.c_fc2", "mlp.c_proj"),
        _OF_GPT2,
        conv1d=True,
    ),
    "llama": Family(
        "model.layers.",
        _of_layers(*_LLAMA, _QKV.format("self_attn"), "self_attn.o_proj", *_LLAMA_MLP),
        _OF_LLAMA,
        _neighbours,
    ),
    "baichuan": Family(
        "model.layers.",
        _of_layers(*_LLAMA, "self_attn.W_pack", "self_attn.o_proj", *_LLAMA_MLP),
        _OF_LLAMA,
    ),
    "llama, Meta's files": Family(
        "layers.",
        _of_layers(
            "attention_norm",
            "ffn_norm",
            "attention.wq attention.wk attention.wv",
            "attention.wo",
            "feed_forward.w3 feed_forward.w1",
            "feed_forward.w2",
        ),
        _others("tok_embeddings", "", "norm", "output"),
    ),
    "opt": Family(
        f"{_OPT}layers.",
        _of_layers(*_OPT_NORMS, _QKV.format("self_attn"), "self_attn.out_proj", "fc1", "fc2"),
        _others(f"{_OPT}embed_tokens", f"{_OPT}embed_positions", f"{_OPT}final_layer_norm")
        | {
            "transformer.embeddings.project_in": f"{_OPT}project_in",
            "project_out": f"{_OPT}project_out",
        },
    ),
    "gptj": Family(
        "transformer.h.",
        _of_layers("ln_1", "", _QKV.format("attn"), "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
        _OF_GPT2,
    ),
    "gpt_neox": Family(
        "gpt_neox.layers.",
        _of_layers(*_LLAMA, "attention.query_key_value", "attention.dense", *_NEOX_MLP),
        _others("gpt_neox.embed_in", "", "gpt_neox.final_layer_norm"),
        _by_group,
    ),
    "falcon": Family(
        "transformer.h.",
        _OF_FALCON_LAYERS,
        _others("transformer.word_embeddings", "", "transformer.ln_f"),
        _by_group,
    ),
    "megatron": Family(
        f"{_MEGATRON}layers.",
        _OF_FALCON_LAYERS,
        _others(
            "language_model.embedding.word_embeddings",
            "language_model.embedding.position_embeddings",
            f"{_MEGATRON}final_layernorm",
        ),
        _by_group,
    ),
}
FAMILIES["mistral"] = FAMILIES["llama"]
# Other names of the same weights, in the order in which they are replaced.
_SYNONYMS = {
    "opt": (("decoder.", _OPT), (f"{_OPT}layer_norm.", f"{_OPT}final_layer_norm.")),
    "falcon": ((".ln_attn.", ".input_layernorm."), (".ln_mlp.", ".post_attention_layernorm.")),
    "gpt_neox": (("embed_out.", "lm_head."),),
    "gpt2": tuple((f"{x}.", f"transformer.{x}.") for x in ("wte", "wpe", "h", "ln_f")),
}
# Causal masks, ALiBi's slopes and rotary frequencies, which are not weights.
_NO_WEIGHTS = (
    ".attn.bias",
    ".attention.bias",
    ".masked_bias",
    ".inv_freq",
    ".slopes",
    "rope.freqs",
)
_WORDS = "transformer.embeddings.word_embeddings.weight"


class _Rule(NamedTuple):
    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()  # output features of each, if there are several
    rows: Tensor | None = None
    transposed: bool = False


def state_dict_from_transformers(
    state_dict: StateDict, config: GPTConfig, family: str | None = None, strict: bool = True
) -> StateDict:
    """Convert a state dict of transformers to one that `GPTLMHeadModel` loads.

    Args:
        state_dict: state dict of a model with a head for language models; ValueError if a weight is
            missing.
        config: configuration of our model.
        family: model_type of their config, or another name in `FAMILIES`; a GPT-2 or a Llama by
            default.
        strict: raise ValueError for other weights; if not, they keep their names.
    """
    family = _family(config) if family is None else family
    remaining = {_known(name, family): x for name, x in state_dict.items()}
    ours = {}
    for rule in _rules(config, FAMILIES[family], remaining):
        missing = [name for name in rule.theirs if name not in remaining]
        if missing:
            raise ValueError(f"state_dict: {missing[0]!r} is missing, for {rule.ours!r}")
        parts = [remaining.pop(name) for name in rule.theirs]
        parts = [part.t() for part in parts] if rule.transposed else parts
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        ours[rule.ours] = joined if rule.rows is None else joined[rule.rows.to(joined.device)]
    head = remaining.pop(f"{FAMILIES[family].others['lm_head']}.weight", None)
    if head is None and not config.tie_word_embeddings:
        raise ValueError("state_dict: 'lm_head.weight' is missing, and the config does not tie it")
    ours["lm_head.weight"] = ours[_WORDS] if head is None or config.tie_word_embeddings else head
    left = {name: x for name, x in remaining.items() if not name.endswith(_NO_WEIGHTS)}
    if left and strict:
        raise ValueError(
            f"state_dict: {next(iter(left))!r} and {len(left) - 1} others fit no parameter"
        )
    return ours | left


def state_dict_to_transformers(
    state_dict: StateDict, config: GPTConfig, family: str | None = None
) -> StateDict:
    """Convert `GPTLMHeadModel`'s state dict to one that transformers loads.

    Args:
        state_dict: state dict of our model.
        config: configuration of our model, from `GPTConfig.from_transformers`.
        family: as in `state_dict_from_transformers`; ValueError if none is given, and the model is
            neither a GPT-2 nor a Llama.
    """
    names = FAMILIES[_family(config) if family is None else family]
    theirs = {f"{names.others['lm_head']}.weight": state_dict["lm_head.weight"]}
    for rule in _rules(config, names, state_dict, there=True):
        weight = state_dict[rule.ours]
        if rule.rows is not None:
            rows = rule.rows.to(weight.device)
            whole = weight.new_zeros(int(rows.max()) + 1, *weight.shape[1:])
            weight = whole.index_copy(0, rows, weight)
        parts = weight.split(rule.sizes) if rule.sizes else (weight,)
        for name, part in zip(rule.theirs, parts, strict=True):
            theirs[name] = (part.t() if rule.transposed else part).contiguous()
    return theirs


def _family(config: GPTConfig) -> str:
    """The family that `config` belongs to, if it is one of two."""
    kind = (config.position, config.norm, config.gated, config.parallel_block)
    if kind == ("learned", "layer_norm", False, False):
        return "gpt2"
    if kind == ("rotary", "rms_norm", True, False):
        return "llama"
    raise ValueError(
        f"config: got position={config.position!r}, norm={config.norm!r}, "
        f"activation={config.activation!r}, parallel_block={config.parallel_block}; want a GPT-2 "
        "(learned positions, layer_norm, plain MLP) or a Llama (rotary positions, rms_norm, gated "
        "MLP) of transformers, or the name of a family"
    )


def _known(name: str, family: str) -> str:
    for other, usual in _SYNONYMS.get(family, ()):
        if name.startswith(other) or (other.startswith(".") and other in name):
            name = name.replace(other, usual, 1)
    return name


def _rules(
    config: GPTConfig, family: Family, given: StateDict, there: bool = False
) -> Iterator[_Rule]:
    """The rules for the weights of a model; of biases those that are `given`, ours if `there`."""
    pairs = [(ours, theirs.split()) for ours, theirs in family.others.items()]
    for number in range(config.num_layers):
        before = f"{family.layers}{number}."
        pairs += [
            (f"transformer.layers.{number}.{ours}", [before + name for name in theirs.split()])
            for ours, theirs in family.of_layers.items()
        ]
    for ours, names in pairs:
        if not _exists(ours, config) or not names:
            continue
        for part in ("weight", "bias"):
            parts = tuple(f"{name}.{part}" for name in names)
            source = f"{ours}.{part}" if there else parts[0]
            if (part == "bias" and source not in given) or f"{ours}.{part}" == "lm_head.weight":
                continue
            yield _Rule(
                f"{ours}.{part}",
                parts,
                _sizes(config, len(parts)),
                _rows(ours, config, family),
                family.conv1d and part == "weight" and ".layers." in ours and ".norm" not in ours,
            )


def _exists(ours: str, config: GPTConfig) -> bool:
    return {
        "transformer.embeddings.position_embeddings": config.position == "learned",
        "transformer.embeddings.project_in": config.word_embed_proj_dim is not None,
        "project_out": config.word_embed_proj_dim is not None,
        "transformer.ln_f": config.prenorm,
    }.get(ours, not (config.tied_norm and ours.endswith("norm2")))


def _sizes(config: GPTConfig, parts: int) -> tuple[int, ...]:
    """Output features of queries, keys and values, or of the halves of a gated MLP."""
    if parts == 3:
        heads = (config.num_heads, config.kv_heads, config.kv_heads)
        return tuple(count * config.head_size for count in heads)
    return 2 * (config.mlp_size,) if parts == 2 else ()


def _rows(ours: str, config: GPTConfig, family: Family) -> Tensor | None:
    if ours.endswith("mixer.Wqkv") and family.projected is not None:
        return family.projected(config)
    if family.layers.startswith(_OPT) and "position_embeddings" in ours:
        return torch.arange(config.max_position_embeddings) + 2  # after those of padding
    return None


def remap(state_dict: StateDict, config: Any, *, family: str) -> StateDict:
    """`state_dict_from_transformers` for a GPT2Config with flash-attn's attributes, with words
    padded as it says; the names in `flash_attn.models` are this function with their family.
    """
    own = GPTConfig.from_transformers(config)
    return padded(state_dict_from_transformers(state_dict, own, family, strict=False), own)


def padded(state_dict: StateDict, config: GPTConfig) -> StateDict:
    """Add rows of zeros to words and head, up to the vocabulary of `config`."""
    for name in (_WORDS, "lm_head.weight", "lm_head.bias"):
        if name in state_dict:
            missing = config.vocab_size - state_dict[name].shape[0]
            sides = (0, missing) if state_dict[name].dim() == 1 else (0, 0, 0, missing)
            state_dict[name] = F.pad(state_dict[name], sides)
    return state_dict


def remap_back(state_dict: StateDict, config: Any, *, family: str) -> StateDict:
    """The inverse of `remap`, with words padded as the config says."""
    own = GPTConfig.from_transformers(config)
    return state_dict_to_transformers(state_dict, own, family)


remap_state_dict_hf_gpt2 = partial(remap, family="gpt2")
remap_state_dict_hf_llama = partial(remap, family="llama")
remap_state_dict_meta_llama = partial(remap, family="llama, Meta's files")
remap_state_dict_hf_opt = partial(remap, family="opt")
remap_state_dict_hf_falcon = partial(remap, family="falcon")
remap_state_dict_hf_gptj = partial(remap, family="gptj")
remap_state_dict_hf_gpt_neox = partial(remap, family="gpt_neox")
remap_state_dict_hf_bigcode = partial(remap, family="gpt_bigcode")
remap_state_dict_hf_btlm = partial(remap, family="btlm")
remap_state_dict_hf_baichuan = partial(remap, family="baichuan")
remap_state_dict_megatron = partial(remap, family="megatron")
inv_remap_state_dict_hf_llama = partial(remap_back, family="llama")
inv_remap_state_dict_hf_bigcode = partial(remap_back, family="gpt_bigcode")
