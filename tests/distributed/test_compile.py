"""The ops of compiled calls. With several ranks they run in `context_worker`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from flashtile import BlockMask, Spans
from flashtile.distributed import ContextParallel, compile
from flashtile.distributed.arguments import Arguments
from flashtile.distributed.layout import layout_of
from flashtile.testing.wires import ThreadCommunicator, run_ranks

pytestmark = pytest.mark.slow

SLOPES = torch.randn(4)
OPTIONS: list[dict[str, Any]] = [
    {"causal": True, "window_size": (9, -1), "softcap": 3.0, "sink": torch.randn(4)},
    {"bias": torch.randn(1, 4, 32, 32), "key_padding_mask": torch.rand(2, 32) > 0.2},
    {"attn_mask": torch.randn(2, 1, 1, 32), "num_splits": 1, "softmax_scale": 0.3},
    {"mask": Spans.documents(torch.arange(64).view(2, 32) // 7), "dropout_p": 0.3},
    {"block_mask": BlockMask.from_tiles(torch.ones(2, 2).tril(), (16, 16))},
    {"score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (i - j).abs(), "causal": True},
    {"qv": torch.randn(2, 32, 4, 8), "causal": True},
    {"relative_bias": torch.randn(4, 7), "window_size": (5, 5)},
    {"seqused_k": torch.tensor([3, 32]), "alibi_slopes": torch.rand(4), "attention_chunk": 8},
]


class Calls(TorchDispatchMode):
    """The arguments of every call of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.flashtile.context_forward.default:
            self.arguments.append(args)
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("return_lse", [True, False])
def test_ops(options: dict[str, Any], return_lse: bool) -> None:
    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(batch=2, seq_len=32, grain=16)
        q, k, v = (torch.randn(2, 32, heads, 8, requires_grad=True) for heads in (4, 2, 2))
        torch.manual_seed(0)
        arguments = Arguments((q, k, v), layout, options, return_lse)
        want = parallel.run(*arguments)
        torch.manual_seed(0)
        with Calls() as calls:
            got = compile.attend(arguments)
        results = []
        for out, lse in (got, want):
            loss = out.sin().sum() + (lse.clamp(min=-9).sum() if return_lse else 0)
            results.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs)
        if return_lse:
            opcheck(torch.ops.flashtile.context_forward.default, calls.arguments[0])

    run_ranks(1, run)


@pytest.mark.parametrize("return_lse", [True, False])
def test_shapes_with_padding(return_lse: bool) -> None:
    """A rank with fewer rows returns what the graph expects, also where nobody sees lse."""

    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm, ulysses=1)
        for layout in (parallel.layout([0, 5, 6, 18, 25]), parallel.layout(seq_len=13, grain=1)):
            shape = (layout.sequences,) if layout.sequences else ()
            x = torch.randn(*shape, layout.local_tokens, 2, 8)
            for _ in range(2):
                with Calls() as calls:
                    found = compile.attend(Arguments((x, x, x), layout, {}, return_lse))
                expected = compile._fake_forward(*calls.arguments[0])
                assert [t.shape for t in found] == [t.shape for t in expected]

    run_ranks(2, run)


def test_a_layout_that_is_gone() -> None:
    with pytest.raises(RuntimeError, match="layout: got number 1000000000"):
        layout_of(torch.tensor(10**9))


def test_score_functions() -> None:
    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=32)

        def layer(x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
            def score_mod(s: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
                return s - slopes.exp()[h] * (i - j).abs()

            out = parallel.attention(2 * x, x, x, layout, score_mod=score_mod)
            assert isinstance(out, torch.Tensor)
            return out

        x, slopes = (torch.randn(*shape, requires_grad=True) for shape in ((1, 32, 4, 8), (4,)))
        results = []
        for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            out = call(x, slopes)
            results.append((out, *torch.autograd.grad(out.sin().sum(), (x, slopes))))
        torch.testing.assert_close(*results)
        torch._dynamo.reset()

    run_ranks(1, run)


@pytest.mark.parametrize(
    "name", ["alibi_slopes", "bias", "qv", "relative_bias", "seqused_q", "sink"]
)
def test_what_is_no_tensor_is_named(name: str) -> None:
    def run(comm: ThreadCommunicator) -> None:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(seq_len=8)
        x = torch.zeros(1, 8, 2, 8)

        @torch.compile(backend="eager")
        def attend(x: torch.Tensor) -> Any:
            return parallel.attention(x, x, x, layout, **{name: [0.5, 0.5]})

        with pytest.raises(TypeError, match=f"{name}: got list, want a torch.Tensor"):
            attend(x)

    run_ranks(1, run)
