"""Random calls against dense attention in float64 that shares no code with `flashtile.testing`.

`FLASHTILE_DRAWS` says how many calls; without it, as many as take about a minute on two cores. The
tiles of the CPU are small, so that short sequences cross their borders. On a GPU most of the time
is compiling: run ``pytest -m gpu -n 15``, which deals the parts to processes.
"""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conformance.devices import carry_calls
from random_calls import DTYPES, RandomCall, draw_call, floors, meaning
from torch import Tensor

import flashtile
from flashtile.testing import assert_close, plain_dtype

pytestmark = pytest.mark.usefixtures("small_cpu_tiles")

PARTS = 60
DRAWS = int(os.environ.get("FLASHTILE_DRAWS", "1200"))
ROUNDINGS = 4  # of each term that are always allowed
LEARNED = ("bias", "sink", "alibi_slopes", "relative_bias")
FUNCTIONS = {
    "dense": "attention",
    "packed": "attention_varlen",
    "cached": "attention_with_kvcache",
}


def run(call: RandomCall, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse) of flashtile's call, and which probabilities dropout kept."""
    names = {"k_new": "k", "v_new": "v"}
    given = call.options | {names.get(name, name): x for name, x in tensors.items()}
    dropped = "dropout_p" in given
    more = {"return_attn_probs": True} if dropped else {}
    torch.manual_seed(call.seed)
    function = getattr(flashtile, FUNCTIONS[call.layout])
    out, lse, *probs = function(**given, **more, return_lse=True)
    return out, lse, ~probs[0].signbit() if dropped else None


def check(call: RandomCall) -> None:
    """Compare results and gradients by the rule."""
    learned = {n: call.options[n] for n in LEARNED if n in call.options}
    leaves = call.leaves | call.new | learned
    has_gradients = call.layout != "cached"

    def copies(dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        made = {n: x.detach().to(dtype or x.dtype, copy=True) for n, x in leaves.items()}
        return {n: x.requires_grad_(has_gradients) for n, x in made.items()}

    def gradients(given: dict[str, Tensor], out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        if not has_gradients:
            return {}
        outputs = [out, lse.masked_fill(lse == -torch.inf, 0)]
        back = [x.to(y.dtype) for x, y in zip(cotangents, outputs, strict=True)]
        found = torch.autograd.grad(outputs, list(given.values()), back, allow_unused=True)
        return {
            f"d{n}": torch.zeros_like(x) if gradient is None else gradient
            for (n, x), gradient in zip(given.items(), found, strict=True)
        }

    given = copies()
    out, lse, keep = run(call, given)
    cotangents = [torch.randn_like(out), torch.randn_like(lse)]
    got = {"out": out, "lse": lse} | gradients(given, out, lse)
    wanted = {}
    for dtype in (torch.float64, plain_dtype(call.dtype)):
        given = copies(dtype)
        found = meaning(call, given, keep)
        wanted[dtype] = {"out": found.out, "lse": found.lse}
        wanted[dtype] |= gradients(given, found.out, found.lse)
        if dtype == torch.float64:
            truth, floor = wanted[dtype], floors(call, given, found, *cotangents)
    for name, x in got.items():
        plain = wanted[plain_dtype(call.dtype)][name]
        least = ROUNDINGS * floor.get(name, torch.zeros(()))
        assert_close(name, x, truth[name], plain, floor=least, dtype=call.dtype, seed=call.seed)


def wrong_calls(part: int, **how: Any) -> list[str]:
    """What is wrong with the calls of a part."""
    base = int(os.environ["FLASHTILE_SEED"]) * 100_000
    found = []
    for number in range(part, DRAWS, PARTS):
        call = draw_call(base + number, **how)
        try:
            check(call)
        except Exception as error:
            found.append(f"{call}\n    {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part: int):
    wrong = wrong_calls(part)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("backend", ["triton", None])
def test_random_calls_on_a_gpu(part: int, backend: str | None, monkeypatch: pytest.MonkeyPatch):
    """By Triton, and by the backend that is chosen. Hopper's spreads NaN of keys that a mask hides
    (numerics.md), so there these keys are only large."""
    carry_calls(monkeypatch, torch.device("cuda"), refusals="fail")
    hidden = math.nan if backend == "triton" else 100.0
    dtypes = [dtype for dtype in DTYPES if dtype != torch.float64]
    with flashtile.backend(backend) if backend else nullcontext():
        wrong = wrong_calls(part, longest=300, dtypes=dtypes, lists=0, hidden=hidden)
    assert not wrong, "\n".join(wrong)
