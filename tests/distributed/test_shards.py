"""Cutting tensors into shards and putting them together."""

from __future__ import annotations

import pytest
import torch

from flashtile.distributed import ContextParallel, Layout
from flashtile.testing.wires import ThreadCommunicator, run_ranks


def test_a_layout_copies_its_indices_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    rows_of = Layout.rows_of

    def counted(self: Layout, rank: int) -> torch.Tensor:
        made.append(rank)
        return rows_of(self, rank)

    monkeypatch.setattr(Layout, "rows_of", counted)

    def run(comm: ThreadCommunicator) -> None:
        layout = ContextParallel.over(comm).layout(seq_len=64)
        for _ in range(3):
            for device in ("cpu", "meta"):
                layout.shard(torch.empty(1, 64, 2, device=device))
        layout.unshard(layout.unshard(torch.zeros(1, layout.local_tokens, 2))[:, :32])
        for device in map(torch.device, ("cpu", "meta")):
            assert layout.positions_on(device) is layout.positions_on(device)
            assert layout.positions_on(device).device == device

    run_ranks(2, run)
    # Each rank copies its own rows to two devices and the other rank's rows to one.
    assert sorted(made) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("packed", [False, True])
def test_the_shards_of_all_ranks_are_the_whole(packed: bool) -> None:
    x = torch.arange(130.0)
    x = x if packed else x.expand(2, 130)

    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        lengths = {"cu_seqlens": [0, 7, 130]} if packed else {"batch": 2, "seq_len": 130}
        layout = parallel.layout(**lengths)
        with torch.inference_mode():
            assert torch.equal(layout.unshard(layout.shard(x)), x)
        leaf = x.clone().requires_grad_()  # after a call in inference mode
        layout.unshard(layout.shard(leaf)).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.sum() == layout.queries.tokens(comm.rank)

    run_ranks(3, run)


def test_position_ids_are_a_tensor_of_their_own() -> None:
    def run(comm: ThreadCommunicator) -> None:
        layout = ContextParallel.over(comm).layout(seq_len=64)
        ids = torch.zeros(1, 64, dtype=torch.int64)
        before = layout.positions.clone()
        layout.batch(input_ids=ids)["position_ids"].zero_()
        assert torch.equal(layout.positions, before)

    run_ranks(2, run)
