"""Functions that allocate tensors of one kind again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

NewTensor = Callable[[], Tensor]


def uninitialised(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> NewTensor:
    """A function that allocates a contiguous tensor on `device`, which is then the current one."""
    kind, sizes = device.type, tuple(shape)
    if kind not in _EMPTY_STRIDED:
        return lambda: torch.empty(sizes, dtype=dtype, device=device)
    strides = torch.empty(sizes, device="meta").stride()
    return partial(_EMPTY_STRIDED[kind], sizes, strides, dtype)


def filled(
    shape: tuple[int, ...], dtype: torch.dtype, value: float, device: torch.device
) -> NewTensor:
    """A function that allocates a contiguous tensor of one value."""
    return partial(torch.full, shape, value, dtype=dtype, device=device)


# What torch.compile's generated code allocates tensors with. These functions take half the time of
# `torch.empty`, because they skip the dispatcher. They are private, so a PyTorch may lack them.
_EMPTY_STRIDED: dict[str, Callable[..., Tensor]] = {
    kind: getattr(torch._C._dynamo.guards, name)
    for kind, name in (("cpu", "_empty_strided_cpu"), ("cuda", "_empty_strided_cuda"))
    if hasattr(torch._C._dynamo.guards, name)
}
