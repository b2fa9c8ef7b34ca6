"""The decoding kernel over latents run in PyTorch (`emulator.py`): index arithmetic, masks, pages
and the order of copies, products and exchanges of its two warpgroups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configurations import one_kind_each
from kernels.decoding import LATENT_CASES, assert_decoding, make_decoding
from kernels.reference import reference
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.latent.launch import latent_launches, scratch_of
from flashtile.backends.hopper.latent.plan import latent_parts
from flashtile.ops.merge.formula import merge
from flashtile.problem import AttentionProblem, Operands, Options, lse_shape
from flashtile.testing import assert_close, floor_of, generator, normal, rounding_variance

from . import emulator
from .launches import MULTIPROCESSORS
from .test_forward_emulated import say_more


@pytest.fixture(autouse=True)
def intrinsics(monkeypatch: pytest.MonkeyPatch) -> None:
    say_more(monkeypatch)


class Emulated:
    """The backend, whose programs start in an order of `seed`; PyTorch merges their parts."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        parts = latent_parts(problem, MULTIPROCESSORS)
        q, scratch = operands.q, scratch_of(operands, parts)
        out = torch.full((*q.shape[:-1], problem.Dv), torch.nan, dtype=q.dtype)
        lse = torch.full(lse_shape(operands), torch.nan)
        made = [out, lse] + [scratch.allocate().fill_(torch.nan)] * (parts > 1)
        launches = latent_launches(problem, operands, parts, made)
        emulator.run(launches[0], self.seed)
        if parts == 1:
            return out, lse
        found = scratch.parts(made[2])
        pairs = zip(found["out"], found["lse"].transpose(-1, -2), strict=True)
        merged = next(pairs)
        for pair in pairs:
            merged = merge(*merged, *pair)
        return merged[0].to(q.dtype), merged[1].transpose(-1, -2)


@pytest.mark.parametrize(
    ("name", "dtype"), one_kind_each(LATENT_CASES, (torch.bfloat16, torch.float16)), ids=str
)
def test_decoding(name: str, dtype: torch.dtype, seed: int):
    """Sequences of no, one, whole and odd tiles; slots after them hold NaN."""
    assert_decoding(Emulated(seed), name, dtype, seed, (1, 3))


def results(operands: Operands, options: Any, seed: int) -> tuple[Tensor, Tensor]:
    problem = AttentionProblem.of(operands, options)
    assert problem.has_values_in_keys
    return Emulated(seed).forward(problem, operands)


def test_many_pairs_of_tiles(seed: int):
    """More than the phases of a barrier; row maxima rise, and the last tile has no key."""
    g, dtype, (B, M, N, H) = generator(seed), torch.bfloat16, (2, 2, 704, 3)
    q, k = (normal(g, B, n, heads, 576, dtype=dtype) for n, heads in ((M, H), (N, 1)))
    k *= torch.linspace(0.1, 1, N)[:, None, None].to(dtype)
    k[0, 650:] = torch.nan
    used = torch.tensor([650, N], dtype=torch.int32)
    operands = Operands(q, k, k[..., :512], seqused_k=used)
    options = Options(M, N, 0.5, window_right=0, num_splits=1)
    truth, plain = reference(operands, options), reference(operands, options, compute_dtype=dtype)
    variance = reference(operands, options, attend=rounding_variance(dtype))
    for field, x in zip(("out", "lse"), results(operands, options, seed), strict=True):
        floor, wanted = floor_of(getattr(variance, field)), getattr(truth, field)
        assert_close(field, x, wanted, getattr(plain, field), floor=floor, dtype=dtype, seed=seed)


def test_latents_in_wider_rows(seed: int):
    """Of queries and keys that are parts of larger tensors."""
    operands, options = make_decoding("latent keys of many heads", torch.bfloat16, seed)
    B, M, H, D = operands.q.shape
    q = torch.full((B, M, H + 1, D + 64), torch.nan, dtype=torch.bfloat16)
    k = torch.full((B + 1, operands.k.shape[1] + 3, 1, D + 8), torch.nan, dtype=torch.bfloat16)
    q, k = q[:, :, 1:, :D].copy_(operands.q), k[:B, 3:, :, :D].copy_(operands.k)
    wide = operands._replace(q=q, k=k, v=k[..., :512])
    pairs = zip(results(wide, options, seed), results(operands, options, seed), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in pairs)


def test_padding_of_queries(seed: int):
    """Queries from `seqused_q` on are padding; the last one before sees the last key."""
    operands, options = make_decoding("latent keys of many heads", torch.bfloat16, seed)
    padded = operands._replace(seqused_q=torch.tensor([0, 1, 1, 2], dtype=torch.int32))
    out, lse = results(padded, options, seed)
    alone = operands._replace(q=operands.q[:, :1].contiguous())
    wanted, wanted_lse = results(alone, options._replace(max_seqlen_q=1), seed)
    assert torch.equal(out[1:3, :1], wanted[1:3])
    assert torch.equal(lse[1:3, :, :1], wanted_lse[1:3])
    assert torch.equal(out[3], results(operands, options, seed)[0][3])
    for b, used in enumerate((0, 1, 1, 2)):
        assert not out[b, used:].any() and (lse[b, :, used:] == -torch.inf).all()
