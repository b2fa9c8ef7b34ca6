"""One call for each option of the kernels, small and odd, described as operands: no GPU, no
dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.dropout import draw_rng_state
from flashtile.masks import BlockMask, Spans
from flashtile.problem import Operands, Options
from flashtile.score_mod import ScoreFunction, derivative, described
from flashtile.testing import alibi_slopes, cu_seqlens, generator, normal, packed_qkv, paged, qkv

Call = tuple[Operands, Options]
Make = Callable[[torch.Generator, torch.dtype], Call]


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(**sizes: int) -> Callable[..., Make]:
    """A dense call of `sizes` whose options `options(g, dtype)` makes."""

    def with_options(options: Callable[..., dict[str, Any]] = lambda g, dtype: {}) -> Make:
        def make(g: torch.Generator, dtype: torch.dtype) -> Call:
            return describe(qkv(g, dtype=dtype, **sizes), Dense(), options(g, dtype))

        return make

    return with_options


SMALL = {"B": 2, "M": 37, "N": 45, "Hq": 4, "Hk": 2, "D": 16}
LARGER = SMALL | {"M": 90, "N": 100, "Hq": 2, "Hk": 1}
WIDE = SMALL | {"M": 70, "N": 80, "Hq": 2, "Hk": 1, "D": 64}
FEW = {"B": 2, "M": 3, "N": 70, "Hq": 4, "Hk": 1, "D": 16}


def packed(g: torch.Generator, dtype: torch.dtype) -> Call:
    """Sequences of odd lengths, an empty one, and rows after the last one."""
    q, k, v = packed_qkv(g, [17, 0, 33, 5], [20, 4, 9, 0], dtype=dtype)
    q = torch.cat([q, q[:3]])
    layout = Packed(cu_seqlens([17, 0, 33, 5]), cu_seqlens([20, 4, 9, 0]), 33, 20)
    used = {"seqused_q": lengths(16, 0, 33, 2), "seqused_k": lengths(20, 4, 7, 0)}
    return describe((q, k, v), layout, {"causal": True, **used})


def cached(g: torch.Generator, dtype: torch.dtype) -> Call:
    """Rows of a cache, one of them twice, with left pads."""
    q, _, _ = qkv(g, **SMALL, dtype=dtype)
    _, k, v = qkv(g, **(SMALL | {"B": 3}), dtype=dtype)
    operands, options = describe((q, k[:2], v[:2]), Dense(), {"causal": True})
    extra = {"seqused_k": lengths(41, 30), "leftpad_k": lengths(3, 0)}
    return operands._replace(k=k, v=v, cache_batch_idx=lengths(2, 2), **extra), options


def pages(g: torch.Generator, dtype: torch.dtype) -> Call:
    """A cache cut into shuffled pages, the first two shared by both sequences."""
    q, k, v = qkv(g, **(SMALL | {"N": 48}), dtype=dtype)
    operands, options = describe((q, k, v), Dense(), {"causal": True})
    state = g.get_state()
    k_pages, table = paged(g, k, 8, shared=2)
    g.set_state(state)
    v_pages, _ = paged(g, v, 8, shared=2)
    extra = {"seqused_k": lengths(45, 23), "leftpad_k": lengths(0, 5)}
    return operands._replace(k=k_pages, v=v_pages, page_table=table, **extra), options


def block_mask(tile_size: tuple[int, int], causal: bool = False, heads: int = 2) -> Make:
    """A random mask with empty, full and partial tiles for each head."""

    def make(g: torch.Generator, dtype: torch.dtype) -> Call:
        tensors = qkv(g, B=1, M=150, N=170, Hq=2, Hk=1, D=16, dtype=dtype)
        mask = torch.rand(1, heads, 150, 170, generator=g) < 0.5
        mask[:, :, :64, :64] = True
        mask[:, :, 64:, :64] = False
        block = BlockMask.from_dense(mask, tile_size)
        return describe(tensors, Dense(), {"block_mask": block, "causal": causal})

    return make


def bias(*shape: int) -> Callable[..., dict[str, Any]]:
    """A bias of `shape`, -inf at one position and over one row."""

    def options(g: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        x = normal(g, *shape, dtype=dtype)
        x[..., 0, 0] = -torch.inf
        return {"bias": x}

    return options


def dropped(make: Make, p: float = 0.3) -> Make:
    """The call with dropout."""

    def with_dropout(g: torch.Generator, dtype: torch.dtype) -> Call:
        operands, options = make(g, dtype)
        state = draw_rng_state(torch.device("cpu"))
        return operands._replace(rng_state=state), options._replace(dropout_p=p)

    return with_dropout


def by_distance(make: Make, slopes: int | None = 1, reach: int | None = 5) -> Make:
    """The call with learned ALiBi slopes for `slopes` sequences, and a relative bias of distances
    up to `reach`."""

    def with_biases(g: torch.Generator, dtype: torch.dtype) -> Call:
        operands, options = make(g, dtype)
        heads = operands.q.shape[-2]
        if slopes is not None:
            rows = alibi_slopes(g, heads, slopes) if slopes > 1 else alibi_slopes(g, heads)
            operands = operands._replace(alibi_slopes=rows)
            options = options._replace(alibi_needs_grad=True)
        if reach is not None:
            table = normal(g, heads, 2 * reach + 1, dtype=dtype)
            operands = operands._replace(relative_bias=table)
            options = options._replace(relative_bias_needs_grad=True)
        return operands, options

    return with_biases


def random_spans(g: torch.Generator, shape: tuple[int, ...], N: int) -> Spans:
    """Intervals of every kind: empty, overlapping, beyond either end, of all keys."""
    starts = torch.randint(-N // 2, N + 4, shape, generator=g, dtype=torch.int32)
    stops = starts + torch.randint(-4, N, shape, generator=g, dtype=torch.int32)
    everything = torch.rand(shape, generator=g) < 0.1
    return Spans(starts.masked_fill(everything, -(2**31)), stops.masked_fill(everything, 2**31 - 1))


def spanned(make: Make, intervals: int, batch: int = 1, heads: int = 1) -> Make:
    """The call with a mask of random spans."""

    def with_spans(g: torch.Generator, dtype: torch.dtype) -> Call:
        operands, options = make(g, dtype)
        shape = (batch, heads, operands.q.shape[-3], intervals)
        mask = random_spans(g, shape, options.max_seqlen_k)
        return operands._replace(span_starts=mask.starts, span_stops=mask.stops), options

    return with_spans


SELF = {"B": 2, "M": 140, "N": 140, "Hq": 2, "Hk": 1, "D": 16}
TREE = {"B": 2, "M": 6, "N": 70, "Hq": 4, "Hk": 1, "D": 16}
PREFIXES, ANSWERS = lengths(50, 7), torch.tensor([[40, 0, 45], [90, 43, 0]])
APART = torch.tensor([64, 0, 110]) + torch.arange(140)[:, None] % 5  # (140, 3)
APART = APART.int()[None, None]
EDGES = torch.arange(140, dtype=torch.int32)[None, None, :, None] % 2  # of tiles, beside them
IMAGES = torch.full((2, 140), -1)
IMAGES[:, 30:110], IMAGES[0, 120:130] = 0, 1


def masked(sizes: dict[str, int], mask: Spans, **options: Any) -> Make:
    """A dense call with a mask."""
    return dense(**sizes)(lambda g, t: {"mask": mask, **options})


BIAS_CASES: dict[str, Make] = {
    "learned alibi": by_distance(dense(**LARGER)(lambda g, t: {"window_size": (30, 40)}), 2, None),
    "relative bias": by_distance(
        dense(**(SMALL | {"B": 1, "M": 150}))(lambda g, t: {"softcap": 2.0}), None, 20
    ),
    "relative bias of all distances": by_distance(
        dense(**SMALL)(lambda g, t: {"causal": True, "sink": normal(g, 4)}), None, 60
    ),
    "relative bias of one number": by_distance(dense(**FEW)(bias(4, 1, 70)), None, 0),
    "relative bias of few queries": by_distance(dense(**FEW)(), None, 3),
    "relative bias, no keys": by_distance(dense(**(SMALL | {"N": 0}))(), None, 3),
    "packed biases by distance": by_distance(dropped(packed), 4),
    "biases by distance in a block mask": by_distance(
        dense(**SMALL)(
            lambda g, t: {
                "block_mask": BlockMask.from_dense(torch.rand(37, 45, generator=g) < 0.5, (16, 16))
            }
        )
    ),
    "biases by distance in spans": by_distance(spanned(dense(**SMALL)(), 2, batch=2)),
    "biases by distance in pages": by_distance(pages),
    "biases by distance in cache rows": by_distance(cached),
}
SPAN_CASES: dict[str, Make] = {
    "prefix of spans": masked(SELF, Spans.prefix_lm(PREFIXES, 140)),
    "documents of spans": masked(SELF, Spans.documents_of_lengths(ANSWERS, 140), softcap=2.0),
    "shared prefix": masked(SELF, Spans.shared_prefix(PREFIXES, ANSWERS, 140)),
    "images": masked(SELF, Spans.image_blocks(IMAGES), window_size=(70, 20)),
    "block diffusion": masked(SELF, Spans.block_diffusion(70, 16)),
    "tree": masked(TREE, Spans.tree([-1, 0, 1, 1, 0, 4]).shifted(lengths(64, 30))),
    "edges of spans": masked(SELF, Spans(EDGES + 32, 96 - EDGES)),
    "three spans apart": masked(SELF, Spans(APART, APART + 20)),
    "one span": spanned(dense(**LARGER)(), 1, batch=2),
    "spans of heads": spanned(
        dense(**LARGER)(
            lambda g, t: {"causal": True, "sink": normal(g, 2), "alibi_slopes": alibi_slopes(g, 2)}
        ),
        2,
        heads=2,
    ),
    "eight spans": spanned(dense(**SMALL)(), 8, batch=2, heads=4),
    "spans of few queries": spanned(dense(**FEW)(), 2, heads=4),
    "spans and a bias": spanned(dropped(dense(**SMALL)(bias(2, 4, 37, 45))), 2, batch=2),
    "spans and a block mask": spanned(block_mask((32, 64), causal=True), 2),
    "packed spans": spanned(dropped(packed), 2, heads=4),
    "spans of cache rows": spanned(cached, 2, batch=2),
    "spans of pages": spanned(pages, 3, batch=2),
}


def scored(make: Make, function: Callable[..., ScoreFunction]) -> Make:
    """The call with a score function, `function(g)`, and its derivative."""

    def with_function(g: torch.Generator, dtype: torch.dtype) -> Call:
        operands, options = make(g, dtype)
        found = described(function(g), torch.float32, torch.device("cpu"))
        gradient = derivative(found.program, torch.float32, of_captured=False)
        operands = operands._replace(captured=found.values, captured_integers=found.integers)
        return operands, options._replace(score_mod=found.program, score_mod_gradient=gradient)

    return with_function


def table_of_distances(g: torch.Generator) -> ScoreFunction:
    """A captured table, read at negative indices, too, and a number that is stored after it."""
    table, factor = normal(g, 4, 90), normal(g, 1)[0]
    return lambda score, b, h, i, j: (score * 0.5 + table[h, i - j]) * factor


def table_of_near_distances(g: torch.Generator) -> ScoreFunction:
    """A captured table whose ends serve all farther distances: most tiles read one number."""
    table = normal(g, 4, 25)
    return lambda score, b, h, i, j: score + table[h, (j - i - 9).clamp(-12, 12) + 12]


def many_operations(g: torch.Generator) -> ScoreFunction:
    """Integers with signs, large products, bools, constants, 16-bit and nonlinear numbers."""
    ids, scale = torch.randint(0, 3, (4, 200), generator=g), normal(g, 3, dtype=torch.bfloat16)

    def function(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = ((i - j) % 5 != 3) & ~((i - j) // 4 == -2) | (ids[b, i] == ids[b, j])
        near = near & ((i > j) + (h == 1)) | ((i + 1) * 1000003 * 1000003 % 7 == j % 7)
        bent = 3 * torch.tanh(score / 3) + torch.sigmoid(score) * (i - j).abs() / 40
        bent = torch.maximum(bent, -score).clamp(-2.5, 4.0) + near.float() * scale[ids[b, j]]
        near = near ^ (torch.sign(i - j).floor() // 2 == torch.relu(j - 9) % 2 - 1)
        return torch.where(near, bent, score.square() - (score.abs() + 1).sqrt().exp() * 0.1)

    return function


def only_captured(g: torch.Generator) -> ScoreFunction:
    """A bias of heads, -inf for one of the keys; nothing of the score."""
    bias, first = normal(g, 4), torch.tensor(2)
    return lambda score, b, h, i, j: torch.where(j == first, -float("inf"), bias[h])


def infinite_slope(g: torch.Generator) -> ScoreFunction:
    """The root has an infinite derivative at 0, which padding has for a score."""
    return lambda score, b, h, i, j: score.abs().sqrt() * score.sign()


SCORE_CASES: dict[str, Make] = {
    "score function": scored(
        dense(**SMALL)(lambda g, t: {"window_size": (9, 7)}), table_of_distances
    ),
    "score function of near and far keys": scored(
        dense(B=1, M=150, N=170, Hq=2, Hk=1, D=16)(), table_of_near_distances
    ),
    "score function of many operations": scored(dense(**SMALL)(), many_operations),
    "score function, few queries of grouped heads": scored(
        dense(**FEW)(lambda g, t: {"causal": True, "softcap": 2.0}), many_operations
    ),
    "score function, packed and dropout": scored(dropped(packed), many_operations),
    "score function, pages": scored(pages, table_of_distances),
    "score function with all other rules": scored(
        dense(**SMALL)(
            lambda g, t: {
                "softcap": 2.0,
                "alibi_slopes": alibi_slopes(g, 4),
                "bias": normal(g, 1, 4, 37, 45, dtype=t),
                "sink": normal(g, 4),
                "seqused_k": lengths(45, 13),
            }
        ),
        table_of_distances,
    ),
    "score function of infinite slope": scored(
        dense(B=1, M=70, N=130, Hq=2, Hk=1, D=16)(), infinite_slope
    ),
    "score function of captured numbers": scored(
        dense(**SMALL)(lambda g, t: {"sink": normal(g, 4)}), only_captured
    ),
}
CASES: dict[str, Make] = (
    SPAN_CASES
    | BIAS_CASES
    | SCORE_CASES
    | {
        "full": dense(**SMALL)(),
        "causal": dense(**SMALL)(lambda g, t: {"causal": True}),
        "causal, dead rows": dense(**(SMALL | {"M": 50}))(lambda g, t: {"causal": True}),
        "causal, full tiles": dense(B=1, M=300, N=300, Hq=2, Hk=1, D=16)(
            lambda g, t: {"causal": True}
        ),
        # Tiles of 32 keys begin one row before those that see them, and end one row after.
        "window": dense(**LARGER)(lambda g, t: {"window_size": (11, 23)}),
        "left window": dense(**(SMALL | {"M": 90}))(lambda g, t: {"window_size": (33, -1)}),
        "window after the query": dense(**LARGER)(lambda g, t: {"window_size": (-9, 40)}),
        "window before the query": dense(**LARGER)(lambda g, t: {"window_size": (None, -20)}),
        "chunk": dense(**(SMALL | {"M": 90}))(lambda g, t: {"attention_chunk": 13, "causal": True}),
        "few queries of grouped heads": dense(**FEW)(lambda g, t: {"causal": True}),
        "one query, one key": dense(**(SMALL | {"M": 1, "N": 1}))(),
        "no keys": dense(**(SMALL | {"N": 0}))(lambda g, t: {"sink": normal(g, 4)}),
        "odd head dims": dense(**(SMALL | {"D": 20, "Dv": 33}))(),
        "head dim 1": dense(**(SMALL | {"D": 1, "Dv": 3}))(),
        "softcap": dense(**SMALL)(lambda g, t: {"softcap": 2.0}),
        "alibi": dense(**SMALL)(lambda g, t: {"alibi_slopes": alibi_slopes(g, 4), "causal": True}),
        "alibi of a batch": dense(**FEW)(lambda g, t: {"alibi_slopes": alibi_slopes(g, 4, 2)}),
        "bias": dense(**SMALL)(bias(2, 4, 37, 45)),
        "bias of heads": dense(**SMALL)(bias(1, 4, 37, 45)),
        "bias of keys": dense(**SMALL)(bias(2, 1, 1, 45)),
        "bias of rows": dense(**SMALL)(bias(1, 4, 37, 1)),
        # 16 divides the keys: the kernels load 16 bytes of bias at once.
        "bias, 80 keys": dense(**WIDE)(bias(1, 2, 70, 80)),
        "bias of keys, 80 keys": dense(**WIDE)(bias(2, 1, 1, 80)),
        "bias, used keys of 80": dense(**WIDE)(
            lambda g, t: {
                "bias": normal(g, 2, 1, 70, 80, dtype=t),
                "seqused_q": lengths(70, 37),
                "seqused_k": lengths(71, 32),
                "causal": True,
            }
        ),
        "sink": dense(**(SMALL | {"M": 50}))(lambda g, t: {"sink": normal(g, 4), "causal": True}),
        "negative scale": dense(**SMALL)(lambda g, t: {"softmax_scale": -0.3, "causal": True}),
        "lengths": dense(**SMALL)(
            lambda g, t: {
                "seqused_q": lengths(30, 0),
                "seqused_k": lengths(45, 13),
                "sink": normal(g, 4),
            }
        ),
        "packed": packed,
        "cache rows": cached,
        "pages": pages,
        "block mask": block_mask((32, 64)),
        "causal block mask, one for all heads": block_mask((64, 32), causal=True, heads=1),
        "block mask of odd tiles": block_mask((24, 20), causal=True),
        "dropout": dropped(dense(**LARGER)()),
        "dropout of few queries and keys": dropped(dense(**SMALL)()),
        "rare dropout": dropped(dense(**LARGER)(), 0.03),
        "dropout of few queries": dropped(dense(**FEW)()),
        "packed dropout": dropped(packed),
    }
)

GROUPED = {"B": 2, "M": 33, "N": 61, "Hq": 4, "Hk": 2, "D": 64}
WINDOWS = [64, 0, 1, 49, 7, 0, 33]


def packed_windows(g: torch.Generator, dtype: torch.dtype) -> Call:
    """Windows of up to 64 tokens, empty ones among them, with a bias of heads."""
    tensors = packed_qkv(g, WINDOWS, WINDOWS, Hq=4, Hk=2, D=32, dtype=dtype)
    starts = cu_seqlens(WINDOWS)
    options = {"bias": normal(g, 1, 4, 64, 64, dtype=dtype)}
    return describe(tensors, Packed(starts, starts, 64, 64), options)


# Beside those of CASES, calls with at most 64 queries and keys, whose kernels are others.
SHORT_CASES: dict[str, Make] = {
    "largest": dense(**(GROUPED | {"M": 64, "N": 64, "D": 80}))(),
    "largest head dim": dense(**(GROUPED | {"B": 1, "D": 128, "Dv": 72}))(),
    "short, causal": dense(**GROUPED)(lambda g, t: {"causal": True}),
    "short window": dense(**GROUPED)(lambda g, t: {"window_size": (11, 9), "sink": normal(g, 4)}),
    "short chunk": dense(**GROUPED)(lambda g, t: {"attention_chunk": 13, "causal": True}),
    "bias of windows": dense(**(GROUPED | {"B": 4, "M": 49, "N": 49, "D": 32}))(bias(4, 1, 49, 49)),
    "short bias of heads": dropped(dense(**GROUPED)(bias(1, 4, 33, 61))),
    "short biases by distance": by_distance(dense(**GROUPED)(bias(2, 1, 1, 61)), 2, 20),
    "packed windows": packed_windows,
}


def make_call(name: str, dtype: torch.dtype, seed: int = 0) -> Call:
    """The operands and options of a case."""
    torch.manual_seed(seed)
    return (CASES | SHORT_CASES)[name](generator(seed), dtype)
