"""Train a small GPT on one long document that two processes share, and on one process.

    torchrun --standalone --nproc-per-node 2 examples/distributed/long_document.py

Each process holds half of the document's tokens. Attention fetches the keys that the other one
holds; everything else is local. The losses of both runs are equal up to rounding.
"""

# Annotations are not evaluated, so that the file runs on Python 3.10.
from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from flashtile.distributed import ContextParallel, Layout, shift_labels
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel

TOKENS, STEPS = 1024, 6


def document() -> Tensor:
    """The first bytes of flashtile's own source code, (1, tokens)."""
    files = sorted(Path(__file__).parents[2].glob("flashtile/**/*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.tensor([list(text[:TOKENS])])


def train(tokens: Tensor, labels: Tensor, layout: Layout | None) -> list[float]:
    """The loss of every step, of all processes together, or of this one alone without a layout."""
    if layout is not None:
        tokens, labels = layout.shard(tokens), layout.shard(labels, fill=-100)
    torch.manual_seed(0)  # the same weights in all processes
    config = GPTConfig.gpt2(
        vocab_size=256, hidden_size=64, num_layers=2, num_heads=4, position="rotary"
    )
    model = GPTLMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        with layout or nullcontext():  # attention over all processes
            logits = model(tokens).logits
        # Every process divides by the number of labels of the whole document, so that sums over the
        # processes are the loss and its gradients.
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (TOKENS - 1)
        optimizer.zero_grad()
        loss.backward()
        shared = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        if layout is not None:
            for x in shared:
                dist.all_reduce(x)
        optimizer.step()
        losses.append(shared[0].item())
    return losses


def main() -> None:
    """Train twice and print the losses side by side."""
    dist.init_process_group("gloo")
    tokens = document()
    labels = shift_labels(tokens)  # before sharding: the next token may be in another process
    layout = ContextParallel().layout(seq_len=TOKENS)
    together = train(tokens, labels, layout)
    if dist.get_rank() == 0:
        print(layout)
        alone = train(tokens, labels, None)
        print("step  one process  together")
        for step, (a, b) in enumerate(zip(alone, together, strict=True)):
            print(f"{step:4}  {a:11.6f}  {b:8.6f}")
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=0)
        print("equal up to rounding")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
