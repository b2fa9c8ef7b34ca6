"""Run Hugging Face transformers models with flashtile.

::

    from flashtile.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())

Everything that models use is supported without approximation: padding on either side, packed
sequences, sliding windows, chunks, softcap, sinks, additive position biases with their gradient,
grouped heads, value head dims that differ from the key's, dropout, custom 4-D masks, key-value
caches, continuous batching. GPT-J, GPT-Neo, Falcon and Bark have their own attention layers, which
cannot be replaced.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from ..current_layout import get as current_layout
from ..masks import Folded
from .transformers_version import requirement, too_old

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.utils import logging

    from . import transformers_layouts
    from .transformers_attend import Call, attend, attend_folded
    from .transformers_loader import LoaderChangedError, patch_loader
    from .transformers_masks import Pattern, chosen_keys
except ImportError as error:
    raise requirement() or error from error

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Keywords that models pass to every layer and that do not affect attention: they concern the loss,
# the outputs or the cache; `seq_idx` is for layers other than attention.
_HARMLESS = {
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "return_dict",
    "seq_idx",
    "use_cache",
}
_KNOWN = {*_HARMLESS, *_LENGTHS, "position_ids", "deterministic"}

_lock = threading.Lock()
_registered: set[str] = set()
_logger = logging.get_logger(__name__)


def register(name: str = "flashtile") -> str:
    """Make ``attn_implementation=name`` mean flashtile in every transformers model.

    For a name that contains "flash", `register` patches a private function of transformers. Such a
    name enables what transformers reserves for flash attention: packing images without padding, and
    continuous batching. Everything else uses public functions, and also works without "flash" in
    the name, or when that private function has changed. Models with chunked attention (Llama 4)
    need a name without "flash", because transformers rejects the others. A second call has no
    further effect.

    A model that is given a bool mask for single scores gets a forward pre-hook, by which its layers
    know that they may share what they read from the mask: see `renew_in_later_steps`.

    Args:
        name: the name of the implementation; must not be that of another implementation.

    Returns:
        The name to pass to transformers: `name`, or, if transformers' private function has changed,
        `name` with "Flash" instead of "flash", with a warning.

    Raises:
        TransformersRequired: transformers is older than 5.17; a subclass of ImportError.
        ValueError: `name` is taken, or contains one of ``| / : @``.
    """
    problem = too_old(transformers.__version__)
    if problem is not None:
        raise problem
    if not name or any(character in name for character in "|/:@"):
        raise ValueError(f"name: got {name!r}, want a plain word")
    with _lock:
        return _register(name)


def _register(name: str) -> str:
    if name in _registered:
        return name
    if name in ("eager", *AttentionInterface().valid_keys()):
        raise ValueError(
            f"name: got {name!r}, which is another attention implementation; want a free name"
        )
    if "flash" in name:
        try:
            patch_loader(name)
        except LoaderChangedError as change:
            public = name.replace("flash", "Flash")
            warnings.warn(
                f"transformers {transformers.__version__} looks for flash attention in a new way "
                f"({change}): pass attn_implementation={public!r}, the return value of register(). "
                "Attention is still exact; continuous batching is not available.",
                stacklevel=3,
            )
            return _register(public)
        _register_paged(name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, transformers_layouts.attention_mask)
    _registered.add(name)
    return name


def _register_paged(name: str) -> None:
    """Register the second name, which transformers up to 5.22 uses for continuous batching."""
    try:
        from transformers.integrations.flash_paged import paged_attention_forward
    except ImportError:  # later versions use the plain name
        return
    AttentionInterface.register(f"paged|{name}", paged_attention_forward)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    rollouts: Folded | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that `register` passes to transformers.

    Args:
        module: the attention layer. Its `is_causal` is used if neither the argument nor a mask
            determines causality and the layer is not defined in transformers.
        query: (batch, heads, seq_q, head_dim).
        key, value: (batch, kv_heads, seq_k, head_dim or value_head_dim).
        attention_mask: the result of `transformers_masks.attention_mask`; (batch, keys) bool or
            integers, 0 at padding; a mask that broadcasts to (batch, heads, seq_q, seq_k), bool or
            additive; or FlexAttention's BlockMask.
        dropout, scaling, softcap: `dropout_p`, `softmax_scale` and `softcap` of
            `flashtile.attention`.
        sliding_window: number of tokens that a query sees, including itself.
        is_causal: whether attention is causal, if the mask does not determine it.
        s_aux: (heads,), `sink` of `flashtile.attention`.
        position_bias: broadcasts to (batch, heads, seq_q, seq_k), added to the scores.
        cache: the paged cache of continuous batching.
        sinks: (batch, heads, seq_q, 1), a sink for every query.
        indices: (batch, seq_q, chosen), the indices of the keys that a query may see.
        block_indices: (batch, groups of heads, seq_q, chosen), the indices of the blocks of
            ``module.indexer.block_size`` keys that a query may see; -1 means no block.
        rollouts: the result of `flashtile.fold`, whose tokens and positions are the model's only
            row; its mask replaces the model's, except for a window, which counts along each
            rollout.
        options: `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` of packed
            sequences, `position_ids`, `deterministic`; keywords that do not affect attention; and,
            with a `cache`, keywords that transformers passes on to its own functions.

    Returns:
        (batch, seq_q, heads, value_head_dim), and None instead of the probabilities, which are
        never stored.

    Raises:
        TypeError: a keyword is unknown, and the eager attention of the same layer does not ignore
            it.
        ValueError: `indices` or `block_indices` have a wrong shape.
        NotImplementedError: an option is not supported together with `cache` or packed sequences.
    """
    if options.get("output_attentions"):
        _logger.warning_once(
            "output_attentions: flashtile stores no attention probabilities; use "
            "attn_implementation='eager' to get them"
        )
    if cache is not None:
        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        options |= {"softcap": softcap, "is_causal": is_causal, "s_aux": s_aux, "cache": cache}
        if any(x is not None for x in (position_bias, sinks, indices, block_indices, rollouts)):
            raise NotImplementedError(
                "cache: continuous batching has no position_bias, sinks, indices, block_indices or "
                "rollouts"
            )
        return _continuous_batching(module, query, key, value, **options)
    for name in options.keys() - _KNOWN:
        if options[name] is not None and not _eager_ignores(module, name):
            raise TypeError(
                f"{name}: got {type(options[name]).__name__}, but flashtile's attention_forward "
                "has no such keyword; use attn_implementation='eager' for this model"
            )
    causal = _says_causal(module) if is_causal is None else is_causal
    lengths = _lengths(query, key, *[options.get(name) for name in _LENGTHS])
    if attention_mask is None and lengths is None and _is_transformers(module):
        sliding_window = None  # as in eager attention: without a mask every key is visible
    # Transformers counts the query itself as part of the window.
    side = -1 if sliding_window is None else sliding_window - 1
    q, k, v = _inputs(query, key, value)
    pattern = Pattern(causal=bool(causal), window_size=(side, side))
    position_ids = options.get("position_ids")
    given = {
        "softmax_scale": scaling,
        "softcap": softcap or None,
        "sink": s_aux,
        "dropout_p": dropout or None,
        # It concerns the backward; reading the environment takes as long as a launch.
        "deterministic": torch.is_grad_enabled() and _deterministic(options.get("deterministic")),
    }
    numbers = {name: x for name, x in given.items() if x is not None and x is not False}
    layout = current_layout()
    if layout is not None:
        refused: dict[str, Any] = {
            "position_bias": position_bias,
            "sinks": sinks,
            "indices": indices,
        }
        refused |= {"block_indices": block_indices, "cu_seq_lens_q": options.get("cu_seq_lens_q")}
        refused |= {"rollouts": rollouts}
        out = transformers_layouts.attend(
            layout, module, (q, k, v), attention_mask, pattern, numbers, position_ids, refused
        )
        return out, None
    transformers_layouts.refuse_forgotten_layout(position_ids)
    chosen = chosen_keys(module, q, k, indices, block_indices)
    call = Call(q, k, v, pattern, position_bias, chosen, sinks, numbers)
    if rollouts is not None:
        return attend_folded(call, attention_mask, lengths, position_ids, rollouts), None
    return attend(call, attention_mask, lengths, position_ids), None


def _lengths(
    query: Tensor, key: Tensor, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any
) -> tuple[Tensor, Tensor, Any, Any] | None:
    """The lengths of packed sequences, if given; the longest is at most the number of tokens."""
    if cu_q is cu_k is max_q is max_k is None:
        return None
    for name, x in (("cu_seq_lens_q", cu_q), ("cu_seq_lens_k", cu_k)):
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{name}: got {x!r} with others of {', '.join(_LENGTHS)}, want the cumulative "
                "lengths of the packed sequences, (sequences + 1,)"
            )
    max_q, max_k = (
        x.shape[0] * x.shape[2] if longest is None else longest
        for x, longest in ((query, max_q), (key, max_k))
    )
    return cu_q, cu_k, max_q, max_k


def _eager_ignores(module: torch.nn.Module, keyword: str) -> bool:
    """Whether the eager attention function in the layer's module has no such keyword.

    Transformers passes every keyword of a model's call to every layer, such as sizes of images.
    """
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    return eager is not None and keyword not in inspect.signature(eager).parameters


def _says_causal(module: torch.nn.Module) -> bool:
    """Whether a layer that gets no mask is causal.

    A causal layer that is defined in transformers always gets a mask. Without one it sees every
    key, as in eager attention, whatever its `is_causal` says (BridgeTower's image stream). Layers
    defined elsewhere may rely on their `is_causal`, as with flash attention.
    """
    if _is_transformers(module):
        return False
    return bool(getattr(module, "is_causal", True))


def _is_transformers(module: torch.nn.Module) -> bool:
    """Whether the layer is defined in transformers."""
    return type(module).__module__.startswith("transformers.")


def _continuous_batching(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Attention over transformers' paged cache.

    Transformers updates the cache, then calls the functions of `transformers_loader`. The lengths
    that it passes replace the mask.
    """
    from transformers.integrations.flash_attention import flash_attention_forward

    return flash_attention_forward(module, query, key, value, attention_mask=None, **options)


def _inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in flashtile's layout, with equal dtypes and batch sizes."""
    # With adapters, the norms of queries and keys can be in float32 while the values are in the
    # model's dtype.
    if not query.dtype == key.dtype == value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    if query.shape[0] != key.shape[0]:  # learned queries that the batch shares
        query = query.expand(key.shape[0], -1, -1, -1)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _deterministic(asked: bool | None) -> bool:
    """The argument or, as in transformers' flash attention, the environment variable."""
    return os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1" if asked is None else asked
