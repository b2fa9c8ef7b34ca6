"""Convert transformers' attention masks to the cheapest exact form for flashtile.

Transformers describes a mask as a function of four indices, and each attention implementation
converts it to the form it needs. `attention_mask` recognises the functions that transformers itself
composes (causal, sliding window, chunk, packed sequences), so that the usual mask is a 2-D tensor
of padding. Any other function becomes the exact 4-D mask. A model that reads its mask also gets the
4-D mask, which has the 2-D one as an attribute. The attribute is valid until the mask is changed in
place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from .. import current_layout
from ..call.checks import broadcasts_to
from .sdpa import calling_modules

MaskFunction = Callable[..., Any]
T = TypeVar("T")


class Pattern(NamedTuple):
    """A mask without its padding, as arguments of `flashtile.attention`."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    segments: Tensor | None = None  # (batch, keys) integers, one for each packed sequence
    keys: int | None = None  # of the layers, with the cache slots that are not written yet

    @property
    def has_positions(self) -> bool:
        """Whether the mask depends on the distance between a query and a key."""
        return self.window_size != (-1, -1) or self.attention_chunk > 0

    @property
    def is_of_tokens(self) -> bool:
        """Whether the queries are among the tokens that a mask of padding marks, and are left out
        where they are padding. Without positions it may be cross attention, whose keys are other
        tokens, and all queries are kept.
        """
        return self.causal or self.has_positions

    def hides(self, keys: int) -> bool:
        """Whether a window or chunk hides some keys of a sequence of length `keys`."""
        sides = [side for side in self.window_size if side >= 0]
        return any(side < keys - 1 for side in sides) or 0 < self.attention_chunk < keys

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not the default ones."""
        return {
            name: x
            for name, x, default in (
                ("causal", self.causal, False),
                ("window_size", self.window_size, (-1, -1)),
                ("attention_chunk", self.attention_chunk, 0),
            )
            if x != default
        }


def recognise(mask_function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function that transformers composed; None for any other function."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if torch.compiler.is_compiling():  # a tracer cannot inspect closures
        return None
    read = _READERS.get(getattr(mask_function, "__code__", None))
    return None if read is None else read(**inspect.getclosurevars(mask_function).nonlocals)


def _all_of(mask_functions: tuple[MaskFunction, ...]) -> Pattern | None:
    causal, left, right, chunk = False, -1, -1, 0
    segments = None
    for mask_function in mask_functions:
        part = recognise(mask_function)
        if part is None or (chunk and part.attention_chunk not in (0, chunk)):
            return None
        causal = causal or part.causal
        left = _narrower(left, part.window_size[0])
        right = _narrower(right, part.window_size[1])
        chunk = chunk or part.attention_chunk
        if segments is not None and part.segments is not None and part.segments is not segments:
            return None
        segments = part.segments if segments is None else segments
    return Pattern(causal, (left, right), chunk, segments)


def _narrower(a: int, b: int) -> int:
    """The smaller of two window sides, where -1 is unbounded."""
    return max(a, b) if min(a, b) < 0 else min(a, b)


def _sliding_window(sliding_window: int) -> Pattern:
    return Pattern(window_size=(sliding_window - 1, -1))  # transformers includes the query


def _bidirectional_window(sliding_window: int) -> Pattern:
    return Pattern(window_size=(sliding_window, sliding_window))


def _chunk(chunk_size: int, left_padding: Tensor) -> Pattern:
    # Like flashtile, transformers counts positions from the first real token.
    return Pattern(attention_chunk=chunk_size)


def _packed(packed_sequence_mask: Tensor) -> Pattern:
    return Pattern(segments=packed_sequence_mask)


def _packed_positions(mask_function: MaskFunction, position_ids: Tensor) -> Pattern | None:
    # Within a packed sequence positions increase by one, so distances are unchanged; the start of a
    # chunk may differ.
    inner = recognise(mask_function)
    is_local = current_layout.get() is None  # a layout counts chunks from a document's start
    return None if inner is None or (inner.attention_chunk and is_local) else inner


def _reader_table() -> dict[Any, Callable[..., Pattern | None]]:
    """Map the code of each closure that transformers' factories return to a function that converts
    its captured variables to a pattern."""
    index = torch.zeros(1, 1, dtype=torch.long)
    closures: list[tuple[str, tuple[Any, ...], Callable[..., Pattern | None]]] = [
        ("and_masks", (), _all_of),
        ("sliding_window_overlay", (1,), _sliding_window),
        ("sliding_window_bidirectional_overlay", (1,), _bidirectional_window),
        ("chunked_overlay", (1, index), _chunk),
        ("packed_sequence_mask_function", (index,), _packed),
        (
            "remap_positions_for_packed_sequence",
            (masking_utils.causal_mask_function, index),
            _packed_positions,
        ),
    ]
    table = {}
    for factory, arguments, reader in closures:
        if hasattr(masking_utils, factory):
            closure = getattr(masking_utils, factory)(*arguments)
            # A closure that captures other variables is a different function and stays
            # unrecognised.
            if set(closure.__code__.co_freevars) == set(inspect.signature(reader).parameters):
                table[closure.__code__] = reader
    return table


_READERS = _reader_table()


# Model types whose layers read the mask. Some of them do not set `allow_is_causal_skip` to False.
READERS_OF_MASKS = {
    *("axk2", "deepseek_v32", "doge", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    *("mistral_large4", "siglip2_vision_model"),
}
# Model types with layers that add the mask to their own scores, as eager attention does; the class
# of the configuration where it has no model type.
ADDERS_OF_MASKS = {
    "PPDocLayoutV2ReadingOrderConfig",
    "bigbird_pegasus",
    "gemma4_audio",
    "git",
    "informer",
    "pix2struct_text_model",
}


def model_type_of(config: Any) -> str:
    """The model type of a configuration; its class where it has none."""
    return getattr(config, "model_type", None) or type(config).__name__


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """The mask function that `register` passes to transformers.

    Args:
        batch_size, q_length, kv_length: sizes of the mask; query i has the position ``q_offset +
            i``, key j ``kv_offset + j``.
        mask_function: function of (batch, head, query, key): whether the query sees the key.
        attention_mask: (batch, tokens) bool, False at padding, indexed by position.
        allow_is_causal_skip, allow_is_bidirectional_skip: False when the model reads a causal or a
            bidirectional mask itself, and so needs it in 4-D.
        options: other arguments of transformers, for other implementations.

    Returns:
        None, if every query sees every key; or (batch, keys) bool, False at padding; or (batch,
        keys) integers that number the packed sequences from 1; or (batch, 1, q_length, kv_length),
        the exact mask: bool, or additive for models that add it themselves. A 2-D mask has its
        `Pattern` as an attribute; keys past its width are cache slots that are not written yet. A
        4-D mask may have its 2-D form as an attribute.
    """
    tracing = torch.compiler.is_compiling()
    if attention_mask is not None:
        complete = attached_pattern(attention_mask)  # `generate` made it in advance
        if complete is not None:
            # What is known of a mask holds for one call of the model.
            return attention_mask if tracing else attach_pattern(attention_mask.clone(), complete)
        attention_mask = rows("attention_mask", attention_mask, batch_size)
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    exact = partial(_exact, *sizes, mask_function, attention_mask, options)
    pattern = recognise(mask_function)
    if pattern is None or (pattern.attention_chunk and kv_offset):
        return exact()
    if tracing and isinstance(q_offset, Tensor):  # the used length of a static cache is data
        return exact()
    allowed = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
    # For packed sequences transformers never allows the skip, but their 4-D mask would take
    # quadratic memory.
    is_read = not allowed and pattern.segments is None
    model_type = model_type_of(options.get("config"))
    is_read = is_read or model_type in READERS_OF_MASKS
    is_4d = is_read or model_type in ADDERS_OF_MASKS
    if is_4d and tracing:
        return exact()
    keys = kv_length
    pattern = pattern._replace(keys=kv_length)
    if pattern.causal:
        keys = min(keys, int(q_offset) + q_length - kv_offset)
    mask = None
    if attention_mask is not None:
        mask = attention_mask[:, kv_offset : kv_offset + keys].bool()
        mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[1]))
        if not tracing and mask.all():
            mask = None
    if pattern.segments is not None and (mask is not None or q_length != keys):
        return exact()
    if mask is not None and pattern.has_positions and has_holes(mask):
        return exact()  # distances include the padding in between
    if pattern.segments is not None:
        mask = rows("position_ids", pattern.segments, batch_size).int() + 1
        mask = attach_pattern(mask, pattern)
    elif mask is not None:
        mask = attach_pattern(mask, pattern, whole=None if tracing else False)
    elif keys < kv_length or (pattern.causal and q_length > 1) or pattern.hides(keys) or is_read:
        # Not every causal layer declares that it is causal, so the pattern is attached to a mask.
        mask = torch.ones(batch_size, keys, dtype=torch.bool, device=options.get("device"))
        mask = attach_pattern(mask, pattern, whole=True)
    return with_short_form(exact(), mask) if is_4d and mask is not None else mask


def _exact(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """The exact 4-D mask, computed by transformers."""
    visible = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=cast(int, q_offset),  # tensors work, too
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    mask = cast(Tensor, visible)
    if getattr(options.get("config"), "model_type", None) in ADDERS_OF_MASKS:
        dtype = options.get("dtype", torch.float32)
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return _made(mask)


def has_holes(mask: Tensor) -> bool:
    """Whether some row of a (batch, keys) bool mask has padding between real tokens."""
    starts = mask[:, 1:] & ~mask[:, :-1]
    return bool((starts.sum(1) + mask[:, :1].sum(1) > 1).any())


# The functions below set our own attributes on masks that `attention_mask` makes. Tensors and
# `torch.compile` allow this, but the type checker does not: each such line has an `ignore`. Such a
# mask belongs to one call of the model, so that what its layers learn about their inputs is kept
# with it. Nothing is kept with the tensors of users: they can change through NumPy or `.data`, and
# PyTorch does not count that, so that `renew_in_later_steps` gives the layers an alias.


def attach_pattern(mask: Tensor, pattern: Pattern, whole: bool | None = None) -> Tensor:
    """Attach `pattern` to a new mask, which transformers passes to every layer.

    Args:
        mask: (batch, keys), padding or indices of sequences.
        pattern: the mask without its padding.
        whole: whether the mask has no padding; None if nobody knows.
    """
    mask = _made(mask)
    mask.flashtile_pattern = pattern  # type: ignore[attr-defined]
    if whole is not None:
        mask.flashtile_whole = _version(mask), whole  # type: ignore[attr-defined]
    return mask


def attached_pattern(mask: Tensor) -> Pattern | None:
    """The pattern attached to `mask`, if it is the object that `attention_mask` returned."""
    return getattr(mask, "flashtile_pattern", None)


def with_short_form(exact: Tensor, short: Tensor) -> Tensor:
    """Attach the 2-D form `short` to the 4-D mask `exact`."""
    exact.flashtile_short = (_version(exact), short)  # type: ignore[attr-defined]
    return exact


def short_form(mask: Tensor) -> Tensor:
    """The 2-D form of a 4-D mask that is unchanged since `attention_mask` made it; else `mask`."""
    version, short = getattr(mask, "flashtile_short", (None, mask))
    return short if version is not None and version == _version(mask) else mask


def _version(mask: Tensor) -> int | None:
    """A number that a change in place increases; None if PyTorch does not count such changes."""
    if torch.compiler.is_compiling():  # a graph changes nothing in place between layers
        return 0
    return None if mask.is_inference() else mask._version


def _made(mask: Tensor) -> Tensor:
    """Mark a new mask as made here."""
    mask = with_memory(mask)
    mask.flashtile_made = True  # type: ignore[attr-defined]
    return mask


def is_made_here(mask: Any) -> bool:
    """Whether `attention_mask` made the mask."""
    return hasattr(mask, "flashtile_made")


def with_memory(mask: Tensor) -> Tensor:
    """The mask of one step of a model, or a copy, with a memory for `once`."""
    if not torch.compiler.is_compiling() and mask.is_inference():
        with torch.inference_mode(False):  # PyTorch counts the changes of the copy
            mask = mask.clone()
    mask.flashtile_known = {}  # type: ignore[attr-defined]
    return mask


def has_memory(mask: Any) -> bool:
    """Whether `once` keeps results with the mask."""
    return hasattr(mask, "flashtile_known")


def is_whole(mask: Tensor) -> bool:
    """Whether a (batch, keys) bool mask is known to have no padding at all."""
    version, whole = getattr(mask, "flashtile_whole", (None, False))
    if torch.compiler.is_compiling():  # a graph cannot read the values of a mask
        return bool(whole)
    if version is not None and version == _version(mask):
        return bool(whole)
    return once(mask, _has_no_padding, mask)


def _has_no_padding(mask: Tensor) -> bool:
    return bool(mask.all())


def once(made: Any, make: Callable[..., T], *arguments: Any) -> T:
    """``make(*arguments)``, once for all layers that get the mask `made` and equal arguments.

    Only where the mask has a memory.
    """
    if made is None or torch.compiler.is_compiling() or not has_memory(made):
        return make(*arguments)
    facts: list[Any] = [make]
    for x in arguments:
        if not isinstance(x, Tensor):
            facts.append(x)
        elif x.is_inference():  # PyTorch does not count its changes
            return make(*arguments)
        else:
            facts += (id(x), x._version)
    known, key = made.flashtile_known, tuple(facts)
    if key not in known:
        # Tensors that live on keep their ids; `made` itself would be in a cycle.
        tensors = [x for x in arguments if isinstance(x, Tensor) and x is not made]
        known[key] = make(*arguments), tensors
    return cast(T, known[key][0])


def rows(name: str, x: Tensor, batch: int) -> Tensor:
    """A 2-D tensor with a row for each sequence of the batch; a single row is for all of them.

    Raises:
        ValueError: `x` has other sizes.
    """
    if x.dim() != 2 or not broadcasts_to(x.shape[:1], (batch,)):
        raise ValueError(
            f"{name}: got a tensor of shape {tuple(x.shape)}, want ({batch}, tokens) or (1, tokens)"
        )
    return x if x.shape[0] == batch else x.expand(batch, -1)


def key_padding(mask: Tensor, batch: int, queries: int, keys: int) -> Tensor | None:
    """The padding that a mask marks, (batch, keys) or narrower: later keys are cache slots that are
    not written yet; None if the mask is one for single scores.

    Raises:
        ValueError: the mask fits neither the keys nor the scores.
    """
    pattern = attached_pattern(mask)
    if pattern is None:
        is_of_scores = mask.dtype == torch.bool and mask.shape == (queries, keys)
        is_ambiguous = queries in (1, batch)  # and counts as padding
        if mask.dim() != 2 or mask.is_floating_point() or (is_of_scores and not is_ambiguous):
            return None
    mask = rows("attention_mask", mask, batch)
    width = mask.shape[1]
    if pattern is not None and pattern.keys is not None:
        fits = keys == pattern.keys
    else:
        fits = queries <= width < keys or width == keys
    if not fits:
        raise ValueError(
            f"attention_mask: got {width} tokens for {queries} queries and {keys} keys, want "
            f"{keys}; fewer are for a cache that has more slots than tokens"
        )
    return mask


def scores_mask(mask: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """A mask for single scores in four dimensions; it may be longer than the keys.

    Args:
        mask: broadcasts to `sizes` from the right, as in plain PyTorch.
        sizes: (batch, heads, seq_q, seq_k).

    Raises:
        ValueError, TypeError: the mask does not fit.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attention_mask: got {mask.dtype} in {mask.dim()} dimensions, want torch.bool or a "
            "floating dtype; integers only in (batch, keys), 0 at padding"
        )
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    fits = len(shape) == 4 and (shape[3] == 1 or shape[3] >= sizes[3])
    if not fits or not broadcasts_to(shape[:3], sizes[:3]):
        raise ValueError(
            f"attention_mask: got a tensor of shape {tuple(mask.shape)}, want one that broadcasts "
            f"to (batch, heads, seq_q, seq_k) = {sizes}, or padding of shape (batch, seq_k)"
        )
    mask = mask if mask.dim() == 4 else mask.view(shape)
    return mask[..., : sizes[3]] if mask.shape[3] > sizes[3] else mask


def chosen_keys(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    indices: Tensor | None,
    block_indices: Tensor | None,
) -> Tensor | None:
    """The keys that sparse attention selects: bool, broadcasts to (batch, heads, seq_q, seq_k).

    Args:
        module: the attention layer; its `indexer` has the block size.
        q: (batch, seq_q, heads, head_dim).
        k: (batch, seq_k, kv_heads, head_dim).
        indices, block_indices: as in `attention_forward`.

    Raises:
        ValueError: one of them has a shape that does not fit `q` and `k`.
    """
    if indices is None and block_indices is None:
        return None
    (B, M, H), N = q.shape[:3], k.shape[1]
    if block_indices is None:
        assert indices is not None
        if indices.dim() != 3 or indices.shape[:2] != (B, M):
            got, want = tuple(indices.shape), f"({B}, {M}, chosen)"
            raise ValueError(f"indices: got a tensor of shape {got}, want {want}")
        return _marked(indices, N)[:, None]
    block_size = cast(int, cast(Any, module).indexer.block_size)
    shape = block_indices.shape
    if len(shape) != 4 or (shape[0], shape[2]) != (B, M) or H % shape[1]:
        got, want = tuple(shape), f"({B}, a divisor of {H}, {M}, chosen)"
        raise ValueError(f"block_indices: got a tensor of shape {got}, want {want}")
    blocks = _marked(block_indices, -(-N // block_size))
    chosen = blocks.repeat_interleave(block_size, dim=-1)[..., :N]
    return chosen.repeat_interleave(H // shape[1], dim=1)


def _marked(numbers: Tensor, size: int) -> Tensor:
    """(..., size) bool, True at the indices in the last dimension; negative ones are ignored."""
    numbers = numbers.long()
    marked = torch.zeros(*numbers.shape[:-1], size + 1, dtype=torch.bool, device=numbers.device)
    return marked.scatter(-1, numbers.masked_fill(numbers < 0, size), True)[..., :size]


# What the layers learn by reading a mask for single scores holds as long as nobody changes the
# mask. Its owner can do that between two steps without PyTorch's knowledge, through NumPy or
# `.data`. So the layers of each step get a new alias of the mask, which keeps what they learn.


def renew_in_later_steps(mask: Any) -> None:
    """Let the model whose layer is running replace its masks before each later step, unless that
    is where `mask` is from.
    """
    if has_memory(mask) or torch.compiler.is_compiling() or not _is_of_scores(mask):
        return
    modules = calling_modules(sys._getframe(1))
    # The innermost model passes the mask to its layers.
    model = next((x for x in modules if isinstance(x, PreTrainedModel)), None)
    if model is not None and _renewed not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_renewed, with_kwargs=True)


def _renewed(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The arguments of a step with aliases of the masks."""
    if torch.compiler.is_compiling():
        return None
    return tuple(map(_alias, arguments)), {name: _alias(x) for name, x in options.items()}


def _alias(x: Any) -> Any:
    if type(x) is dict:  # a mask for each kind of layer
        return {name: _alias(mask) for name, mask in x.items()}
    return with_memory(x.detach()) if _is_of_scores(x) else x


def _is_of_scores(x: Any) -> bool:
    """Whether this is a mask for single scores that layers read, and PyTorch counts its changes."""
    is_mask = type(x) is Tensor and x.dtype == torch.bool and x.dim() == 4
    return is_mask and not x.is_inference()
