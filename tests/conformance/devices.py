"""Calls on the device of a backend under test.

The suite makes its inputs on the CPU and judges results there. For a backend of another device,
the tensors of every call are copied there with their strides and offsets; gradients and tensors
written in place are copied back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.utils import _pytree as pytree

import flashtile
from flashtile.masks import BlockMask, Spans

FUNCTIONS = ("attention", "attention_varlen", "attention_with_kvcache")
WRITTEN = ("out", "k_cache", "v_cache")  # arguments that a call may write to

Memory = dict[tuple[int, torch.dtype], Tensor]  # the copies, by address and dtype


def device_of(backend: str | None) -> torch.device:
    """The device of a backend's tensors."""
    return torch.device("cpu" if backend in (None, "cpu") else "cuda")


def carry_calls(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, refusals: str = "skip"
) -> None:
    """Patch flashtile's functions so that they take CPU tensors and compute on `device`.

    A call that the forced backend refuses skips its test for the backend's own reasons
    (`unsupported_reasons`), or fails it where `refusals` is "fail".
    """
    for name in FUNCTIONS:
        call = _carried(getattr(flashtile, name), device)
        monkeypatch.setattr(flashtile, name, call if refusals == "fail" else _skipping(call))


def _skipping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotImplementedError as refusal:
            asked, _, reasons = str(refusal).partition(" run this call:\n")
            if not asked.startswith("backend ") or not reasons:
                raise
            if hypothesis.currently_in_test_context():
                hypothesis.reject()
            pytest.skip(reasons.strip())

    return call


def _carried(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        memory: Memory = {}
        moved = {name: _moved(value, device, memory) for name, value in given.items()}
        result = pytree.tree_map_only(Tensor, lambda x: x.cpu(), function(**moved))
        for name in WRITTEN:
            if isinstance(given.get(name), Tensor):
                _storage(given[name]).copy_(_storage(moved[name]))
        out = given.get("out")
        if out is None:
            return result
        return (out, *result[1:]) if isinstance(result, tuple) else out

    return call


def _moved(value: Any, device: torch.device, memory: Memory) -> Any:
    if isinstance(value, FlexBlockMask):  # its function reads tensors of the CPU
        value = BlockMask.from_flex(value)
    if isinstance(value, BlockMask):
        tensors = value.kinds, value.partial_index, value.partial_tiles
        return BlockMask(*(x.to(device) for x in tensors), value.lengths)
    if isinstance(value, Spans):
        return Spans(*(x.to(device) for x in value))
    if isinstance(value, functools.partial):  # a score function, after the tensors that it captures
        return functools.partial(value.func, *(x.to(device) for x in value.args))
    if not isinstance(value, Tensor):
        return value
    if forward_ad._current_level >= 0:
        primal, tangent = forward_ad.unpack_dual(value)
        if tangent is not None:
            return forward_ad.make_dual(_moved(primal, device, memory), tangent.to(device))
    return _Carry.apply(value, device, memory)


def _storage(x: Tensor) -> Tensor:
    """The whole storage of `x`, as one row of its dtype."""
    size = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((size,), (1,), 0)


class _Carry(torch.autograd.Function):
    """A copy on another device with the same strides and offset. `memory` keeps the storages, so
    that tensors that share memory here share it there, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device, memory: Memory) -> Tensor:
        key = x.untyped_storage().data_ptr(), x.dtype
        if key not in memory:
            memory[key] = _storage(x).to(device)
        return memory[key].as_strided(x.shape, x.stride(), x.storage_offset())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.cpu(), None, None
