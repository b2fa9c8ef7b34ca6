"""Measurements that are made again and again: named cases with the peers that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .run import Settings
from .shapes import BLOCK_TILE, Case

TOKENS, HIDDEN = 16384, 2048  # of a dense case: length times batch, heads times head dim
BOTH_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Preset:
    """What to measure, and how where nothing else is asked for."""

    about: str
    cases: Sequence[Case]
    settings: Settings


def _case(head_dim: int, length: int, **changes: object) -> Case:
    heads = HIDDEN // head_dim
    plain = Case(
        dtype="bfloat16",
        head_dim=head_dim,
        head_dim_v=head_dim,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=length,
        seqlen_k=length,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # the names of Case's own fields


def _dense() -> list[Case]:
    return [
        _case(head_dim, length, batch=TOKENS // length, causal=causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def _memory() -> list[Case]:
    return [_case(128, 1024 << doubled, causal=True) for doubled in range(7)]


def _sparse() -> list[Case]:
    full = _case(128, TOKENS)
    blocks = [
        replace(full, variant=f"block-sparse {density:.1%}", block_density=_drawn(density, TOKENS))
        for density in (0.125, 0.25, 0.375, 0.5, 0.75)
    ]
    windows = [
        replace(full, variant=f"window {width}", causal=True, window=(width - 1, 0))
        for width in (1024, 4096)
    ]
    return [full, replace(full, causal=True), *blocks, *windows]


def _drawn(density: float, length: int) -> float:
    """The share of tiles to draw so that `density` stays in all.

    The first column and the diagonal stay whatever is drawn.
    """
    tiles = -(-length // BLOCK_TILE)
    kept = (2 - 1 / tiles) / tiles
    return (density - kept) / (1 - kept)


def _decode() -> list[Case]:
    """(batch, query heads, key heads, tokens in the cache), each contiguous and in pages."""
    rows = (
        (1, 32, 8, 32768),
        (16, 32, 8, 8192),
        (64, 32, 8, 4096),
        (16, 32, 32, 4096),
        (1, 32, 1, 131072),
    )
    dense = [
        _case(
            128, length, batch=batch, heads_q=heads, heads_kv=key_heads, seqlen_q=1, cached=True,
            variant="decode",
        )
        for batch, heads, key_heads, length in rows
    ]  # fmt: skip
    paged = [
        replace(case, page_size=size, variant=f"decode, pages of {size}")
        for size in (16, 256)
        for case in dense
    ]
    return dense + paged


def _host() -> list[Case]:
    return [
        _case(head_dim, length, causal=True)
        for head_dim in (64, 128)
        for length in (128, 512, 1024)
    ]


def _settings(peers: str, directions: tuple[str, ...], seconds: float) -> Settings:
    return Settings("cuda", tuple(peers.split()), directions, seconds)


PRESETS = {
    "gpu-dense": Preset(
        "speed against length: 16,384 tokens, hidden size 2,048, three head dims, full and causal",
        _dense(),
        replace(_settings("flashtile fa2 cudnn fa3", (*BOTH_PASSES, "both"), 0.15), memory=False),
    ),
    "gpu-memory": Preset(
        "peak memory of forward and backward against length, 1,024 to 65,536 tokens",
        _memory(),
        replace(_settings("standard fa2 flashtile", ("both",), 0.1), accuracy=False),
    ),
    "gpu-sparse": Preset(
        "speed against density: block masks and windows over 16,384 tokens",
        _sparse(),
        replace(_settings("flashtile fa2 flex", BOTH_PASSES, 0.3), memory=False),
    ),
    "gpu-decode": Preset(
        "one query token for each sequence of a cache: share of the memory's speed",
        _decode(),
        replace(_settings("flashtile fa2 fa3", ("forward",), 0.15), memory=False, accuracy=False),
    ),
    "gpu-host": Preset(
        "the host's time of an eager call at small shapes",
        _host(),
        replace(
            # Not SDPA held to a backend: what holds it takes the host's time as well.
            _settings("flashtile sdpa fa3", ("forward", "both"), 0.1),
            host=True,
            memory=False,
            accuracy=False,
        ),
    ),
}


def preset_cases(name: str) -> list[Case]:
    """The cases of a preset, each with its name."""
    return [replace(case, preset=name) for case in PRESETS[name].cases]
