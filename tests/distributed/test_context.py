"""`ContextParallel` over threads: every option gives what one process gives."""

from __future__ import annotations

import pytest
import torch
from cases import Case, compare

from flashtile.distributed import ContextParallel
from flashtile.distributed.arguments import OPTIONS
from flashtile.testing.wires import ThreadWire, run_ranks


@pytest.mark.parametrize("seed", range(40))
def test_ranks_compute_what_one_process_does(seed: int) -> None:
    case = Case(seed)
    results = run_ranks(
        case.ranks,
        lambda wire: case.on_rank(
            ContextParallel.over(wire, ulysses=case.ulysses, stages=case.stages)
        ),
    )
    compare(case, results)


WAYS = {  # ranks, and how they exchange keys
    "gather": (3, {}),
    "stages": (3, {"stages": 3}),
    "ulysses": (3, {"ulysses": 3}),
    "2d": (4, {"ulysses": 2, "stages": 2}),
}
TAKEN = [name for name in OPTIONS if name not in ("softmax_scale", "deterministic")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", TAKEN)
def test_every_option_in_every_way(option: str, way: str) -> None:
    ranks, numbers = WAYS[way]
    for seed in range(3):
        case = Case(seed, ranks, wanted=option)
        results = run_ranks(
            ranks, lambda wire, case=case: case.on_rank(ContextParallel.over(wire, **numbers))
        )
        compare(case, results)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("bias", torch.zeros(1, 1, 1, 8), "bias: got packed documents, want a dense batch"),
        ("attn_mask", torch.ones(1, 1, 1, 8) > 0, "attn_mask: got packed documents"),
        ("key_padding_mask", torch.ones(1, 8) > 0, "key_padding_mask: got packed documents"),
    ],
)
def test_packed_documents_have_no_masks_of_a_batch(
    option: str, value: torch.Tensor, message: str
) -> None:
    def run(wire: ThreadWire) -> str:
        parallel = ContextParallel.over(wire)
        layout = parallel.layout([0, 8])
        x = torch.randn(layout.local_tokens, 2, 8)
        with pytest.raises(NotImplementedError, match="got") as caught:
            parallel.attention(x, x, x, layout, **{option: value})
        return str(caught.value)

    assert all(message in found for found in run_ranks(2, run))


def test_slopes_have_no_gradient() -> None:
    def run(wire: ThreadWire) -> str:
        parallel = ContextParallel.over(wire)
        layout = parallel.layout([0, 8])
        x, slopes = torch.randn(layout.local_tokens, 2, 8), torch.rand(2, requires_grad=True)
        with pytest.raises(NotImplementedError, match="alibi_slopes: requires grad") as caught:
            parallel.attention(x, x, x, layout, alibi_slopes=slopes)
        return str(caught.value)

    assert len(run_ranks(2, run)) == 2


def test_used_lengths_are_not_combined_with_a_bias() -> None:
    def run(wire: ThreadWire) -> str:
        parallel = ContextParallel.over(wire)
        layout = parallel.layout(seq_len=8)
        x = torch.randn(1, layout.local_tokens, 2, 8)
        masks = {"seqused_k": torch.tensor([5]), "key_padding_mask": torch.ones(1, 8) > 0}
        with pytest.raises(NotImplementedError, match="got") as caught:
            parallel.attention(x, x, x, layout, **masks)
        return str(caught.value)

    for found in run_ranks(2, run):
        assert "seqused_k: got it together with key_padding_mask" in found
