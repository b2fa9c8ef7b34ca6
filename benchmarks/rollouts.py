"""A training step over many answers to one prompt: as a tree (`flashtile.fold`), and separately.

    python -m benchmarks.rollouts                                  # on a GPU
    python -m benchmarks.rollouts --answers 8 64 --csv rollouts.csv

Forward and backward of a Llama without its head, with random weights in bfloat16, by transformers
with flashtile. All sequences of a batch have the same length, so nothing is padding. The calls of a
line take turns in random order; a number is the median time of the step.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from flashtile import fold
from flashtile.cli import integer
from flashtile.cli.timing import Timing, interleave, timer_for
from flashtile.integrations.transformers import register

from .command import Command

SIZES = ("answers", "prompt", "answer", "tokens_separately", "tokens_as_tree")
COLUMNS = dict.fromkeys((*SIZES, "separately_ms", "as_tree_ms", "speedup"), 18)


def measure(
    model: LlamaModel, answers: int, prompt: int, answer: int, budget_ms: float
) -> tuple[object, ...]:
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
    times = f"{separately:.2f}", f"{tree:.2f}", f"{separately / tree:.2f}"
    return answers, prompt, answer, texts.numel(), len(folded.tokens), *times


def measure_all(args: Namespace) -> Iterator[tuple[object, ...]]:
    """A line for each number of answers."""
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
    for answers in args.answers:
        yield measure(model, answers, args.prompt, args.answer, args.budget)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("rollouts", __doc__, budget_ms=3000.0)
    integer(command, "--answers", (8, 16, 32, 64), "answers to the prompt")
    integer(command, "--prompt", 2048, "tokens of the prompt")
    integer(command, "--answer", 512, "tokens of each answer")
    integer(command, "--hidden", 2048, "hidden size of the model")
    integer(command, "--layers", 4, "layers of the model")
    return command.run(argv, COLUMNS, measure_all)


if __name__ == "__main__":
    sys.exit(main())
