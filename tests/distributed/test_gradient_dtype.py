"""Gradients of keys and values that travel in bfloat16: half the bytes, sums in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.distributed import ContextParallel
from flashtile.testing.wires import ThreadCommunicator, run_ranks

EPS = torch.finfo(torch.bfloat16).eps


def gradients(ways: dict[str, int], **given: Any) -> tuple[dict[str, Tensor], int]:
    """dq, dk and dv of the whole, and the bytes that all ranks sent in the backward."""
    g = torch.Generator().manual_seed(5)
    whole = [torch.randn(1, 64, heads, 8, generator=g) for heads in (4, 2, 2)]
    dout = torch.randn(1, 64, 4, 8, generator=g)

    def one_rank(comm: ThreadCommunicator) -> tuple[dict[str, Tensor], int]:
        parallel = ContextParallel.over(comm, **ways, **given)
        layout = parallel.layout(seq_len=64, grain=4)
        q, k, v = (layout.shard(x).requires_grad_() for x in whole)
        out = parallel.attention(q, k, v, layout)
        before = comm.sent_bytes
        out.backward(layout.shard(dout))
        sent = comm.sent_bytes - before
        named = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
        return {n: layout.unshard(x) for n, x in named.items() if x is not None}, sent

    results = run_ranks(4, one_rank)
    return results[0][0], sum(sent for _, sent in results)


@pytest.mark.parametrize(
    "ways", [{"ulysses": 1}, {"ulysses": 1, "stages": 3}, {"ulysses": 2}, {"ulysses": 4}], ids=str
)
def test_half_the_bytes_and_sums_in_float32(ways: dict[str, int]) -> None:
    want, sent = gradients(ways)
    got, sent_rounded = gradients(ways, gradient_dtype=torch.bfloat16)
    assert sent_rounded < sent
    if ways == {"ulysses": 1}:  # K and V travel again in float32, dK and dV as many back
        assert sent_rounded == sent * 3 // 4
    assert torch.equal(got["dq"], want["dq"])
    for name in ("dk", "dv"):
        assert got[name].dtype == torch.float32
        assert not torch.equal(got[name], want[name])
        # One rounding of each of the three parts that came from other ranks, and of none of sums.
        scale = want[name].abs().max()
        assert (got[name] - want[name]).abs().max() <= 3 * EPS / 2 * scale
    owned = (got["dv"].bfloat16().float() != got["dv"]).any()
    assert owned  # the sums themselves are not rounded


def test_gradients_of_a_shared_key_head_are_added_before_they_are_rounded() -> None:
    """Of four ranks with a quarter of its query heads each; the inputs are bfloat16."""
    g = torch.Generator().manual_seed(5)
    whole = [torch.randn(1, 256, heads, 16, generator=g).bfloat16() for heads in (8, 1, 1, 8)]

    def of(ulysses: int, dtype: torch.dtype) -> list[Tensor]:
        def one_rank(comm: ThreadCommunicator) -> list[Tensor]:
            parallel = ContextParallel.over(comm, ulysses=ulysses)
            layout = parallel.layout(seq_len=256, grain=4)
            q, k, v, dout = (layout.shard(x).to(dtype) for x in whole)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = layout.attend(*leaves, causal=True)
            return [layout.unshard(x).double() for x in torch.autograd.grad(out, leaves, dout)]

        return run_ranks(4, one_rank)[0]

    exact, once = of(1, torch.float64), of(1, torch.bfloat16)
    for found, rounded_once, want in zip(of(4, torch.bfloat16), once, exact, strict=True):
        assert (found - want).norm() < 1.1 * (rounded_once - want).norm()


def test_ranks_that_disagree() -> None:
    def one_rank(comm: ThreadCommunicator) -> None:
        dtype = torch.float32 if comm.rank else torch.bfloat16
        parallel = ContextParallel.over(comm, gradient_dtype=dtype)
        layout = parallel.layout(seq_len=64)
        x = torch.zeros(1, layout.local_tokens, 2, 8)
        with pytest.raises(ValueError, match="the ranks disagree on gradient_dtype"):
            parallel.attention(x, x, x, layout)

    run_ranks(2, one_rank)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gradient_dtype: got torch\.float16, want"):
        run_ranks(1, lambda comm: ContextParallel.over(comm, gradient_dtype=torch.float16))
