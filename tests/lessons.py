"""The kernels of lesson 7 against the reference in float64, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.testing import assert_close, attention_reference, floor_of, rounding_variance

LENGTHS = [(70, 70), (40, 100), (100, 40), (1, 65)]  # queries, keys


def assert_both_passes(
    device: str, M: int, N: int, dtype: torch.dtype, causal: bool, seed: int
) -> None:
    """Compare O and the three gradients by the rule; the inputs are drawn here."""
    from examples.learn.triton_attention import TritonAttention  # wants Triton

    inputs = [torch.randn(2, length, 16).to(dtype) for length in (M, N, N)]
    dO = torch.randn(2, M, 16).to(dtype)

    def lesson(*qkv: Tensor) -> Tensor:
        return TritonAttention.apply(*(x.to(device) for x in qkv), causal).cpu()

    def reference(*qkv: Tensor, **how: Any) -> Tensor:  # the lesson's heads are its batch
        return attention_reference(*(x[:, :, None] for x in qkv), causal=causal, **how).out[:, :, 0]

    found = _results(lesson, inputs, dO)
    wide = [x.double() for x in inputs]
    truth = _results(reference, wide, dO)
    plain = _results(partial(reference, compute_dtype=dtype), inputs, dO)
    variance = _results(partial(reference, attend=rounding_variance(dtype)), wide, dO)
    for name, *results in zip(("O", "dQ", "dK", "dV"), found, truth, plain, variance, strict=True):
        assert_close(name, *results[:3], floor=floor_of(results[3]), dtype=dtype, seed=seed)


def _results(attend: Callable[..., Tensor], inputs: Sequence[Tensor], dO: Tensor) -> list[Tensor]:
    """O, dQ, dK and dV."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    O = attend(*leaves)
    return [O.detach(), *torch.autograd.grad(O, leaves, dO.to(O))]
