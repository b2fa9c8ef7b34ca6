"""The attention calls of published models: their heads, head dims, lengths and masks."""

from __future__ import annotations

from math import log
from random import Random
from typing import Any

from .shapes import Case

SEED = 1  # of the lengths of packed sequences


def calls() -> list[Case]:
    """A case for each call, causal in bfloat16 unless it says otherwise, named after its model."""
    full: dict[str, Any] = {"causal": False}
    return [
        # name, batch, length of queries, query heads, key heads, head dim
        _call("llama3-8b 8k", 2, 8192, 32, 8, 128),
        _call("llama3-8b fp16 4k", 2, 4096, 32, 8, 128, dtype="float16"),
        _call("llama3-70b 8k tp1", 1, 8192, 64, 8, 128),
        _call("qwen3-0.6b 4k", 4, 4096, 16, 8, 128),
        _call("qwen2.5-1.5b 2k", 8, 2048, 12, 2, 128),
        _call("qwen2.5-7b 32k", 1, 32768, 28, 4, 128),
        _call("phi3-mini 4k", 4, 4096, 32, 32, 96),
        _call("tinyllama 2k", 8, 2048, 32, 4, 64),
        _call("smollm2-135m 2k", 16, 2048, 9, 3, 64),
        _call("falcon-7b 2k", 4, 2048, 71, 1, 64),
        _call("gpt2 1k", 16, 1024, 12, 12, 64),
        _call("gpt2 1k dropout", 16, 1024, 12, 12, 64, dropout=0.1),
        _call("gpt2 1k float32", 8, 1024, 12, 12, 64, dtype="float32"),
        _call("bloom-7b alibi 2k", 4, 2048, 32, 32, 128, alibi=True),
        _call("deepseek mla 4k", 1, 4096, 128, 128, 192, head_dim_v=128),
        _call("gemma2-9b softcap 8k", 1, 8192, 16, 8, 256, softcap=50.0),
        _call("gemma3-4b window 8k", 2, 8192, 8, 4, 256, window=(1023, 0)),
        _call("mistral-7b window 16k", 1, 16384, 32, 8, 128, window=(4095, 0)),
        _call("gpt-oss sink full 8k", 1, 8192, 64, 8, 64, sink=True),
        _call("gpt-oss sink window 8k", 1, 8192, 64, 8, 64, sink=True, window=(127, 0)),
        _call("chunked prefill 1k of 16k", 4, 1024, 32, 8, 128, seqlen_k=16384),
        _call("bert-base 512", 64, 512, 12, 12, 64, **full),
        _call("t5 relative bias 512", 32, 512, 12, 12, 64, relative=128, **full),
        _call("whisper-l 1500", 16, 1500, 20, 20, 64, **full),
        _call("vit-l 577", 64, 577, 16, 16, 64, **full),
        _call("siglip so400m 729", 32, 729, 16, 16, 72, **full),
        _call("dinov3 7b 1029", 16, 1029, 32, 32, 128, **full),
        _call("swin windows 49", 4096, 49, 4, 4, 32, **full),
        _call("sdxl cross 77", 16, 4096, 10, 10, 64, seqlen_k=77, **full),
        _call("flux 4608", 4, 4608, 24, 24, 128, **full),
        _call("wan2.1 14b 32760", 1, 32760, 40, 40, 128, **full),
        _packed("packed sft 32k", _lengths(32768, 1024, 1.2), 32, 8, 128),
        _packed("packed proteins esm2", _lengths(32768, 256, 0.6, 30, 1024), 20, 20, 64, **full),
        _packed("packed qwen2-vl windows 64", [64] * 512, 16, 16, 80, **full),
    ]


def _call(
    name: str, batch: int, length: int, heads_q: int, heads_kv: int, head_dim: int, **facts: Any
) -> Case:
    given: dict[str, Any] = {
        "variant": name, "dtype": "bfloat16", "causal": True,
        "batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim,
        "head_dim_v": head_dim, "seqlen_q": length, "seqlen_k": length,
    }  # fmt: skip
    return Case(**given | facts)


def _packed(name: str, lengths: list[int], *heads: int, **facts: Any) -> Case:
    count, tokens = len(lengths), sum(lengths)
    return _call(name, 1, tokens, *heads, documents=count, lengths=tuple(lengths), **facts)


def _lengths(
    tokens: int, median: int, spread: float, least: int = 1, most: int | None = None
) -> list[int]:
    """Log-normal lengths of `tokens` tokens in all; `spread` is the deviation of the logarithm."""
    random, lengths = Random(SEED), list[int]()
    while left := tokens - sum(lengths):
        length = round(random.lognormvariate(log(median), spread))
        lengths.append(min(max(length, least), most or tokens, left))
    return lengths
