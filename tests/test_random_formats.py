"""Random calls over caches of packed rows, against dense attention in float64 over the rows as a
decoder of the tests reads them. `FLASHTILE_DRAWS` says how many calls; without it, 50.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from conformance.devices import carry_calls
from packed_rows import KINDS
from random_calls import DTYPES, RandomCall, draw_call, floors, meaning
from test_random_calls import ROUNDINGS
from torch import Tensor

import flashtile
from flashtile.testing import assert_close, plain_dtype

pytestmark = pytest.mark.usefixtures("small_cpu_tiles")

PARTS = 10
DRAWS = int(os.environ.get("FLASHTILE_DRAWS", "50"))


def packed_call(call: RandomCall) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """The arguments of a call over packed rows, the tensors that they mean, and the formats. Rows
    that no query sees are random bytes.
    """
    draw, generator = random.Random(call.seed), torch.Generator().manual_seed(call.seed)
    names = {"k_new": "k", "v_new": "v"}
    arguments = call.options | {names[n]: x for n, x in call.new.items()}
    given, formats, shown = dict(call.leaves) | call.new, [], []
    for side in "kv":
        cache = call.leaves[f"{side}_cache"]
        head_dim = cache.shape[-1]
        fitting = [name for name, kind in KINDS.items() if head_dim % kind.multiple == 0]
        kind = KINDS[draw.choice(fitting)]
        formats.append(kind.make(head_dim))
        if side == "v" and formats[1].head_dim is None:
            formats[1] = flashtile.CacheFormat(
                formats[1].bytes_per_row, formats[1].unpack, formats[1].pack, head_dim
            )
        shown.append(next(name for name in fitting if KINDS[name] is kind))
        rows = formats[-1].packed(cache.nan_to_num())
        noise = torch.randint(0, 256, rows.shape, generator=generator, dtype=torch.uint8)
        hidden = cache.isnan().any(-1, keepdim=True)
        arguments[f"{side}_cache"] = torch.where(hidden, noise, rows)
        given[f"{side}_cache"] = kind.decode(rows, head_dim)
        if call.new:
            new = formats[-1].packed(call.new[f"{side}_new"])
            given[f"{side}_new"] = kind.decode(new, head_dim)
    arguments |= {"q": call.leaves["q"], "cache_format": tuple(formats)}
    return arguments, given, " and ".join(shown)


def check(call: RandomCall) -> None:
    arguments, given, shown = packed_call(call)
    out, lse = flashtile.attention_with_kvcache(**arguments, return_lse=True)
    learned = ("sink", "alibi_slopes", "relative_bias")
    given |= {n: call.options[n] for n in learned if n in call.options}
    exact = {n: x.double() for n, x in given.items()}
    found = meaning(call, exact)
    plain_type = plain_dtype(call.dtype)
    # Its inputs are those of a cache in the dtype of the queries.
    rounded = {n: x.to(call.dtype).to(plain_type) for n, x in given.items()}
    plain = meaning(call, rounded)
    zeros = torch.zeros_like(found.out), torch.zeros_like(found.lse)
    floor = floors(call, exact, found, *zeros)
    for name, x in (("out", out), ("lse", lse)):
        truth, low = getattr(found, name), getattr(plain, name)
        least = ROUNDINGS * floor[name]
        assert_close(f"{name} of {shown}", x, truth, low, floor=least, dtype=call.dtype)


def wrong_calls(part: int, **how: Any) -> list[str]:
    """What is wrong with the calls of a part."""
    base = int(os.environ["FLASHTILE_SEED"]) * 100_000
    found = []
    for number in range(part, DRAWS, PARTS):
        call = draw_call(base + number, layouts=("cached",), **how)
        try:
            check(call)
        except Exception as error:
            found.append(f"{call}\n    {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_random_packed_caches(part: int):
    wrong = wrong_calls(part)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_random_packed_caches_on_a_gpu(part: int, monkeypatch: pytest.MonkeyPatch):
    carry_calls(monkeypatch, torch.device("cuda"), refusals="fail")
    dtypes = [dtype for dtype in DTYPES if dtype != torch.float64]
    wrong = wrong_calls(part, longest=300, dtypes=dtypes, lists=0)
    assert not wrong, "\n".join(wrong)
