"""The configuration of a GPT: one frozen dataclass for GPT-2, Llama and models in between."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from . import families
from .flash_attn_config import added_fields

POSITIONS = ("learned", "rotary", "alibi", "none")
NORMS = ("layer_norm", "rms_norm")
GATED = ("swiglu", "geglu", "glu")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "sqrelu", *GATED)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and choices of a `GPTModel`; the defaults are GPT-2 small without dropout.

    Args:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: number of features of a token.
        num_layers: number of blocks.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of num_heads; num_heads by default.
        head_dim: ``hidden_size / num_heads`` by default.
        intermediate_size: number of features inside the MLP; ``4 * hidden_size`` by default, for a
            gated MLP ``8 / 3 * hidden_size`` rounded up to a multiple of 128.
        max_position_embeddings: rows of the table of learned positions, which limits the length of
            a sequence. Other kinds of positions have no limit.
        position: "learned", "rotary", "alibi" or "none".
        rotary_base: the longest wavelength is about ``2 pi * rotary_base`` tokens.
        rotary_fraction: share of a head's features that is rotated, in (0, 1].
        rotary_interleaved: pairs of neighbours (GPT-J) instead of halves (GPT-NeoX, Llama).
        rotary_scale_base: of xPos; see `flashtile.layers.rotary.RotaryEmbedding`.
        norm: "layer_norm" or "rms_norm".
        norm_eps: number that the norms add to the variance.
        activation: "gelu", "gelu_tanh" (GPT-2), "relu", "sqrelu" (its square), or gated: "swiglu"
            (Llama), "geglu", "glu" (with a sigmoid).
        attention_bias, mlp_bias: whether the projections have a bias.
        lm_head_bias: whether the head has a bias.
        tie_word_embeddings: the head shares the weight of the word embeddings.
        norm_head: divide the rows of the head's weight by their lengths (Baichuan 2).
        word_embed_proj_dim: features of the word embeddings and of the head's input, if they are
            projected to hidden_size and back (OPT-350m).
        prenorm: norms before the branches, and one after the last layer; if not, after them.
        parallel_block: attention and MLP read the same input (`ParallelBlock`).
        tied_norm: a parallel block has one norm (GPT-J, Falcon-7b).
        dwconv: as in `flashtile.modules.mha.MHA`.
        window_size: (left, right), numbers of keys visible on the two sides of a query; -1 is
            unbounded. Attention is always causal.
        softcap: bound on the attention scores; 0 is off.
        softmax_scale: factor on the attention scores; ``head_dim ** -0.5`` by default.
        scale_attn_by_inverse_layer_idx: divide it by the number of the layer, counted from 1.
        residual_in_fp32: keep the residual stream in float32, whatever the dtype of the weights.
        embedding_dropout, residual_dropout, attention_dropout: dropout rates in [0, 1).
        embedding_multiplier, output_multiplier: factors on the embeddings and on the head's input
            (muP; Yang et al. 2022, https://arxiv.org/abs/2203.03466).
        initializer_range: standard deviation of new weights.
        width_scale: muP's ratio of widths, by whose root new weights of linear layers and by which
            the head's input are multiplied.
        sequence_parallel: with a process group, each process has some rows between the layers.

    Raises:
        ValueError, TypeError: a field is out of range; the message names it.
    """

    vocab_size: int = 50257
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 1024
    position: str = "learned"
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    rotary_interleaved: bool = False
    rotary_scale_base: float | None = None
    norm: str = "layer_norm"
    norm_eps: float = 1e-5
    activation: str = "gelu_tanh"
    attention_bias: bool = True
    mlp_bias: bool = True
    lm_head_bias: bool = False
    tie_word_embeddings: bool = True
    norm_head: bool = False
    word_embed_proj_dim: int | None = None
    prenorm: bool = True
    parallel_block: bool = False
    tied_norm: bool = False
    dwconv: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    scale_attn_by_inverse_layer_idx: bool = False
    residual_in_fp32: bool = False
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_multiplier: float = 1.0
    output_multiplier: float = 1.0
    initializer_range: float = 0.02
    width_scale: float = 1.0
    sequence_parallel: bool = True

    @classmethod
    def gpt2(cls, **changes: Any) -> GPTConfig:
        """GPT-2 small (Radford et al. 2019), with `changes`."""
        return cls(**changes)

    @classmethod
    def llama(cls, **changes: Any) -> GPTConfig:
        """Llama's architecture (Touvron et al. 2023) in the size of GPT-2 small, with `changes`."""
        llama = {
            "position": "rotary",
            "norm": "rms_norm",
            "activation": "swiglu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }
        return cls(**{**llama, **changes})

    @classmethod
    def from_transformers(cls, config: Any) -> GPTConfig:
        """Convert a config of transformers: of GPT-2, Llama, Mistral, OPT, Falcon, GPT-J, GPT-NeoX,
        GPT-BigCode, BTLM or Baichuan.

        A GPT2Config may have flash-attn's additional attributes, such as `rotary_emb_fraction`,
        `n_head_kv`, `rms_norm` and `parallel_block`.

        Raises:
            ValueError: `config` is of another model, or has an option that `GPTConfig` lacks; the
                message names it.
        """
        readers = {"gpt2": _from_gpt2, "llama": _from_llama, "mistral": _from_llama}
        readers |= {family: partial(_from_other, family) for family in families.CONVERSIONS}
        model_type = getattr(config, "model_type", type(config).__name__)
        if model_type not in readers:
            wanted = ", ".join(readers)
            raise ValueError(f"config: got model_type {model_type!r}, want one of {wanted}")
        return cls(**readers[model_type](config))

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Rotated features of a head; 0 is none."""
        return int(self.rotary_fraction * self.head_size) if self.position == "rotary" else 0

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return self.activation in GATED

    @property
    def mlp_size(self) -> int:
        """Features inside the MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-8 * self.hidden_size // 384) * 128 if self.gated else 4 * self.hidden_size

    def __post_init__(self) -> None:
        window: Any = self.window_size
        if isinstance(window, list):  # configuration files have lists, not tuples
            object.__setattr__(self, "window_size", tuple(window))
        self._check_types()
        self._check_ranges()
        self._check_heads()

    def _check_types(self) -> None:
        accepted: dict[str, Any] = {
            "int": int,
            "int | None": (int, type(None)),
            "float": (float, int),
            "float | None": (float, int, type(None)),
            "bool": bool,
            "str": str,
            "tuple[int, int]": tuple,
        }
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if not isinstance(value, accepted[kind]) or (
                isinstance(value, bool) != (kind == "bool")
            ):
                raise TypeError(f"{field.name}: got {value!r}, want {kind}")
        if len(self.window_size) != 2 or not all(
            isinstance(side, int) for side in self.window_size
        ):
            raise TypeError(f"window_size: got {self.window_size}, want two integers")

    def _check_ranges(self) -> None:
        for name, choices in (
            ("position", POSITIONS),
            ("norm", NORMS),
            ("activation", ACTIVATIONS),
        ):
            if getattr(self, name) not in choices:
                wanted = ", ".join(choices)
                raise ValueError(f"{name}: got {getattr(self, name)!r}, want one of {wanted}")
        for name in _POSITIVE:
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be positive, got {getattr(self, name)}")
        for name in ("embedding_dropout", "residual_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: got {getattr(self, name)}, want 0 <= p < 1")
        if self.softcap < 0.0:
            raise ValueError(f"softcap: must not be negative, got {self.softcap}")
        if min(self.window_size) < -1:
            raise ValueError(f"window_size: got {self.window_size}, want -1 or more on each side")

    def _check_heads(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads: {self.num_heads} does not divide hidden_size {self.hidden_size}; "
                "pass head_dim for heads of another size"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads: {self.kv_heads} does not divide num_heads {self.num_heads}"
            )
        if self.tied_norm and not self.parallel_block:
            raise ValueError("tied_norm: got True, want False without parallel_block")
        if not self.prenorm and (self.parallel_block or self.residual_in_fp32):
            raise ValueError("prenorm: got False with parallel_block or residual_in_fp32")
        if self.rotary_fraction > 1.0:
            raise ValueError(f"rotary_fraction: got {self.rotary_fraction}, want at most 1")
        if self.position == "rotary" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"rotary_fraction: {self.rotary_fraction} of head_dim {self.head_size} are "
                f"{self.rotary_dim} features; want a positive even number"
            )


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rotary_base",
    "rotary_fraction",
    "rotary_scale_base",
    "norm_eps",
    "softmax_scale",
    "word_embed_proj_dim",
    "initializer_range",
    "width_scale",
)

# Activations of transformers -> ours, for a plain MLP; `_GATED_ACTIVATIONS` for a gated one.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Activations that only flash-attn accepts in a GPT2Config.
_FLASH_ATTN_ACTIVATIONS = {
    "gelu_fast": "gelu_tanh",
    "gelu_approx": "gelu_tanh",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "glu": "glu",
    "sqrelu": "sqrelu",
}
_GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}


def _from_gpt2(config: Any) -> dict[str, Any]:
    """Fields of a GPT2Config."""
    _want(config, "add_cross_attention", False)
    activation = _lookup("activation_function", config, _ACTIVATIONS | _FLASH_ATTN_ACTIVATIONS)
    return added_fields(config, activation, activation in GATED) | {
        "hidden_size": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "norm_eps": config.layer_norm_epsilon,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "tie_word_embeddings": config.tie_word_embeddings,
        "embedding_dropout": config.embd_pdrop,
        "residual_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
        "initializer_range": config.initializer_range,
    }


def _from_other(family: str, config: Any) -> dict[str, Any]:
    """Fields of a config that a GPT2Config with flash-attn's attributes describes."""
    return _from_gpt2(families.CONVERSIONS[family](config))


def _from_llama(config: Any) -> dict[str, Any]:
    """Fields of a LlamaConfig or MistralConfig."""
    # Before transformers 5 the base was a separate field, and the dictionary was `rope_scaling`.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_parameters: got rope_type {kind!r}, want 'default'")
    window = getattr(config, "sliding_window", None)  # counts the query itself
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None),
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "position": "rotary",
        "rotary_base": rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)),
        "rotary_fraction": rope.get("partial_rotary_factor", 1.0),
        "norm": "rms_norm",
        "norm_eps": config.rms_norm_eps,
        "activation": _lookup("hidden_act", config, _GATED_ACTIVATIONS),
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "tie_word_embeddings": config.tie_word_embeddings,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.initializer_range,
    }


def _lookup(name: str, config: Any, names: dict[str, str]) -> str:
    """flashtile's name of an activation."""
    value = getattr(config, name)
    if value not in names:
        raise ValueError(f"{name}: got {value!r}, want one of {', '.join(names)}")
    return names[value]


def _want(config: Any, name: str, wanted: bool) -> None:
    if getattr(config, name, wanted) != wanted:
        raise ValueError(f"{name}: got {not wanted}; this model supports only {wanted}")
