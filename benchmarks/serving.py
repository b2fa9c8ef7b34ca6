"""Tokens per second of one request, with transformers' own loop and with flashtile's cache.

    python -m benchmarks.serving                        # SmolLM2-135M's shape, batch 1
    python -m benchmarks.serving --csv serving.csv

The model has the shape of SmolLM2-135M and random weights, which take as long as trained ones and
need no download. Every loop picks the likeliest token and generates as many tokens as asked. The
loops are: `generate` of transformers with PyTorch's attention (sdpa) and with flashtile's, and the
server of `examples/demo/serve.py`, which appends, rotates and attends in one call, eagerly and, on
a GPU, as a CUDA graph. The loops take turns, and medians are reported.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.demo.serve import Request, Server, plain
from flashtile.cli.machine import provenance
from flashtile.integrations.transformers import register

# LlamaConfig of SmolLM2-135M.
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


class EagerServer(Server):
    """A server that launches every step anew."""

    def capture(self) -> None:
        """Record nothing."""


def model_of(layers: int, device: str) -> Any:
    """A `LlamaForCausalLM` of SmolLM2's shape with `layers` layers and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SMOLLM2 | {"num_hidden_layers": layers}))).eval()
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    frequencies = model.model.rotary_emb.inv_freq
    model = model.to(device=device, dtype=dtype)
    model.model.rotary_emb.inv_freq = frequencies.to(device)  # 16 bits would change the angles
    return model


def loops(model: Any, prompt: list[int], tokens: int) -> dict[str, Callable[[], list[int]]]:
    """What is timed: functions that return the new tokens."""
    longest = len(prompt) + tokens

    def with_attention(name: str) -> list[int]:
        model.set_attn_implementation(name)
        request = Request(prompt, tokens)
        plain(model, [request], 1)
        return request.made

    def served(server: Server) -> list[int]:
        request = Request(prompt, tokens)
        server.run([request])
        return request.made

    eager = EagerServer(model, 1, longest)
    found: dict[str, Callable[[], list[int]]] = {
        "transformers, sdpa": lambda: with_attention("sdpa"),
        "transformers, flashtile": lambda: with_attention("flashtile"),
        "server, eager": lambda: served(eager),
    }
    if model.device.type == "cuda":
        captured = Server(model, 1, longest)
        found["server, CUDA graph"] = lambda: served(captured)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for name, default, meaning in (
        ("--prompt", 128, "tokens of the prompt"),
        ("--tokens", 128, "tokens to generate"),
        ("--layers", 30, "layers of the model"),
        ("--rounds", 5, "how often each loop runs"),
    ):
        help = f"{meaning} (default: {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=help)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, help="CSV file to write (default: none)")
    args = parser.parse_args(argv)
    register()
    model = model_of(args.layers, args.device)
    prompt = torch.randint(SMOLLM2["vocab_size"], (args.prompt,)).tolist()
    timed = loops(model, prompt, args.tokens)
    made = {name: loop() for name, loop in timed.items()}  # compiles kernels
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(args.rounds):
        for name in random.sample(list(timed), len(timed)):
            start = time.perf_counter()
            timed[name]()
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["transformers, sdpa"])
    rows = []
    for name, found in seconds.items():
        median = statistics.median(found)
        same = sum(a == b for a, b in zip(made[name], made["transformers, sdpa"], strict=True))
        rows.append((name, f"{args.tokens / median:.4g}", f"{base / median:.4g}", same))
        print(
            f"{name:24} {args.tokens / median:8.1f} tokens/s  {base / median:5.2f} x  "
            f"{same} of {args.tokens} tokens as with sdpa"
        )
    if args.csv:
        columns = ("loop", "tokens_per_second", "ratio", "same_tokens")
        here = provenance(args.device, " ".join(["python -m benchmarks.serving", *argv]))
        size = {name: getattr(args, name) for name in ("prompt", "tokens", "layers", "rounds")}
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*columns, *size, *here))
            writer.writerows((*row, *size.values(), *here.values()) for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
