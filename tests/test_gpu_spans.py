"""Masks as spans in the Hopper kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import Spans
from flashtile.testing import (
    assert_close,
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
    qkv,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_buffers")]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    """Skip these tests on other devices."""
    if torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name()
        pytest.skip(f"the Hopper backend wants compute capability 9.0, this is {found}")


def random_spans(g: torch.Generator, shape: tuple[int, ...], keys: int) -> Spans:
    """Some intervals are empty, reach past the keys or overlap."""
    starts = torch.randint(-30, keys, shape, generator=g)
    lengths = torch.randint(-20, keys // 2, shape, generator=g)
    return Spans(starts.int(), (starts + lengths).int())


def on_gpu(mask: Spans) -> Spans:
    return Spans(*(x.cuda() for x in mask))


def check(tensors: Any, mask: Spans, seed: int, **options: Any) -> None:
    """Compare outputs and gradients with the reference by the rule."""
    dout = normal(generator(seed + 1), *tensors[0].shape, dtype=torch.bfloat16)

    def results(call: Any, mask: Spans, device: str, **how: Any) -> list[Tensor]:
        leaves = [x.detach().to(device).requires_grad_() for x in tensors]
        found = call(*leaves, mask=mask, **how, **options)
        out, lse = found if isinstance(found, tuple) else (found.out, found.lse)
        wanted = (out.float() if device == "cuda" else out) * dout.to(device)
        return [x.detach().cpu() for x in (out, lse, *torch.autograd.grad(wanted.sum(), leaves))]

    how = {"return_lse": True, "backend": "hopper"}
    found = results(flashtile.attention, on_gpu(mask), "cuda", **how)
    truth, plain = (
        results(attention_reference, mask, "cpu", compute_dtype=dtype)
        for dtype in (torch.float64, torch.bfloat16)
    )
    for name, *x in zip(("out", "lse", "dq", "dk", "dv"), found, truth, plain, strict=True):
        assert_close(name, *x, dtype=torch.bfloat16, seed=seed)


def inputs(seed: int, D: int, M: int = 700, N: int = 900) -> tuple[Tensor, ...]:
    """q, k, v: two sequences, four query heads and two key heads."""
    return qkv(generator(seed), B=2, M=M, N=N, Hq=4, Hk=2, D=D, dtype=torch.bfloat16)


@pytest.mark.parametrize("D", [64, 80, 96, 128, 144, 192, 256])
@pytest.mark.parametrize("intervals", [1, 2])
@pytest.mark.parametrize("lead", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_random_spans(lead: tuple[int, int], intervals: int, D: int, seed: int) -> None:
    mask = random_spans(generator(seed), (*lead, 700, intervals), 900)
    check(inputs(seed, D), mask, seed)


MASKS = {
    "causal": lambda n: Spans.prefix_lm(torch.tensor([0]), n),
    "prefix": lambda n: Spans.prefix_lm(torch.tensor([300, 70]), n),
    "documents": lambda n: Spans.documents_of_lengths(torch.tensor([[130, 1, 500, 90]]), n),
    "shared prefix": lambda n: Spans.shared_prefix(
        torch.tensor([429]), torch.tensor([[200, 340]]), n
    ),
    "block diffusion": lambda n: Spans.block_diffusion(n // 2, 48),
}


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("length", [900, 1300])
@pytest.mark.parametrize("mask", MASKS)
def test_everyday_masks(mask: str, length: int, D: int, seed: int) -> None:
    check(inputs(seed, D, length, length), MASKS[mask](length), seed)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (300, 50)},
    "chunk": {"attention_chunk": 260},
    "softcap": {"softcap": 3.0},
}


@pytest.mark.parametrize(("intervals", "D"), [(1, 64), (1, 128), (2, 128)])
@pytest.mark.parametrize("options", OPTIONS)
def test_with_other_options(options: str, intervals: int, D: int, seed: int) -> None:
    mask = random_spans(generator(seed), (2, 4, 700, intervals), 900)
    check(inputs(seed, D), mask, seed, **OPTIONS[options])


@pytest.mark.parametrize("heads", [1, 4])
def test_packed_sequences(heads: int, seed: int) -> None:
    lengths = [300, 0, 65, 1, 600, 257]
    g = generator(seed)
    tensors = [x[0] for x in qkv(g, B=1, M=1223, N=1223, Hq=4, Hk=2, D=128, dtype=torch.bfloat16)]
    mask = random_spans(g, (1, heads, 1223, 2), 600)
    cu = cu_seqlens(lengths)
    given: dict[str, Any] = {"max_seqlen_q": 600, "max_seqlen_k": 600, "causal": True}
    with torch.no_grad():
        out = flashtile.attention_varlen(
            *(x.cuda() for x in tensors), cu_seqlens_q=cu.cuda(), cu_seqlens_k=cu.cuda(),
            mask=on_gpu(mask), backend="hopper", **given,
        )  # fmt: skip
    truth, plain = (
        attention_varlen_reference(
            *tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=mask, compute_dtype=dtype, **given
        ).out
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_close("out", out.cpu(), truth, plain, dtype=torch.bfloat16, seed=seed)


def changing_call(D: int) -> tuple[Any, list[Spans]]:
    """A call without gradients, and masks for it of the same shape."""
    tensors = [x.cuda() for x in inputs(0, D, 900, 900)]
    masks = [MASKS["prefix"](900), random_spans(generator(1), (2, 1, 900, 1), 900)]

    def call(starts: Tensor, stops: Tensor) -> Tensor:
        with torch.no_grad():
            return flashtile.attention(*tensors, mask=Spans(starts, stops), backend="hopper")

    return call, [on_gpu(mask) for mask in masks]


@pytest.mark.parametrize("D", [64, 128])
def test_a_captured_graph_serves_other_masks(D: int) -> None:
    call, masks = changing_call(D)
    given = Spans(*(x.clone() for x in masks[0]))
    call(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*given)
    for mask in masks[::-1]:
        for x, fresh in zip(given, mask, strict=True):
            x.copy_(fresh)
        graph.replay()
        assert torch.equal(out, call(*mask))


@pytest.mark.parametrize("D", [64, 128])
def test_compiled_calls(D: int) -> None:
    call, masks = changing_call(D)
    compiled = torch.compile(call, fullgraph=True)
    for mask in masks:
        assert torch.equal(compiled(*mask), call(*mask))


@pytest.mark.parametrize("D", [64, 128])
def test_no_wait_of_the_host(D: int) -> None:
    call, masks = changing_call(D)
    for mask in (*masks, *masks):  # compiled, and prepared
        call(*mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask in masks:
            call(*mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("D", [64, 128])
def test_two_hundred_repeats_agree_bit_for_bit(D: int) -> None:
    call, masks = changing_call(D)
    wanted = [call(*mask) for mask in masks]
    for repeat in range(200):
        torch.empty(1 << 22, device="cuda").normal_()
        assert torch.equal(call(*masks[repeat % 2]), wanted[repeat % 2]), repeat
