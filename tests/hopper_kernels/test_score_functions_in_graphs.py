"""Score functions in graphs of ``torch.compile`` for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile.gpu.described import TARGETS, representing
from flashtile.problem import Options

pytest.importorskip("triton", reason="the package triton is not installed")


class _Recorded(Exception):
    """Ends a compilation, so that nothing is launched."""


@pytest.mark.parametrize(("needs_grad", "backend"), [(False, "hopper"), (True, "triton")])
def test_the_choice_of_the_backend_is_traced(needs_grad: bool, backend: str) -> None:
    """It reads facts of the program, which the tracer takes for constants. Hopper's kernels have no
    gradients of captured tensors.
    """
    found: list[Options] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for module in graph.modules():
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                if "attention_forward" in str(node.target):
                    found.append(Options(*node.args[-len(Options._fields) :]))
        raise _Recorded

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> Any:
        def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score - slopes[h] * (q.shape[1] - 1 - j)

        return flashtile.attention(q, k, v, score_mod=alibi)

    torch._dynamo.reset()
    given = [torch.randn(2, 256, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
    slopes = torch.randn(4, requires_grad=needs_grad)
    with representing(TARGETS["sm_90"]), pytest.raises(Exception, match="_Recorded"):
        torch.compile(call, backend=record, fullgraph=True, dynamic=True)(*given, slopes)
    torch._dynamo.reset()
    assert [options.backend for options in found] == [backend]
    assert "values" in found[0].score_mod
