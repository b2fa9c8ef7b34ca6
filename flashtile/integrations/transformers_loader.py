"""Patch the private loader of transformers that serves implementation names with "flash".

If the name of an attention implementation contains "flash", transformers looks for a kernel package
of that name with its private function `_lazy_imports`. `patch_loader` makes that function return
flashtile's functions for our names. Such a name enables what transformers reserves for flash
attention: packing the images of a batch without padding, and continuous batching.

The patch is checked before it is used. If transformers has changed, `patch_loader` raises
`LoaderChangedError` and removes the patch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import flash_attn_interface as ours

_logger = logging.get_logger(__name__)


class LoaderChangedError(RuntimeError):
    """This version of transformers looks for flash attention in another way."""


def patch_loader(*names: str) -> Callable[[], None]:
    """Make transformers find flashtile's functions when it looks for one of these kernel packages,
    on any device.

    Returns:
        A function that ends it.

    Raises:
        LoaderChangedError: transformers' private functions have changed; nothing stays patched.
    """
    try:
        loader = importlib.import_module("transformers.modeling_flash_attention_utils")
        functions = (
            flash_attn_func,
            flash_attn_varlen_func,
            flash_attn_with_kvcache,
            loader._pad_input,
            loader._unpad_input,
        )
        original_imports: Any = loader._lazy_imports
        original_check: Any = PreTrainedModel._check_and_adjust_attn_implementation
    except (ImportError, AttributeError) as error:
        raise LoaderChangedError(str(error)) from error
    ours = {*names, *(f"paged|{name}" for name in names)}

    @functools.wraps(original_imports)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation in ours:
            return functions
        return original_imports(implementation, *args, **kwargs)

    @functools.wraps(original_check)
    def check(
        self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> Any:
        # Some models list the kernels that support what they need. flashtile supports it, but is
        # not on these lists.
        if attn_implementation in ours:
            if _attends_by_itself(self):
                _logger.warning(
                    f"{type(self).__name__} computes attention in its own layers, which "
                    "attn_implementation cannot replace: it runs with 'eager' instead of "
                    f"{attn_implementation!r}"
                )
                return "eager"
            loader.lazy_import_flash_attention(attn_implementation)
            return attn_implementation
        return original_check(self, attn_implementation, *args, **kwargs)

    def patch(imports: Any, check: Any) -> None:
        # The type checker knows no private name of a module, and allows no replacing of a method.
        loader._lazy_imports = imports  # type: ignore[attr-defined]
        PreTrainedModel._check_and_adjust_attn_implementation = check  # type: ignore[method-assign]

    patch(lazy_imports, check)
    try:
        found = loader.lazy_import_flash_attention(names[0])[0]
        if tuple(found[:2]) != functions[:2]:
            raise LoaderChangedError(
                "lazy_import_flash_attention does not return the functions of _lazy_imports"
            )
    except Exception as error:  # a changed loader may raise anything
        patch(original_imports, original_check)
        raise LoaderChangedError(str(error)) from error

    def end() -> None:
        # Later patches may call these functions, so they stay, and serve no name.
        if loader._loaded_implementation in ours:
            loader._loaded_implementation = None  # type: ignore[attr-defined]
        ours.clear()

    return end


def _attends_by_itself(model: PreTrainedModel) -> bool:
    """Whether the layers of a transformers model ignore `attn_implementation`. Such layers need the
    masks of eager attention; without masks they would see every key."""
    own_code = type(model).__module__.startswith("transformers.")
    return own_code and not model._can_set_attn_implementation()


# Transformers inspects these signatures to see which options a kernel has, under the names that
# flash_attn and its forks use.


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
    """`flashtile.flash_attn_func`."""
    call = (q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, None, deterministic)
    return cast(Tensor, ours.flash_attn_func(*call, sink=s_aux))


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
    """`flashtile.flash_attn_varlen_func`.

    Raises:
        ValueError: `max_seqlen_q` exceeds the number of all queries. This happens when a model that
            packs by itself adds up the indices of packed sequences as if they were lengths.
    """
    if int(max_seqlen_q) > q.shape[0]:
        raise ValueError(
            f"max_seqlen_q: got {int(max_seqlen_q)}, want at most {q.shape[0]}, the number of "
            "queries; for packed sequences pass this model cu_seq_lens_q, cu_seq_lens_k, "
            "max_length_q and max_length_k"
        )
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    call = (q, k, v, *lengths, dropout_p, softmax_scale, causal, window_size, softcap, None)
    options: Any = {"block_table": block_table, "sink": s_aux}
    return cast(Tensor, ours.flash_attn_varlen_func(*call, deterministic, **options))


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
    """`flashtile.flash_attn_with_kvcache`."""
    tokens = (k, v, None, None, cache_seqlens, None, None, block_table)
    call = (q, k_cache, v_cache, *tokens, softmax_scale, causal, window_size, softcap)
    return cast(Tensor, ours.flash_attn_with_kvcache(*call, sink=s_aux))
