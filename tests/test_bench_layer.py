"""The layer around a peer's attention is the same for every peer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import layer, peers, prepared, run, shapes
from benchmarks.shapes import Case, vary

SMALL = Case(
    variant="layer", layer=True, causal=True, head_dim=8, head_dim_v=8, seqlen_q=40, seqlen_k=40
)
QUICK = run.Settings(peers=("flashtile", "sdpa"), directions=("both",), seconds=0, min_rounds=1)


def _results(peer: str, case: Case = SMALL) -> dict[str, torch.Tensor]:
    made = layer.in_layer(peers.PEERS[peer](case, shapes.make_inputs(case)), case)
    return dict(zip(("out", *made.leaves), made.forward_and_backward(), strict=True))


def test_the_layer_is_the_same_around_every_peer() -> None:
    ours, theirs = _results("flashtile"), _results("sdpa")
    assert set(ours) == {"out", "x", "qkv", "proj", "up", "down"}
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], msg=lambda m, name=name: f"{name}: {m}")
    full = _results("sdpa", replace(SMALL, causal=False))
    assert not torch.allclose(ours["out"], full["out"])  # attention is in it


def test_the_work_of_a_layer_is_its_weights_and_its_scores() -> None:
    case = replace(SMALL, batch=2)
    inputs = shapes.make_inputs(case)
    weights = layer.in_layer(peers.flashtile(case, inputs), case).leaves.values()
    count = sum(x.numel() for x in weights if x.dim() == 2)
    for direction, share in (("forward", 2), ("backward", 4), ("both", 6)):
        scores = shapes.flops(replace(case, layer=False), direction)
        assert shapes.flops(case, direction) == scores + share * 2 * 40 * count


def test_a_layer_is_measured_without_a_truth() -> None:
    for row in run.measure_case(SMALL, QUICK, timer=lambda _: 1.0):
        assert (row.skipped, row.max_error, row.median_ms) == ("", None, 1.0)
        assert row.peak_mib


@pytest.mark.parametrize("variant", ["varlen", "decode"])
def test_a_layer_takes_plain_sequences_alone(variant: str) -> None:
    case = vary(SMALL, variant)
    with pytest.raises(prepared.Skip, match="a layer takes no"):
        layer.in_layer(peers.flashtile(case, shapes.make_inputs(case)), case)
    with pytest.raises(prepared.Skip, match="not set up for a layer"):
        layer.in_layer(peers.standard(SMALL, shapes.make_inputs(SMALL)), SMALL)
