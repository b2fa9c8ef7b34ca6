"""Calls whose masks are huge numbers: as a bias, and from a score function.

Rows whose every key is hidden by such a number weigh all keys equally, as in plain PyTorch. Each
case comes with an equal call whose scores have ordinary sizes (`assert_call` says why).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.score_mod import ScoreFunction
from flashtile.testing import generator, normal

from .cases import FEW, SMALL, Call, Make, dense, dropped, packed, pages, scored, spanned
from .compare import assert_call

MakeTwin = Callable[[bool], Make]  # from whether the scores are huge


def masked(make: Make, *shape: int) -> MakeTwin:
    """The call with a mask of `shape` as a bias: the smallest number of the dtype for left padding,
    for single keys and for whole rows; a row each of -1e30 and of 1e30, if the dtype has them."""

    def twin(is_huge: bool) -> Make:
        def with_mask(g: torch.Generator, dtype: torch.dtype) -> Call:
            operands, options = make(g, dtype)
            bias = mask(torch.Generator().manual_seed(7), shape, dtype)
            if not is_huge:
                hidden = bias != 0
                # Not -inf: other rules may leave a row only hidden keys, which it then sees.
                bias.masked_fill_(hidden, -20.0)
                bias.masked_fill_(hidden.all(-1, keepdim=True), 0.0)
            return operands._replace(bias=bias), options

        return with_mask

    return twin


def mask(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    bias, lowest = torch.zeros(shape, dtype=dtype), torch.finfo(dtype).min
    bias.masked_fill_(torch.rand(shape, generator=g) < 0.2, lowest)
    bias[:1, ..., : shape[-1] // 3] = lowest  # left padding of the first sequence
    bias[:, :, ::5] = lowest
    bias[:, :, 1:2], bias[:, :, 2:3] = max(-1e30, lowest), min(1e30, -lowest)
    return bias


def hiding(value: float) -> Callable[[torch.Generator], ScoreFunction]:
    """`value` in place of some scores, and of all scores of some rows."""

    def function(g: torch.Generator) -> ScoreFunction:
        hidden = torch.rand(4, 200, generator=g) < 0.3
        return lambda score, b, h, i, j: torch.where(hidden[b, i] | hidden[b, j], value, score)

    return function


def by_function(make: Make) -> MakeTwin:
    return lambda is_huge: scored(make, hiding(-1e30 if is_huge else 0.0))


def options(**given: Any) -> Make:
    return dense(**SMALL)(lambda g, t: given)


HUGE_CASES: dict[str, MakeTwin] = {
    "dense": masked(options(), 2, 4, 37, 45),
    "heads share the mask, causal": masked(options(causal=True), 2, 1, 37, 45),
    "all rows of some sequences": masked(options(), 2, 1, 1, 45),
    "softcap, sink and dropout": masked(
        dropped(dense(**SMALL)(lambda g, t: {"softcap": 2.0, "sink": normal(g, 4)})), 1, 1, 37, 45
    ),
    "few queries": masked(dense(**FEW)(), 2, 1, 3, 70),
    "packed": masked(packed, 4, 1, 33, 20),
    "pages": masked(pages, 2, 1, 37, 48),
    "spans": masked(spanned(dense(**SMALL)(), 2, batch=2), 2, 1, 37, 45),
    "score function": by_function(options()),
    "score function, causal window": by_function(options(causal=True, window_size=(20, 0))),
    "score function, packed": by_function(packed),
}


def assert_huge_case(
    backend: Any, name: str, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> None:
    """Compare outputs and gradients with those of float64."""
    call, calm = (HUGE_CASES[name](is_huge)(generator(seed), dtype) for is_huge in (True, False))
    torch.manual_seed(seed)
    assert_call(backend, call, dtype, seed, device, calm=calm)
