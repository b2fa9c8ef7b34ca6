"""What the preset measures: shapes that a rank holds a part of."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashtile.testing import generator


class ContextCase(NamedTuple):
    """Causal self-attention over a sequence that all ranks hold together."""

    variant: str  # "dense", "window" or "packed"
    dtype: str
    heads_q: int
    heads_kv: int
    head_dim: int
    tokens: int  # of each rank
    window: int = 0  # keys that a query sees before its own; 0 is all

    @property
    def options(self) -> dict[str, Any]:
        """Those of `flashtile.attention`."""
        return {"causal": True, "window_size": (self.window or -1, -1)}

    def lengths(self, ranks: int) -> list[int]:
        """Of the documents, which together have `tokens` for each rank."""
        whole = self.tokens * ranks
        if self.variant != "packed":
            return [whole]
        # Many short and few long ones, as in corpora of text; at most a quarter of all tokens.
        drawn = torch.randn(1000, generator=generator(ranks)).mul(1.2).add(6.4).exp()
        lengths, left = [], whole
        for length in drawn.clamp(1, whole // 4).int().tolist():
            lengths.append(min(length, left))
            left -= lengths[-1]
            if not left:
                break
        return [*lengths, left] if left else lengths


def cases(device: str) -> list[ContextCase]:
    """Language models' shapes on GPUs, small ones on CPUs."""
    if device == "cpu":
        base = ContextCase("dense", "float32", 8, 2, 64, 1024)
        return [
            base._replace(tokens=512),
            base,
            base._replace(tokens=2048),
            base._replace(heads_kv=8),
            base._replace(tokens=2048, variant="window", window=256),
            base._replace(tokens=2048, variant="packed"),
        ]
    base = ContextCase("dense", "bfloat16", 32, 8, 128, 8192)
    return [
        base,
        base._replace(tokens=16384),
        base._replace(heads_q=64),
        base._replace(heads_q=64, variant="packed"),
        base._replace(tokens=16384, variant="window", window=1024),
        base._replace(heads_q=16, heads_kv=1),
    ]
