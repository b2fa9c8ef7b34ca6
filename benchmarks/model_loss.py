"""What a language model loses when attention, or its cache of keys and values, has fewer bits.

    python -m benchmarks.model_loss --csv fp8-model-loss.csv
    python -m benchmarks.model_loss --caches --windows 2 --csv cache-formats-model.csv

SmolLM2-135M reads windows of Shakespeare's Hamlet; `make demo` fetches both. On the CPU, with the
roundings of a GPU's float8 units emulated; weights and everything except attention in float32. A
cache gets its tokens in chunks, each by the call that attends to it, as in a chunked prefill.
Compared with attention in bfloat16: the perplexity, the divergence of the probabilities of all next
tokens (Kullback-Leibler, in nats per token), and how often the likeliest one is the same.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

import flashtile
from examples.demo.inputs import cut, find_model, find_play, load
from examples.demo.serve import CHUNK
from flashtile import CacheFormat, cache_formats
from flashtile.cli import integer
from flashtile.quantize import rotation

from .command import Command

Attend = Callable[..., Any]
Format = CacheFormat | tuple[CacheFormat, CacheFormat] | None
HEAD_DIM = 64  # of SmolLM2-135M
SIZES = {"scheme": 36, "bits": 6, "tokens": 6, "window": 6}
COLUMNS = {**SIZES, "loss": 10, "perplexity": 10, "divergence": 10, "agreement": 10}


def in_16_bits(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Attention in bfloat16."""
    return flashtile.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options)


def in_8_bits(**how: Any) -> Attend:
    """Attention in float8 of inputs rounded to bfloat16."""
    return lambda q, k, v, **options: flashtile.attention_fp8(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), **options, **how
    )


def cached(cache_format: Format, dtype: torch.dtype = torch.uint8) -> Attend:
    """Attention in bfloat16 over a cache, to which each call appends a chunk of tokens."""
    pair = cache_format if isinstance(cache_format, tuple) else (cache_format, cache_format)
    sizes = [HEAD_DIM if x is None else x.bytes_per_row for x in pair]

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        k_cache, v_cache = (k.new_zeros(*k.shape[:-1], size, dtype=dtype) for size in sizes)
        chunks = zip(*(x.bfloat16().split(CHUNK, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat(
            [
                flashtile.attention_with_kvcache(
                    q, k_cache, v_cache, k, v,
                    cache_seqlens=CHUNK * i, cache_format=cache_format, **options,
                )
                for i, (q, k, v) in enumerate(chunks)
            ],
            dim=1,
        )  # fmt: skip

    return attend


def centred(attend: Attend) -> Attend:
    """With keys less their mean over the first chunk, which changes no weight."""
    return lambda q, k, v, **options: attend(
        q, k - k[:, :CHUNK].mean(1, keepdim=True), v, **options
    )


def rotated(attend: Attend) -> Attend:
    """With queries and keys times the same rotation, which changes no score."""
    matrix = rotation(HEAD_DIM)
    return lambda q, k, v, **options: attend(q @ matrix, k @ matrix, v, **options)


# Bits of a number, scales included and padding not; and how to attend.
FLOAT8: dict[str, tuple[float, Attend]] = {
    "bfloat16": (16, in_16_bits),
    "float32": (32, flashtile.attention),
    "float8, one scale a tensor": (8, in_8_bits(scales="tensor", hadamard=False)),
    "float8, Q and K rotated": (8, in_8_bits()),
    "float8, K smoothed": (8, in_8_bits(hadamard=False, smooth_k=True)),
    "float8, Q and K rotated, K smoothed": (8, in_8_bits(smooth_k=True)),
}
INT8, INT4 = cache_formats.int8(HEAD_DIM), cache_formats.int4(HEAD_DIM)
NVFP4 = cache_formats.nvfp4(HEAD_DIM)
CACHES: dict[str, tuple[float, Attend]] = {
    "bfloat16": (16, cached(None, torch.bfloat16)),
    "int8, a scale for a token": (8.25, cached(INT8)),
    "int8, a scale for 32 elements": (8.5, cached(cache_formats.int8(HEAD_DIM, 32))),
    "e4m3": (8, cached(None, torch.float8_e4m3fn)),
    "e5m2": (8, cached(cache_formats.e5m2(HEAD_DIM))),
    "int8 keys, int4 values": (6.375, cached((INT8, INT4))),
    "int4 keys, int8 values": (6.375, cached((INT4, INT8))),
    "nvfp4": (4.5, cached(NVFP4)),
    "nvfp4, K centred": (4.5, centred(cached(NVFP4))),
    "int4, a scale for 32 elements": (4.5, cached(INT4)),
    "int4, K centred": (4.5, centred(cached(INT4))),
    "int4, Q and K rotated": (4.5, rotated(cached(INT4))),
    "int4, K centred, Q and K rotated": (4.5, centred(rotated(cached(INT4)))),
    "int4, a scale for a token": (4.25, cached(cache_formats.int4(HEAD_DIM, None))),
}


def attention_of(scheme: Attend) -> Attend:
    """A scheme as an attention function of transformers."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scheme(q, k, v, causal=True, softmax_scale=scaling).float(), None

    return attend


@torch.no_grad()
def log_probs(model: Any, tokens: Tensor, scheme: Attend) -> Tensor:
    """Of all words after each token but the last: (tokens - 1, words)."""
    AttentionInterface.register("scheme", attention_of(scheme))
    model.set_attn_implementation("scheme")
    return model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)


def compared(found: Tensor, bfloat16: Tensor, tokens: Tensor) -> Tensor:
    """(3,) float64: mean loss, mean divergence, and share of the same likeliest words."""
    loss = -found.gather(1, tokens[1:, None]).mean()
    divergence = sum(
        (base.exp() * (base - x)).sum(-1).double().sum()
        for base, x in zip(bfloat16.split(256), found.split(256), strict=True)
    )
    same = (found.argmax(-1) == bfloat16.argmax(-1)).double().mean()
    return torch.stack([loss.double(), divergence / len(found), same])


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """A line for each scheme: the means over the windows, whose own numbers are printed before."""
    model, tokenizer = load(find_model(args.model), args.device)
    play = find_play(args.data).read_text(encoding="utf-8", errors="replace")
    passage = cut(play, tokenizer, args.windows * args.tokens, args.device).passage[0]
    schemes = CACHES if args.caches else FLOAT8
    found: dict[str, list[Tensor]] = {name: [] for name in schemes}
    for window, tokens in enumerate(passage.split(args.tokens), start=1):
        bfloat16 = None
        for name, (_, scheme) in schemes.items():
            words = log_probs(model, tokens, scheme)
            bfloat16 = words if bfloat16 is None else bfloat16
            found[name].append(compared(words, bfloat16, tokens))
            loss, divergence, same = found[name][-1].tolist()
            print(f"{window}: {name:36} {loss:.4f} {divergence:.5f} {same:.4f}", flush=True)
    for name, (bits, _) in schemes.items():
        loss, divergence, same = torch.stack(found[name]).mean(0).tolist()
        numbers = (f"{x:.5g}" for x in (loss, math.exp(loss), divergence, same))
        yield name, bits, len(passage), args.tokens, *numbers


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the means."""
    command = Command("model_loss", __doc__, device=None)
    command.add_argument("--model", type=Path, help="a GGUF file (default: what make demo fetched)")
    command.add_argument("--data", type=Path, help="folder of the plays (default: .data)")
    command.add_argument(
        "--caches", action="store_true", help="formats of the cache (default: float8 attention)"
    )
    integer(command, "--windows", 1, "texts")
    integer(command, "--tokens", 2048, "tokens of a text")
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
