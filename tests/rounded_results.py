"""The allowed error of whole layers and models, for any order of their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flashtile.testing import assert_close, floor_of

Run = dict[str, Tensor]  # results by name


def judge_client(got: Run, plain: Callable[[torch.dtype], Run], seed: int) -> None:
    """Check the results of a library with flashtile by the rule. `plain(dtype)` gives the results
    without flashtile in that precision."""
    unit = torch.finfo(next(iter(got.values())).dtype).eps
    with sdpa_kernel(SDPBackend.MATH):
        truth, low = plain(torch.float64), plain(torch.float32)
        floor = floors(lambda: plain(torch.float64), truth, seed)
    assert got.keys() == truth.keys()
    for name, x in got.items():
        assert_close(name, x, truth[name], low[name], floor=floor[name] * unit, seed=seed)


def judge_with_gradients(
    got: Tensor, plain: Callable[..., Tensor], inputs: Sequence[Tensor], seed: int
) -> None:
    """Check `got` and its gradients by the rule; `plain(*inputs)` makes the same of `inputs` in
    their precision."""
    cotangent = torch.randn_like(got)

    def named(out: Tensor, leaves: Sequence[Tensor]) -> Run:
        gradients = torch.autograd.grad(out, leaves, cotangent.to(out.dtype))
        return {"out": out.detach()} | {f"gradient {i}": x for i, x in enumerate(gradients)}

    def run(dtype: torch.dtype) -> Run:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        return named(plain(*leaves), leaves)

    judge_client(named(got, inputs), run, seed)


def floors(run: Callable[[], Run], truth: Run, seed: int) -> dict[str, float]:
    """What a dtype may lose of every tensor of `run()`, plain PyTorch in float64, in whatever order
    it adds up terms, in units of its eps: the rule allows it at least
    (`flashtile.testing.error_model`).

    The sizes of the terms travel through a net of layers as small errors that are put into every
    result, always in the same number of runs.
    """
    squares = dict.fromkeys(truth, 0.0)
    for number in range(ERRORS):
        with RoundedResults(seed + number):
            found = run()
        for name, x in found.items():
            squares[name] = squares[name] + (x.detach() - truth[name].detach()).square() / ERRORS
    eps = torch.finfo(torch.float32).eps
    return {name: float(floor_of(x).max()) / eps for name, x in squares.items()}


aten = torch.ops.aten
ERRORS = 8


class RoundedResults(TorchDispatchMode):
    """Every new tensor has errors of float32's size, in the backward too: matrix products and sums
    for the terms that they add up, softmax for its exponents, all else for its own size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (aten.mm.default, aten.bmm.default):
            sizes = args[0].abs() @ args[1].abs()
        elif func is aten.addmm.default:
            sizes = args[0].abs() + args[1].abs() @ args[2].abs()
        elif func is aten.sum.dim_IntList:
            sizes = func(args[0].abs(), *args[1:], **(kwargs or {}))
        elif func is aten._softmax.default:
            sizes = result * (1 + result.clamp(min=1e-30).log().abs())
        elif any(x.alias_info is not None for x in func._schema.returns):  # the result is a view
            return result
        else:
            return tree_map_only(Tensor, self._rounded, result)
        return self._rounded(result, sizes)

    def _rounded(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float64:
            return x
        sizes = x.masked_fill(x.isinf(), 0) if sizes is None else sizes
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return x + torch.finfo(torch.float32).eps * sizes * noise
