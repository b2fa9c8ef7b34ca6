"""The checks on a language model: equal numbers with every implementation of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .turns import Advance, best_of_three

LOSS_TOLERANCE = 1e-5
LOGIT_TOLERANCE = 1e-3  # logits reach 30: float32 rounding through 30 layers, with a margin


class Loss(NamedTuple):
    """Loss of one text, by attention implementation."""

    per_token: dict[str, Tensor]  # float64, one for each token but the first
    seconds: dict[str, float]

    @property
    def mean(self) -> dict[str, float]:
        """Nats per token."""
        return {name: losses.mean().item() for name, losses in self.per_token.items()}

    @property
    def difference(self) -> float:
        """Between the largest and the smallest mean."""
        return max(self.mean.values()) - min(self.mean.values())

    @property
    def passed(self) -> bool:
        """Whether all are equal; NaN equals nothing."""
        first, *others = self.mean.values()
        return all(abs(other - first) <= LOSS_TOLERANCE for other in others)


@torch.no_grad()
def loss(model: Any, ids: Tensor, names: Sequence[str], advance: Advance) -> Loss:
    """The loss that `model` has on `ids` (1, tokens), with each attention of `names`."""

    def read(name: str) -> Tensor:
        model.set_attn_implementation(name)
        logits = model(ids, use_cache=False).logits[0, :-1]
        advance()
        return F.cross_entropy(logits.double(), ids[0, 1:], reduction="none").cpu()

    per_token = {name: read(name) for name in names}
    return Loss(per_token, best_of_three(_calls(read, names), str(model.device)))


def _calls(run: Callable[[str], Tensor], names: Iterable[str]) -> dict[str, Callable[[], Tensor]]:
    return {name: partial(run, name) for name in names}


class Continuation(NamedTuple):
    """The continuation of the model, by attention implementation."""

    tokens: dict[str, Tensor]
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether they are equal, token for token."""
        first, *others = self.tokens.values()
        return all(torch.equal(first, other) for other in others)


@torch.no_grad()
def continuation(
    model: Any, ids: Tensor, names: Sequence[str], new_tokens: int, advance: Advance
) -> Continuation:
    """`new_tokens` greedy next tokens after `ids` (1, tokens), through the key-value cache."""

    def count(ids: Tensor, scores: Tensor, **unused: Any) -> Tensor:
        advance()
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)  # do not stop

    def write(name: str) -> Tensor:
        model.set_attn_implementation(name)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=[count],
        )
        return output[0, ids.shape[1] :].cpu()

    tokens = {name: write(name) for name in names}
    return Continuation(tokens, best_of_three(_calls(write, names), str(model.device)))


class Packed(NamedTuple):
    """A batch of sentences, padded for standard attention and packed for flashtile."""

    lengths: list[int]
    differences: dict[str, float]  # largest, over the logits of all real tokens, against eager
    same_choice: bool  # the likeliest next token of every real token
    seconds: dict[str, float]

    @property
    def real(self) -> int:
        """Tokens of the sentences."""
        return sum(self.lengths)

    @property
    def padded(self) -> int:
        """Tokens of the padded batch."""
        return len(self.lengths) * max(self.lengths)

    @property
    def passed(self) -> bool:
        """Whether the logits are equal."""
        return self.same_choice and all(d <= LOGIT_TOLERANCE for d in self.differences.values())


PADDED_EAGER, PADDED, PACKED_ROW = "eager, padded", "flashtile, padded", "flashtile, packed"


@torch.no_grad()
def packed(model: Any, sentences: Sequence[Tensor], name: str, advance: Advance) -> Packed:
    """Three ways through the same `sentences`: eager attention on the padded batch; attention
    `name` on it; and `name` on one row of all sentences, without padding."""
    device = model.device
    lengths = [len(sentence) for sentence in sentences]
    ids = torch.nn.utils.rnn.pad_sequence(list(sentences), batch_first=True).to(device)
    mask = torch.arange(ids.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
    row = torch.cat(list(sentences))[None].to(device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    ways = {
        PADDED_EAGER: ("eager", {"input_ids": ids, "attention_mask": mask.long()}),
        PADDED: (name, {"input_ids": ids, "attention_mask": mask.long()}),
        PACKED_ROW: (name, {"input_ids": row, "position_ids": positions}),
    }

    def run(way: str) -> Tensor:
        implementation, inputs = ways[way]
        model.set_attn_implementation(implementation)
        logits = model(**inputs, use_cache=False).logits
        advance()
        return logits[mask] if way != PACKED_ROW else logits[0]

    results = {way: run(way) for way in ways}
    seconds = best_of_three(_calls(run, ways), str(device))
    reference = results.pop(PADDED_EAGER)
    return Packed(
        lengths=lengths,
        differences={way: (x - reference).abs().max().item() for way, x in results.items()},
        same_choice=all(torch.equal(x.argmax(-1), reference.argmax(-1)) for x in results.values()),
        seconds=seconds,
    )
