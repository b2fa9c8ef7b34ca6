"""The accuracy of a backward pass in float8: the experiment of docs/log/float8.md.

    python -m benchmarks.fp8_backward gradients    # errors of dQ, dK and dV; two minutes
    python -m benchmarks.fp8_backward training     # a small GPT on Shakespeare; twenty minutes

Emulated on the CPU. The forward is that of `attention_fp8` with its default recipe. The backward
multiplies what a kernel would hold: Q, K and V as they are in float8, and dO, P and dS rounded to
8 bits; sums are in float32. Every scale is a power of two, so products of numbers times their
scales are those that a kernel makes, but for the order of sums.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashtile
from examples.demo.inputs import find_play
from flashtile.cli import integer
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel
from flashtile.ops.quantize.formula import dequantized, power_of_two
from flashtile.problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from flashtile.quantize import attention_fp8, quantize_qkv, rotation
from flashtile.quantize.tensors import rows_of
from flashtile.testing import generator, normal

from .fp8_accuracy import inputs

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
WEIGHT = 2.0**8  # multiplies P, at most 1, before it is rounded, as in the forward


@dataclass(frozen=True)
class Scheme:
    """The formats to which a backward pass rounds its operands."""

    dO: torch.dtype = BF16  # a scale for each block of queries
    P: torch.dtype = BF16
    dS: torch.dtype = BF16
    measures: bool = True  # the scale of dS for each tile: from its largest number, or from a bound
    float8_inputs: bool = True  # forward and operands in float8; or all in bfloat16


SCHEMES = {
    "bfloat16": Scheme(float8_inputs=False),
    "bfloat16 on float8's numbers (ships)": Scheme(),
    "P in e4m3 alone": Scheme(P=E4M3),
    "dO in e4m3 alone": Scheme(dO=E4M3),
    "dO in e5m2 alone": Scheme(dO=E5M2),
    "dS in e4m3 alone": Scheme(dS=E4M3),
    "dS in e4m3 alone, scale from a bound": Scheme(dS=E4M3, measures=False),
    "dS in e5m2 alone, scale from a bound": Scheme(dS=E5M2, measures=False),
    "dO bfloat16, P and dS e4m3": Scheme(P=E4M3, dS=E4M3),
    "dO, P and dS e4m3": Scheme(E4M3, E4M3, E4M3),
    "dO e5m2, P and dS e4m3": Scheme(E5M2, E4M3, E4M3),
    "dO and dS e5m2, P e4m3, scale from a bound": Scheme(E5M2, E4M3, E5M2, measures=False),
}
# The attention of a trained model: functions of the package, and schemes.
TRAINED = (
    *("float32", "bfloat16", "attention_fp8", "dO bfloat16, P and dS e4m3"),
    "dO and dS e5m2, P e4m3, scale from a bound",
)


def rounded(x: Tensor, dtype: torch.dtype, largest: Tensor) -> Tensor:
    """`x`, at most `largest`, in `dtype` with the smallest scale that fits, and back."""
    if dtype == BF16:
        return x.to(BF16).to(x.dtype)
    scale = power_of_two(largest / torch.finfo(dtype).max)
    return (x / scale).to(dtype).to(x.dtype) * scale


def largest_of_rows(x: Tensor) -> Tensor:
    """The largest magnitude of the block of queries around every row of `x` (..., M, columns)."""
    found = x.abs().amax(-1, keepdim=True).unflatten(-2, (-1, FLOAT8_QUERY_BLOCK)).amax(-2)
    return found.repeat_interleave(FLOAT8_QUERY_BLOCK, -2)


def largest_of_tiles(x: Tensor) -> Tensor:
    """The same of the tile around every element of `x` (..., M, N)."""
    tiles = x.unflatten(-1, (-1, FLOAT8_KEY_BLOCK))
    tiles = tiles.unflatten(-3, (-1, FLOAT8_QUERY_BLOCK))
    return tiles.abs().amax((-3, -1), keepdim=True).expand_as(tiles).flatten(-4, -3).flatten(-2)


def gradients(
    operands: Sequence[Tensor], dout: Tensor, how: Scheme, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV. `operands`: Q, K, V, O (batch, heads, rows, head_dim) and L (batch, heads,
    rows), float32; rows are whole blocks."""
    q, k, v, out, lse = operands
    scale = q.shape[-1] ** -0.5
    dout = rounded(dout, how.dO, largest_of_rows(dout))
    delta = (dout * out).sum(-1, keepdim=True)
    S = q @ k.mT * scale
    if causal:
        S.masked_fill_(torch.ones(S.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    P = torch.exp(S - lse[..., None])
    dS = P * (dout @ v.mT - delta)
    P = rounded(P, how.P, torch.tensor(torch.finfo(how.P).max / WEIGHT))
    if how.measures:
        largest = largest_of_tiles(dS)
    else:  # |dP| and |delta| are at most |dO| |V|
        largest = 2 * largest_of_rows(dout.norm(dim=-1, keepdim=True))
        largest = largest * v.norm(dim=-1).amax(-1)[..., None, None]
    dS = rounded(dS, how.dS, largest)
    return dS @ k * scale, dS.mT @ q * scale, P.mT @ dout


class Emulated(torch.autograd.Function):
    """Attention of inputs rounded to bfloat16; the backward follows a scheme."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: Scheme, causal: bool) -> Tensor:
        q, k, v = (x.to(BF16) for x in (q, k, v))
        if how.float8_inputs:
            out, lse = attention_fp8(q, k, v, causal=causal, return_lse=True)
            small = quantize_qkv(q, k, v)
            rows_q, rows_k = rows_of(q, k, None)
            block_q, block_k, wide = FLOAT8_QUERY_BLOCK, FLOAT8_KEY_BLOCK, torch.float32
            q = dequantized(small.q, small.q_descale, rows_q, block_q, wide)
            k = dequantized(small.k, small.k_descale, rows_k, block_k, wide)
            v = dequantized(small.v, small.v_descale, rows_k, block_k, wide)
        else:
            out, lse = flashtile.attention(q, k, v, causal=causal, return_lse=True)
        ctx.how, ctx.causal = how, causal
        ctx.save_for_backward(*(x.float().transpose(1, 2) for x in (q, k, v, out)), lse)
        return out.float()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        dout = dout.to(BF16).float().transpose(1, 2)
        dq, dk, dv = gradients(ctx.saved_tensors, dout, ctx.how, ctx.causal)
        if ctx.how.float8_inputs:
            R = rotation(dq.shape[-1])
            dq, dk = dq @ R.mT, dk @ R.mT
        return *(x.to(BF16).float().transpose(1, 2) for x in (dq, dk, dv)), None, None


def gradient_rows(tokens: int, seeds: int) -> Iterator[tuple[Any, ...]]:
    """Errors of every scheme against float64 on the same numbers of bfloat16, means of draws."""
    for kind, share in (("normal", 0.0), ("outliers", 0.001)):
        for head_dim in (64, 128, 256):
            found: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for seed in range(seeds):
                given = [x.to(BF16) for x in inputs(seed, tokens, tokens, head_dim, share)]
                dout = normal(generator(1000 + seed), *given[0].shape, dtype=BF16)
                leaves = [x.double().requires_grad_() for x in given]
                truth = torch.autograd.grad(flashtile.attention(*leaves), leaves, dout.double())
                for name, how in SCHEMES.items():
                    leaves = [x.float().requires_grad_() for x in given]
                    out = Emulated.apply(*leaves, how, False)
                    got = torch.autograd.grad(out, leaves, dout.float())
                    for which, x, y in zip(("dq", "dk", "dv"), got, truth, strict=True):
                        wrong = x.double() - y
                        rms = (wrong.square().mean() / y.square().mean()).sqrt().item()
                        worst = (wrong.abs().max() / y.abs().max()).item()
                        found.setdefault((name, which), []).append((rms, worst))
            for (name, which), errors in found.items():
                rms, worst = (statistics.mean(x) for x in zip(*errors, strict=True))
                print(f"{kind:9s}{head_dim:4d} {name:44s}{which} {rms:.2e} {worst:.2e}", flush=True)
                yield kind, head_dim, name, which, f"{rms:.4g}", f"{worst:.4g}", tokens, seeds


def training_rows(text: Path | None, steps: int, seeds: int) -> Iterator[tuple[Any, ...]]:
    """The loss of every step, by attention; every 50 steps that of held-out text too."""
    plays = sorted(find_play(text).parent.glob("*_gut.txt"))
    stream = torch.tensor(list(b"".join(x.read_bytes() for x in plays)))
    cut = len(stream) * 19 // 20
    for seed, name in itertools.product(range(seeds), TRAINED):
        torch.manual_seed(seed)
        model, g = small_gpt(name), generator(seed)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        for step in range(1, steps + 1):
            progress = max(step - 25, 0) / (steps - 25)
            rate = 2e-3 * min(step / 25, 0.55 + 0.45 * math.cos(math.pi * progress))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = loss_of(model, stream[:cut], g, 4)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            held_out = ""
            if step % 50 == 0 or step == steps:
                with torch.no_grad():
                    held_out = f"{loss_of(model, stream[cut:], generator(1), 32).item():.5f}"
                print(f"{seed}  {name:44s}{step:5d}  held out {held_out}", flush=True)
            yield name, seed, step, f"{loss.item():.5f}", held_out


def small_gpt(name: str) -> GPTLMHeadModel:
    """A Llama of 0.9 million parameters, two heads of 64 features, in float32."""
    how = SCHEMES.get(name)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if how is not None:
            return Emulated.apply(q, k, v, how, True)
        if name == "attention_fp8":
            q, k, v = (x.to(BF16) for x in (q, k, v))
            out = attention_fp8(q, k, v, causal=True)
            assert isinstance(out, Tensor)
            return out.float()
        return flashtile.attention(q, k, v, causal=True)

    sizes = {"vocab_size": 256, "hidden_size": 128, "num_layers": 4, "num_heads": 2}
    return GPTLMHeadModel(GPTConfig.llama(**sizes, tie_word_embeddings=True), attend=attend)


def loss_of(model: GPTLMHeadModel, text: Tensor, g: torch.Generator, windows: int) -> Tensor:
    """The loss in nats a byte on windows of 256 bytes, drawn at random."""
    starts = torch.randint(len(text) - 257, (windows, 1), generator=g)
    tokens = text[starts + torch.arange(257)]
    return model(tokens[:, :-1], targets=tokens[:, 1:].contiguous()).loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what",
        choices=("gradients", "training"),
        help="the error of the gradients, or the loss of a small GPT that is trained with them",
    )
    integer(parser, "--seq-len", 1024, "gradients: length of queries and keys, in tokens")
    integer(parser, "--seeds", 4, "random inputs, or models to train")
    integer(parser, "--steps", 200, "training: steps of each model")
    parser.add_argument("--data", type=Path, help="folder of the plays (default: .data)")
    parser.add_argument("--csv", type=Path, help="CSV file to write (default: none)")
    chosen = parser.parse_args()
    if chosen.what == "gradients":
        names = ["inputs", "head_dim", "scheme", "gradient", "rmse", "largest", "tokens", "seeds"]
        rows = gradient_rows(chosen.seq_len, chosen.seeds)
    else:
        names = ["scheme", "seed", "step", "loss", "held_out"]
        rows = training_rows(chosen.data, chosen.steps, chosen.seeds)
    with open(chosen.csv or os.devnull, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*names, "date", "torch"))
        for row in rows:
            writer.writerow((*row, date.today().isoformat(), torch.__version__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
