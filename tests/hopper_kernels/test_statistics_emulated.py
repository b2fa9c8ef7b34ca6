"""The largest score and the entropy of each row from the Hopper forward's source run in PyTorch, as
in `test_forward_emulated.py`, against the CPU backend in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.compare import converted
from kernels.reference import reference
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import cpu
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.testing import assert_close, floor_of, generator, normal, rounding_variance

from .inputs import dense_inputs, packed_inputs, random_mask, random_spans, with_draws
from .test_forward_emulated import emulate, intrinsics  # noqa: F401 -- a fixture of every test

SINK = normal(generator(0), 2)
SIZES = {"M": 290, "N": 330}
# Options, and sizes that differ from SIZES.
DENSE: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "full": ({}, {}),
    "full 64": ({}, {"D": 64}),
    "causal 64": ({"causal": True}, {"D": 64}),
    "keys of the last block": ({}, {"M": 193, "N": 340, "D": 64}),
    "rows without a key": ({"causal": True}, {"M": 300, "N": 77}),
    "one key": ({}, {"M": 65, "N": 1}),
    "window and sink": ({"window_size": (50, 20), "sink": SINK}, {}),
    "sink of rows without a key": ({"causal": True, "sink": SINK}, {"M": 300, "N": 77}),
    "no sink": ({"sink": torch.full((2,), -torch.inf)}, {"D": 64}),
    "large sink": ({"sink": SINK + 100}, {"D": 64}),
    "softcap": ({"softcap": 3.0, "causal": True}, {"D": 96}),
    "negative scale": ({"softmax_scale": -0.1, "causal": True}, {"D": 64}),
    "capped negative scale": ({"softmax_scale": -0.1, "softcap": 2.0}, {"D": 64}),
    "large_scores": ({"softmax_scale": 3.0, "causal": True}, {"D": 64}),
    "dropout": ({"dropout_p": 0.4}, {"D": 64}),
    "tails": ({"causal": True}, {"D": 192, "Dv": 128}),
}


def statistics(operands: Operands, options: Options, dtype: torch.dtype) -> tuple[Tensor, ...]:
    problem = AttentionProblem.of(converted(operands, dtype), options)
    found = cpu.forward(problem._replace(has_statistics=True), converted(operands, dtype))
    return found[1:4]


def check(operands: Operands, options: Options, seed: int) -> None:
    """Statistics are sums in float32 of products that are exact there."""
    operands, _ = with_draws(operands, options, {}, seed)
    _, *found = emulate(operands, options, seed, has_statistics=True)
    undropped = options._replace(dropout_p=0.0)
    truth, plain = (
        statistics(operands, undropped, dtype) for dtype in (torch.float64, torch.float32)
    )
    exact = converted(operands, torch.float64)
    variance = reference(exact, undropped, attend=rounding_variance(torch.float32))
    P = cpu.probabilities(AttentionProblem.of(exact, undropped), exact, truth[0])
    slope = torch.where(P > 0, P, 1.0).log() + 1  # of the entropy, -sum P log P
    of_entropy = floor_of((variance.probs * slope.square()).sum(-1))
    if truth[0].dim() == 2:  # packed, and the floors of entropies are padded
        of_entropy = of_entropy.max()
    floors = floor_of(variance.lse), floor_of(variance.lse).max(), of_entropy
    for name, floor, *three in zip(
        ("lse", "largest", "entropy"), floors, found, truth, plain, strict=True
    ):
        assert_close(name, *three, floor=floor, dtype=torch.float32, seed=seed)


@pytest.mark.parametrize("case", DENSE)
def test_dense(case: str, seed: int) -> None:
    options, sizes = DENSE[case]
    check(*describe(dense_inputs(seed, "contiguous", SIZES | sizes), Dense(), options), seed)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"sink": normal(generator(0), 4)}], ids=["causal", "sink"]
)
@pytest.mark.parametrize("used", [False, True])
def test_packed(used: bool, options: dict[str, Any], seed: int) -> None:
    """Rows of no sequence have the largest score -inf and the entropy 0."""
    seqused = {"seqused_q": [70, 0, 0, 250], "seqused_k": [101, 3, 0, 129]} if used else {}
    tensors, layout, counts = packed_inputs(seed, 64, [70, 0, 1, 260], [130, 40, 0, 265], seqused)
    check(*describe(tensors, layout, {**options, **counts}), seed)


def test_lengths(seed: int) -> None:
    given = {"seqused_k": torch.tensor([330, 7], dtype=torch.int32), "causal": True}
    check(*describe(dense_inputs(seed, "contiguous", SIZES | {"B": 2}), Dense(), given), seed)


@pytest.mark.parametrize("mask", ["tiles", "one span", "spans"])
def test_masks(mask: str, seed: int) -> None:
    if mask == "tiles":
        given: dict[str, Any] = {"block_mask": random_mask((1, 1, 290, 330), (128, 128), seed)}
    else:
        shape = (1, 1, 290, 1 if mask == "one span" else 2)
        given = {"mask": random_spans(generator(seed), shape, 330)}
    sizes = SIZES | {"D": 64 if mask == "one span" else 128}
    check(*describe(dense_inputs(seed, "contiguous", sizes), Dense(), given), seed)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_largest_alone(head_dim: int, seed: int) -> None:
    """Without the entropy, the same bits."""
    sizes = SIZES | {"D": head_dim}
    call = describe(dense_inputs(seed, "contiguous", sizes), Dense(), {"causal": True})
    *wanted, _ = emulate(*call, seed, has_statistics=True)
    found = emulate(*call, seed, has_statistics=True, has_entropy=False)
    assert len(found) == 3
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
