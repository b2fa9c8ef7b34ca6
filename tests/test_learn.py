"""The code of the lessons, against PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from examples.learn import (
    backward,
    flash_attention_1,
    flash_attention_2,
    merging,
    softmax,
    traffic,
)
from examples.learn import standard as lesson_1
from flashtile.testing import generator

pytestmark = pytest.mark.slow

ROWS = [
    [1.0, 2.0, 3.0, 4.0],
    [4.0, 3.0, 2.0, 1.0],
    [-1000.0, 1000.0, 999.0],
    [-math.inf, 0.5, -math.inf, -2.0],
    [0.0],
]
SIZES = [(40, 40), (13, 70), (70, 13), (1, 33)]  # queries, keys


def inputs(M: int, N: int, D: int = 16, Dv: int = 24) -> list[Tensor]:
    """Q, K and V of one head."""
    g = generator(0)
    shapes = ((M, D), (N, D), (N, Dv))
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def standard(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """(O, L); rows that see no key are 0 and -inf."""
    S = (Q @ K.T / math.sqrt(Q.shape[1])).masked_fill(~visible, -math.inf)
    P = torch.softmax(S, dim=1).masked_fill(~visible.any(1, keepdim=True), 0.0)
    return P @ V, torch.logsumexp(S, dim=1)


def seen(M: int, N: int, causal: bool) -> Tensor:
    """(M, N), True where query i sees key j."""
    everything = torch.ones(M, N, dtype=torch.bool)
    return everything.tril(N - M) if causal else everything


@pytest.mark.parametrize("passes", [softmax.three_passes, softmax.two_passes])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_softmax(passes: Callable[..., list[float]], row: list[float]):
    expected = torch.softmax(torch.tensor(row, dtype=torch.float64), 0)
    torch.testing.assert_close(torch.tensor(passes(row), dtype=torch.float64), expected)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_one_pass_averages(row: list[float]):
    values = [float(n * n) for n in range(len(row))]
    weights = softmax.three_passes(row)
    expected = sum(p * v for p, v in zip(weights, values, strict=True))
    assert math.isclose(softmax.one_pass(row, values), expected, rel_tol=1e-12)


def test_rows_without_keys_are_zero_and_nan_stays():
    hidden = [-math.inf] * 3
    assert softmax.three_passes(hidden) == softmax.two_passes(hidden) == [0.0] * 3
    assert softmax.one_pass(hidden, [1.0, 2.0, 3.0]) == 0.0
    for bad in (math.nan, math.inf):
        row = [1.0, bad, 2.0]
        assert all(map(math.isnan, softmax.three_passes(row) + softmax.two_passes(row)))
        assert math.isnan(softmax.one_pass(row, row))


@pytest.mark.parametrize(("M", "N"), SIZES)
def test_flash_attention_1(M: int, N: int):
    Q, K, V = inputs(M, N)
    expected, _ = standard(Q, K, V, seen(M, N, False))
    for fast_memory in (64, 1000, 10**6):
        torch.testing.assert_close(flash_attention_1.attention(Q, K, V, fast_memory), expected)


def test_flash_attention_1_hides_padding_and_tiles():
    Q, K, V = inputs(48, 64)
    B_r, B_c = flash_attention_1.block_sizes(1024, 16)
    assert (B_r, B_c) == (16, 16)
    n = torch.arange(64)
    for padding in (n < 13, (n > 17) & (n < 40)):  # whole tiles, the first or the last
        found = flash_attention_1.attention(Q, K, V, 1024, visible=padding)
        torch.testing.assert_close(found, standard(Q, K, V, padding.expand(48, 64))[0])
    kept = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    found = flash_attention_1.attention(Q, K, V, 1024, is_kept=lambda i, j: bool(kept[i, j]))
    visible = kept.repeat_interleave(16, 0).repeat_interleave(16, 1)
    torch.testing.assert_close(found, standard(Q, K, V, visible)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("M", "N"), SIZES)
def test_flash_attention_2(M: int, N: int, causal: bool):
    Q, K, V = inputs(M, N)
    O, L = flash_attention_2.forward(Q, K, V, causal, B_r=16, B_c=8)
    expected = standard(Q, K, V, seen(M, N, causal))
    torch.testing.assert_close((O, L), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("M", "N"), SIZES)
def test_gradients(M: int, N: int, causal: bool):
    qkv = [x.requires_grad_() for x in inputs(M, N)]
    expected, _ = standard(*qkv, seen(M, N, causal))
    dO = torch.randn(expected.shape, generator=generator(1), dtype=torch.float64)
    with torch.no_grad():
        O, L = flash_attention_2.forward(*qkv, causal)
        found = backward.backward(*qkv, O, L, dO, causal, B_r=16, B_c=8)
    torch.testing.assert_close(found, torch.autograd.grad(expected, qkv, dO))
    by_autograd = torch.autograd.grad(backward.FlashAttention.apply(*qkv, causal), qkv, dO)
    torch.testing.assert_close(by_autograd, found)


def masked(M: int, N: int) -> Tensor:
    """A mask with a row, a column and a tile of 16 x 8 that are hidden."""
    visible = torch.rand(M, N, generator=generator(2)) < 0.5
    visible[M // 2], visible[:, N // 2], visible[:16, 8:16] = False, False, False
    return visible


@pytest.mark.parametrize(("M", "N"), SIZES)
def test_any_mask(M: int, N: int):
    qkv = [x.requires_grad_() for x in inputs(M, N)]
    visible = masked(M, N)
    expected = standard(*qkv, visible)
    dO = torch.randn(M, 24, generator=generator(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected[0], qkv, dO)
    with torch.no_grad():
        torch.testing.assert_close(lesson_1.attention(*qkv, visible), expected[0])
        first = flash_attention_1.attention(*qkv, 1024, visible=visible)
        torch.testing.assert_close(first, expected[0])
        O, L = flash_attention_2.forward(*qkv, B_r=16, B_c=8, visible=visible)
        torch.testing.assert_close((O, L), expected)
        found = backward.backward(*qkv, O, L, dO, B_r=16, B_c=8, visible=visible)
        torch.testing.assert_close(found, tuple(gradients))


@pytest.mark.parametrize(("M", "N"), SIZES)
def test_results_over_different_keys_merge(M: int, N: int):
    Q, K, V = inputs(M, N)
    visible = masked(M, N)
    expected = standard(Q, K, V, visible)
    torch.testing.assert_close(merging.split_kv(Q, K, V, visible, keys=7), expected)
    torch.testing.assert_close(merging.ring(Q, K, V, visible), expected)


def test_traffic_counts_what_the_loops_move():
    N, d, fast_memory, B_r = 96, 16, 1024, 32
    _, B_c = flash_attention_1.block_sizes(fast_memory, d)
    first = second = 0
    for j in range(0, N, B_c):
        first += 2 * len(range(j, min(j + B_c, N))) * d  # K_j and V_j
        first += N * d + 2 * (N * d + N + N)  # Q; O, l and m, read and written
    for i in range(0, N, B_r):
        rows = len(range(i, min(i + B_r, N)))
        second += 2 * rows * d + rows + 2 * N * d  # Q_i, O_i and L_i; K and V
    assert traffic.flash_attention_1_traffic(N, d, fast_memory) == first
    assert traffic.flash_attention_2_traffic(N, d, B_r) == second
    assert traffic.standard_traffic(N, d) == 4 * N * N + 4 * N * d


def test_the_measurement_prints_a_line_for_each_length(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(traffic, "seconds", lambda call, device: call() is None or 1.0)
    monkeypatch.setattr(traffic, "LENGTHS", (64, 128))
    traffic.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["64", "128"]


def test_a_slow_call_is_timed_once():
    calls: list[int] = []
    assert traffic.seconds(lambda: calls.append(1), "cpu", least=0.0) < math.inf
    assert len(calls) == 2
