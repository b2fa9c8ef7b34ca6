"""Single options in every dtype, then combinations, on dense inputs, forward and backward."""

from __future__ import annotations

import pytest
import torch

from flashtile.testing import DTYPES

from .harness import OPTIONS, Sizes, check_dense

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))

# Each combines two paths of the code: mask and mask, mask and score, score and softmax.
COMBINATIONS = (
    "causal + softcap",
    "causal + alibi",
    "causal + bias shared by heads",
    "causal + sink",
    "causal + dropout",
    "causal + seqused",
    "causal + chunk",
    "causal + block mask with partial tiles",
    "causal window + sink",
    "causal window + softcap + sink",
    "window + alibi for each batch",
    "window + dropout",
    "window + seqused",
    "window + block mask for each head",
    "chunk + sink",
    "chunk + seqused",
    "softcap + dropout",
    "softcap + bias",
    "softcap + alibi",
    "alibi + dropout",
    "alibi + seqused",
    "alibi + bias for each key",
    "bias + dropout",
    "bias + seqused",
    "bias + block mask",
    "bias with -inf + sink",
    "bias for each head + window",
    "sink + dropout",
    "sink + seqused",
    "sink + block mask for each head",
    "dropout + seqused",
    "dropout + block mask with partial tiles",
    "seqused + block mask with partial tiles",
    "causal + span",
    "chunk + spans for each batch",
    "spans for each batch and head + block mask with partial tiles",
    "spans for each batch + dropout + sink",
    "spans for each batch and head + alibi + bias + seqused",
    "relative bias + causal + seqused",
    "relative bias + learned alibi + bias + softcap + sink + dropout",
    "relative bias of all distances + window + block mask for each head",
    "learned alibi for each batch + chunk + spans for each batch",
    "learned alibi + relative bias + curved score function + seqused",
    "score function + causal window + dropout + sink",
    "curved score function + softcap + alibi + bias + seqused",
    "curved score function + spans for each batch and head + block mask with partial tiles",
    "score function that hides + softcap + chunk + sink",
    "causal window + softcap + alibi + bias + sink + dropout + seqused + block mask",
)


@pytest.mark.parametrize("option", OPTIONS)
@dtypes
def test_option_alone(option, dtype, backend, seed):
    check_dense(Sizes(), option, dtype, backend, seed)


@pytest.mark.parametrize("options", COMBINATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_options_together(options, dtype, backend, seed):
    check_dense(Sizes(), options, dtype, backend, seed)


def several_tiles(M, N, backend):
    """Sizes that cross the borders of tiles, those of `small_cpu_tiles` on a CPU."""
    smaller = 5 if backend == "cpu" else 1
    return Sizes(B=1, M=M // smaller, N=N // smaller, Hq=2, Hk=1, D=16)


@pytest.mark.slow
@pytest.mark.usefixtures("small_cpu_tiles")
@pytest.mark.parametrize("option", OPTIONS)
def test_option_over_several_tiles(option, backend, seed):
    check_dense(several_tiles(301, 547, backend), option, torch.float32, backend, seed)


@pytest.mark.slow
@pytest.mark.usefixtures("small_cpu_tiles")
@pytest.mark.parametrize(
    "option", ["nothing", "causal", "window", "sink", "block mask with partial tiles", "dropout"]
)
def test_more_queries_than_keys_over_several_tiles(option, backend, seed):
    check_dense(several_tiles(547, 301, backend), option, torch.float32, backend, seed)


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["negative scale", "scale of zero"])
@pytest.mark.parametrize("mask", ["causal", "causal + sink", "window to the left", "chunk"])
@pytest.mark.parametrize(
    "sizes", [Sizes(M=16, N=16), Sizes(B=1, M=550, N=600, Hq=2, Hk=1, D=8)], ids=str
)
def test_scales_that_are_not_positive(sizes, mask, scale, backend, seed):
    """PyTorch's own kernel masks before it scales, and -inf times 0 is NaN."""
    check_dense(sizes, f"{mask} + {scale}", torch.float32, backend, seed)
