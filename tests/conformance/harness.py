"""Cases for the judge of `flashtile.testing`: options by name, and calls of each function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.masks import BlockMask, Spans
from flashtile.score_mod import ScoreFunction
from flashtile.testing import (
    Leaves,
    Run,
    alibi_slopes,
    attention_reference,
    attention_varlen_reference,
    call_failures,
    cu_seqlens,
    dense_from_tiles,
    drawn_keep,
    generator,
    normal,
    output_failures,
    tile_kinds,
)
from flashtile.testing.tolerance import CAPTURED

from .devices import device_of

DIFFERENTIABLE = ("q", "k", "v", "qv", "bias", "sink", "relative_bias")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; `M`, `N` are the longest lengths of a packed one. `Dv` None is `D`."""

    B: int = 2
    M: int = 19
    N: int = 27
    Hq: int = 4
    Hk: int = 2
    D: int = 16
    Dv: int | None = None

    @property
    def value_dim(self) -> int:
        return self.D if self.Dv is None else self.Dv


@dataclass(frozen=True)
class Masked:
    """A block mask for the backend, and the same as a dense bool tensor for the reference."""

    block_mask: BlockMask
    dense: Tensor


@dataclass(frozen=True)
class Twin:
    """A score function that captures a leaf, and the option that is the same leaf for the
    reference, which knows the errors of its gradient."""

    function: ScoreFunction  # of the leaf, the constants and a score with its indices
    option: str
    leaf: Tensor
    constants: tuple[Tensor, ...] = ()


def whole_tiles(g: torch.Generator, s: Sizes, heads: bool) -> Masked:
    """A random mask of whole 8 x 4 tiles, shared or for each batch and head."""
    lead = (s.B, s.Hq) if heads else (1, 1)
    kinds = tile_kinds(g, *lead, -(-s.M // 8), -(-s.N // 4))
    return Masked(BlockMask.from_tiles(kinds, (8, 4)), dense_from_tiles(kinds, (8, 4), s.M, s.N))


def partial_tiles(g: torch.Generator, s: Sizes) -> Masked:
    """A random mask of empty, full and partial tiles of 8 x 8 for each head."""
    dense = torch.rand(1, s.Hq, s.M, s.N, generator=g) < 0.5
    dense[:, :, :8, :8] = True
    dense[:, :, 8:16] = False
    return Masked(BlockMask.from_dense(dense, (8, 8)), dense)


def random_spans(g: torch.Generator, s: Sizes, intervals: int, lead: tuple[int, int]) -> Spans:
    """Intervals of every kind: empty, overlapping, beyond either end, of all keys."""
    shape = (*lead, s.M, intervals)
    starts = torch.randint(-3, s.N + 4, shape, generator=g, dtype=torch.int32)
    stops = starts + torch.randint(-4, s.N + 5, shape, generator=g, dtype=torch.int32)
    everything = torch.rand(shape, generator=g) < 0.1
    return Spans(starts.masked_fill(everything, -(2**31)), stops.masked_fill(everything, 2**31 - 1))


def packed_spans(mask: Spans, lengths: list[int]) -> Spans:
    """A mask of padded sequences for the same sequences packed, of these lengths."""
    rows = (x.expand(len(lengths), *x.shape[1:]).unbind(0) for x in mask)
    cut = ([x[:, :n] for x, n in zip(part, lengths, strict=True)] for part in rows)
    return Spans(*(torch.cat(part, dim=1)[None] for part in cut))


def relative_table(g: torch.Generator, s: Sizes) -> ScoreFunction:
    """Add a number for each head and distance."""

    def add(table: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, j - i + s.M]

    return partial(add, normal(g, s.Hq, s.M + s.N + 1))


def curved(g: torch.Generator, s: Sizes) -> ScoreFunction:
    """Bend half of the scores, and scale the others by a number for each sequence and query."""

    def bend(scale: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((i + j) % 2 == 0, score * scale[b, i], 2 * torch.tanh(score / 2) - h)

    return partial(bend, normal(g, s.B, max(s.M, 1)))


def same_document(g: torch.Generator, s: Sizes) -> ScoreFunction:
    """Hide the keys of other documents."""

    def hide(
        query_ids: Tensor, key_ids: Tensor,
        score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor,
    ) -> Tensor:  # fmt: skip
        return torch.where(query_ids[b, i] == key_ids[b, j], score, -float("inf"))

    query_ids = torch.randint(0, 3, (s.B, max(s.M, 1)), generator=g)
    key_ids = torch.randint(0, 3, (s.B, max(s.N, 1)), generator=g, dtype=torch.int32)
    return partial(hide, query_ids, key_ids)


def bias_with_infinities(g: torch.Generator, s: Sizes, dtype: torch.dtype) -> Tensor:
    """An additive mask: -inf at some positions and over the whole second row."""
    bias = normal(g, s.B, 1, s.M, s.N, dtype=dtype)
    bias.masked_fill_(torch.rand(bias.shape, generator=g) < 0.3, -torch.inf)
    bias[:, :, 1:2] = -torch.inf
    return bias


def used(g: torch.Generator, B: int, longest: int) -> Tensor:
    """Used lengths int32 (B,) from 0 to `longest`."""
    return torch.randint(0, longest + 1, (B,), generator=g, dtype=torch.int32)


def sink_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def learned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A number for each head as a leaf, which calls of `dtype` differentiate."""
    return x.to(sink_dtype(dtype)).requires_grad_()


Make = Callable[[torch.Generator, Sizes, torch.dtype], dict[str, Any]]

# Every option of a call, by the name in the ids of the test cases.
OPTIONS: dict[str, Make] = {
    "nothing": lambda g, s, t: {},
    "scale": lambda g, s, t: {"softmax_scale": 0.37},
    "negative scale": lambda g, s, t: {"softmax_scale": -0.2},
    "scale of zero": lambda g, s, t: {"softmax_scale": 0.0},
    "causal": lambda g, s, t: {"causal": True},
    "window": lambda g, s, t: {"window_size": (6, 3)},
    "window to the left": lambda g, s, t: {"window_size": (5, -1)},
    "window to the right": lambda g, s, t: {"window_size": (None, 4)},
    "window of one key": lambda g, s, t: {"window_size": (0, 0)},
    "window after the query": lambda g, s, t: {"window_size": (-3, 9)},
    "window before the query": lambda g, s, t: {"window_size": (9, -3)},
    "keys far before the query": lambda g, s, t: {"window_size": (None, -5)},
    "keys far after the query": lambda g, s, t: {"window_size": (-5, -1)},
    "window without a key": lambda g, s, t: {"window_size": (2, -4)},
    "causal window without a key": lambda g, s, t: {"causal": True, "window_size": (-4, 6)},
    "causal window": lambda g, s, t: {"causal": True, "window_size": (7, 2)},
    "chunk": lambda g, s, t: {"attention_chunk": 7},
    "softcap": lambda g, s, t: {"softcap": 1.5},
    "alibi": lambda g, s, t: {"alibi_slopes": alibi_slopes(g, s.Hq)},
    "alibi for each batch": lambda g, s, t: {"alibi_slopes": alibi_slopes(g, s.Hq, s.B)},
    "learned alibi": lambda g, s, t: {"alibi_slopes": learned(alibi_slopes(g, s.Hq), t)},
    "learned alibi for each batch": lambda g, s, t: {
        "alibi_slopes": learned(alibi_slopes(g, s.Hq, s.B), t)
    },
    "relative bias": lambda g, s, t: {"relative_bias": normal(g, s.Hq, 17, dtype=sink_dtype(t))},
    "relative bias of all distances": lambda g, s, t: {
        "relative_bias": normal(g, s.Hq, 2 * max(s.M, s.N) + 3, dtype=t)
    },
    "relative bias of one number": lambda g, s, t: {
        "relative_bias": normal(g, s.Hq, 1, dtype=sink_dtype(t))
    },
    "bias": lambda g, s, t: {"bias": normal(g, s.B, s.Hq, s.M, s.N, dtype=t)},
    "bias shared by heads": lambda g, s, t: {"bias": normal(g, s.B, 1, s.M, s.N, dtype=t)},
    "bias for each key": lambda g, s, t: {"bias": normal(g, s.B, 1, 1, s.N, dtype=t)},
    "bias for each head": lambda g, s, t: {"bias": normal(g, s.Hq, 1, s.N, dtype=t)},
    "bias matrix": lambda g, s, t: {"bias": normal(g, s.M, s.N, dtype=t)},
    "bias with -inf": lambda g, s, t: {"bias": bias_with_infinities(g, s, t)},
    "sink": lambda g, s, t: {"sink": normal(g, s.Hq, dtype=sink_dtype(t))},
    "dropout": lambda g, s, t: {"dropout_p": 0.3},
    "seqused": lambda g, s, t: {
        "seqused_q": used(g, s.B, s.M),
        "seqused_k": used(g, s.B, s.N),
    },
    "block mask": lambda g, s, t: {"block_mask": whole_tiles(g, s, heads=False)},
    "block mask for each head": lambda g, s, t: {"block_mask": whole_tiles(g, s, heads=True)},
    "block mask with partial tiles": lambda g, s, t: {"block_mask": partial_tiles(g, s)},
    "span": lambda g, s, t: {"mask": random_spans(g, s, 1, (1, 1))},
    "spans for each batch": lambda g, s, t: {"mask": random_spans(g, s, 2, (s.B, 1))},
    "spans for each batch and head": lambda g, s, t: {"mask": random_spans(g, s, 3, (s.B, s.Hq))},
    "score function": lambda g, s, t: {"score_mod": relative_table(g, s)},
    "curved score function": lambda g, s, t: {"score_mod": curved(g, s)},
    "score function that hides": lambda g, s, t: {"score_mod": same_document(g, s)},
    "deterministic": lambda g, s, t: {"deterministic": True},
}


# Names joined by ` + `, or a function that makes the options.
Options = str | Make


def resolve(options: Options, g: torch.Generator, s: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """The options of a case, made for its sizes."""
    if not isinstance(options, str):
        return options(g, s, dtype)
    merged: dict[str, Any] = {}
    for name in options.split(" + "):
        merged |= OPTIONS[name](g, s, dtype)
    return merged


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Leaves]:
    """Options for the backend, options for the reference, and the differentiable ones."""

    def is_leaf(name: str) -> bool:
        return name in DIFFERENTIABLE or getattr(options[name], "requires_grad", False)

    leaves = {n: x for n, x in options.items() if is_leaf(n)}
    function = options.get("score_mod")
    if isinstance(function, Twin):
        leaves[function.option] = function.leaf
    elif isinstance(function, partial) and any(x.requires_grad for x in function.args):
        leaves |= {f"{CAPTURED}{n}": x for n, x in enumerate(function.args)}
    plain = {n: x for n, x in options.items() if not is_leaf(n)}
    reference = {n: x for n, x in plain.items() if n != "deterministic"}
    if isinstance(function, Twin):
        del reference["score_mod"]
    if isinstance(plain.get("block_mask"), Masked):
        masked = plain["block_mask"]
        plain, reference = (
            plain | {"block_mask": masked.block_mask},
            reference | {"block_mask": masked.dense},
        )
    return plain, reference, leaves


def arguments(leaves: Leaves, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; its score function captures the leaves made for that."""
    given, function = leaves | options, options.get("score_mod")
    if isinstance(function, Twin):
        captured = (given.pop(function.option), *function.constants)
        return given | {"score_mod": partial(function.function, *captured)}
    captured = tuple(given.pop(name) for name in leaves if name.startswith(CAPTURED))
    return given | ({"score_mod": partial(function.func, *captured)} if captured else {})


def dropout_keep(seed: int, dropout_p: float, s: Sizes, backend: str | None) -> Tensor | None:
    """The mask that a call of these sizes draws right after `torch.manual_seed(seed)`."""
    if dropout_p == 0:
        return None
    return drawn_keep(seed, dropout_p, (s.B, s.Hq, s.M, s.N), device_of(backend))


def judge_outputs(got: Run, reference: Callable[..., Any], dtype: torch.dtype, seed: int) -> None:
    """Assert that `output_failures` finds nothing."""
    _assert_none(output_failures(got, reference, dtype), seed)


def compare(
    flash: Callable[[Leaves], Any],
    reference: Callable[..., Any],
    leaves: Leaves,
    *,
    seed: int,
    through: tuple[str, ...] = ("out", "out and lse"),
) -> None:
    """Assert that `call_failures` finds nothing."""
    dtype = next(iter(leaves.values())).dtype
    found = call_failures(flash, reference, leaves, seed=seed, dtype=dtype, through=through)
    _assert_none(found, seed)


def _assert_none(failures: list[str], seed: int) -> None:
    assert not failures, "\n".join([f"seed {seed}", *failures])


def check_dense(
    s: Sizes,
    names: Options,
    dtype: torch.dtype,
    backend: str | None,
    seed: int,
    layout: Callable[[Tensor], Tensor] = lambda x: x,
    **how: Any,
) -> None:
    """`flashtile.attention` with the options in `names`, forward and backward."""
    g = generator(seed)
    leaves = {
        "q": layout(normal(g, s.B, s.M, s.Hq, s.D, dtype=dtype)),
        "k": layout(normal(g, s.B, s.N, s.Hk, s.D, dtype=dtype)),
        "v": layout(normal(g, s.B, s.N, s.Hk, s.value_dim, dtype=dtype)),
    }
    options, for_reference, extra = split_options(resolve(names, g, s, dtype))
    keep = dropout_keep(seed, options.get("dropout_p", 0.0), s, backend)
    compare(
        lambda x: flashtile.attention(**arguments(x, options), return_lse=True, backend=backend),
        lambda x, **how: attention_reference(**arguments(x, for_reference), keep=keep, **how),
        leaves | extra,
        seed=seed,
        **how,
    )


def resolve_packed(
    names: Options,
    g: torch.Generator,
    s: Sizes,
    dtype: torch.dtype,
    lengths_q: list[int],
    lengths_k: list[int],
) -> dict[str, Any]:
    """`resolve` for packed sequences, none of which uses more tokens than it has."""
    given = resolve(names, g, s, dtype)
    for name, lengths in (("seqused_q", lengths_q), ("seqused_k", lengths_k)):
        if name in given:
            given[name] = torch.minimum(given[name], torch.tensor(lengths, dtype=torch.int32))
    if "mask" in given:
        given["mask"] = packed_spans(given["mask"], lengths_q)
    return given


def check_varlen(
    lengths_q: list[int],
    lengths_k: list[int],
    s: Sizes,
    names: Options,
    dtype: torch.dtype,
    backend: str | None,
    seed: int,
    layout: Callable[[Tensor], Tensor] = lambda x: x,
    **how: Any,
) -> None:
    """`flashtile.attention_varlen`; `s.M`, `s.N` are the max_seqlens and `s.B` the sequences."""
    g = generator(seed)
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    leaves = {
        "q": layout(normal(g, total_q, s.Hq, s.D, dtype=dtype)),
        "k": layout(normal(g, total_k, s.Hk, s.D, dtype=dtype)),
        "v": layout(normal(g, total_k, s.Hk, s.value_dim, dtype=dtype)),
    }
    given = resolve_packed(names, g, s, dtype, lengths_q, lengths_k)
    options, for_reference, extra = split_options(given)
    keep = dropout_keep(seed, options.get("dropout_p", 0.0), s, backend)
    packing = {
        "cu_seqlens_q": cu_seqlens(lengths_q),
        "cu_seqlens_k": cu_seqlens(lengths_k),
        "max_seqlen_q": s.M,
        "max_seqlen_k": s.N,
    }
    compare(
        lambda x: flashtile.attention_varlen(
            **arguments(x, options), **packing, return_lse=True, backend=backend
        ),
        lambda x, **how: attention_varlen_reference(
            **arguments(x, for_reference), **packing, keep=keep, **how
        ),
        leaves | extra,
        seed=seed,
        **how,
    )
