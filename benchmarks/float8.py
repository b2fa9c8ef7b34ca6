"""Float8 peers: attention on numbers that are quantised before the clock starts, and quantising.

A case stays in its 16 bits, so that bfloat16 and float8 alternate in it and the errors are those
of the whole recipe. Everyone gets the same numbers, with Q and K rotated.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile import api
from flashtile.api import explain
from flashtile.quantize import Quantized, quantize_qkv

from .prepared import Prepared, Skip, cuda_package, output_alone, refuse
from .shapes import Case, Inputs, quantized_bytes

DENSE_ALONE = {
    "documents": "not set up for packed sequences",
    "cached": "not set up for caches",
    "chunk": "not set up for chunks",
    "block_sparse": "not set up for block masks",
    "alibi": "not set up for ALiBi",
    "bias": "not set up for a bias",
    "sink": "not set up for a sink",
    "dropout": "not set up for dropout",
    "relative": "not set up for a relative bias",
    "prefix": "not set up for prefixes",
}


def flashtile(case: Case, inputs: Inputs, scales: str) -> Prepared:
    """flashtile, with per-block or per-head scales; it chooses its backend."""
    small, descales = _quantized(case, inputs, scales)
    options = {**descales, "causal": case.causal, "window_size": case.window}
    options["softcap"] = case.softcap
    chosen = explain(*small[:3], **options).chosen
    attend = partial(api.attention, *small[:3], **options)
    return Prepared(lambda: output_alone(attend()), {}, inputs.dout, backend=chosen)


def fa3(case: Case, inputs: Inputs) -> Prepared:
    """FlashAttention-3, which supports per-head scales.

    Its default build reads a V whose head dim is contiguous, and transposes it while loading.
    """
    module = cuda_package("flash_attn_interface", inputs)
    small, descales = _quantized(case, inputs, "head")
    options = {**descales, "causal": case.causal, "window_size": case.window}
    options["softcap"] = case.softcap
    attend = partial(module.flash_attn_func, small.q, small.k, small.v.contiguous(), **options)
    return Prepared(lambda: output_alone(attend()), {}, inputs.dout)


def _quantized(case: Case, inputs: Inputs, scales: str) -> tuple[Quantized, dict[str, Any]]:
    """The numbers of a case, and their scales by name."""
    refuse(case, **DENSE_ALONE)
    _forward_alone()
    small = quantize_qkv(inputs.q, inputs.k, inputs.v, scales=scales)
    return small, {name: getattr(small, name) for name in ("q_descale", "k_descale", "v_descale")}


def _forward_alone() -> None:
    if torch.is_grad_enabled():
        raise Skip("float8 has no backward")


def quantize(case: Case, inputs: Inputs) -> Prepared:
    """`quantize_qkv` as the case's recipe says."""
    if case.recipe is None:
        raise Skip("quantises, and this case attends")
    _forward_alone()
    recipe = case.recipe._asdict()

    def run() -> Tensor:
        return quantize_qkv(inputs.q, inputs.k, inputs.v, **recipe).q

    return Prepared(run, {}, inputs.dout)


def copy(case: Case, inputs: Inputs) -> Prepared:
    """PyTorch's copy, which reads and writes as many bytes in all as quantising the case does."""
    if case.recipe is None:
        raise Skip("copies, and this case attends")
    _forward_alone()
    source = torch.ones(quantized_bytes(case) // 2, dtype=torch.uint8, device=inputs.q.device)
    target = torch.empty_like(source)
    return Prepared(lambda: target.copy_(source), {}, inputs.dout)


QUANTIZERS = {"flashtile-quantize": quantize, "copy": copy}
