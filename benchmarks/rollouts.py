"""A training step over many answers to one prompt: as a tree (`flashtile.fold`), and separately.

    python -m benchmarks.rollouts                                  # on a GPU
    python -m benchmarks.rollouts --answers 8 64 --csv rollouts.csv

Forward and backward of a Llama without its head, with random weights in bfloat16, by transformers
with flashtile. All sequences of a batch have the same length, so nothing is padding. The calls of a
line take turns in random order; a number is the median time of the step.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from flashtile import fold
from flashtile.cli.machine import provenance
from flashtile.cli.timing import Timing, interleave, timer_for
from flashtile.integrations.transformers import register

SIZES = ("answers", "prompt", "answer", "tokens_separately", "tokens_as_tree")
COLUMNS = (*SIZES, "separately_ms", "as_tree_ms", "speedup")


def measure(model: LlamaModel, answers: int, prompt: int, answer: int, budget_ms: float) -> dict:
    """The medians of a step with this many answers."""
    device = next(model.parameters()).device
    size = model.config.vocab_size
    shared = torch.randint(size, (1, prompt)).expand(answers, -1)
    texts = torch.cat((shared, torch.randint(size, (answers, answer))), dim=1).to(device)
    folded = fold(list(texts))

    def step(**inputs: Any) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            model(use_cache=False, **inputs).last_hidden_state.sum().backward()

        return run

    row = {"input_ids": folded.tokens[None], "position_ids": folded.positions[None]}
    steps = {"separately": step(input_ids=texts), "tree": step(**row, rollouts=folded)}
    samples = interleave(steps, timer_for(device.type), budget_ms=budget_ms)
    separately, tree = (Timing.of(samples[name]).median_ms for name in steps)
    values = answers, prompt, answer, texts.numel(), len(folded.tokens)
    times = f"{separately:.2f}", f"{tree:.2f}", f"{separately / tree:.2f}"
    return dict(zip(COLUMNS, (*values, *times), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--answers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget", type=float, default=3000, help="milliseconds for a line")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="CSV file to write (default: none)")
    args = parser.parse_args(argv)
    heads = max(args.hidden // 64, 4)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
    )
    model = LlamaModel(config).to(args.device, torch.bfloat16).train()
    model.set_attn_implementation(register())
    print(("{:>18} " * len(COLUMNS)).format(*COLUMNS))
    lines = []
    for answers in args.answers:
        line = measure(model, answers, args.prompt, args.answer, args.budget)
        print(("{:>18} " * len(COLUMNS)).format(*line.values()), flush=True)
        lines.append(line)
    if args.csv:
        here = provenance(args.device, " ".join(["python -m benchmarks.rollouts", *argv]))
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, (*COLUMNS, *here), lineterminator="\n")
            writer.writeheader()
            writer.writerows({**line, **here} for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
