"""Attention of transformers models inside `with layout:`, over all ranks of context parallelism.

A model sees only this rank's tokens and makes its masks for them. What counts here is the rule of a
mask (causal, window, chunk); which tokens a query may see follows from the rule and the layout.
Whatever the layout cannot express raises an error, on all ranks: nothing falls back to attention
over this rank's tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from .. import current_layout
from ..current_layout import Layout
from ..lru import memoised
from . import transformers_masks
from .transformers_masks import Pattern, attach_pattern, attached_pattern, is_whole, once, recognise

Mask = Tensor | None

# Fields of configurations that say what each layer is; layers of these kinds are right on a shard.
_KINDS = ("layer_types", "layers_block_type")
_OF_TOKENS = {
    *("full_attention", "sliding_attention", "chunked_attention", "attention"),
    *("mlp", "moe", "dense", "sparse"),
}
_COMPUTE_WITH_MASKS = transformers_masks.READERS_OF_MASKS | transformers_masks.ADDERS_OF_MASKS


def attention_mask(*sizes: Any, **options: Any) -> Mask:
    """`transformers_masks.attention_mask`; inside `with layout:` only the rule of the mask.

    Raises:
        NotImplementedError: the layout cannot honour the mask.
        ValueError: the positions of the tokens contradict the layout.
    """
    layout = current_layout.get()
    if layout is None:
        return transformers_masks.attention_mask(*sizes, **options)
    return _rule(layout, *sizes, **options)


@torch.compiler.disable  # a graph would keep the answers for one layout
def _rule(
    layout: Layout,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Mask = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    **options: Any,
) -> Tensor:
    pattern = recognise(mask_function)

    def check() -> None:
        if isinstance(q_offset, Tensor) or q_offset or kv_offset or q_length != kv_length:
            raise NotImplementedError(
                f"past_key_values: got {q_length} queries and {kv_length} keys, want a model "
                "without cached tokens inside `with layout:`"
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            raise NotImplementedError(
                "attention_mask: got padding inside `with layout:`; pack the sequences as documents"
            )
        if pattern is None:
            raise NotImplementedError(
                "attention_mask: the model makes a mask that `with layout:` does not support; want "
                "causal, a window, chunks or documents"
            )
        allowed = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
        model_type = transformers_masks.model_type_of(options.get("config"))
        is_read = not allowed and pattern.segments is None
        if is_read or model_type in _COMPUTE_WITH_MASKS:
            raise NotImplementedError(
                "attention_mask: the model computes with its mask itself, which covers only this "
                "rank's tokens inside `with layout:`"
            )
        if pattern.segments is not None:
            steps = layout.positions.diff(prepend=layout.positions[:1] - 1)
            expected = (steps != 1).cumsum(0).to(pattern.segments.device)
            if pattern.segments.shape[-1] != len(expected) or (pattern.segments != expected).any():
                raise ValueError(_CONTRADICTION)

    layout.together("the mask of a transformers model", check)
    assert pattern is not None
    mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=options.get("device"))
    return attach_pattern(mask, pattern._replace(segments=None), whole=True)


_CONTRADICTION = (
    "position_ids: they contradict the layout; pass the model what layout.batch(...) returns"
)


@torch.compiler.disable
def attend(
    layout: Layout,
    module: torch.nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    pattern: Pattern,
    numbers: Mapping[str, Any],
    position_ids: Any,
    refused: Mapping[str, Any],
) -> Tensor:
    """The attention of one layer over all ranks.

    Args:
        module: the layer.
        qkv: (batch, local_tokens, heads, head_dim); packed documents are one row.
        mask: what the model passes to its layer; its rule replaces `pattern`.
        pattern: the rule of a layer without a mask.
        numbers: the other options of `ContextParallel.attention`.
        position_ids: what the model passes to its layer.
        refused: arguments that the layout cannot honour unless they are None.

    Raises:
        NotImplementedError, ValueError: an argument cannot be honoured; all ranks raise it.
    """

    def check() -> None:
        for name, x in refused.items():
            if x is not None:
                raise NotImplementedError(f"{name}: not supported inside `with layout:`")
        if mask is not None and not _is_rule(mask):
            raise NotImplementedError(
                "attention_mask: got a mask with an element for each token or score, which covers "
                "only this rank's tokens inside `with layout:`; want None"
            )
        if not isinstance(position_ids, Tensor):
            raise NotImplementedError(
                "position_ids: the model passes none to its attention, so that nobody can tell "
                "whether they fit the layout"
            )
        objection = _objection_to_layers(module) or _objection_to_file(type(module).__module__)
        if objection is not None:
            raise NotImplementedError(objection)
        if not once(mask, _are_positions_of, position_ids, layout):
            raise ValueError(_CONTRADICTION)
        rows = max(layout.sequences, 1)
        if qkv[0].shape[0] != rows:
            raise ValueError(f"input_ids: got {qkv[0].shape[0]} rows, want {rows} in this layout")

    layout.together("the attention of a transformers model", check)
    pattern = (attached_pattern(mask) if mask is not None else None) or pattern
    q, k, v = qkv if layout.sequences else (x.squeeze(0) for x in qkv)
    out = layout.attend(q, k, v, **pattern.options, **numbers)
    return out if layout.sequences else out.unsqueeze(0)


def _is_rule(mask: Any) -> bool:
    """Whether a mask hides nothing beyond the rule that is attached to it."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    pattern = attached_pattern(mask)
    if pattern is None and mask.is_floating_point():
        return False
    return (pattern is None or pattern.segments is None) and is_whole(mask)


def _objection_to_layers(module: torch.nn.Module) -> str | None:
    """Why a model with this attention layer has others that see only this rank's tokens."""
    config = getattr(module, "config", None)
    kinds = {str(kind) for name in _KINDS for kind in getattr(config, name, None) or ()}
    others = sorted(kinds - _OF_TOKENS)
    if not others:
        return None
    return f"layer_types: {others[0]} would see only this rank's tokens inside `with layout:`"


@memoised(256)
def _objection_to_file(file: str) -> str | None:
    """Why the models in a Python module do not take positions as `Layout.batch` makes them."""
    classes = [x for x in vars(sys.modules[file]).values() if isinstance(x, type)]
    models = [kind for kind in classes if issubclass(kind, PreTrainedModel)]
    if not any("position_ids" in inspect.signature(kind.forward).parameters for kind in models):
        # Such a model passes `position_ids` on to its layers unread.
        return "position_ids: the model does not take them; it counts this rank's tokens from 0"
    if any(hasattr(x, "create_position_ids_from_input_ids") for x in (*classes, sys.modules[file])):
        return "position_ids: the model does not count them from 0 (as RoBERTa does not)"
    return None


def _are_positions_of(position_ids: Tensor, layout: Layout) -> bool:
    want = layout.positions_on(position_ids.device)
    if position_ids.shape[-1] != len(want):
        return False
    return bool((position_ids == want).all())


def refuse_forgotten_layout(position_ids: Any) -> None:
    """Raise if the tokens are those of a layout that is not in force.

    Raises:
        RuntimeError: they are; local attention would be wrong.
    """
    if torch.compiler.is_compiling():  # a graph cannot read the attribute
        return
    if getattr(position_ids, "flashtile_layout", None) is not None:
        raise RuntimeError(
            "with layout: the inputs are those of a layout that is not in force; call the model "
            "inside `with layout:`, and with activation checkpointing backward, too"
        )
