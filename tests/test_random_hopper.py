"""Random problems of the Hopper backend, for each head dim it has kernels for, by the rule.

`FLASHTILE_DRAWS` says how many for each head dim, in parts that can run in parallel. What is drawn
at large are sizes, strides and numbers; which options stand together, in which layout and with
which head dims, comes from a fixed list of random combinations, because each is a set of kernels
and takes many seconds to compile. A refusal by the backend is a failure, and so is a call that
takes longer than `HANG_SECONDS`: it ends the process, after naming the call. The references run on
the CPU, so many processes at once want OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from conformance.devices import carry_calls
from conformance.harness import OPTIONS, Masked, Sizes, check_dense, check_varlen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flashtile.masks import BlockMask
from flashtile.testing import STRIDE_STYLES, dense_from_tiles, strided, tile_kinds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_buffers")]

# Of a head dim's tiles: the pairs (key's, value's) that are drawn.
HEAD_DIMS = {
    64: [(64, 64), (40, 64), (64, 8)],
    80: [(80, 80), (72, 80)],
    96: [(96, 96), (80, 96)],
    112: [(112, 112), (104, 112)],
    128: [(128, 128), (120, 104), (128, 64)],
    160: [(160, 160), (144, 160), (160, 128)],
    176: [(176, 176), (168, 168)],
    192: [(192, 192), (192, 128), (160, 136)],
    208: [(208, 208), (224, 240)],
    256: [(256, 256), (200, 248)],
}
COMBINATIONS = 40
SHORTEST = 65  # queries that the backend takes
BLOCK_TILE = (128, 128)  # of a block mask
# Keys of sequences, and of either side of a window, whose tiles are those of long problems.
LONG, WIDE = 1100, 300
HANG_SECONDS = 180  # nearly all for compiling, beside many other processes
PART = 20  # draws of a test
DRAWS = int(os.environ.get("FLASHTILE_DRAWS", str(PART)))

draws = settings(
    max_examples=min(DRAWS, PART),
    deadline=None,
    database=None,
    print_blob=True,
    phases=(Phase.generate,),  # a wrong result is compared hundreds of times; shrinking takes hours
    suppress_health_check=list(HealthCheck),
)

queries = st.one_of(st.integers(SHORTEST, 140), st.sampled_from([128, 129, 192, 193, 256, 300]))
keys = st.one_of(st.integers(1, 12), st.integers(1, 300), st.sampled_from([64, 128, 129, 512, 700]))
sequences = st.tuples(st.integers(0, 150), st.one_of(st.integers(0, 12), st.integers(0, 300)))


class Combination(NamedTuple):
    """The configuration of the compiled kernels, except the dtype."""

    head_dims: tuple[int, int]
    packed: bool
    options: frozenset[str]


def combination(number: int, head_dim: int) -> Combination:
    """A combination of options; a number always gives the same one."""
    chance = random.Random(1000 * head_dim + number)
    dims, packed = chance.choice(HEAD_DIMS[head_dim]), chance.random() < 0.5
    mask = chance.choice(["full", "causal", "causal", "left", "right", "window", "chunk"])
    likely = {"causal chunk": 0.2, "softcap": 0.3, "alibi": 0.2, "sink": 0.3, "scale": 0.3}
    likely |= {"negative scale": 0.1, "deterministic": 0.3, "used": 0.3}
    chosen = {mask, *(name for name, share in likely.items() if chance.random() < share)}
    if not packed and chance.random() < 0.3:
        chosen.add("block mask")
    if not packed and not chosen & {"block mask", "deterministic"} and chance.random() < 0.4:
        chosen.add(chance.choice(["span", "spans for each batch"]))
    if chance.random() < 0.25:
        chosen.add("dropout")
    if chance.random() < 0.5:
        chosen.add("long")
    return Combination(dims, packed, frozenset(chosen))


def options_of(chosen: frozenset[str], left: int, right: int, chunk: int, packed: bool) -> Any:
    """The maker of the options named in `chosen`; numbers are drawn with the sizes."""
    window = (
        left if chosen & {"left", "window"} else -1,
        right if chosen & {"right", "window"} else -1,
    )
    plain = {
        "causal": bool(chosen & {"causal", "causal chunk"}),
        "window_size": window,
        "attention_chunk": chunk if chosen & {"chunk", "causal chunk"} else 0,
        "softcap": 2.0 if "softcap" in chosen else 0.0,
        "softmax_scale": -0.2 if "negative scale" in chosen else 0.3 if "scale" in chosen else None,
        "deterministic": "deterministic" in chosen,
    }
    of_harness = ("alibi", "sink", "span", "spans for each batch", "dropout")
    named = [name for name in of_harness if name in chosen]
    named += ["seqused"] if packed and "used" in chosen else []
    blocks = "block mask" in chosen

    def make(g: torch.Generator, s: Sizes, dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = dict(plain)
        for name in named:
            made |= OPTIONS[name](g, s, dtype)
        if blocks:
            made["block_mask"] = block_mask(g, s)
        return made

    make.__name__ = f"{plain} {named} {'block mask' * blocks}"
    return make


def block_mask(g: torch.Generator, s: Sizes) -> Masked:
    """A random mask of empty, full and partial tiles, shared or for each head."""
    heads = int(torch.randint(2, (), generator=g)) * (s.Hq - 1) + 1
    counts = [-(-length // size) for length, size in zip((s.M, s.N), BLOCK_TILE, strict=True)]
    dense = dense_from_tiles(tile_kinds(g, 1, heads, *counts), BLOCK_TILE, s.M, s.N)
    partial_tiles = dense_from_tiles(tile_kinds(g, 1, heads, *counts), BLOCK_TILE, s.M, s.N)
    dense &= ~partial_tiles | (torch.rand(dense.shape, generator=g) < 0.5)
    return Masked(BlockMask.from_dense(dense, BLOCK_TILE), dense)


@pytest.fixture
def named_if_it_hangs(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], None]]:
    """Name what is about to run; the process ends if nothing else is named in time."""
    with capfd.disabled():
        terminal = os.dup(2)
    timer: list[threading.Timer] = []

    def hang(what: str) -> None:
        os.write(terminal, f"\nno end after {HANG_SECONDS} s: {what}\n".encode())
        os._exit(1)

    def begin(what: str) -> None:
        end()
        timer.append(threading.Timer(HANG_SECONDS, hang, [what]))
        timer[0].start()

    def end() -> None:
        while timer:
            timer.pop().cancel()

    yield begin
    end()
    os.close(terminal)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend's name; calls are copied to the GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name()
        pytest.skip(f"the Hopper backend wants compute capability 9.0, this is {found}")
    carry_calls(monkeypatch, torch.device("cuda"), refusals="fail")
    return "hopper"


@pytest.mark.parametrize("part", range(-(-DRAWS // PART)))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@given(data=st.data())
@draws
def test_random_problems(
    head_dim: int,
    part: int,
    hopper: str,
    named_if_it_hangs: Callable[[str], None],
    data: st.DataObject,
) -> None:
    Hk, group = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3)), "heads")
    number = data.draw(st.integers(0, COMBINATIONS - 1), "combination")
    (D, Dv), packed, options = combination(number, head_dim)
    is_long = "long" in options
    sides = st.one_of(st.integers(0, 40), st.integers(0, 300))
    numbers = [data.draw(sides) + WIDE * is_long for _ in range(2)]
    chunk = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 300)), "chunk")
    chosen = options_of(options, *numbers, chunk, packed)
    # Float16 is the same kernels with other products: a few combinations will do.
    dtype = torch.float16 if number % 8 == 0 and data.draw(st.booleans()) else torch.bfloat16
    layout = partial(strided, style=data.draw(st.sampled_from(STRIDE_STYLES), "strides"))
    seed = data.draw(st.integers(0, 2**31), "seed")
    if not packed:
        B, M, N = data.draw(st.integers(1, 3)), data.draw(queries, "M"), data.draw(keys, "N")
        N += LONG * is_long
        s = Sizes(B, M, N, Hk * group, Hk, D, Dv)
        named_if_it_hangs(f"{s} {dtype} {chosen.__name__} {layout} seed {seed}")
        check_dense(s, chosen, dtype, hopper, seed, layout)
        return
    lengths = data.draw(st.lists(sequences, min_size=1, max_size=4), "lengths")
    lengths_q, lengths_k = (list(x) for x in zip(*lengths, strict=True))
    # Upper bounds, not always reached.
    M, N = max(SHORTEST, *lengths_q), max(LONG if is_long else 1, *lengths_k)
    s = Sizes(len(lengths), M, N, Hk * group, Hk, D, Dv)
    named_if_it_hangs(f"{s} {lengths} {dtype} {chosen.__name__} {layout} seed {seed}")
    check_varlen(lengths_q, lengths_k, s, chosen, dtype, hopper, seed, layout)
