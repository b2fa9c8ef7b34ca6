"""`batch_invariant`: a row has the same bits in every layout, forward and backward.

A draw has a few sequences and options, computes some of their rows in two random layouts and
compares the bits of the rows that both have. `FLASHTILE_DRAWS` says how many draws.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conformance.devices import carry_calls
from conformance.harness import OPTIONS, Sizes, check_dense, check_varlen
from torch import Tensor
from torch.nn.functional import pad

import flashtile
from flashtile import Spans
from flashtile.backends.cpu import whole_tiles
from flashtile.backends.cpu.tiles import TileGradients
from flashtile.testing import cu_seqlens

pytestmark = pytest.mark.slow
DRAWS = int(os.environ.get("FLASHTILE_DRAWS", "60"))
CHUNKS = 4  # tests that share the draws

# Of a sequence: the first row (or key) and its results, by name.
Results = dict[str, tuple[int, Tensor]]


class Sequence(NamedTuple):
    """All queries, keys and values of a sequence, (length, heads, head_dim), and cotangents."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor  # (heads, length)

    @property
    def length(self) -> int:
        return self.q.shape[0]


class World(NamedTuple):
    """What two layouts have in common."""

    sequences: list[Sequence]
    options: dict[str, Any]
    grows: bool  # a query sees no later key, so that it may be computed before there are any
    prefix: int  # tokens with which all sequences begin
    biases: list[Tensor] | None  # (heads, length, length)
    spans: list[Tensor] | None  # (2, length, intervals) int32, starts and stops

    def options_of(
        self, queries: list[tuple[int, int, int]], rows: int, keys: int, is_packed: bool = False
    ) -> dict[str, Any]:
        """The options of a call on the queries [first, stop) of some sequences, with room for so
        many rows and keys of each."""
        options = dict(self.options)
        if self.biases is not None:
            parts = [self.biases[i][:, a:b, :keys] for i, a, b in queries]
            options["bias"] = torch.stack(
                [pad(x, (0, keys - x.shape[2], 0, rows - x.shape[1])) for x in parts]
            )
        if self.spans is not None:
            parts = [self.spans[i][:, a:b] for i, a, b in queries]
            if is_packed:
                ends = torch.cat(parts, 1)[:, None]
            else:
                ends = torch.stack([pad(x, (0, 0, 0, rows - x.shape[1])) for x in parts], 1)
            options["mask"] = Spans(*ends.unsqueeze(2))
        return options


# On a GPU, where each combination of options compiles dozens of kernels: head dim, dtype and
# options. There are few page sizes and groups there, too.
KINDS: list[tuple[int, torch.dtype, dict[str, Any]]] = [
    (128, torch.bfloat16, {"causal": True}),
    (64, torch.float16, {"causal": True}),
    (128, torch.bfloat16, {"causal": True, "window_size": (100, 0)}),
    (64, torch.bfloat16, {"causal": True, "softcap": 2.0, "sink": ()}),
    (64, torch.bfloat16, {"causal": True, "alibi_slopes": ()}),
    (64, torch.float32, {"causal": True}),
    (128, torch.float16, {"causal": True, "attention_chunk": 300}),
    (128, torch.bfloat16, {}),
]


def random_options(r: random.Random, heads: int) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": r.random() < 0.8}
    if r.random() < 0.3:
        options["window_size"] = (r.choice((-1, 0, 5, 70)), r.choice((-1, 0)))
    if r.random() < 0.2:
        options["attention_chunk"] = r.choice((7, 100))
    if r.random() < 0.2:
        options["softcap"] = 2.0
    if r.random() < 0.2:
        options["softmax_scale"] = 0.4
    options |= {name: () for name in ("alibi_slopes", "sink") if r.random() < 0.2}
    if r.random() < 0.2:
        options["relative_bias"] = torch.randn(heads, 2 * 9 + 1)
    if r.random() < 0.1:
        scale = torch.rand(())
        options["score_mod"] = lambda s, b, h, i, j: s + torch.sin(s * scale)
    return options


def world(r: random.Random, kind: int | None = None) -> World:
    """Sequences and options; on a GPU if they are of a `kind`."""
    device = "cpu" if kind is None else "cuda"
    g = torch.Generator().manual_seed(r.randrange(2**31))
    if kind is None:
        Hk, group, D = r.choice((1, 2)), r.choice((1, 1, 2, 3)), r.choice((8, 16, 33, 64))
        Dv, longest = r.choice((D, D, 24)), r.choice((3, 40, 40, 300, 600))
        dtype = r.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
        options = random_options(r, Hk * group)
    else:
        Hk, group, longest = 2, 2, r.choice((40, 300, 2500))
        D, dtype, options = KINDS[kind]
        Dv = D
    lengths = [r.randint(1, longest) for _ in range(r.randint(1, 4))]
    prefix = r.choice((0, 0, min(lengths) - 1))

    def rows(heads: int, size: int, shared: int = 0) -> list[Tensor]:
        start = torch.randn(shared, heads, size, generator=g)
        own = (torch.randn(n - shared, heads, size, generator=g) for n in lengths)
        return [torch.cat((start, x)).to(dtype).to(device) for x in own]

    heads = Hk * group
    statistics = torch.promote_types(dtype, torch.float32)
    dlse = [x[..., 0].T.to(statistics).contiguous() for x in rows(heads, 1)]
    k, v = rows(Hk, D, prefix), rows(Hk, Dv, prefix)
    parts = zip(rows(heads, D), k, v, rows(heads, Dv), dlse, strict=True)
    # An empty tuple stands for a random number for each head.
    random_numbers = {n: torch.rand(heads, generator=g) for n, x in options.items() if x == ()}
    options = {**options, **{n: x.to(device) for n, x in random_numbers.items()}}
    right = options.get("window_size", (-1, -1))[1]
    grows = options.get("causal", False) or right == 0
    biases, spans = None, None
    if kind is None and r.random() < 0.2:
        biases = [torch.randn(heads, n, n, generator=g).to(dtype) for n in lengths]
    if kind is None and r.random() < 0.2:
        ends = [torch.randint(0, n + 1, (2, n, 2), generator=g, dtype=torch.int32) for n in lengths]
        spans = [x.sort(0).values for x in ends]
    return World([Sequence(*x) for x in parts], options, grows, prefix, biases, spans)


# Layouts: (out, lse) of some rows of each sequence. Those with gradients return the leaves, too.


class Run(NamedTuple):
    """A layout's results, (rows, heads, ...), in the order of `indices`."""

    indices: list[int]
    firsts: list[int]
    outs: list[Tensor]
    lses: list[Tensor]  # (heads, rows)
    leaves: tuple[list[Tensor], list[Tensor], list[Tensor]] | None = None


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def training_rows(
    w: World, r: random.Random
) -> tuple[list[int], list[int], tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Some sequences in any order; of each the queries from a row on, and all keys."""
    indices = r.sample(range(len(w.sequences)), r.randint(1, len(w.sequences)))
    chosen = [w.sequences[i] for i in indices]
    firsts = [r.choice((0, 0, r.randrange(s.length))) for s in chosen]
    q = [leaf(s.q[first:]) for s, first in zip(chosen, firsts, strict=True)]
    return indices, firsts, (q, [leaf(s.k) for s in chosen], [leaf(s.v) for s in chosen])


def alone(w: World, r: random.Random) -> Run:
    indices, firsts, leaves = training_rows(w, r)
    outs, lses = [], []
    for i, first, q, k, v in zip(indices, firsts, *leaves, strict=True):
        qkv = (x[None] for x in (q, k, v))
        options = w.options_of([(i, first, len(k))], len(q), len(k))
        out, lse = flashtile.attention(*qkv, batch_invariant=True, return_lse=True, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return Run(indices, firsts, outs, lses, leaves)


def padded(w: World, r: random.Random) -> Run:
    indices, firsts, leaves = training_rows(w, r)
    rooms = [max(x.shape[0] for x in part) + r.choice((0, 5)) for part in leaves]
    q, k, v = (
        torch.stack([torch.cat((x, x.new_zeros(room - len(x), *x.shape[1:]))) for x in part])
        for part, room in zip(leaves, (rooms[0], rooms[1], rooms[1]), strict=True)
    )
    device = q.device
    used = [torch.tensor([len(x) for x in part], dtype=torch.int32) for part in leaves[:2]]
    queries = list(zip(indices, firsts, map(len, leaves[1]), strict=True))
    out, lse = flashtile.attention(
        q, k, v, seqused_q=used[0].to(device), seqused_k=used[1].to(device),
        batch_invariant=True, return_lse=True, **w.options_of(queries, *rooms[:2]),
    )  # fmt: skip
    count = [len(x) for x in leaves[0]]
    outs = [x[:n] for x, n in zip(out, count, strict=True)]
    lses = [x[:, :n] for x, n in zip(lse, count, strict=True)]
    return Run(indices, firsts, outs, lses, leaves)


def packed(w: World, r: random.Random) -> Run:
    indices, firsts, leaves = training_rows(w, r)
    device = leaves[0][0].device
    counts = [[len(x) for x in part] for part in leaves[:2]]
    starts = [cu_seqlens(x).to(device) for x in counts]
    queries, longest = list(zip(indices, firsts, counts[1], strict=True)), list(map(max, counts))
    options = w.options_of(queries, *longest, is_packed=True)
    with flashtile.batch_invariant():
        out, lse = flashtile.attention_varlen(
            *map(torch.cat, leaves), *starts, *longest, return_lse=True, **options
        )
    return Run(indices, firsts, list(out.split(counts[0])), list(lse.split(counts[0], 1)), leaves)


def chunk_of(w: World, r: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Sequences, and of each the queries [first, stop) of a chunk as long as the others."""
    order = r.sample(range(len(w.sequences)), len(w.sequences))
    shortest = min(s.length for s in w.sequences)
    rows = r.choice((1, 1, 1, r.randint(1, shortest)))
    rows = min(rows, *(s.length - w.prefix for s in w.sequences))
    stops = [
        r.randint(w.prefix + rows, w.sequences[i].length) if w.grows else w.sequences[i].length
        for i in order
    ]
    return order, [stop - rows for stop in stops], stops


def cached(w: World, r: random.Random) -> Run:
    """A chunk that is decoded from a cache, in pages or not, with or without an append."""
    indices, firsts, stops = chunk_of(w, r)
    chosen = [w.sequences[i] for i in indices]
    q = torch.stack([s.q[a:b] for s, a, b in zip(chosen, firsts, stops, strict=True)])
    appended = r.choice((0, stops[0] - firsts[0]))
    held = torch.tensor([stop - appended for stop in stops], dtype=torch.int32)
    capacity = max(stops) + r.choice((0, 40))
    page_size = r.choice((0, 0, 1, 3, 16, 64, 256) if q.device.type == "cpu" else (0, 16))
    room = -(-capacity // page_size) * page_size if page_size else capacity
    queries = list(zip(indices, firsts, stops, strict=True))
    arguments = w.options_of(queries, stops[0] - firsts[0], room)
    if appended:
        new = [
            torch.stack([x[stop - appended : stop] for x, stop in zip(part, stops, strict=True)])
            for part in ([s.k for s in chosen], [s.v for s in chosen])
        ]
        arguments |= dict(zip("kv", new, strict=True))
    if page_size:
        pages = -(-capacity // page_size)
        table = torch.randperm(len(chosen) * pages + 2)[: len(chosen) * pages]
        table = table.view(len(chosen), pages).int()
        shape = (len(chosen) * pages + 2, page_size)
        arguments["page_table"] = table.to(q.device)
    else:
        pads = [r.randint(0, capacity - stop) for stop in stops]
        if any(pads) and not w.prefix and q.device.type == "cpu":
            arguments["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32).to(q.device)
        else:
            pads = [0] * len(pads)
        table = torch.randperm(len(chosen) + 1)[: len(chosen)].int()
        shape = (len(chosen) + 1, capacity)
        arguments["cache_batch_idx"] = table.to(q.device)
        held += torch.tensor(pads, dtype=torch.int32)
    caches = []
    for part in ([s.k for s in chosen], [s.v for s in chosen]):
        cache = torch.full((*shape, *part[0].shape[1:]), torch.nan).to(part[0])
        for row, (x, count) in enumerate(zip(part, held.tolist(), strict=True)):
            if page_size:
                position = torch.arange(count)
                slots = table[row, position // page_size].long() * page_size + position % page_size
                cache.view(-1, *x.shape[1:])[slots.to(x.device)] = x[:count]
            else:
                pad = pads[row]
                cache[table[row], pad:count] = x[: count - pad]
        caches.append(cache)
    if (
        w.prefix
        and "score_mod" not in w.options
        and not {"attention_chunk", "relative_bias", "bias", "mask"} & set(arguments)
    ):
        arguments["shared_prefix_len"] = w.prefix // max(page_size, 1) * max(page_size, 1)
    out, lse = flashtile.attention_with_kvcache(
        q, *caches, cache_seqlens=held.to(q.device), batch_invariant=True, return_lse=True,
        **arguments,
    )  # fmt: skip
    return Run(indices, firsts, list(out), list(lse))


def paged_varlen(w: World, r: random.Random) -> Run:
    """Chunked prefill: packed queries over pages, each sequence with a chunk of its own length."""
    indices = r.sample(range(len(w.sequences)), len(w.sequences))
    chosen = [w.sequences[i] for i in indices]
    stops = [r.randint(1, s.length) if w.grows else s.length for s in chosen]
    firsts = [r.randrange(stop) for stop in stops]
    spans = list(zip(chosen, firsts, stops, strict=True))
    device = chosen[0].q.device
    page_size = r.choice((2, 16, 100)) if device.type == "cpu" else 16
    table = torch.full((len(chosen), -(-max(stops) // page_size)), 0, dtype=torch.int32)
    pages: list[list[Tensor]] = [[], []]
    for row, (s, _, stop) in enumerate(spans):
        for column, start in enumerate(range(0, stop, page_size)):
            table[row, column] = len(pages[0])
            for part, x in zip(pages, (s.k, s.v), strict=True):
                page = x.new_full((page_size, *x.shape[1:]), torch.nan)
                page[: min(stop - start, page_size)] = x[start : min(stop, start + page_size)]
                part.append(page)
    counts = [stop - first for _, first, stop in spans]
    queries, room = list(zip(indices, firsts, stops, strict=True)), table.shape[1] * page_size
    options = w.options_of(queries, max(counts), room, is_packed=True)
    out, lse = flashtile.attention_varlen(
        torch.cat([s.q[a:b] for s, a, b in spans]), torch.stack(pages[0]), torch.stack(pages[1]),
        cu_seqlens(counts).to(device), max_seqlen_q=max(counts), page_table=table.to(device),
        seqused_k=torch.tensor(stops, dtype=torch.int32).to(device), batch_invariant=True,
        return_lse=True, **options,
    )  # fmt: skip
    return Run(indices, firsts, list(out.split(counts)), list(lse.split(counts, 1)))


LAYOUTS: tuple[Callable[[World, random.Random], Run], ...] = (
    alone,
    padded,
    packed,
    packed,
    cached,
    cached,
    paged_varlen,
)


def results(w: World, run: Run) -> dict[int, Results]:
    """All results of a run by sequence, gradients included if it recorded them."""
    found: dict[int, Results] = {}
    rows = list(zip(run.indices, run.firsts, run.outs, run.lses, strict=True))
    for i, first, out, lse in rows:
        found[i] = {"out": (first, out.detach()), "lse": (first, lse.detach().T)}
    if run.leaves is None:
        return found
    outputs = [x for _, _, out, lse in rows for x in (out, lse)]
    cotangents = []
    for i, first, out, _ in rows:
        s = w.sequences[i]
        cotangents += [s.dout[first : first + len(out)], s.dlse[:, first : first + len(out)]]
    flat = [x for part in run.leaves for x in part]
    gradients = torch.autograd.grad(outputs, flat, cotangents)
    parts = [gradients[at : at + len(rows)] for at in range(0, len(flat), len(rows))]
    for (i, first, _, _), dq, dk, dv in zip(rows, *parts, strict=True):
        # Keys before the first query are seen by other queries, too, which this run lacks.
        seen = first if w.grows or first == 0 else len(dk)
        found[i] |= {"dq": (first, dq), "dk": (seen, dk[seen:]), "dv": (seen, dv[seen:])}
    return found


def assert_same_bits(one: dict[int, Results], other: dict[int, Results]) -> int:
    """The number of rows that were compared."""
    compared = 0
    for i in one.keys() & other.keys():
        for name in one[i].keys() & other[i].keys():
            (a, x), (b, y) = one[i][name], other[i][name]
            first, stop = max(a, b), min(a + len(x), b + len(y))
            if first < stop:
                compared += stop - first
                x, y = x[first - a : stop - a], y[first - b : stop - b]
                assert torch.equal(x, y), f"{name} of sequence {i}: {(x != y).sum()} numbers differ"
    return compared


def draw(number: int, kind: int | None = None) -> int:
    """The number of rows that two layouts have in common, which have the same bits."""
    r = random.Random(number)
    torch.manual_seed(number)
    w = world(r, kind)
    one, other = (r.choice(LAYOUTS) for _ in range(2))
    try:
        return assert_same_bits(results(w, one(w, r)), results(w, other(w, r)))
    except AssertionError as error:
        raise AssertionError(f"draw {number}: {one.__name__}, {other.__name__}: {error}") from None


def make_draws(count: int, seed: int, kind: int | None = None) -> None:
    """At least `count` draws, a third of which compare rows."""
    made = compared = 0
    while made < count or compared <= count // 3:
        compared += draw(seed + made, kind) > 0
        made += 1
        assert made < 20 * count, "the layouts have no rows in common"


@pytest.mark.parametrize("part", range(CHUNKS))
def test_a_row_has_the_same_bits_in_two_layouts(part: int, seed: int) -> None:
    make_draws(-(-DRAWS // CHUNKS), seed)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["native", "plain"])
def test_keys_add_up_rows_in_the_same_order(options: dict[str, float]) -> None:
    """A call may begin with the first row of the sequence, or with one that sees a key."""
    q, k, v, dout = torch.randn(4, 1, 400, 2, 32).unbind()
    found = []
    for first in (0, 70):
        k_leaf, v_leaf = (x.clone().requires_grad_() for x in (k, v))
        out = flashtile.attention(
            q[:, first:], k_leaf, v_leaf, window_size=(200, 0), batch_invariant=True, **options
        )
        grads = torch.autograd.grad(out, (k_leaf, v_leaf), dout[:, first:])
        found.append([x[:, 70:] for x in grads])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_row_has_the_same_bits_on_a_gpu(kind: int, part: int, seed: int) -> None:
    make_draws(-(-DRAWS // (2 * len(KINDS))), seed, kind)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_a_cuda_graph() -> None:
    q, k, v = (torch.randn(2, 1500, heads, 64).half().cuda() for heads in (4, 2, 2))
    trained = flashtile.attention(q, k, v, causal=True, batch_invariant=True)
    row, held = q[:, :1].clone(), torch.zeros(2, dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        given = {"cache_seqlens": held, "causal": True, "batch_invariant": True}
        return flashtile.attention_with_kvcache(row, k, v, **given)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for p in (0, 700, 1023, 1024, 1499):
        row.copy_(q[:, p : p + 1])
        held.fill_(p + 1)
        graph.replay()
        assert torch.equal(out[:, 0], trained[:, p])


# The same rule of correctness as for all calls.
ALLOWED = [name for name in OPTIONS if name != "dropout"]


@pytest.mark.gpu
@pytest.mark.parametrize("names", ["nothing", "causal window", "chunk + sink", "seqused + alibi"])
def test_triton(names: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_calls(monkeypatch, torch.device("cuda"), refusals="fail")
    with flashtile.batch_invariant():
        check_dense(Sizes(2, 70, 1290, 4, 2, 64), names, torch.bfloat16, "triton", seed)


@pytest.mark.parametrize("names", ALLOWED)
def test_dense(names: str, seed: int) -> None:
    with flashtile.batch_invariant():
        check_dense(Sizes(2, 70, 290, 4, 2, 24, 40), names, torch.float32, "cpu", seed)


@pytest.mark.parametrize("names", [name for name in ALLOWED if "batch" not in name])
def test_packed(names: str, seed: int) -> None:
    with flashtile.batch_invariant():
        sizes = Sizes(3, 40, 300, 4, 2, 16)
        check_varlen([33, 0, 7], [290, 5, 0], sizes, names, torch.float16, "cpu", seed)


CHECKED = {alone: True, padded: True, packed: True, cached: False, paged_varlen: False}


@pytest.mark.parametrize("layout", CHECKED)
def test_a_check_computes_a_row_alone(
    layout: Callable[[World, random.Random], Run], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In both passes: no rows differ, unless each call gets other numbers than the one before."""
    r = random.Random(seed)
    w = world(r)
    w.options.pop("score_mod", None)
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    calls = [0]

    def shifted(function: Callable[..., Any]) -> Callable[..., Any]:
        def shifting(*args: Any) -> Any:
            first, *rest = function(*args)
            calls[0] += 1
            as_results = TileGradients._make if "backward" in function.__name__ else tuple
            return as_results((first + calls[0], *rest))

        return shifting

    def shift(*names: str) -> None:
        for name in names:
            monkeypatch.setattr(whole_tiles, name, shifted(getattr(whole_tiles, name)))

    run = layout(w, r)
    if CHECKED[layout]:
        results(w, run)
        shift("backward", "native_backward")
        with pytest.raises(RuntimeError, match="the gradient of query"):
            results(w, layout(w, r))
    shift("forward", "native_forward")
    with torch.no_grad(), pytest.raises(RuntimeError, match="the output of query"):
        layout(w, r)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"dropout_p": 0.1}, "dropout_p"), ({"num_splits": 2}, "num_splits")],
)
def test_what_cannot_keep_the_promise(options: dict[str, Any], name: str) -> None:
    q = torch.randn(1, 3, 2, 16)
    with pytest.raises(NotImplementedError, match=f"batch_invariant with {name}"):
        flashtile.attention(q, q, q, batch_invariant=True, **options)
    with flashtile.batch_invariant():
        with pytest.raises(NotImplementedError, match=f"batch_invariant with {name}"):
            flashtile.flash_attn_varlen_func(
                q[0], q[0], q[0], cu_seqlens([3]), cu_seqlens([3]), 3, 3, **options
            )
        flashtile.attention(q, q, q, batch_invariant=False, **options)
        with pytest.raises(NotImplementedError, match="batch_invariant with float8 queries"):
            flashtile.attention_fp8(q, q, q)
    flashtile.attention(q, q, q, **options)


def test_the_setting_of_a_block_and_of_all_calls() -> None:
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 99, 2, 16)

    def is_invariant(**options: Any) -> bool:
        return "(batch_invariant)" in str(flashtile.explain(q, k, k, **options))

    assert not is_invariant() and is_invariant(batch_invariant=True)
    with flashtile.batch_invariant():
        assert is_invariant() and not is_invariant(batch_invariant=False)
        with flashtile.batch_invariant(False):
            assert not is_invariant()
    flashtile.batch_invariant()
    assert is_invariant()
    flashtile.batch_invariant(False)
    assert not is_invariant()
    with pytest.raises(TypeError, match="enabled: got int, want True or False"):
        flashtile.batch_invariant(1)  # type: ignore[arg-type]


def test_compiled_calls_follow_the_setting() -> None:
    q, k = torch.randn(1, 40, 4, 16), torch.randn(1, 300, 2, 16)

    def call(q: Tensor, k: Tensor) -> Tensor:
        return flashtile.attention(q, k, k, causal=True)

    def in_a_block(q: Tensor, k: Tensor) -> Tensor:
        with flashtile.batch_invariant():
            return call(q, k)

    free, compiled = call(q, k), torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k), free)
    invariant = flashtile.attention(q, k, k, causal=True, batch_invariant=True)
    with flashtile.batch_invariant():
        assert torch.equal(compiled(q, k), invariant)
    assert torch.equal(compiled(q, k), free)
    compiled = torch.compile(in_a_block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k), invariant)
