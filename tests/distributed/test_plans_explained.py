"""`explain`, `check` and `measure`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.distributed import ContextParallel, check, executor
from flashtile.distributed.strategy import MACHINES
from flashtile.masks import BlockMask, Spans
from flashtile.testing.wires import ThreadCommunicator, run_ranks

pytestmark = pytest.mark.slow


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def explanation(ranks: int, tokens: int, **given: Any) -> str:
    """That of rank 0."""

    def one_rank(comm: ThreadCommunicator) -> str:
        parallel = ContextParallel.over(comm, **given)
        layout = parallel.layout(seq_len=ranks * tokens)
        q = torch.zeros(1, layout.local_tokens, 8, 64)
        k = q[:, :, :2]
        text = parallel.explain(layout, q, k, k, causal=True)
        assert comm.notes == comm.messages == 0
        return text

    texts = run_ranks(ranks, one_rank)
    assert len(set(texts)) == 1
    return texts[0]


def test_explain_prints_a_row_for_every_rank() -> None:
    text = explanation(4, 256, machine=MACHINES["H200"])
    assert "1,024 tokens on 4 ranks, 8:2 heads, head dim 64" in text
    rows = re.findall(r"^ +(\d) +256 +([\d.]+)% +[\d,]+$", text, flags=re.MULTILINE)
    assert [int(rank) for rank, _ in rows] == [0, 1, 2, 3]
    assert sum(float(share) for _, share in rows) == pytest.approx(100, abs=1)
    chosen = r"strategy: (ulysses=\d, stages=1, head_groups=1): the fastest of 3; estimated ms"
    found = re.search(chosen, text)
    prices = re.findall(r"^ +([\d.]+)  (ulysses=\d, .*)$", text, flags=re.MULTILINE)
    assert found and len(prices) == 3
    assert min(prices, key=lambda line: float(line[0]))[1] == found[1]


def test_explain_says_what_was_requested() -> None:
    assert "strategy: ulysses=2, stages=2, head_groups=1: requested" in explanation(
        4, 64, ulysses=2, stages=2, head_groups=1
    )
    text = explanation(4, 64, stages=1, stage_tokens=200)
    assert "the fastest of 3 with stages=1, stage_tokens=200" in text
    assert "the only one" in explanation(1, 64)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0, 0]])
def test_explain_without_tokens(cu_seqlens: list[int], ranks: int) -> None:
    def run(comm: ThreadCommunicator) -> str:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(cu_seqlens)
        x = torch.zeros(layout.local_tokens, 2, 8)
        return parallel.explain(layout, x, x, x)

    assert all("0 tokens on" in text for text in run_ranks(ranks, run))


def test_explain_refuses_what_attention_refuses() -> None:
    parallel = ContextParallel.over(run_ranks(1, lambda comm: comm)[0])
    layout = parallel.layout(seq_len=8)
    x = torch.zeros(1, 8, 2, 8)
    with pytest.raises(ValueError, match="window_size"):
        parallel.explain(layout, x, x, x, window_size=3)


def run_check(ranks: int, dtype: torch.dtype, packed: bool, **options: Any) -> list[str]:
    def one_rank(comm: ThreadCommunicator) -> str:
        parallel = ContextParallel.over(comm)
        if packed:
            layout = parallel.layout([0, 7, 7, 40], grain=4)
            q, k, v = drawn(40, 4, 8), drawn(40, 2, 8), drawn(40, 2, 12)
        else:
            layout = parallel.layout(batch=2, seq_len=40, grain=4)
            q, k, v = drawn(2, 40, 4, 8), drawn(2, 40, 2, 8), drawn(2, 40, 2, 12)
        mine = dict(options)
        if "bias" in mine:
            mine["bias"] = layout.shard(mine["bias"], dim=2)
        if "qv" in mine:
            mine["qv"] = layout.shard(mine["qv"])
        if "mask" in mine:
            mine["mask"] = Spans(*(layout.shard(x, dim=2) for x in mine["mask"]))
        shards = (layout.shard(x.to(dtype)) for x in (q, k, v))
        return parallel.check(*shards, layout, **mine)

    return run_ranks(ranks, one_rank)


def spans() -> Spans:
    stops = torch.arange(1, 41, dtype=torch.int32).view(1, 1, 40, 1)
    return Spans(stops.sub(9).clamp(min=0), stops)


def tiles() -> BlockMask:
    """Tiles that divide the pieces of the layouts below."""
    return BlockMask.from_tiles((drawn(1, 1, 10, 10) > 0).to(torch.uint8), (4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("packed", "options"),
    [
        (False, {"causal": True, "sink": drawn(4)}),
        (False, {"bias": drawn(1, 4, 40, 40), "key_padding_mask": drawn(2, 40) > -1}),
        (False, {"mask": spans(), "softcap": 2.0}),
        (False, {"block_mask": tiles(), "causal": True, "num_splits": 1}),
        (True, {"block_mask": tiles()}),
        (True, {"alibi_slopes": drawn(4).abs(), "relative_bias": drawn(4, 9).requires_grad_()}),
        (True, {"bias": drawn(1, 4, 40, 33), "seqused_q": torch.tensor([7, 0, 20])}),
        (False, {"qv": drawn(2, 40, 4, 12), "window_size": (20, 0)}),
        (True, {"window_size": (9, 0), "deterministic": True}),
        (True, {"causal": True, "seqused_k": torch.tensor([4, 0, 30], dtype=torch.int32)}),
    ],
)
def test_check_accepts_right_results(
    dtype: torch.dtype, packed: bool, options: dict[str, Any]
) -> None:
    floats = {"qv", "sink", "bias", "relative_bias"}
    given = {name: x.to(dtype) if name in floats else x for name, x in options.items()}
    weights = [f"d{name}" for name in ("qv", "sink", "relative_bias") if name in options]
    for text in run_check(3, dtype, packed, **given):
        assert text.startswith("3 ranks give what one process gives")
        names = ["out", "lse", "dq", "dk", "dv", *weights]
        assert re.findall(r"^ +(\w+): largest error", text, flags=re.MULTILINE) == names


@pytest.mark.parametrize("name", ["sink", "alibi_slopes", "relative_bias"])
def test_check_accepts_gradients_with_fewer_bits_than_q(name: str) -> None:
    """Every rank rounds its part of the sum to the dtype of the weight."""
    weight = drawn(4, 9) if name == "relative_bias" else drawn(4).abs()
    for text in run_check(3, torch.float32, True, **{name: weight.half().requires_grad_()}):
        assert f"d{name}: largest error" in text


def test_check_names_the_rank_and_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    right = executor.backward

    def wrong(plan: Any, *rest: Any) -> Any:
        gradients = right(plan, *rest)
        if plan.comm.rank == 1:
            gradients.dv[2] += 0.1
        return gradients

    monkeypatch.setattr(executor, "backward", wrong)

    def one_rank(comm: ThreadCommunicator) -> str:
        parallel = ContextParallel.over(comm, ulysses=1)
        layout = parallel.layout(seq_len=40, grain=4)
        x = layout.shard(drawn(1, 40, 2, 8))
        with pytest.raises(AssertionError) as caught:
            parallel.check(x, x, x, layout, causal=True)
        return str(caught.value)

    for text in run_ranks(3, one_rank):
        assert text.startswith("context parallel: dv of rank 1: 16 of")


def test_a_reference_that_fails_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise MemoryError("no memory for all scores")

    monkeypatch.setattr(check, "attention_reference", fails)

    def one_rank(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=16, grain=4)
        x = layout.shard(drawn(1, 16, 2, 8))
        with pytest.raises(AssertionError, match="no memory for all scores"):
            parallel.check(x, x, x, layout)

    run_ranks(2, one_rank, timeout=5)


def test_check_refuses_dropout() -> None:
    with pytest.raises(NotImplementedError, match="dropout_p: check compares calls without"):
        run_check(2, torch.float32, packed=True, dropout_p=0.1)


@pytest.mark.parametrize(("ranks", "node"), [(1, 8), (2, 8), (5, 2)])
def test_measure_gives_all_ranks_the_same_machine(ranks: int, node: int) -> None:
    machine = MACHINES["CPU"]._replace(node=node)

    def one_rank(comm: ThreadCommunicator) -> Any:
        return ContextParallel.over(comm, machine=machine).measure("cpu")

    (found,) = set(run_ranks(ranks, one_rank))
    assert found.name == "CPU, links measured"
    assert (found.inside == machine.inside) == (ranks == 1)
    assert (found.across == machine.across) == (ranks <= node)
    for link in (found.inside, found.across):
        assert link.bandwidth > 0
        assert link.latency > 0


def test_the_reference_is_computed_where_the_tensors_are() -> None:
    """On the device `meta`, as on a GPU, a tensor made on the CPU is an error."""
    parallel = ContextParallel.over(run_ranks(1, lambda comm: comm)[0])
    layout = parallel.layout(seq_len=8)
    x = torch.randn(1, 8, 2, 8, device="meta")
    cotangents = x, x[..., 0].transpose(-1, -2)
    results = check._reference(
        layout, dict.fromkeys("qkv", x), {"causal": True}, cotangents, torch.float64
    )
    assert {y.device.type for y in results.values()} == {"meta"}
