"""Tokens per second of requests, with transformers' own loop and with flashtile's cache.

    python -m benchmarks.serving                        # SmolLM2-135M's shape, 1 and 8 requests
    python -m benchmarks.serving --csv serving.csv

The model has the shape of SmolLM2-135M and random weights, which take as long as trained ones and
need no download. Every loop picks the likeliest token and generates as many tokens as asked. The
loops are: `generate` of transformers with PyTorch's attention (sdpa) and with flashtile's, with a
dynamic and a static cache, for one request and for several left-padded ones; and, for one request,
the server of `examples/demo/serve.py`, which appends, rotates and attends in one call, eagerly and,
on a GPU, as a CUDA graph. No loop compiles the model, so that a small model shows the time of the
host. The loops take turns, and medians are reported.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from examples.demo.serve import Request, Server
from flashtile.cli import integer
from flashtile.cli.timing import Timing, cpu_timer, interleave
from flashtile.integrations.transformers import register

from .command import Command
from .measure import default_device

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
SUBJECT = {"loop": 24, "requests": 8, "cache": 8}  # as `Case` has them
FOUND = {"tokens_per_second": 17, "ratio": 6, "same_tokens": 11}
COLUMNS = {**SUBJECT, **FOUND, "prompt": 6, "tokens": 6, "layers": 6, "rounds": 6}


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


class Case(NamedTuple):
    """What is timed; ratios are to the first loop with as many requests and the same cache."""

    loop: str
    requests: int
    cache: str


def prompts_of(length: int, requests: int) -> list[list[int]]:
    """Random prompts: the first one has `length` tokens, the last one little more than half."""
    lengths = [length - i * length // (2 * requests) for i in range(requests)]
    return [torch.randint(1, SMOLLM2["vocab_size"], (n,)).tolist() for n in lengths]


def generated(
    model: Any, attention: str, prompts: list[list[int]], tokens: int, cache: str
) -> list[int]:
    """The tokens that `generate` adds to left-padded prompts, one prompt after the other."""
    model.set_attn_implementation(attention)
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    masks = [[0] * pad + [1] * (longest - pad) for pad in pads]
    made = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(masks, device=model.device),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        cache_implementation=cache,
        disable_compile=True,
    )
    return made[:, longest:].flatten().tolist()


def served(server: Server, prompt: list[int], tokens: int) -> list[int]:
    """The tokens that a server adds to a prompt."""
    request = Request(prompt, tokens)
    server.run([request])
    return request.made


def loops(
    model: Any, length: int, tokens: int, requests: Sequence[int]
) -> dict[Case, Callable[[], list[int]]]:
    """What is timed: functions that return the new tokens."""
    found: dict[Case, Callable[[], list[int]]] = {}
    for count in requests:
        prompts = prompts_of(length, count)
        for cache in ("dynamic", "static"):
            for attention in ("sdpa", "flashtile"):
                case = Case(f"transformers, {attention}", count, cache)
                found[case] = partial(generated, model, attention, prompts, tokens, cache)
        if count == 1:
            servers: dict[str, Server] = {"server, eager": EagerServer(model, 1, length + tokens)}
            if model.device.type == "cuda":
                servers["server, CUDA graph"] = Server(model, 1, length + tokens)
            for name, server in servers.items():
                found[Case(name, 1, "dynamic")] = partial(served, server, prompts[0], tokens)
    return found


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """A line for each loop."""
    register()
    timed = loops(model_of(args.layers, args.device), args.prompt, args.tokens, args.requests)
    made = {case: loop() for case, loop in timed.items()}  # compiles kernels
    samples = interleave(timed, cpu_timer, budget_ms=0, min_rounds=args.rounds)
    medians = {case: Timing.of(found).median_ms for case, found in samples.items()}
    for case, ms in medians.items():
        base = case._replace(loop="transformers, sdpa")
        speed = case.requests * args.tokens / ms * 1e3
        same = sum(a == b for a, b in zip(made[case], made[base], strict=True))
        size = args.prompt, args.tokens, args.layers, args.rounds
        yield *case, f"{speed:.4g}", f"{medians[base] / ms:.4g}", same, *size


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("serving", __doc__, device=default_device())
    integer(command, "--prompt", 128, "tokens of the longest prompt")
    integer(command, "--tokens", 128, "tokens to generate")
    integer(command, "--layers", 30, "layers of the model")
    integer(command, "--rounds", 5, "how often each loop runs")
    integer(command, "--requests", (1, 8), "how many requests are answered together")
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
