"""Presets: named groups of cases with the peers to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashtile.ops.quantize.formula import Recipe
from flashtile.testing import generator

from . import field, models
from .run import Settings
from .shapes import BLOCK_TILE, Case, vary

TOKENS, HIDDEN = 16384, 2048  # of a dense case: length times batch, heads times head dim
PACKED_LENGTHS = 128, 8193  # of the sequences in a packed case, drawn from this range
BOTH_PASSES = ("forward", "backward")
SEED = 1  # of the presets that draw their cases
# Settings of presets with hundreds of measurements: little time for each, and only time.
MANY_CELLS: dict[str, Any] = {"min_rounds": 2, "memory": False, "accuracy": False}


@dataclass(frozen=True)
class Preset:
    """The cases to measure, and the default settings."""

    about: str
    cases: Sequence[Case] | Callable[[int], Sequence[Case]]  # or what draws them with a seed
    settings: Settings

    @property
    def draws(self) -> bool:
        """Whether a seed draws the cases."""
        return callable(self.cases)


def plain_case(head_dim: int, length: int, **changes: object) -> Case:
    """One full bfloat16 sequence of `length`, with hidden size 2,048, and then the changes."""
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
        plain_case(head_dim, length, batch=TOKENS // length, causal=causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def _readme() -> list[Case]:
    """The grid of the plots in flash-attention's README."""
    return [replace(case, dtype="float16") for case in _dense()]


def _lecture() -> list[Case]:
    """The grid of Triton's tutorial on attention, with more lengths."""
    return [
        plain_case(128, length, batch=32, heads_q=4, heads_kv=4, causal=causal, dtype=dtype)
        for dtype in ("float32", "float16")
        for causal in (False, True)
        for length in range(512, 8193, 512)
    ]


def _hopper() -> list[Case]:
    """What `_dense` lacks: other head dims, grouped heads, a window, unlike lengths packed."""
    plain: list[tuple[int, int, dict[str, Any]]]
    plain = [(head_dim, length, {}) for head_dim in (96, 192) for length in (4096, 16384)]
    grouped = [
        (128, length, {"heads_q": 32, "heads_kv": 8, "variant": "grouped"})
        for length in (4096, 16384)
    ]
    lengths = torch.randint(*PACKED_LENGTHS, (16,), generator=generator(0)).tolist()
    packed = {"documents": len(lengths), "lengths": tuple(lengths), "variant": "packed"}
    return [
        plain_case(head_dim, length, batch=TOKENS // length, causal=causal, **changes)
        for head_dim, length, changes in (*plain, *grouped)
        for causal in (False, True)
    ] + [
        plain_case(128, TOKENS, causal=True, window=(1023, 0), variant="window 1024"),
        *(plain_case(128, sum(lengths), causal=causal, **packed) for causal in (False, True)),
    ]


def _long() -> list[Case]:
    return [case for case in _dense() if case.seqlen_k in (4096, 16384)]


def _quantize() -> list[Case]:
    recipes = {
        "per-block scales": Recipe(),
        "per-head scales": Recipe("head"),
        "per-block scales, not rotated": Recipe(hadamard=False),
    }
    return [
        plain_case(head_dim, TOKENS, variant=name, recipe=recipe)
        for head_dim in (64, 128, 256)
        for name, recipe in recipes.items()
    ]


def _memory() -> list[Case]:
    return [plain_case(128, 1024 << doubled, causal=True) for doubled in range(7)]


def _sparse() -> list[Case]:
    full = plain_case(128, TOKENS)
    blocks = [block_sparse_case(density) for density in (0.05, 0.125, 0.25, 0.375, 0.5, 0.75)]
    windows = [
        replace(full, variant=f"window {width}", causal=True, window=(width - 1, 0))
        for width in (1024, 4096)
    ]
    return [full, replace(full, causal=True), *blocks, *windows]


def block_sparse_case(density: float, head_dim: int = 128) -> Case:
    """16,384 tokens, of whose tiles a random block mask keeps the share `density`."""
    full = plain_case(head_dim, TOKENS, variant=f"block-sparse {density:.1%}")
    return replace(full, block_density=_drawn(density, TOKENS))


def _masks() -> list[Case]:
    """Masks and changes of scores that FlexAttention's users write as functions."""
    changes: dict[str, dict[str, Any]] = {
        "causal": {},
        "documents": {"documents": 12},
        "prefix 4096": {"prefix": 4096},
        "window 1024": {"window": (1023, 0)},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi": True},
        "relative bias, 128 to a side": {"relative": 128},
        "relative bias, every distance": {"relative": TOKENS - 1},
    }
    return [
        case
        for head_dim in (64, 128)
        for case in (
            *(
                plain_case(head_dim, TOKENS, causal=True, variant=name, **facts)
                for name, facts in changes.items()
            ),
            *(block_sparse_case(density, head_dim) for density in (0.05, 0.25, 0.75)),
        )
    ]


def _cascade() -> list[Case]:
    """One token for each of 64 sequences that share their first 8,192 tokens, of 9,216."""
    plain = plain_case(128, 9216, batch=64, heads_q=32, seqlen_q=1, cached=True, shared_prefix=8192)
    return [
        replace(plain, heads_kv=heads, page_size=size, variant=f"shared prefix{name}")
        for heads in (8, 32)
        for size, name in ((0, ""), (16, ", pages of 16"))
    ]


def _drawn(density: float, length: int) -> float:
    """The share of tiles to draw so that `density` stays in all.

    The first column and the diagonal stay whatever is drawn.
    """
    tiles = -(-length // BLOCK_TILE)
    kept = (2 - 1 / tiles) / tiles
    return (density - kept) / (1 - kept)


def _decode() -> list[Case]:
    """(batch, query heads, key heads, tokens in the cache), each contiguous and in pages, of two
    dtypes, and with the token's own key appended."""
    rows = (
        (1, 32, 8, 32768),
        (16, 32, 8, 8192),
        (64, 32, 8, 4096),
        (16, 32, 32, 4096),
        (1, 32, 1, 131072),
    )
    dense = [
        plain_case(
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
    float8 = [
        replace(case, cache_dtype="float8_e4m3fn", variant=f"{case.variant}, float8")
        for case in (*dense, *paged[: len(dense)])
    ]
    appended = [replace(case, appends=True, variant="decode, append and rotary") for case in dense]
    return dense + paged + float8 + appended


def _prefill() -> list[Case]:
    """Chunks of a prompt as keys in one piece, in a cache, in pages: 2,048 tokens after 30,720, and
    512 after 7,680 of each of four sequences."""
    chunks = [
        plain_case(
            128, length, batch=batch, seqlen_q=count, heads_q=32, heads_kv=8, causal=True,
            variant="prefill",
        )
        for batch, count, length in ((1, 2048, 32768), (4, 512, 8192))
    ]  # fmt: skip
    stored = [(0, "prefill, cache"), *((n, f"prefill, pages of {n}") for n in (16, 64, 256))]
    return [
        case
        for plain in chunks
        for case in (
            plain,
            *(replace(plain, cached=True, page_size=n, variant=name) for n, name in stored),
        )
    ]


def _few_queries() -> list[Case]:
    """2 to 16 query tokens for each of 1 to 64 sequences, over 4,096 to 131,072 keys."""
    sizes = ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (64, 4096), (64, 16384))
    return [
        plain_case(
            128, length, batch=batch, seqlen_q=count, heads_q=32, heads_kv=8, causal=True,
            cached=True, variant=f"{count} queries",
        )
        for batch, length in sizes
        for count in (2, 4, 16)
    ]  # fmt: skip


def _host() -> list[Case]:
    dense = [
        plain_case(head_dim, length, causal=True)
        for head_dim in (64, 128)
        for length in (128, 512, 1024)
    ]
    steps = [
        plain_case(
            128, 1024, batch=batch, heads_q=32, heads_kv=8, seqlen_q=tokens, causal=True,
            cached=True, appends=appends, rotates=rotates, variant=name,
        )
        for name, tokens, appends, rotates in (
            ("decode", 1, False, False),
            ("decode, append", 1, True, False),
            ("decode, append and rotary", 1, True, True),
            ("4 tokens, append and rotary", 4, True, True),
        )
        for batch in (1, 8, 16)
    ]  # fmt: skip
    return dense + steps


def _options() -> list[Case]:
    """What few libraries have: options, other dtypes, a value head dim of its own."""
    causal = ("softcap", "alibi", "sink", "chunk", "value-dim", "dropout")
    return [
        case
        for length in (4096, 16384)
        for plain in [plain_case(128, length, batch=TOKENS // length, causal=True)]
        for case in (
            *(vary(plain, name) for name in causal),
            vary(replace(plain, causal=False), "bias"),
            plain_case(
                192, length, batch=plain.batch, heads_q=16, heads_kv=16, head_dim_v=128,
                causal=True, variant="value-dim 128",
            ),
            *(replace(plain, dtype=dtype, variant=dtype) for dtype in ("float16", "float32")),
        )
    ]  # fmt: skip


def _settings(peers: str, directions: tuple[str, ...], seconds: float, **others: Any) -> Settings:
    return Settings("cuda", tuple(peers.split()), directions, seconds, **others)


PRESETS = {
    "gpu-dense": Preset(
        "speed against length: 16,384 tokens, hidden size 2,048, three head dims, full and causal",
        _dense(),
        _settings(
            "flashtile flashtile-triton fa2 cudnn fa3 fa4",
            (*BOTH_PASSES, "both"),
            0.1,
            memory=False,
        ),
    ),
    "fa-readme": Preset(
        "flash-attention's own plots: float16, 16,384 tokens, hidden size 2,048, three head dims",
        _readme(),
        _settings(
            "flashtile flashtile-triton fa2 cudnn fa3 fa4 standard",
            (*BOTH_PASSES, "both"),
            0.02,
            **MANY_CELLS,
        ),
    ),
    "lecture": Preset(
        "batch 32, 4 heads of 128, 512 to 8,192 tokens in steps of 512, float32 and float16",
        _lecture(),
        _settings("flashtile fa2 sdpa-efficient standard", BOTH_PASSES, 0.02, **MANY_CELLS),
    ),
    "gpu-hopper": Preset(
        "more shapes for Hopper: head dims 96 and 192, grouped heads, a window, packed lengths",
        _hopper(),
        _settings("flashtile flashtile-triton fa2 cudnn fa3 fa4", BOTH_PASSES, 0.1, memory=False),
    ),
    "gpu-field": Preset(
        f"{field.COUNT} shapes that --seed draws: lengths, heads, head dims, masks, packing",
        field.draw,
        _settings("flashtile fa3 fa4 cudnn", BOTH_PASSES, 0.1, memory=False),
    ),
    "gpu-models": Preset(
        "34 attention calls of published models, next to every library that has them",
        models.calls(),
        _settings(
            "flashtile fa3 fa4 cudnn fa2 sdpa-efficient flex", BOTH_PASSES, 0.05, **MANY_CELLS
        ),
    ),
    "gpu-options": Preset(
        "options, other dtypes and a value head dim, next to the libraries that have them",
        _options(),
        _settings(
            "flashtile flashtile-triton flex fa2 fa2-package sdpa-efficient cudnn fa3 fa4",
            BOTH_PASSES,
            0.1,
            memory=False,
        ),
    ),
    "gpu-deterministic": Preset(
        "what a backward costs that is bitwise repeatable",
        _long(),
        _settings(
            "flashtile flashtile-deterministic", ("backward",), 0.1, memory=False, accuracy=False
        ),
    ),
    "gpu-float8": Preset(
        "attention on float8 numbers, with per-block and per-head scales, against bfloat16",
        _long(),
        _settings(
            "flashtile flashtile-float8 flashtile-float8-head fa3-float8",
            ("forward",),
            0.2,
            memory=False,
        ),
    ),
    "gpu-quantize": Preset(
        "quantising 16,384 tokens of q, k and v to float8, as a fraction of a copy's speed",
        _quantize(),
        _settings(
            "flashtile-quantize copy",
            ("forward",),
            0.1,
            memory=False,
            accuracy=False,
            cuda_graph=True,
        ),
    ),
    "gpu-layer": Preset(
        "forward and backward of a whole layer of GPT-2's kind, 16 heads of 128",
        [plain_case(128, 8192, causal=True, layer=True, variant="layer")],
        _settings("flashtile flashtile-triton fa2 cudnn fa4", ("both",), 0.5),
    ),
    "gpu-memory": Preset(
        "peak memory of forward and backward against length, 1,024 to 65,536 tokens",
        _memory(),
        _settings("standard fa2 flashtile flashtile-triton", ("both",), 0.05, accuracy=False),
    ),
    "gpu-sparse": Preset(
        "speed against density: block masks and windows over 16,384 tokens",
        _sparse(),
        _settings("flashtile flashtile-triton fa2 flex", BOTH_PASSES, 0.1, memory=False),
    ),
    "gpu-masks": Preset(
        "masks and score functions over 16,384 tokens, written as options, functions and spans, "
        "against FlexAttention",
        _masks(),
        _settings(
            "flashtile flashtile-function flashtile-spans flex", BOTH_PASSES, 0.1, memory=False
        ),
    ),
    "gpu-cascade": Preset(
        "decoding of 64 sequences with a common prefix of 8,192 tokens, read once or by each",
        _cascade(),
        _settings(
            "flashtile flashtile-unshared fa3", ("forward",), 0.1, memory=False, cuda_graph=True
        ),
    ),
    "gpu-decode": Preset(
        "one query token for each sequence of a cache: share of the memory's speed",
        _decode(),
        _settings(
            "flashtile fa2 fa3", ("forward",), 0.1, memory=False, accuracy=False, cuda_graph=True
        ),
    ),
    "gpu-few-queries": Preset(
        "2 to 16 query tokens for each sequence of a cache, as in speculative decoding",
        _few_queries(),
        _settings(
            "flashtile flashtile-triton flashtile-hopper fa3",
            ("forward",),
            0.05,
            memory=False,
            accuracy=False,
            cuda_graph=True,
        ),
    ),
    "gpu-prefill": Preset(
        "chunks of a prompt over cached tokens, against the same keys in one piece",
        _prefill(),
        _settings(
            "flashtile fa3", ("forward",), 0.2, memory=False, accuracy=False, cuda_graph=True
        ),
    ),
    "gpu-host": Preset(
        "the host's time of an eager call at small shapes, and of a decoding step",
        _host(),
        _settings(
            # Not SDPA with a given backend, because selecting it takes host time as well. FA4 is
            # measured where --peers names it: it compiles for longer than the others take.
            "flashtile flashtile-triton sdpa fa3",
            ("forward", "both"),
            0.05,
            host=True,
            memory=False,
            accuracy=False,
        ),
    ),
}


def preset_cases(name: str, seed: int = SEED) -> list[Case]:
    """The cases of a preset, each with its name and number; `seed` is for one that draws them."""
    cases = PRESETS[name].cases
    drawn = cases(seed) if callable(cases) else cases
    return [replace(case, preset=name, index=index) for index, case in enumerate(drawn, 1)]
