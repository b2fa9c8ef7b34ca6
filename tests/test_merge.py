"""Parts of attention merged by their log-sum-exp, against sums in Python's floats.

Every combination of a few log-sum-exps: no key at all, far apart, equal, and too large for `exp`.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from flashtile.ops.merge.formula import add_sink, merge, merge_entropies, merge_parts

LSES = (-math.inf, -90.0, 0.0, 1.5, 800.0)
OUTS = [(1.0, -2.0), (3.5, 0.25), (-7.0, 4.0)]  # of the parts


def by_hand(outs, lses):
    """(out, lse) over the union of the parts' keys; out 0 and LSE -inf without any key."""
    largest = max(lses)
    if largest == -math.inf:
        return [0.0] * len(outs[0]), largest
    weights = [math.exp(lse - largest) for lse in lses]
    total = math.fsum(weights)
    out = [
        math.fsum(w * x for w, x in zip(weights, column, strict=True)) / total
        for column in zip(*outs, strict=True)
    ]
    return out, largest + math.log(total)


def as_tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def check(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, as_tensor(y), rtol=1e-12, atol=1e-15)


def test_two_parts():
    a, b = OUTS[:2]
    for lse_a, lse_b in product(LSES, repeat=2):
        got = merge(as_tensor(a), as_tensor(lse_a), as_tensor(b), as_tensor(lse_b))
        check(got, by_hand([a, b], [lse_a, lse_b]))


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_any_number_of_parts(splits):
    """A part without keys may hold NaN."""
    for lses in product(LSES, repeat=splits):
        outs = [
            (math.nan, math.nan) if lse == -math.inf else out
            for out, lse in zip(OUTS, lses, strict=False)
        ]
        got = merge_parts(as_tensor(outs), as_tensor(lses), torch.float64)
        check(got, by_hand(OUTS[:splits], lses))


def test_a_sink_is_a_key_of_value_zero():
    for lse, sink in product(LSES, repeat=2):
        out = (0.0, 0.0) if lse == -math.inf else OUTS[0]
        got = add_sink(as_tensor(out), as_tensor(lse), as_tensor(sink))
        check(got, by_hand([out, (0.0, 0.0)], [lse, sink]))


@pytest.mark.parametrize("given", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float64], ids=str)
def test_parts_are_summed_in_the_dtype_of_the_lse(given, wanted):
    """1 + 2048 is not a float16; only the sum is rounded, to the dtype that is asked for."""
    outs = torch.tensor([[2.0], [4096.0]], dtype=given)
    out, lse = merge_parts(outs, torch.zeros(2), wanted)
    assert out.dtype == wanted and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), torch.tensor([2049.0]).to(wanted).double())


def test_rows_that_no_part_saw_have_no_gradient():
    lses = torch.tensor([[-math.inf, 0.5], [-math.inf, -math.inf]], requires_grad=True)
    outs = torch.randn(2, 2, 3, requires_grad=True)
    out, lse = merge_parts(outs, lses, torch.float32)
    (out.sum() + lse.sum()).backward()
    assert torch.equal(lses.grad, torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    assert torch.equal(outs.grad[0], torch.tensor([[0.0] * 3, [1.0] * 3]))
    assert torch.equal(outs.grad[1], torch.zeros(2, 3))


@pytest.mark.parametrize("split", [0, 2, 9])
def test_entropies_of_two_parts(split):
    """Those of the scores together; also where a part or both see no key."""
    S = 30 * torch.randn(40, 9, dtype=torch.float64)
    S[:10, :split] = S[5:20, split:] = -math.inf

    def of(S):
        P = S.softmax(-1).nan_to_num(0.0)
        return torch.special.entr(P).sum(-1), S.logsumexp(-1)

    found = merge_entropies(*of(S[:, :split]), *of(S[:, split:]))
    torch.testing.assert_close(found, of(S)[0], rtol=1e-12, atol=1e-15)
