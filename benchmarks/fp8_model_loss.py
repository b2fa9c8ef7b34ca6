"""The loss of SmolLM2-135M on Shakespeare's Hamlet when every attention runs in float8, or
over a cache of packed rows.

    python -m benchmarks.fp8_model_loss --csv benchmarks/results/cpu/fp8-model-loss.csv

On the CPU, with the roundings of a GPU's float8 units emulated; weights and everything except
attention in float32. Model and text are those of `make demo`, which fetches them.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

import flashtile
from examples.demo.inputs import cut, find_model, find_play, load
from flashtile import CacheFormat, cache_formats

Attend = Callable[..., Any]


def in_16_bits(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Attention in bfloat16."""
    return flashtile.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options)


def in_8_bits(**how: Any) -> Attend:
    """Attention in float8 of inputs rounded to bfloat16."""
    return lambda q, k, v, **options: flashtile.attention_fp8(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), **options, **how
    )


def in_rows(cache_format: CacheFormat) -> Attend:
    """Attention in bfloat16 over keys and values as a cache of packed rows holds them."""
    return lambda q, k, v, **options: in_16_bits(
        q, *(cache_format.unpacked(cache_format.packed(x.bfloat16())) for x in (k, v)), **options
    )


HEAD_DIM = 64  # of SmolLM2-135M
SCHEMES: dict[str, Attend] = {
    "float32": flashtile.attention,
    "bfloat16": in_16_bits,
    "float8, one scale a tensor": in_8_bits(scales="tensor", hadamard=False),
    "float8, Q and K rotated": in_8_bits(),
    "float8, K smoothed": in_8_bits(hadamard=False, smooth_k=True),
    "float8, Q and K rotated, K smoothed": in_8_bits(smooth_k=True),
    "cache in e5m2": in_rows(cache_formats.e5m2(HEAD_DIM)),
    "cache in int8": in_rows(cache_formats.int8(HEAD_DIM)),
    "cache in int4, a scale for 32 elements": in_rows(cache_formats.int4(HEAD_DIM)),
    "cache in nvfp4": in_rows(cache_formats.nvfp4(HEAD_DIM)),
}


def attention_of(scheme: Attend) -> Attend:
    """A scheme as an attention function of transformers."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scheme(q, k, v, causal=True, softmax_scale=scaling).float(), None

    return attend


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: what make demo fetched)")
    parser.add_argument("--data", type=Path, help="folder of the plays (default: .data)")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens of the text (default: %(default)s)"
    )
    parser.add_argument("--csv", type=Path, help="CSV file to write (default: none)")
    chosen = parser.parse_args()
    model, tokenizer = load(find_model(chosen.model), "cpu")
    play = find_play(chosen.data).read_text(encoding="utf-8", errors="replace")
    tokens = cut(play, tokenizer, chosen.tokens, "cpu").passage
    rows = []
    for name, scheme in SCHEMES.items():
        AttentionInterface.register("scheme", attention_of(scheme))
        model.set_attn_implementation("scheme")
        with torch.no_grad():
            loss = model(tokens, labels=tokens).loss.item()
        rows.append((name, loss))
        change = 100 * (loss / rows[min(1, len(rows) - 1)][1] - 1)
        print(f"{name:36s} loss {loss:.5f}  {change:+.3f} % of bfloat16's", flush=True)
    if chosen.csv is not None:
        with chosen.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("scheme", "loss", "tokens", "device", "date", "torch"))
            how = (chosen.tokens, "cpu", date.today().isoformat(), torch.__version__)
            writer.writerows((name, f"{loss:.6f}", *how) for name, loss in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
