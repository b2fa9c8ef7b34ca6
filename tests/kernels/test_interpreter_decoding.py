"""Decoding in Triton's interpreter: KV loops split into parts, their merge, appending with
rotary embedding, and rotary embedding by itself, against the CPU's results.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_decoding.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from configurations import one_kind_each
from torch import Tensor

import flashtile.ops.gather  # noqa: F401  (defines the op)
from flashtile.combine import flash_attn_combine
from flashtile.gpu import hardware
from flashtile.layers import rotary
from flashtile.ops import append as append_op
from flashtile.ops import rotary as rotary_op
from flashtile.problem import AttentionProblem
from flashtile.testing import (
    assert_close,
    combine_variance,
    cu_seqlens,
    floor_of,
    generator,
    normal,
    rotary_tables,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend
from flashtile.backends.triton.plan import fastest_splits
from flashtile.ops.append.kernel import append, rotate_and_append
from flashtile.ops.gather.kernel import gather_pages
from flashtile.ops.merge.kernel import merge_parts
from flashtile.ops.rotary.kernel import rotate

from .decoding import CASES, FLOAT8_CASES, assert_decoding, make_decoding

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

DTYPES = (torch.float32, torch.float16)


# One part, and parts of up to two tiles followed by an empty one.
SPLITS = [(torch.float32, 4), (torch.float16, 3), (torch.float16, 1)]


@pytest.mark.parametrize(("name", "kind"), one_kind_each(CASES, SPLITS), ids=str)
def test_decoding(name: str, kind: tuple[torch.dtype, int], seed: int):
    dtype, splits = kind
    assert_decoding(backend, name, dtype, seed, splits=(splits,))


@pytest.mark.parametrize(
    "name", ["one key head", "bias of huge numbers", "pages, packed queries", "left pads"]
)
def test_float32_in_six_products(name: str, monkeypatch: pytest.MonkeyPatch, seed: int):
    monkeypatch.setattr(hardware, "has_tma", lambda capability: False)  # no chained launches
    assert_decoding(backend, name, torch.float32, seed, splits=(1, 3), capability=(9, 0))


@pytest.mark.parametrize(
    ("name", "kind"),
    one_kind_each(FLOAT8_CASES, [(torch.float16, 3), (torch.bfloat16, 1)]),
    ids=str,
)
def test_float8_cache(name: str, kind: tuple[torch.dtype, int], seed: int):
    """Its numbers times a factor for each sequence and key head."""
    dtype, splits = kind
    assert_decoding(backend, name, dtype, seed, splits=(splits,), float8=True)


def test_lengths_need_not_be_contiguous(seed: int):
    operands, options = make_decoding("few queries, causal", torch.float32, seed)
    used = operands.seqused_k
    assert used is not None
    spread = torch.stack([used, used + 7], -1)[:, 0]
    problem = AttentionProblem.of(operands, options)
    wanted = backend.forward(problem, operands)
    got = backend.forward(problem, operands._replace(seqused_k=spread))
    assert all(map(torch.equal, got, wanted))


def test_decoding_by_default(seed: int):
    """With the number of parts that the plan chooses."""
    assert_decoding(backend, "few queries, causal", torch.float32, seed, splits=(0,))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["one query", "pages of 16", "few queries, causal"])
def test_a_number_of_splits_leaves_the_batch_out(name: str, splits: int, seed: int):
    """A sequence gives the same bits by itself and in a batch."""
    operands, options = make_decoding(name, torch.float16, seed)
    options = options._replace(num_splits=splits)
    whole = backend.forward(AttentionProblem.of(operands, options), operands)
    assert operands.seqused_k is not None
    for b in range(operands.q.shape[0]):
        one = slice(b, b + 1)
        alone = operands._replace(q=operands.q[one], seqused_k=operands.seqused_k[one])
        if operands.page_table is None:
            alone = alone._replace(k=operands.k[one], v=operands.v[one])
        else:
            alone = alone._replace(page_table=operands.page_table[one])
        got = backend.forward(AttentionProblem.of(alone, options), alone)
        assert all(torch.equal(x[0], y[b]) for x, y in zip(got, whole, strict=True))


@pytest.mark.parametrize(
    ("programs", "steps", "wanted"),
    [(8, 512, 32), (256, 64, 1), (512, 64, 1), (128, 128, 2), (1, 2048, 128), (1, 3, 1), (8, 0, 1)],
)
def test_the_number_of_splits_fills_the_gpu(programs: int, steps: int, wanted: int):
    """Programs of a call, steps of each, and the parts that 132 multiprocessors want."""
    assert fastest_splits(programs, steps, 132) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 2, 3, 4, 20), (1, 7, 2, 64), (300, 2, 1, 16)], ids=str)
def test_combine(shape: tuple[int, ...], dtype: torch.dtype, seed: int):
    """Parts without visible keys hold NaN; one row sees no key in any part."""
    g = generator(seed)
    parts, lse = normal(g, *shape, dtype=dtype), 4 * normal(g, *shape[:-1])
    # Later parts have larger scores, so that each step of a merge finds another maximum.
    lse += torch.arange(shape[0]).view(-1, *[1] * (lse.dim() - 1)) / 10
    unseen = torch.rand(lse.shape, generator=g) < 0.3
    unseen[:, 0, ..., 0] = True
    lse[unseen], parts[unseen] = -torch.inf, torch.nan
    got = merge_parts(parts, lse, dtype)
    truth, plain = flash_attn_combine(parts.double(), lse.double()), flash_attn_combine(parts, lse)
    variance = combine_variance(parts, lse)
    for name, *results, x in zip(("out", "lse"), got, truth, plain, variance, strict=True):
        assert_close(name, *results, floor=floor_of(x), seed=seed)


# Rotary embedding


def rotary_inputs(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (3, 5, 3, 24), and tables of 12 positions that rotate 16 of 24 features."""
    x = normal(generator(seed), 3, 5, 3, 24, dtype=dtype)
    return x, *rotary_tables(12, 16, dtype)


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make calls use the kernel, which is interpreted on the CPU here."""
    library = torch.library.Library("flashtile", "IMPL")
    library.impl("rotate_tokens", lambda x, out, *rest: rotate(x, out, *rest), "CPU")
    monkeypatch.setattr(rotary_op, "runs_as_kernel", lambda *args: True)
    yield
    library._destroy()


OFFSETS = {
    "from 0": {},
    "from 4": {"seqlen_offsets": 4},
    "beyond the table": {"seqlen_offsets": torch.tensor([-2, 9, 3])},
    "packed": {"cu_seqlens": cu_seqlens([4, 0, 3]), "max_seqlen": 5},
    "packed, offsets": {
        "cu_seqlens": cu_seqlens([4, 0, 3]),
        "max_seqlen": 5,
        "seqlen_offsets": torch.tensor([1, 0, 10]),
    },
}


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize(("offsets", "dtype"), one_kind_each(OFFSETS, DTYPES), ids=str)
def test_rotary(
    offsets: str, interleaved: bool, dtype: torch.dtype, by_kernel: Any, seed: int,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """Forward, backward and in place, with features that are passed through."""
    monkeypatch.setenv("FLASHTILE_CHECK", "0")  # offsets beyond the table, as on a GPU
    x, cos, sin = rotary_inputs(seed, dtype)
    if "packed" in offsets:
        x = x.flatten(0, 1)
    how = {"interleaved": interleaved, **OFFSETS[offsets]}
    grad = normal(generator(seed + 1), *x.shape, dtype=dtype)

    def run(call: Any, x: Tensor, *tables: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = call(x, *tables, **how)
        return [out.detach(), *torch.autograd.grad(out, x, grad.to(x.dtype))]

    got = run(rotary.apply_rotary_emb, x, cos, sin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary_op, "runs_as_kernel", lambda *args: False)
        truth = run(rotary.apply_rotary_emb, x.double(), cos.double(), sin.double())
        plain = run(rotary.apply_rotary_emb, x, cos, sin)
    for name, *results in zip(("out", "dx"), got, truth, plain, strict=True):
        assert_close(name, *results, seed=seed)
    inside = x.clone()
    assert rotary.apply_rotary_emb(inside, cos, sin, inplace=True, **how) is inside
    assert torch.equal(inside, got[0])
    with torch.no_grad():
        saved = torch.ones(x.shape, dtype=dtype, requires_grad=True)
        with torch.enable_grad():
            product = saved * inside
        rotary.apply_rotary_emb(inside, cos, sin, inplace=True, **how)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_rotary_of_a_packed_qkv_leaves_v(by_kernel: Any, seed: int):
    qkv = normal(generator(seed), 2, 5, 3, 4, 16)
    cos, sin = rotary_tables(8, 16)
    wanted = [rotary.apply_rotary_emb(qkv[:, :, i], cos, sin) for i in (0, 1)]
    got = rotary.apply_rotary_emb_qkv_(qkv.clone(), cos, sin)
    assert torch.equal(got, torch.stack([*wanted, qkv[:, :, 2]], 2))


def test_the_kernel_is_for_a_gpu():
    x = torch.zeros(1, 1, 1, 2)
    assert not rotary_op.runs_as_kernel(x, *rotary_tables(1, 2))


@pytest.mark.parametrize("own", [True, False], ids=["own positions", "one position"])
@pytest.mark.parametrize(
    ("layout", "dtype"), one_kind_each(["dense", "packed", "rows", "pages"], DTYPES), ids=str
)
def test_rotate_and_append(layout: str, own: bool, dtype: torch.dtype, seed: int):
    """The caches, and what must not change in them, and the queries."""
    g = generator(seed)
    cache = [normal(g, 5, 16, 2, d, dtype=dtype) for d in (20, 7)]
    q = normal(g, 3, 4, 6, 20, dtype=dtype)
    new = [normal(g, 3, 4, 2, d, dtype=dtype) for d in (20, 7)]
    lengths = torch.tensor([0, 14, 7], dtype=torch.int32)
    base = lengths + 2
    starts_q = starts_k = page_table = cache_rows = None
    if layout == "packed":
        q, *new = (x.flatten(0, 1) for x in (q, *new))
        starts_q, starts_k = cu_seqlens([5, 0, 4]), cu_seqlens([1, 0, 8])
    elif layout == "rows":
        cache_rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    elif layout == "pages":
        lengths = torch.tensor([0, 30, 14], dtype=torch.int32)
        page_table = torch.tensor([[4, 0], [1, 3], [2, 9]], dtype=torch.int32)
    where = (lengths, base, starts_q, starts_k, page_table, cache_rows, None, None)
    rest = (*where, layout != "rows", own)

    def run(call: Any, as_dtype: torch.dtype) -> list[Tensor]:
        written = [x.to(as_dtype, copy=True) for x in cache]
        tables = [x.to(as_dtype) for x in rotary_tables(17, 16, dtype)]
        tokens = [x.to(as_dtype) for x in new]
        rotated, used = call(q.to(as_dtype), *written, *tokens, *tables, *rest)
        added = starts_k.diff() if starts_k is not None else 4
        assert torch.equal(used, lengths + added)
        return [rotated[:9] if layout == "packed" else rotated, *written]  # 9 belong to sequences

    reference = torch.ops.flashtile.kvcache_rotate_append
    got, plain = run(rotate_and_append, dtype), run(reference, dtype)
    truth = run(reference, torch.float64)
    for name, *results in zip(("q", "k_cache", "v_cache"), got, truth, plain, strict=True):
        assert_close(name, *results, seed=seed)
    for x, wanted, before in zip(got[1:], truth[1:], cache, strict=True):
        kept = wanted == before.double()
        assert torch.equal(x[kept], before[kept])


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_rotate_and_append_in_float8(interleaved: bool, seed: int):
    """As large as float8 can be at most. The sums are its numbers: the interpreter may round others
    to half of what they are."""
    g = generator(seed)
    shapes = ((2, 3, 4, 20), (2, 8, 2, 20), (2, 8, 2, 7), (2, 3, 2, 20), (2, 3, 2, 7))
    given = [(2.0 ** torch.randint(7, 9, s, generator=g)).to(torch.float8_e4m3fn) for s in shapes]
    lengths = torch.tensor([0, 6], dtype=torch.int32)
    tables = [torch.randint(-1, 2, (10, 8), generator=g).float() for _ in range(2)]
    rest = (*tables, lengths, lengths, *[None] * 6, interleaved, True)

    def run(call: Any) -> list[Tensor]:
        q, k_cache, v_cache, k, v = (x.clone() for x in given)
        return [call(q, k_cache, v_cache, k, v, *rest)[0], k_cache, v_cache]

    got, wanted = run(rotate_and_append), run(torch.ops.flashtile.kvcache_rotate_append)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.float(), b.float())
    assert got[0].float().max() == 448


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("rotated", [False, True], ids=["append", "rotate and append"])
def test_a_backward_that_saved_a_cache_notices_an_append(rotated: bool, cache: str):
    """As of any write in place; a cache made in inference mode has no version, and no backward."""
    new, lengths = torch.ones(2, 1, 1, 1, 16), torch.zeros(1, dtype=torch.int32)

    def write(caches: list[Tensor]) -> None:
        if rotated:
            rest = (*rotary_tables(4, 16), lengths, lengths, *[None] * 6, True, True)
            append_op.rotate_and_append_on_gpu(new[0], *caches, *new, *rest)
        else:
            append_op.append_on_gpu(*caches, *new, lengths, *[None] * 5)

    caches = [torch.zeros(1, 4, 1, 16) for _ in range(2)]
    saved = caches[cache == "v_cache"]
    product = torch.ones(saved.shape, requires_grad=True) * saved
    write(caches)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        write([torch.zeros(1, 4, 1, 16) for _ in range(2)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_append_to_a_float8_cache(dtype: torch.dtype, seed: int):
    """Divided by the factors, and as large as float8 can be at most.

    Of numbers that float8 holds: the interpreter rounds some others to half of what they are, and
    has no NaN in float8.
    """
    g = generator(seed)
    cache = [normal(g, 3, 16, 2, d).to(torch.float8_e4m3fn) for d in (20, 7)]
    new = [normal(g, 3, 2, 2, d).to(torch.float8_e4m3fn).to(dtype) for d in (20, 7)]
    for x in new:
        x[:, 0] *= 2**12
    new[0][0, 0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    wanted = [x.clone() for x in cache]
    lengths = torch.tensor([0, 14, 7], dtype=torch.int32)
    factors = torch.exp2(-torch.randint(0, 3, (3, 2), generator=g).float())
    rest = (lengths, None, None, None, factors, None)
    append(*cache, *new, *rest)
    torch.ops.flashtile.kvcache_append(*wanted, *new, *rest)
    for x, y in zip(cache, wanted, strict=True):
        assert torch.equal(x.float(), y.float())
        assert y.float().abs().max() == 448


@pytest.mark.parametrize("page_size", [1, 8, 130])  # the last one is copied in two parts
def test_gather_pages(page_size: int, seed: int):
    """Used pages are gathered in order; the others are not read."""
    g = generator(seed)
    k, v = (normal(g, 9, page_size, 2, d) for d in (20, 7))
    k = torch.stack([k, k], -2)[..., 0, :]
    table = torch.tensor([[4, 0, 70], [1, -3, 70]], dtype=torch.int32)  # of 9 pages
    used = torch.tensor([2 * page_size + 1, page_size], dtype=torch.int32)
    got = gather_pages(k, v, table, used)
    wanted = torch.ops.flashtile.gather_pages(k, v, table, used)
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x[0], y[0])
        assert torch.equal(x[1, :page_size], y[1, :page_size])
        assert x[1, page_size:].isnan().all()  # as the poisoned buffer was
