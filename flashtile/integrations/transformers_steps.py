"""Give users' masks a memory that lasts for one step of a model.

What the layers learn by reading a mask for single scores holds as long as nobody changes the mask.
Its owner can do that between two steps without PyTorch's knowledge, through NumPy or `.data`. So
the layers of each step get a new alias of the mask, and what they learn is kept with the alias.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .bypasses import calling_modules
from .transformers_masks import has_memory, with_memory


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
