"""Inputs of the emulated kernels, with NaN and infinities wherever they must not be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.backends.hopper.forward.plan import KernelConfig
from flashtile.backends.hopper.shared.span_lists import SpanData, SpanLists, span_tensors, spans_of
from flashtile.call.layouts import Packed
from flashtile.dropout import draw_rng_state, keep_mask
from flashtile.masks import BlockMask, Spans
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import (
    alibi_slopes,
    cu_seqlens,
    generator,
    normal,
    packed_qkv,
    qkv,
    strided,
)

UNWRITTEN = -(2**30)  # a number that nobody has put there
# What the kernels that list blocks say and others do not.
OF_LISTS = {"min": torch.amin, "max": torch.amax, "cumsum": torch.cumsum}
SPARE = 5  # rows after the last sequence
DROPOUT: dict[str, dict[str, Any]] = {  # calls with dropout, of two heads
    "alone": {"dropout_p": 0.4},
    "numbers of 16 bits": {"dropout_p": 0.03},
    "nearly everything dropped": {"dropout_p": 0.99, "causal": True},
    "window": {"dropout_p": 0.1, "window_size": (60, 10)},
    "causal chunk": {"dropout_p": 0.1, "causal": True, "attention_chunk": 100},
    "and more": {
        "dropout_p": 0.1,
        "window_size": (60, 10),
        "softcap": 3.0,
        "alibi_slopes": alibi_slopes(generator(0), 2),
        "sink": normal(generator(0), 2),
    },
}


def dense_inputs(seed: int, style: str, sizes: dict[str, Any]) -> list[Tensor]:
    """q, k, v with strides of a `style`; one key head for two query heads unless `sizes` say
    otherwise."""
    shape = {"B": 1, "Hq": 2, "Hk": 1, "D": 128, "dtype": torch.bfloat16} | sizes
    return [strided(x, style) for x in qkv(generator(seed), **shape)]


def packed_inputs(
    seed: int, D: int, lengths_q: list[int], lengths_k: list[int], used: dict[str, list[int]]
) -> tuple[list[Tensor], Packed, dict[str, Tensor]]:
    """q, k, v, their layout and the used lengths of sequences of unlike lengths, with NaN between
    them and infinities after them."""
    tensors = packed_qkv(
        generator(seed), [*lengths_q, SPARE], [*lengths_k, SPARE], D=D, dtype=torch.bfloat16
    )
    cu_q, cu_k = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    counts = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in used.items()}
    sides = ((cu_q, "seqused_q"), (cu_k, "seqused_k"), (cu_k, "seqused_k"))
    for x, (cu, name) in zip(tensors, sides, strict=True):
        stops = cu[:-1] + counts[name] if used else cu[1:]
        for b, stop in enumerate(stops.tolist()):
            x[stop : cu[b + 1]] = torch.nan
        x[cu[-1] :] = torch.inf
    # The bounds are upper ones.
    layout = Packed(cu_q, cu_k, max(lengths_q) + 10, max(lengths_k) + 5)
    return list(tensors), layout, counts


def with_draws(
    operands: Operands, options: Options, given: dict[str, Any], seed: int
) -> tuple[Operands, dict[str, Any]]:
    """Operands with the random numbers of dropout, and the options of a reference with its mask;
    both as they are without dropout."""
    if options.dropout_p == 0:
        return operands, given
    state = draw_rng_state(torch.device("cpu"), generator(seed + 2))
    problem = AttentionProblem.of(operands, options)
    sizes = problem.B, problem.Hq, problem.M, problem.N
    keep = keep_mask(state, options.dropout_p, *(torch.arange(size) for size in sizes))
    return operands._replace(rng_state=state), given | {"keep": keep}


def drawn(call: tuple[Operands, Options]) -> tuple[Operands, Options]:
    """A call with dropout and its random numbers."""
    operands, options = call
    return operands._replace(rng_state=draw_rng_state(torch.device("cpu"), generator(0))), options


def random_mask(shape: tuple[int, ...], tile_size: tuple[int, int], seed: int) -> BlockMask:
    """A mask with empty, full and partial tiles; the last tiles of queries see nothing, and nothing
    sees the first tiles of keys."""
    random = generator(seed)
    rows, columns = (-(-size // step) for size, step in zip(shape[2:], tile_size, strict=True))
    kinds = torch.randint(0, 3, (*shape[:2], rows, columns), generator=random)
    kinds[:, :, -1] = 0
    kinds[..., 0] = 0
    large = kinds.repeat_interleave(tile_size[0], 2).repeat_interleave(tile_size[1], 3)
    elements = torch.rand(shape, generator=random) < 0.5
    visible = (large[:, :, : shape[2], : shape[3]] == 1) | (
        (large[:, :, : shape[2], : shape[3]] == 2) & elements
    )
    return BlockMask.from_dense(visible, tile_size)


def random_spans(g: torch.Generator, shape: tuple[int, ...], keys: int) -> Spans:
    """Some intervals are empty, reach past the keys or overlap."""
    starts = torch.randint(-30, keys, shape, generator=g)
    lengths = torch.randint(-20, keys // 2, shape, generator=g)
    return Spans(starts.int(), (starts + lengths).int())


def unwritten_spans(
    problem: AttentionProblem, config: KernelConfig, operands: Operands
) -> SpanLists | SpanData:
    """What the forward reads of spans, with lists that a kernel has yet to write."""
    made = tuple(allocate() for allocate in span_tensors(problem, operands, config))
    for x in made:
        x.fill_(UNWRITTEN)
    return spans_of(problem, operands, made)
