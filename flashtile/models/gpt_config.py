"""The configuration of a GPT: one frozen dataclass for GPT-2, Llama and models in between."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from . import families
from .transformers_config import GATED, gpt2_fields, llama_fields

POSITIONS = ("learned", "rotary", "alibi", "none")
NORMS = ("layer_norm", "rms_norm")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "sqrelu", *GATED)
DROPOUTS = ("embedding_dropout", "residual_dropout", "attention_dropout")
# Numbers that need not be positive; all others are, if they are given.
ANY_SIGN = ("softcap", "embedding_multiplier", "output_multiplier", *DROPOUTS)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and choices of a `GPTModel`; the defaults are GPT-2 small without dropout. ValueError
    or TypeError names a field that is out of range.

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
        GPT-BigCode, BTLM or Baichuan. A GPTConfig is returned as it is.

        A GPT2Config may have flash-attn's additional attributes, such as `rotary_emb_fraction`,
        `n_head_kv`, `rms_norm` and `parallel_block`. ValueError names another model, or an option
        that `GPTConfig` lacks.
        """
        if isinstance(config, GPTConfig):
            return config
        model_type = getattr(config, "model_type", type(config).__name__)
        if model_type in ("llama", "mistral"):
            return cls.llama(**llama_fields(config))
        if model_type in families.CONVERSIONS:
            config = families.CONVERSIONS[model_type](config)
        elif model_type != "gpt2":
            wanted = ", ".join(("gpt2", "llama", "mistral", *families.CONVERSIONS))
            raise ValueError(f"config: got model_type {model_type!r}, want one of {wanted}")
        return cls(**gpt2_fields(config))

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
            is_number = kind.startswith(("int", "float")) and value is not None
            if is_number and field.name not in ANY_SIGN and not value > 0:
                raise ValueError(f"{field.name}: must be positive, got {value}")
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
        for name in DROPOUTS:
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
