"""Score functions for the Hopper kernels, which read tensors for four heads and 600 positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.call.layouts import Layout
from flashtile.call.prepare import describe, read
from flashtile.problem import Operands, Options
from flashtile.score_mod import derivative
from flashtile.testing import alibi_slopes, generator, normal

SLOPES = alibi_slopes(generator(0), 4)
TABLE = normal(generator(1), 4, 81)
DOCUMENTS = torch.arange(600) // 70
SCALES = normal(generator(2), 4, 4)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf),
    "table": lambda s, b, h, i, j: s + TABLE[h, (j - i).clamp(-40, 40) + 40],
    "softcap": lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0),
    "documents": lambda s, b, h, i, j: torch.where(DOCUMENTS[i] == DOCUMENTS[j], s, -torch.inf),
    "whole table": lambda s, b, h, i, j: s + TABLE[h, (j - i).abs() // 8],
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    # NaN where a mask hides scores.
    "undefined ahead": lambda s, b, h, i, j: s + torch.log((i - j + 61).to(s.dtype)),
    "batch and head": lambda s, b, h, i, j: s * SCALES[b, h] + 0.01 * (j - 2 * i),
    # The slope is infinite, and its product NaN, where s is 0, as in rows after the last query.
    "infinite slope": lambda s, b, h, i, j: (s + 0 * j).abs().sqrt() * s.sign(),
}
MASKED: dict[str, dict[str, Any]] = {"undefined ahead": {"causal": True}}  # where it is defined


def described(
    tensors: Sequence[Tensor], layout: Layout, given: dict[str, Any]
) -> tuple[Operands, Options]:
    """A call, with the derivative of its score function."""
    q, k, v = tensors
    operands, options = describe(*read((q, k, v), layout, given))
    gradient = derivative(options.score_mod, torch.float32, of_captured=False)
    return operands, options._replace(score_mod_gradient=gradient)
