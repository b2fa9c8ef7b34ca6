"""Sums over many query rows and over a group's heads, which PyTorch's kernel rounds as it goes, and
sums that stay sums."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import Sizes, check_dense
from torch import Tensor

from flashtile.backends import cpu
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import generator, normal, packed_qkv

SIZES = {
    "many rows": Sizes(B=1, M=40_000, N=5, Hq=2, Hk=2, D=16),
    "many heads in a group": Sizes(B=1, M=800, N=5, Hq=64, Hk=1, D=16),
    "rows in short blocks": Sizes(B=1, M=700, N=5, Hq=32, Hk=1, D=16),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_few_keys(sizes, dtype, seed):
    check_dense(sizes, "nothing", dtype, "cpu", seed, through=("out",))


@pytest.mark.parametrize("lengths", [[9], [5, 4]], ids=["one sequence", "two"])
def test_parts_keep_the_dtype_of_their_sums(lengths: list[int], seed: int) -> None:
    """Except dq, if no other part has these queries."""
    g = generator(seed)
    q, k, v = packed_qkv(g, lengths, lengths, dtype=torch.bfloat16)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    operands = Operands(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
    options = Options(max(lengths), max(lengths), 0.3, window_right=0)
    whole = AttentionProblem.of(operands, options)
    out, lse = cpu.forward(whole, operands)
    dout = normal(g, *out.shape, dtype=q.dtype)

    def gradients(**facts: bool) -> tuple[Tensor, ...]:
        return cpu.backward(whole._replace(**facts), operands, out, lse, dout, None)[:3]

    rounded = gradients()
    sums = gradients(is_partial=True)
    of_whole_queries = gradients(is_partial=True, has_whole_queries=True)
    assert {x.dtype for x in rounded} == {q.dtype}
    assert {x.dtype for x in sums} == {torch.float32}
    assert [x.dtype for x in of_whole_queries] == [q.dtype, torch.float32, torch.float32]
    for found in (sums, of_whole_queries):
        assert all(map(torch.equal, (x.to(q.dtype) for x in found), rounded))
