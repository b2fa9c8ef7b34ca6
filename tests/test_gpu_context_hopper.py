"""Context parallelism on the Hopper kernels: ranks as threads that share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashtile import Spans
from flashtile.backends import hopper
from flashtile.distributed import ContextParallel
from flashtile.testing import (
    assert_close,
    attention_varlen_reference,
    generator,
    normal,
    packed_qkv,
)
from flashtile.testing.wires import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

LENGTHS = [1500, 0, 130, 1, 700]
ENDS = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
NAMES = ("out", "dq", "dk", "dv")
DTYPE = torch.bfloat16
# Options, each with a head dim: compiling a kernel takes seconds.
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (128, {"causal": True}),
    "window": (64, {"window_size": (200, 0)}),
    "both sides": (192, {"window_size": (90, 60), "softcap": 5.0}),
    "chunk": (128, {"attention_chunk": 300, "causal": True}),
    "sink": (96, {"causal": True, "sink": normal(generator(0), 4)}),
    "score function": (64, {"causal": True, "score_mod": lambda s, b, h, i, j: s + 0.1 * s * s}),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("way", "ranks", "stages", "groups"),
    [("zigzag", 4, 1, 1), ("documents", 3, 1, 2), ("contiguous", 3, 2, 1)],
)
def test_ranks_compute_what_one_process_does(
    way: str, ranks: int, stages: int, groups: int, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = count_calls(monkeypatch)
    head_dim, given = OPTIONS[option]
    q, k, v = packed_qkv(generator(head_dim), LENGTHS, LENGTHS, D=head_dim, dtype=DTYPE)
    dout = normal(generator(1), *q.shape, dtype=DTYPE)

    def one_rank(comm: Any) -> dict[str, torch.Tensor]:
        parallel = ContextParallel.over(comm, ulysses=1, stages=stages, head_groups=groups)
        layout = parallel.layout(ENDS, way=way)
        leaves = [layout.shard(x).cuda().requires_grad_() for x in (q, k, v)]
        on_gpu = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        out = parallel.attention(*leaves, layout, **on_gpu)
        gradients = torch.autograd.grad(out, leaves, layout.shard(dout).cuda())
        found = dict(zip(NAMES, map(layout.unshard, (out, *gradients)), strict=True))
        return {name: x.cpu() for name, x in found.items()}

    found = run_ranks(ranks, one_rank)[0]
    truth, plain = (reference((q, k, v), dout, given, x) for x in (torch.float64, DTYPE))
    for name, got in found.items():
        assert_close(name, got, truth[name], plain[name], dtype=DTYPE, seed=head_dim)
    assert used["forward"] > 0
    assert used["backward"] > 0


def count_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the backend's functions are called."""
    used = {"forward": 0, "backward": 0}

    def counting(name: str) -> Any:
        function = getattr(hopper, name)

        def call(*args: Any, **more: Any) -> Any:
            used[name] += 1
            return function(*args, **more)

        return call

    for name in used:
        monkeypatch.setattr(hopper, name, counting(name))
    return used


def reference(
    inputs: tuple[torch.Tensor, ...], dout: torch.Tensor, given: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """What one process computes in `dtype`."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    bounds = (cu, cu, max(LENGTHS), max(LENGTHS))
    out = attention_varlen_reference(*leaves, *bounds, compute_dtype=dtype, **given).out
    gradients = torch.autograd.grad((out * dout.to(dtype)).sum(), leaves)
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))


def test_spans_of_whole_documents_have_gradients() -> None:
    """The forward of this backend masks packed documents by spans, its backward does not."""
    q, k, v = packed_qkv(generator(0), LENGTHS, LENGTHS, D=64, dtype=DTYPE)
    dout = normal(generator(1), *q.shape, dtype=DTYPE)
    starts = torch.arange(len(q), dtype=torch.int32).remainder(40).view(1, 1, -1, 1)
    mask = Spans(starts, starts + 300)

    def one_rank(comm: Any) -> dict[str, torch.Tensor]:
        layout = ContextParallel.over(comm, ulysses=2).layout(ENDS)
        leaves = [layout.shard(x).cuda().requires_grad_() for x in (q, k, v)]
        own = Spans(*(layout.shard(x, dim=2).cuda() for x in mask))
        out = layout.attend(*leaves, causal=True, mask=own)
        gradients = torch.autograd.grad(out, leaves, layout.shard(dout).cuda())
        found = map(layout.unshard, (out, *gradients))
        return dict(zip(NAMES, (x.cpu() for x in found), strict=True))

    found = run_ranks(2, one_rank)[0]
    given = {"causal": True, "mask": mask}
    truth, plain = (reference((q, k, v), dout, given, x) for x in (torch.float64, DTYPE))
    for name, got in found.items():
        assert_close(name, got, truth[name], plain[name], dtype=DTYPE)
