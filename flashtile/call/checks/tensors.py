"""Checks of one tensor: its type, dtype, rank, shape and device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...problem import FLOAT8

INDEX_DTYPES = (torch.int32, torch.int64)
INTEGERS = (int, torch.SymInt)


def shape_of(x: Tensor) -> str:
    """The shape as text for messages."""
    return str(tuple(x.shape))


def tensor(name: str, x: Any) -> None:
    """Raise unless `x` is a tensor that has a shape and strides."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, want a torch.Tensor")
    if x.is_nested:
        raise TypeError(
            f"{name}: got a nested tensor, want a plain tensor; for jagged tensors call "
            "attention_varlen(q.values(), k.values(), v.values(), q.offsets(), k.offsets(), ...), "
            "or integrations.sdpa.scaled_dot_product_attention"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, want torch.strided")


def shape(name: str, x: Tensor, wanted: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError unless `x` has the shape `wanted`; `meaning` explains that shape."""
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want {wanted}, {meaning}")


def rank(name: str, x: Any, meaning: str) -> None:
    """Raise unless `x` is a tensor with one dimension for each name in `meaning`."""
    tensor(name, x)
    wanted = meaning.count(",") + 1
    if x.dim() != wanted:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want {wanted} dimensions ({meaning})")


def index_tensor(name: str, x: Any, like: Tensor) -> None:
    """Raise unless `x` is an int32 or int64 tensor on the device of `like`."""
    tensor(name, x)
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: got dtype {x.dtype}, want torch.int32")
    same_device(name, x, like)


def same_device(name: str, x: Tensor, like: Tensor) -> None:
    """Raise ValueError unless `x` is on the device of `like` (the queries)."""
    if x.device != like.device:
        raise ValueError(f"{name}: got device {x.device}, want {like.device}, the device of q")


def no_shared_elements(name: str, x: Tensor) -> None:
    """Raise ValueError if elements of `x`, which a call writes to, share memory, as after
    ``expand``.
    """
    if not torch.compiler.is_compiling() and torch._debug_has_internal_overlap(x) == 1:
        raise ValueError(
            f"{name}: got strides {x.stride()}, want a tensor whose elements do not share memory"
        )


def floating(name: str, x: Any, q: Tensor) -> None:
    if x is None:
        return
    tensor(name, x)
    if not x.is_floating_point() or x.dtype in FLOAT8:
        raise TypeError(f"{name}: got dtype {x.dtype}, want a floating dtype, float16 to float64")
    same_device(name, x, q)


def per_sequence(name: str, x: Any, q: Tensor, batch: int) -> None:
    """Check an optional tensor of (batch,) integers."""
    if x is not None:
        index_tensor(name, x, q)
        shape(name, x, (batch,), "one number for each sequence")


def unpacked(name: str, x: Any, count: int, layout: str) -> tuple[Tensor, ...]:
    """Split `x` along its third dimension from the end, which must have size `count`."""
    rank(name, x, layout)
    if x.shape[-3] != count:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want ({layout})")
    return x.unbind(-3)


def is_readable(x: Tensor) -> bool:
    """Whether `x` has values that the host can read now."""
    return not (torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta)


def read_on_host(name: str, x: Tensor) -> Any:
    """The values of `x` as Python numbers; the host waits for the GPU."""
    if not is_readable(x):
        raise TypeError(
            f"{name}: got a tensor whose values cannot be read here (torch.compile, a fake or a "
            "meta tensor), want plain ints"
        )
    return x.tolist()


def as_python(name: str, x: Any) -> Any:
    """The values of a tensor or NumPy object as Python numbers; any other object unchanged."""
    if isinstance(x, Tensor):
        return read_on_host(name, x)
    return x.tolist() if hasattr(x, "tolist") else x
