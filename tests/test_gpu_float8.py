"""Float8 on Hopper by the public functions: what dispatch chooses, against the rule and the CPU's
emulation, and whether repeats agree."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from float8_numbers import descales
from torch import Tensor

import flashtile
from flashtile.call import Packed
from flashtile.quantize.tensors import E4M3, Quantized, Recipe, quantized
from flashtile.testing import (
    assert_close,
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    packed_qkv,
    qkv,
)

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (50, 20)},
    "softcap": {"softcap": 3.0, "causal": True},
}
HEAD_DIMS = [(64, 64), (128, 128), (256, 256), (96, 80), (192, 128)]
REPEATS = 30


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    """Nothing here runs elsewhere."""
    if torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name()
        pytest.skip(f"the float8 kernel wants compute capability 9.0, this is {found}")


def carried(x: Tensor) -> Tensor:
    """`x` on the GPU with the strides that it has: the keys of V are adjacent."""
    bytes_of = torch.empty_strided(x.shape, x.stride(), dtype=torch.uint8, device="cuda")
    return bytes_of.copy_(x.view(torch.uint8)).view(E4M3)


def check(function: Any, reference: Any, small: Quantized, *layout: Any, **given: Any) -> None:
    """The call on the GPU by the rule, nearly what the CPU makes of it, and always the same."""
    given = given | descales(small)
    cpu = function(*small[:3], *layout, **given, return_lse=True)
    truth = reference(*small[:3], *layout, **given)
    plain = reference(*small[:3], *layout, **given, compute_dtype=torch.float32, weights=E4M3)
    moved = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in given.items()}
    places = [x.cuda() if isinstance(x, Tensor) else x for x in layout]
    call = partial(function, *map(carried, small[:3]), *places, **moved, return_lse=True)
    got = call()
    for _ in range(REPEATS):
        assert all(map(torch.equal, call(), got))
    for name, x, y in zip(("out", "lse"), got, cpu, strict=True):
        dtype = torch.bfloat16 if name == "out" else torch.float32
        wanted, low = getattr(truth, name), getattr(plain, name)
        if name == "lse":  # the tensor cores add up float8 products with fewer bits than float32
            dtype = torch.bfloat16
        assert_close(name, x.cpu(), wanted, low, dtype=dtype, seed=0)
        live = y.isfinite()
        assert torch.equal(live, x.cpu().isfinite())
        # Sums that end otherwise round P otherwise: 0.72 to 0.98 of the numbers were within a step.
        step = torch.finfo(torch.bfloat16).eps * y[live].abs() + 1e-2
        assert ((x.cpu()[live] - y[live]).abs() <= step).double().mean() > 0.6


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("scales", ["head", "block"])
@pytest.mark.parametrize("option", OPTIONS)
def test_dense(option: str, scales: str, head_dims: tuple[int, int], seed: int):
    D, Dv = head_dims
    q, k, v = qkv(generator(seed), B=2, M=290, N=333, Hq=4, Hk=2, D=D, Dv=Dv)
    k[:, ::3] *= 3
    v[:, 140:] *= 50  # so that scales differ by block
    small = quantized(q, k, v, Recipe(scales), None)
    given = OPTIONS[option] | {"softmax_scale": D**-0.5}
    check(flashtile.attention, attention_reference, small, **given)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed(head_dim: int, seed: int):
    lengths_q, lengths_k = [290, 0, 1, 70], [333, 5, 0, 130]
    q, k, v = packed_qkv(generator(seed), lengths_q, lengths_k, D=head_dim)
    layout = Packed(cu_seqlens(lengths_q), cu_seqlens(lengths_k), 300, 340)
    small = quantized(q, k, v, Recipe("head"), layout)
    given = {"causal": True, "softmax_scale": head_dim**-0.5}
    function, reference = flashtile.attention_varlen, attention_varlen_reference
    check(function, reference, small, *layout[:4], **given)


def test_dispatch_takes_hopper():
    small = flashtile.quantize_qkv(*(x.cuda() for x in qkv(generator(0), M=300, N=400, D=128)))
    report = str(flashtile.explain(*small[:3], **descales(small)))
    assert "-> hopper: yes" in report
    assert "forward in float8" in report


@pytest.mark.parametrize("causal", [False, True])
def test_attention_fp8_is_the_emulated_one(causal: bool, seed: int):
    """With gradients, which are those of 16 bits."""
    given = [x.cuda() for x in qkv(generator(seed), M=300, N=400, D=128, dtype=torch.bfloat16)]

    def run(emulate: bool) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        out = flashtile.attention_fp8(*leaves, causal=causal, emulate=emulate)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    for x, y in zip(run(False), run(True), strict=True):
        assert (x - y).float().norm() <= 0.03 * y.float().norm()
