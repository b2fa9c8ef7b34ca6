"""The Hopper kernels on a GPU: repeated calls, streams, graphs, compilation, and deadlocks.

`conformance/test_hopper.py` and `test_random_hopper.py` check their results. The tests
under `small` are short enough for a checker of memory accesses:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m pytest -m gpu tests/test_gpu_hopper.py -k small
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hopper_kernels import tile_counts
from hopper_kernels.tile_counts import MASKS
from kernels.decoding import LATENT_CASES, assert_decoding
from processes import output_of

import flashtile
from flashtile.backends import hopper
from flashtile.masks import BlockMask
from flashtile.testing import cu_seqlens

pytestmark = pytest.mark.gpu

WATCHDOG_SECONDS = 140  # of which nearly all is for compiling


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    """Skip these tests on other devices."""
    if torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name()
        pytest.skip(f"the Hopper backend wants compute capability 9.0, this is {found}")


def inputs(B, M, N, Hq, Hk, D, seed=0):
    """q, k, v and dout in bfloat16."""
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = (B, M, Hq, D), (B, N, Hk, D), (B, N, Hk, D), (B, M, Hq, D)
    return [torch.randn(s, generator=g, device="cuda").bfloat16() for s in shapes]


def step(q, k, v, dout, **options):
    """Out, lse and the gradients of one call by the Hopper backend."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flashtile.attention(*leaves, return_lse=True, backend="hopper", **options)
    return out, lse, *torch.autograd.grad(out, leaves, dout)


def block_mask(density, partial):
    """Tiles of 128 x 128 over 2,000 queries and keys; some are seen in part."""
    g = torch.Generator().manual_seed(0)
    kinds = torch.rand(16, 16, generator=g) < density
    visible = kinds.repeat_interleave(128, 0).repeat_interleave(128, 1)[:2000, :2000]
    if partial:
        visible &= torch.rand(2000, 2000, generator=g) < 0.9
    mask = BlockMask.from_dense(visible)
    parts = (x.cuda() for x in (mask.kinds, mask.partial_index, mask.partial_tiles))
    return {"block_mask": BlockMask(*parts, mask.lengths)}


# One tile and many, masks that leave tiles out, sequences that end inside a tile.
RACES = {
    "one block a tile": ((64, 65, 65, 4, 4, 64), {"causal": True}),
    "short window": ((2, 700, 700, 8, 8, 128), {"causal": True, "window_size": (100, 0)}),
    "full": ((2, 1024, 1024, 8, 8, 128), {}),
    "causal, grouped": ((2, 1000, 1000, 8, 2, 128), {"causal": True}),
    "causal, narrow": ((2, 1000, 1000, 16, 16, 64), {"causal": True}),
    "causal, wide": ((1, 1000, 1000, 8, 8, 256), {"causal": True}),
    "wide, long": ((1, 8192, 8192, 4, 4, 256), {}),
    "columns of zeros": ((2, 1000, 1000, 8, 2, 112), {"causal": True}),
    "columns of zeros, wide": ((1, 1000, 1000, 8, 2, 176), {"causal": True}),
    "causal, long": ((1, 2100, 8300, 8, 2, 128), {"causal": True}),
    "softcap": ((2, 500, 900, 8, 8, 128), {"softcap": 5.0}),
    "chunk": ((2, 900, 900, 8, 8, 96), {"attention_chunk": 250}),
    "score function": (
        (2, 500, 900, 8, 8, 64),
        {"score_mod": lambda s, b, h, i, j: torch.where(i % 7 != j % 7, s - 0.1 * h, -torch.inf)},
    ),
    "score function, wide": (
        (2, 500, 900, 8, 2, 128),
        {"score_mod": lambda s, b, h, i, j: s - torch.tanh(s) * (i - j).abs(), "causal": True},
    ),
    "dropout": ((2, 1000, 1000, 8, 2, 128), {"causal": True, "dropout_p": 0.1}),
    "dropout, wide": ((1, 1000, 1000, 8, 8, 256), {"dropout_p": 0.1}),
}


BLOCK_MASKS = {
    "sparse": ((2, 2000, 2000, 8, 8, 128), 0.15, False),
    "dense, grouped": ((1, 2000, 2000, 8, 2, 128), 0.75, False),
    "partial": ((2, 2000, 2000, 8, 8, 64), 0.3, True),
    "wide": ((1, 2000, 2000, 8, 8, 256), 0.5, True),
}


@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_two_hundred_repeats_of_a_block_mask_agree_bit_for_bit(name):
    shape, density, partial = BLOCK_MASKS[name]
    repeats_agree(shape, block_mask(density, partial))


@pytest.mark.parametrize("name", RACES)
def test_two_hundred_repeats_agree_bit_for_bit(name):
    repeats_agree(*RACES[name])


def repeats_agree(shape, options):
    """Always out, lse, dk and dv; dq when it is asked to be deterministic."""
    tensors = inputs(*shape)

    def run():
        torch.manual_seed(0)  # of dropout
        return step(*tensors, **options, deterministic=deterministic)

    for deterministic in (False, True):
        first = run()
        kept = 5 if deterministic else 2
        for repeat in range(200):
            if repeat % 10 == 0:  # other work and other memory in between
                torch.empty(1 << 22, device="cuda").normal_()
            again = run()
            same = [torch.equal(a, b) for a, b in zip(again, first, strict=True)]
            assert all(same[:kept]), (repeat, deterministic, same)
            assert all(same[3:]), (repeat, deterministic, same)


def test_repeats_over_latents_agree_bit_for_bit():
    """Both warpgroups wait for each other, and copy for themselves and each other."""
    g = torch.Generator("cuda").manual_seed(0)
    q, latents = (
        torch.randn(shape, generator=g, device="cuda").bfloat16()
        for shape in ((64, 2, 128, 576), (64, 2048, 1, 576))
    )
    used = (37 * torch.arange(64, device="cuda", dtype=torch.int32)) % 2048
    call = (q, latents, latents[..., :512])
    options = {"cache_seqlens": used, "causal": True, "backend": "hopper"}
    first = flashtile.attention_with_kvcache(*call, **options)
    for _ in range(200):
        assert torch.equal(flashtile.attention_with_kvcache(*call, **options), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LATENT_CASES)
def test_small_decoding_over_latents(name, dtype, seed):
    assert_decoding(hopper, name, dtype, seed, splits=(0, 1, 3), device="cuda")


def test_repeats_of_packed_sequences_agree_bit_for_bit():
    lengths = cu_seqlens([300, 0, 65, 1, 900, 257]).cuda()
    q, k, v, dout = (x[0] for x in inputs(1, 1523, 1523, 8, 2, 128))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given = (lengths, lengths, 900, 900)

    def run():
        out, lse = flashtile.attention_varlen(
            *leaves, *given, causal=True, deterministic=True, return_lse=True, backend="hopper"
        )
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    first = run()
    for _ in range(200):
        assert all(map(torch.equal, run(), first))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_no_count_of_tiles_hangs(head_dim, mask):
    """Each configuration with no, one and many tiles for a program, in a process that can be killed
    when a kernel never ends."""
    output_of(Path(tile_counts.__file__), head_dim, mask, seconds=WATCHDOG_SECONDS)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_packed", [False, True])
def test_repeated_calls_drop_what_the_triton_kernels_drop(is_packed, head_dim):
    """Every call draws anew, the ones that repeat an earlier one as well."""
    q, k, v, dout = inputs(2, 300, 300, 4, 2, head_dim)
    options = {"causal": True, "dropout_p": 0.5}
    found = {}
    for backend in ("hopper", "triton"):
        torch.manual_seed(5)
        calls = []
        for _ in range(3):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            if is_packed:
                starts = cu_seqlens([300, 300]).cuda()
                rows = (x.flatten(0, 1) for x in leaves)
                out = flashtile.attention_varlen(
                    *rows, starts, starts, 300, 300, backend=backend, **options
                ).view_as(q)
            else:
                out = flashtile.attention(*leaves, backend=backend, **options)
            calls.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
        found[backend] = calls
    for ours, theirs in zip(found["hopper"], found["triton"], strict=True):
        for got, wanted in zip(ours, theirs, strict=True):
            # Another mask would differ by as much as the results are large.
            difference = (got.float() - wanted.float()).norm() / wanted.float().norm()
            assert difference < 0.02
    first, second, third = (call[0] for call in found["hopper"])
    assert not torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_large_inputs_stay_finite(D):
    q, k, v, dout = inputs(2, 1000, 1500, 8, 4, D)
    for options in ({}, {"causal": True}):
        for x in step(5 * q, 5 * k, 5 * v, 5 * dout, **options):
            assert x.isfinite().all()


def test_two_streams_at_once():
    """Each launch goes to the stream that is current; the counters of tiles are not shared."""
    pairs = [inputs(4, 700, 700, 8, 8, 128, seed) for seed in (0, 1)]
    options = {"causal": True, "deterministic": True}
    wanted = [step(*tensors, **options) for tensors in pairs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    for _ in range(20):
        got = []
        for stream, tensors in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                got.append(step(*tensors, **options))
        torch.cuda.synchronize()
        for mine, theirs in zip(got, wanted, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("options", [{}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "block mask"])
def test_training_inside_a_graph(options, masked):
    if masked:
        options = {**options, **block_mask(0.7, True)}
    tensors = inputs(2, 300, 300, 8, 2, 128)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step(*tensors, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*tensors, **options)
    for x, fresh in zip(tensors, inputs(2, 300, 300, 8, 2, 128, seed=1), strict=True):
        x.copy_(fresh)
    for _ in range(3):
        graph.replay()
        eager = step(*tensors, **options)
        for mine, theirs in zip(captured, eager, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)
        assert all(map(torch.equal, captured[:2], eager[:2]))


def test_a_captured_graph_serves_other_packed_lengths():
    """Lengths are read on the device: a graph captured once is replayed with others."""
    q, k, v, _ = (x[0] for x in inputs(1, 600, 600, 8, 2, 128))
    lengths = cu_seqlens([300, 300]).cuda()

    def call():
        return flashtile.attention_varlen(
            q, k, v, lengths, lengths, 400, 400, causal=True, backend="hopper"
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for first in (200, 400, 231):
        lengths.copy_(cu_seqlens([first, 600 - first]))
        graph.replay()
        assert torch.equal(out, call()), first


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_call_equals_the_eager_one(dynamic):
    def call(q, k, v):
        return flashtile.attention(q, k, v, causal=True, deterministic=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    for length in (300, 400):
        *qkv, dout = inputs(2, length, length, 4, 2, 128)
        leaves = [x.requires_grad_() for x in qkv]
        assert flashtile.explain(*leaves, causal=True).chosen == "hopper"
        outs = [f(*leaves) for f in (compiled, call)]
        assert torch.equal(*outs)
        mine, theirs = (torch.autograd.grad(out, leaves, dout) for out in outs)
        for a, b in zip(mine, theirs, strict=True):
            assert (a - b).norm() < 1e-2 * b.norm()


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "softcap": 3.0}, {"causal": True, "dropout_p": 0.3}],
    ids=str,
)
def test_small(D, options):
    """Lengths that end inside a tile, a key head for two query heads, strided heads."""
    q, k, v, dout = inputs(2, 70, 133, 4, 2, D)
    results = []
    for keys in (k.transpose(1, 2).contiguous().transpose(1, 2), k):
        torch.manual_seed(0)  # of dropout
        results.append(step(q, keys, v, dout, **options))
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_small_packed(D):
    cu_q, cu_k = cu_seqlens([70, 0, 1, 66]).cuda(), cu_seqlens([90, 3, 0, 40]).cuda()
    q, k, v, dout = (x[0] for x in inputs(1, 140, 140, 4, 2, D))  # three rows belong to no sequence
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given = (cu_q, cu_k, 70, 90)
    out = flashtile.attention_varlen(*leaves, *given, causal=True, backend="hopper")
    for x in (out, *torch.autograd.grad(out, leaves, dout)):
        assert x.isfinite().all()
    assert not out[137:].any()
