"""The private door of transformers that an implementation name with "flash" in it goes through.

Transformers takes every attention implementation whose name contains "flash" for a kernel package,
which its private `_lazy_imports` must find. `open_door` makes that function return flashtile's for
our names. In exchange such names get what transformers reserves for flash attention: images of a
batch packed without padding, continuous batching.

Everything is checked before it is relied on. When transformers has changed, `DoorChangedError` says
so and nothing stays patched.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..api import attention, attention_varlen, attention_with_kvcache

_logger = logging.get_logger(__name__)


class DoorChangedError(RuntimeError):
    """This version of transformers finds flash attention in another way."""


def open_door(name: str) -> None:
    """Make transformers find flashtile's functions when it looks for the kernel package `name`.

    Raises:
        DoorChangedError: transformers no longer asks in the known way; then nothing stays patched.
    """
    try:
        door = importlib.import_module("transformers.modeling_flash_attention_utils")
        functions = (
            flash_attn_func,
            flash_attn_varlen_func,
            flash_attn_with_kvcache,
            door._pad_input,
            door._unpad_input,
        )
        original_imports: Any = door._lazy_imports
        original_check: Any = PreTrainedModel._check_and_adjust_attn_implementation
    except (ImportError, AttributeError) as error:
        raise DoorChangedError(str(error)) from error
    ours = (name, f"paged|{name}")

    @functools.wraps(original_imports)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation in ours:
            return functions
        return original_imports(implementation, *args, **kwargs)

    @functools.wraps(original_check)
    def check(
        self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> Any:
        # Some models list the kernels that can do what they need; flashtile is not on the list,
        # and can.
        if attn_implementation in ours:
            if _attends_by_itself(self):
                _logger.warning(
                    f"{type(self).__name__} computes attention in its own layers, which no "
                    f"attn_implementation replaces: it runs with 'eager' instead of {name!r}"
                )
                return "eager"
            door.lazy_import_flash_attention(attn_implementation)
            return attn_implementation
        return original_check(self, attn_implementation, *args, **kwargs)

    def patch(imports: Any, check: Any) -> None:
        # Private functions, replaced on purpose: no type allows it.
        door._lazy_imports = imports  # type: ignore[attr-defined]
        PreTrainedModel._check_and_adjust_attn_implementation = check  # type: ignore[method-assign]

    patch(lazy_imports, check)
    try:
        found = door.lazy_import_flash_attention(name)[0]
        if tuple(found[:2]) != functions[:2]:
            raise DoorChangedError("lazy_import_flash_attention does not return what it is given")
    except Exception as error:  # whatever a changed loader raises
        patch(original_imports, original_check)
        raise DoorChangedError(str(error)) from error


def _attends_by_itself(model: PreTrainedModel) -> bool:
    """Whether the layers of a model of transformers ignore `attn_implementation`. Such layers want
    the masks of eager attention; without them, they would see every key."""
    own_code = type(model).__module__.startswith("transformers.")
    return own_code and not model._can_set_attn_implementation()


# Transformers reads in these signatures which options a kernel has, by the names that flash_attn
# and its forks use.


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """`flashtile.attention`."""
    out = attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        sink=s_aux,
    )
    return cast(Tensor, out)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """`flashtile.attention_varlen`.

    Raises:
        ValueError: a sequence longer than all queries together, the mark of lengths summed from the
            numbers of packed sequences by a model that does its own packing.
    """
    if int(max_seqlen_q) > q.shape[0]:
        raise ValueError(
            f"max_seqlen_q: got {int(max_seqlen_q)}, but there are {q.shape[0]} queries; for "
            "packed sequences pass this model cu_seq_lens_q and _k, max_length_q and _k"
        )
    out = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        sink=s_aux,
        page_table=block_table,
    )
    return cast(Tensor, out)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """`flashtile.attention_with_kvcache`."""
    out = attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sink=s_aux,
    )
    return cast(Tensor, out)
