"""GPT: decoder-only language models such as GPT-2 and Llama.

The parameters have flash-attn's names (``flash_attn.models.gpt``), so state dicts can be exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import current_layout
from ..layers.activations import squared_relu
from ..layers.tensor_parallel import Group, all_gather_raw, linears, shared, sync_shared_params
from ..losses.cross_entropy import CrossEntropyLoss, linear_cross_entropy
from ..modules.attend import Attend, flash_attend
from ..modules.block import Block, ParallelBlock, norm_of
from ..modules.embedding import GPT2Embeddings, ParallelGPT2Embeddings
from ..modules.inference import InferenceParams
from ..modules.mha import MHA, ParallelMHA
from ..modules.mlp import GatedMlp, Mlp, ParallelGatedMlp, ParallelMLP
from . import decoding, generation, hugging_face
from .gpt_config import GPTConfig as GPTConfig
from .shards import shard_state_dict_tp

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sqrelu": squared_relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "glu": F.sigmoid,
}
_NORMS: dict[str, type[nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}


class CausalLMOutput(NamedTuple):
    """The result of a language model without targets, as in flash_attn."""

    logits: Tensor


class CausalLMLoss(NamedTuple):
    """The result of a language model with targets."""

    loss: Tensor


class GPTPreTrainedModel(nn.Module):
    """What the models have in common: a `config`, and `from_pretrained`."""

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        super().__init__()
        self.config = GPTConfig.from_transformers(config)

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        config: Any,
        *args: Any,
        strict: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        world_size: int = 1,
        rank: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Load a model of Hugging Face with transformers, as a `GPTLMHeadModel`.

        Args:
            model_name: name or folder of a model whose weights fit the config, else ValueError.
            config: `GPTConfig`, or a config of transformers, perhaps with flash-attn's additional
                attributes; its vocabulary may be padded.
            args, kwargs, device, dtype: of the constructor.
            strict: raise an error for weights that are missing or have no parameter.
            world_size, rank: number of processes that share the model, and this one's; with a
                `process_group` in `args` or `kwargs`.
        """
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(model_name)
        model = cls(config, *args, device=device, dtype=dtype, **kwargs)
        family = theirs.config.model_type
        state = hugging_face.remap(theirs.state_dict(), model.config, family=family)
        if world_size > 1:
            state = shard_state_dict_tp(state, model.config, world_size, rank)
        model.load_state_dict(state, strict=strict)
        return model


class GPTModel(GPTPreTrainedModel):
    """Embeddings, blocks and a final norm: maps tokens to features.

    Args:
        config: `GPTConfig`, or a config of transformers that `GPTConfig.from_transformers` reads.
        attend: function that computes self-attention; flashtile by default.
        activation_checkpointing: in training mode, recompute each block in the backward instead of
            keeping its activations. May be changed at any time.
        process_group: of torch.distributed. Each process has some heads, some features of the MLPs
            and some words, and with the config's `sequence_parallel` some tokens between layers.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        config: Any,
        process_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attend: Attend = flash_attend,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(config)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        config = self.config
        self.activation_checkpointing = activation_checkpointing
        self.process_group = process_group
        positions = config.max_position_embeddings if config.position == "learned" else 0
        sizes = (config.hidden_size, config.vocab_size, positions)
        if process_group is None:
            width = config.word_embed_proj_dim
            self.embeddings: Any = GPT2Embeddings(*sizes, word_embed_proj_dim=width, **where)
        else:
            shares: dict[str, Any] = {"sequence_parallel": config.sequence_parallel, **where}
            self.embeddings = ParallelGPT2Embeddings(*sizes, process_group, **shares)
        self.layers = nn.ModuleList(
            create_block(config, layer_idx, process_group, attend=attend, **where)
            for layer_idx in range(config.num_layers)
        )
        if config.prenorm:
            self.drop_f = nn.Dropout(config.residual_dropout)
            self.ln_f: Any = _NORMS[config.norm](config.hidden_size, eps=config.norm_eps, **where)
            marks = {"_shared_params": True, "_sequence_parallel": config.sequence_parallel}
            for parameter in self.ln_f.parameters() if process_group is not None else ():
                vars(parameter).update(marks)
        self.apply(partial(_initialize, config=config))
        # GPT-2 scales these weights, because each layer adds two branches to the residual stream,
        # whose variance would grow with the number of layers.
        branch_std = _linear_std(config) / math.sqrt(2 * config.num_layers)
        layers: list[Any] = list(self.layers)
        for layer in layers:
            layer.mixer.rotary_emb = layers[0].mixer.rotary_emb  # one table of angles for all
            nn.init.normal_(layer.mixer.out_proj.weight, std=branch_std)
            nn.init.normal_(layer.mlp.fc2.weight, std=branch_std)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Copy the first process's values of the parameters that all processes have."""
        if self.process_group is not None:
            sync_shared_params(self, self.process_group)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: InferenceParams | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Features of each token, (batch, seq, hidden_size) or (total, hidden_size).

        Arguments are those of `GPTLMHeadModel.forward`.
        """
        _check_tokens(input_ids, cu_seqlens, max_seqlen)
        if position_ids is None:
            position_ids = self._positions(input_ids, cu_seqlens, max_seqlen, inference_params)
        shares_tokens = self.process_group is not None and self.config.sequence_parallel
        together = {"combine_batch_seqlen_dim": True} if shares_tokens else {}
        embedded = self.embeddings(input_ids, position_ids, **together)
        # The branches that are not yet added, and the residual stream.
        state: tuple[Tensor, ...] = (embedded * self.config.embedding_multiplier,)
        arguments = {
            "seqlen": input_ids.shape[1] if shares_tokens else None,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
            "inference_params": inference_params,
        }
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        layers: list[Any] = list(self.layers)
        for layer in layers:
            if recompute:
                if self.config.prenorm and not (layer.dropout1.p or layer.dropout2.p):
                    state = (_sum(state),)  # one tensor to keep instead of two or three
                apply = partial(current_layout.kept(layer), mixer_kwargs=arguments)
                result: Any = checkpoint(apply, *state, use_reentrant=False)
            else:
                result = layer(*state, mixer_kwargs=arguments)
            state = result if self.config.prenorm else (result,)
        if not self.config.prenorm:
            return state[0]
        *branches, stream = state
        stream = _sum((*map(self.drop_f, branches), stream))
        return norm_of(self.ln_f, stream)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> dict[int, Tensor]:
        """Each layer's memory, for `InferenceParams.key_value_memory_dict`."""
        layers: list[Any] = list(self.layers)
        sizes = (batch_size, max_seqlen, dtype)
        return {i: layer.allocate_inference_cache(*sizes) for i, layer in enumerate(layers)}

    def _positions(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        inference_params: InferenceParams | None,
    ) -> Tensor | None:
        """Positions for the learned embeddings; None if they are 0, 1, ... or not needed."""
        if self.config.position != "learned":
            return None
        limit, longest = self.config.max_position_embeddings, max_seqlen
        layout = current_layout.get()
        if layout is not None:
            longest = layout.longest
        elif inference_params is not None:
            longest = inference_params.max_seqlen
        if longest is not None and longest > limit:
            raise ValueError(f"max_seqlen: {longest} exceeds max_position_embeddings {limit}")
        if layout is not None:
            return layout.positions_on(input_ids.device)
        if inference_params is not None:
            return inference_params.positions(input_ids.shape[1], input_ids.device)
        if cu_seqlens is None or longest is None:
            return None
        row = torch.arange(input_ids.shape[0], device=input_ids.device)
        document = torch.searchsorted(cu_seqlens, row, right=True) - 1
        # Clamped, because wrong lengths must not read past the table.
        return (row - cu_seqlens[document]).clamp(0, longest - 1)


class GPTLMHeadModel(GPTPreTrainedModel, decoding.GenerationMixin):
    """`GPTModel`, which has the same arguments, and a linear layer from features to the logits of
    the next token.
    """

    def __init__(
        self,
        config: Any,
        process_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attend: Attend = flash_attend,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(config)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        config = self.config
        options = {"attend": attend, "activation_checkpointing": activation_checkpointing, **where}
        self.transformer = GPTModel(config, process_group, **options)
        self.process_group = process_group
        width = config.word_embed_proj_dim
        self.project_out: nn.Module | None = None
        if width is not None:
            self.project_out = nn.Linear(config.hidden_size, width, bias=False, **where)
            _initialize(self.project_out, config)
        make, _ = linears(process_group, config.sequence_parallel)
        sizes = (config.hidden_size if width is None else width, config.vocab_size)
        self.lm_head = make(*sizes, bias=config.lm_head_bias, **where)
        _initialize(self.lm_head, config)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the head share the weight of the word embeddings, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.embeddings.word_embeddings.weight
        self.transformer.tie_weights()

    @classmethod
    def from_transformers(cls, model: Any, **keywords: Any) -> GPTLMHeadModel:
        """Convert a model of transformers; the result has a copy of its weights and is in
        evaluation mode.

        Args:
            model: a model for language, whose config `GPTConfig.from_transformers` takes, or else
                raises ValueError.
            keywords: arguments of the constructor; device and dtype are those of `model` by
                default.
        """
        ours = cls(model.config, **{"device": model.device, "dtype": model.dtype, **keywords})
        state = hugging_face.state_dict_from_transformers(
            model.state_dict(), ours.config, model.config.model_type
        )
        ours.load_state_dict(state)
        return ours.eval()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: InferenceParams | None = None,
        num_last_tokens: int = 0,
        *,
        targets: Tensor | None = None,
        loss: CrossEntropyLoss | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> CausalLMOutput | CausalLMLoss:
        """Named tuples: (logits,) of the next token, (..., vocab_size), or with targets (loss,).
        ValueError names arguments that do not fit together.

        Args:
            input_ids: (batch, seq) integers, or (total,) with cu_seqlens. Padding must be on the
                right: a token sees all tokens before it. Inside `with layout:` of
                `flashtile.distributed` this rank's shard; the layout has its positions.
            position_ids: rows of the table of learned positions, broadcasts to the shape of
                input_ids; worked out from the other arguments by default. As in flash_attn, they do
                not affect rotary positions and ALiBi.
            targets: input_ids' shape, int64: the token that follows each token, or the loss's
                ignore_index. With targets, the logits of all tokens are never in memory at once.
            loss: the loss function; ``CrossEntropyLoss()`` by default.
            cu_seqlens: (documents + 1,) int32, cumulative lengths of packed documents, 0 first. A
                token sees only its own document, and positions count from the document's start.
            max_seqlen: upper bound of the documents' lengths.
            inference_params: keys and values of earlier tokens, to which those of input_ids are
                appended. No gradient is recorded through attention.
            num_last_tokens: compute logits only for this many last tokens of each row; 0 for all.
        """
        hidden = self.transformer(
            input_ids, position_ids, inference_params, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
        )
        if targets is not None:
            if self.process_group is not None:
                raise NotImplementedError(
                    "targets: want None with a process_group; give the logits to a "
                    "CrossEntropyLoss with this process_group"
                )
            if current_layout.get() is not None and (loss is None or loss.reduction == "mean"):
                raise ValueError(
                    "loss: got the mean over this rank's tokens inside `with layout:`; want "
                    "reduction='sum', divided by the number of targets of all ranks"
                )
            hidden, weight = self._before_head(hidden)
            bias = self.lm_head.bias
            return CausalLMLoss(linear_cross_entropy(hidden, weight, targets, loss, bias=bias))
        if num_last_tokens > 0:
            if current_layout.get() is not None:
                raise NotImplementedError("num_last_tokens: not supported inside `with layout:`")
            hidden = hidden[..., -num_last_tokens:, :]
        return CausalLMOutput(self.logits(hidden, inference_params is not None))

    def logits(self, hidden: Tensor, is_inference: bool) -> Tensor:
        """Logits (..., vocab_size) of what the transformer returns, (..., hidden_size); with a
        process group those of this process's words, but in inference those of all.
        """
        hidden, weight = self._before_head(hidden)
        if not self.config.norm_head:
            logits = self.lm_head(hidden)
        else:
            if self.process_group is not None:
                hidden = shared(hidden, self.process_group, self.config.sequence_parallel)
            logits = F.linear(hidden, weight, self.lm_head.bias)
        if self.process_group is not None and is_inference:
            parts, _ = all_gather_raw(logits, self.process_group)
            logits = torch.cat(parts.split(logits.shape[0]), dim=-1)
        return logits

    def _before_head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the head multiplies: the projected and scaled features, and its weight."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        scale = self.config.output_multiplier * self.config.width_scale
        weight = self.lm_head.weight
        if self.config.norm_head:
            weight = F.normalize(weight)
        return hidden if scale == 1.0 else hidden * scale, weight

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Tensor]:
        """`GPTModel.allocate_inference_cache`."""
        return self.transformer.allocate_inference_cache(batch_size, max_seqlen, dtype, **kwargs)

    def generate(self, input_ids: Tensor, max_length: int, *args: Any, **options: Any) -> Any:
        """Continue prompts; see `flashtile.models.generation.generate`. Options that only
        flash_attn has, such as return_dict_in_generate, are those of `decoding.GenerationMixin`.
        """
        if options.keys() & decoding.OPTIONS:
            return super().generate(input_ids, max_length, *args, **options)
        options |= dict(zip(("top_k", "top_p", "temperature"), args, strict=False))
        return generation.generate(self, input_ids, max_length, **options)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Number of parameters; without `embeddings` of the weights that a token is multiplied by,
        which include a table that is tied to the head.
        """
        total = sum(parameter.numel() for parameter in self.parameters())
        if embeddings:
            return total
        tables = self.transformer.embeddings
        total -= 0 if self.config.tie_word_embeddings else tables.word_embeddings.weight.numel()
        if self.config.position == "learned":
            total -= tables.position_embeddings.weight.numel()
        return total

    def flops_per_token(self, seqlen: int) -> float:
        """Floating-point operations per token of a training step, forward and backward, on
        sequences of `seqlen` tokens.

        A token needs 6 for each weight that it is multiplied by and, in each layer, 12 for each
        pair of a feature of the query heads and a visible key, on average (Chowdhery et al. 2022,
        "PaLM", appendix B, which counts masked keys too).
        """
        config = self.config
        left = config.window_size[0]
        most = seqlen if left < 0 else min(seqlen, left + 1)  # keys that a token sees
        seen = most * (most + 1) / 2 + (seqlen - most) * most  # summed over all tokens
        attention = 12.0 * config.num_layers * config.num_heads * config.head_size * seen / seqlen
        return 6.0 * self.num_parameters(embeddings=False) + attention


def create_mixer_cls(
    config: Any,
    layer_idx: int | None = None,
    process_group: Group | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    attend: Attend = flash_attend,
) -> partial[Any]:
    """The function that makes a layer's attention from `config.hidden_size`; arguments and errors
    of `create_block`.
    """
    config = GPTConfig.from_transformers(config)
    scale = config.softmax_scale
    if config.scale_attn_by_inverse_layer_idx:
        if layer_idx is None:
            raise ValueError("layer_idx: needed with scale_attn_by_inverse_layer_idx, got None")
        scale = (config.head_size**-0.5 if scale is None else scale) / (layer_idx + 1)
    if process_group is not None and config.dwconv:
        raise NotImplementedError("process_group: want None with dwconv")
    return partial(
        MHA if process_group is None else ParallelMHA,
        num_heads=config.num_heads,
        num_heads_kv=config.kv_heads,
        qkv_proj_bias=config.attention_bias,
        out_proj_bias=config.attention_bias,
        dropout=config.attention_dropout,
        softmax_scale=scale,
        causal=True,
        layer_idx=layer_idx,
        dwconv=config.dwconv,
        rotary_emb_dim=config.rotary_dim,
        rotary_emb_base=config.rotary_base,
        rotary_emb_interleaved=config.rotary_interleaved,
        rotary_emb_scale_base=config.rotary_scale_base,
        use_alibi=config.position == "alibi",
        window_size=config.window_size,
        softcap=config.softcap,
        head_dim=config.head_size,
        attend=attend,
        process_group=process_group,
        sequence_parallel=config.sequence_parallel,
        device=device,
        dtype=dtype,
    )


def create_mlp_cls(
    config: Any,
    layer_idx: int | None = None,
    process_group: Group | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> partial[Any]:
    """The function that makes a layer's MLP from `config.hidden_size`; arguments and errors of
    `create_block`.
    """
    config = GPTConfig.from_transformers(config)
    kinds: Any = ((Mlp, ParallelMLP), (GatedMlp, ParallelGatedMlp))[config.gated]
    options = {"multiple_of": 1} if config.gated else {}
    return partial(
        kinds[process_group is not None],
        hidden_features=config.mlp_size,
        activation=_ACTIVATIONS[config.activation],
        bias1=config.mlp_bias,
        bias2=config.mlp_bias,
        process_group=process_group,
        sequence_parallel=config.sequence_parallel,
        device=device,
        dtype=dtype,
        **options,
    )


def create_block(
    config: Any,
    layer_idx: int | None = None,
    process_group: Group | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    attend: Attend = flash_attend,
) -> Block | ParallelBlock:
    """One layer of a `GPTModel`; ValueError if `config` does not fit.

    Args:
        config, process_group, device, dtype, attend: as in `GPTModel`.
        layer_idx: index of the layer. The first dropout of layer 0 is that of the embeddings.
    """
    config = GPTConfig.from_transformers(config)
    kind = {"tied_norm": config.tied_norm} if config.parallel_block else {"prenorm": config.prenorm}
    block: Any = (ParallelBlock if config.parallel_block else Block)(
        config.hidden_size,
        create_mixer_cls(config, layer_idx, process_group, device, dtype, attend=attend),
        create_mlp_cls(config, layer_idx, process_group, device, dtype),
        partial(_NORMS[config.norm], eps=config.norm_eps, device=device, dtype=dtype),
        resid_dropout1=config.embedding_dropout if layer_idx == 0 else config.residual_dropout,
        resid_dropout2=config.residual_dropout,
        residual_in_fp32=config.residual_in_fp32,
        sequence_parallel=config.sequence_parallel and process_group is not None,
        mark_shared_params=process_group is not None,
        **kind,
    )
    block.layer_idx = layer_idx
    return block


def _sum(terms: tuple[Tensor, ...]) -> Tensor:
    """Branches and the stream, which is last, added in the order of `ParallelBlock`."""
    *branches, stream = terms
    return reduce(torch.add, branches, stream)


def _linear_std(config: GPTConfig) -> float:
    return config.initializer_range * math.sqrt(config.width_scale)


def _initialize(module: nn.Module, config: GPTConfig) -> None:
    """Initialise a layer as GPT-2 does, and by muP's rule."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=config.initializer_range)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=_linear_std(config))
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _check_tokens(input_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ValueError("cu_seqlens, max_seqlen: pass both or none")
    layout = current_layout.get()
    if layout is not None:
        rows = (layout.sequences,) if layout.sequences else ()
        if tuple(input_ids.shape) != (*rows, layout.local_tokens):
            raise ValueError(
                f"input_ids: got shape {tuple(input_ids.shape)}, want "
                f"{(*rows, layout.local_tokens)} in this layout; see Layout.shard"
            )
        return
    dims, wanted = (2, "(batch, seq)") if cu_seqlens is None else (1, "(total,) with cu_seqlens")
    if input_ids.dim() != dims:
        raise ValueError(f"input_ids: expected {wanted}, got shape {tuple(input_ids.shape)}")
