"""The TypeError for an unknown keyword, which suggests the keyword that was probably meant.

Every public function ends with ``**unknown: Never``, so that its signature stays explicit and type
checkers still reject an unknown keyword.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

# Arguments that hide keys from queries, and arguments that mark padding; no function has all.
MASKS = ("attn_mask", "bias", "block_mask")
PADDING = ("key_padding_mask", "seqused_k", "cache_seqlens")

# Names of arguments in other libraries and functions, and our arguments with the same purpose.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "attention_bias": ("bias",),
    "attention_mask": MASKS + PADDING,
    "attn_bias": ("bias",),
    "attn_mask": MASKS,
    "block_table": ("page_table",),
    "cache_seqlens": ("seqused_k",),
    "centre_k": ("smooth_k",),  # the name until 0.1, like `rotate` and `rotate_v`
    "dropout": ("dropout_p",),
    "is_causal": ("causal",),
    "key_padding_mask": PADDING,
    "learnable_sink": ("sink",),
    "mask": MASKS + PADDING,
    "mask_mod": ("block_mask",),
    "need_weights": ("return_attn_probs",),
    "output_attentions": ("return_attn_probs",),
    "padding_mask": PADDING,
    "rotate": ("hadamard",),
    "rotate_v": ("hadamard_v",),
    "return_softmax_lse": ("return_lse",),
    "s_aux": ("sink",),
    "scale": ("softmax_scale",),
    "scaling": ("softmax_scale",),
    "seqused_k": ("cache_seqlens",),
    "sinks": ("sink",),
    "sliding_window": ("window_size",),
    "sm_scale": ("softmax_scale",),
    "window": ("window_size",),
}

# Differences that the suggested name does not show.
REMARKS = {
    "enable_gqa": "not needed; it follows from the numbers of heads",
    "is_causal": "it aligns to the bottom-right corner, PyTorch's to the top-left corner",
    "sliding_window": "(sliding_window - 1, 0)",
}


def unexpected_keywords(unknown: Iterable[str], function: Callable[..., Any]) -> TypeError:
    """The error to raise for the keywords `unknown`, which `function` does not have.

    It names the function that the user called: the outermost running function of this package,
    because `flash_attn_func` and others pass their keywords on.
    """
    accepted = list(inspect.signature(function).parameters)
    return TypeError(
        f"{_called_function()}() got an unexpected keyword argument "
        + ", ".join(_described(name, accepted) for name in unknown)
    )


def _called_function() -> str:
    """The name of the outermost running function of this package."""
    package = __name__.partition(".")[0] + "."
    frame = sys._getframe(1)
    while frame.f_back and frame.f_back.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return frame.f_code.co_name


def _described(name: str, accepted: list[str]) -> str:
    """An unknown name, and the accepted names that may have been meant."""
    if name in OTHER_NAMES:
        meant = [other for other in OTHER_NAMES[name] if other in accepted]
    else:
        meant = difflib.get_close_matches(name, accepted, n=1)
    advice = [f"want {' or '.join(meant)}"] if meant else []
    advice += [REMARKS[name]] if name in REMARKS else []
    return f"{name!r} ({'; '.join(advice)})" if advice else repr(name)
