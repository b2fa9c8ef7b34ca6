"""A peer's prepared call: the tensors in its layout, or the reason why there is no call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .measure import memory_bytes
from .shapes import Case, Inputs

EXTRA_LEAVES = ("bias", "sink", "relative_bias")  # beside q, k and v
DIFFERENTIATED = ("backward", "both")  # the passes that record gradients


class Skip(Exception):
    """This peer cannot run this case; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """A peer's call, ready to run."""

    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor]  # what to differentiate: q, k, v, and the case's `EXTRA_LEAVES`
    dout: Tensor  # shaped as what `forward` returns
    heads_first: bool = False  # out, q, k, v are (B, H, M, D) instead of (B, M, H, D)
    backend: str | None = None  # which one ran it, when the peer chose
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # the same on other q, k, v

    def call(self, direction: str) -> Callable[[], object]:
        """What to time as this pass; gradients must be on for those that are `DIFFERENTIATED`."""
        if direction == "backward":
            return self.backward()
        return self.forward_and_backward if direction == "both" else self.forward

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        """Run the forward once; returns the call that repeats its backward."""
        out, leaves = self.forward(), tuple(self.leaves.values())
        return lambda: torch.autograd.grad(out, leaves, self.dout, retain_graph=True)

    def forward_and_backward(self) -> tuple[Tensor, ...]:
        """Out and the gradients of the leaves, in this peer's layout."""
        out = self.forward()
        return out, *torch.autograd.grad(out, tuple(self.leaves.values()), self.dout)

    def public(self, name: str, x: Tensor) -> Tensor:
        """`x`, whose name is `out` or that of a leaf, with the length before the heads."""
        return x.transpose(1, 2) if self.heads_first and name in ("out", "q", "k", "v") else x


def leaves_of(inputs: Inputs, layout: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The tensors that a peer differentiates; `layout` brings q, k and v into its layout."""
    leaves = {"q": layout(inputs.q), "k": layout(inputs.k), "v": layout(inputs.v)}
    leaves |= {
        name: x.detach() for name in EXTRA_LEAVES if (x := getattr(inputs, name)) is not None
    }
    return {name: x.requires_grad_() for name, x in leaves.items()}


def heads_first_view(x: Tensor) -> Tensor:
    """(B, length, H, dim) viewed as (B, H, length, dim)."""
    return x.detach().transpose(1, 2)


def heads_first(x: Tensor) -> Tensor:
    """(B, length, H, dim) copied to (B, H, length, dim)."""
    return heads_first_view(x).contiguous()


def refuse(case: Case, **reasons: str) -> None:
    """Raise `Skip` with the reasons whose name is a feature that the case uses."""
    met = [reason for feature, reason in reasons.items() if getattr(case, feature)]
    if met:
        raise Skip(", ".join(met))


def refuse_quadratic(case: Case, device: torch.device) -> None:
    """Raise `Skip` when three float32 matrices of all scores exceed half of the memory.

    Not on a GPU, where an allocation that does not fit fails at once without harm.
    """
    wanted = 3 * 4 * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k
    memory = memory_bytes(device)
    if device.type == "cpu" and memory is not None and wanted > memory / 2:
        raise Skip(f"its scores take {wanted / 2**30:.0f} GiB of {memory / 2**30:.0f} GiB")


def cuda_package(name: str, inputs: Inputs) -> Any:
    """An optional library that needs a GPU."""
    if inputs.q.device.type != "cuda":
        raise Skip("runs only on CUDA")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skip(f"not installed ({error})") from error


def output_alone(result: Any) -> Tensor:
    """The output of a function that may return more."""
    return result[0] if isinstance(result, tuple) else result
