"""SmolLM2, a small one with random weights and the real one where `make demo` has fetched it: its
log-probabilities in packed training have the bits of those of its generation from a paged cache.

Linear layers, norms and activations work row by row, so that attention is all that sees the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashtile
from examples.demo.inputs import MissingInputError, find_model, load
from flashtile.testing import cu_seqlens

transformers = pytest.importorskip("transformers", reason="the package transformers is missing")

pytestmark = pytest.mark.slow
LONGEST = 64


class RowByRow(nn.Module):
    """A layer, applied to each row by itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).split(1)
        return torch.cat([self.layer(row) for row in rows]).unflatten(0, x.shape[:-1])


class Attention(nn.Module):
    """The layer's own projections around a call of `attend`, set for each pass."""

    def __init__(self, layer: Any, config: Any, tables: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.layer, self.tables, self.head_dim = layer, tables, config.head_dim
        self.attend: Any = None

    def forward(self, hidden_states: Tensor, position_ids: Tensor, **other: Any) -> tuple[Any, ...]:
        projections = (self.layer.q_proj, self.layer.k_proj, self.layer.v_proj)
        q, k, v = (p(hidden_states).unflatten(-1, (-1, self.head_dim)) for p in projections)
        cos, sin = (table[position_ids][:, :, None] for table in self.tables)
        half = self.head_dim // 2

        def rotated(x: Tensor) -> Tensor:
            return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

        out = self.attend(rotated(q), rotated(k), v)
        return self.layer.o_proj(out.flatten(-2)), None


class PagedCache:
    """Pages of a layer; sequence b has the row b of the table."""

    def __init__(self, table: Tensor, page_size: int, heads: int, head_dim: int) -> None:
        self.table = table
        self.k, self.v = torch.zeros(2, table.numel(), page_size, heads, head_dim)
        self.lengths = torch.zeros(len(table), dtype=torch.int32)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flashtile.attention_with_kvcache(
            q, self.k, self.v, k, v, cache_seqlens=self.lengths, page_table=self.table, causal=True
        )
        self.lengths = self.lengths + q.shape[1]
        return out


def small() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=96,
        num_hidden_layers=2, vocab_size=67, tie_word_embeddings=True, head_dim=8,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def real() -> Any:
    try:
        return load(find_model(), "cpu")[0]
    except MissingInputError as error:  # only `make demo` installs the model, of 93 MB
        pytest.skip(str(error))


def attentions_of(model: Any) -> list[Attention]:
    """Those that replace the attention of each layer; all else works row by row from here on."""
    positions = torch.arange(LONGEST)[None]
    tables = model.model.rotary_emb(torch.zeros(1), positions)
    attentions = []
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, RowByRow(getattr(layer.self_attn, name)))
        layer.self_attn = Attention(layer.self_attn, model.config, (tables[0][0], tables[1][0]))
        attentions.append(layer.self_attn)
        layer.mlp = RowByRow(layer.mlp)
        layer.input_layernorm = RowByRow(layer.input_layernorm)
        layer.post_attention_layernorm = RowByRow(layer.post_attention_layernorm)
    model.model.norm = RowByRow(model.model.norm)
    model.lm_head = RowByRow(model.lm_head)
    return attentions


log_softmax = RowByRow(nn.LogSoftmax(-1))


def log_probs(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Of all words after each token: (batch, tokens, words)."""
    hidden = model.model.embed_tokens(tokens)
    for layer in model.model.layers:
        hidden = layer(hidden, position_ids=positions)
    return log_softmax(model.lm_head(model.model.norm(hidden)))


@pytest.mark.parametrize(("make", "page_size"), [(small, 3), (small, 16), (real, 3)])
def test_trained_log_probabilities_are_those_of_generation(
    make: Callable[[], Any], page_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = make()
    attentions, config = attentions_of(model), model.config
    cache_shape = config.num_key_value_heads, config.head_dim
    prompts, new = [5, 17, 2], 9  # tokens before each answer, and of the answers
    count = len(prompts)
    pages = -(-LONGEST // page_size)
    table = torch.randperm(count * pages).view(count, pages).int()
    caches = [PagedCache(table, page_size, *cache_shape) for _ in attentions]
    answers: list[Tensor] = []
    served: list[Tensor] = []
    with flashtile.batch_invariant(), torch.no_grad():
        for attention, cache in zip(attentions, caches, strict=True):
            attention.attend = cache.attend
        last = []
        for b, length in enumerate(prompts):  # each prompt in a prefill of its own
            tokens = torch.randint(config.vocab_size, (1, length))
            answers.append(tokens[0])
            for attention, cache in zip(attentions, caches, strict=True):
                alone = PagedCache(table[b : b + 1], page_size, *cache_shape)
                alone.k, alone.v = cache.k, cache.v
                attention.attend = alone.attend
            last.append(log_probs(model, tokens, torch.arange(length)[None])[0, -1])
        for attention, cache in zip(attentions, caches, strict=True):
            cache.lengths = torch.tensor(prompts, dtype=torch.int32)
            attention.attend = cache.attend
        words = torch.stack(last)
        for step in range(new):  # then all answers at once, a token at a time
            token = torch.multinomial(words.exp(), 1)
            served.append(words.gather(1, token)[:, 0])
            answers = [torch.cat((x, t)) for x, t in zip(answers, token, strict=True)]
            positions = torch.tensor(prompts)[:, None] + step
            words = log_probs(model, token, positions)[:, 0]
    lengths = [len(x) - 1 for x in answers]
    starts = cu_seqlens(lengths)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = (q[0], k[0], v[0], starts, starts, max(lengths), max(lengths))
        return flashtile.attention_varlen(*given, causal=True, batch_invariant=True)[None]

    for attention in attentions:
        attention.attend = packed
    tokens = torch.cat([x[:-1] for x in answers])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    words = log_probs(model, tokens, positions)[0]
    targets = torch.cat([x[1:] for x in answers])
    trained = words.gather(1, targets[:, None])[:, 0].split(lengths)
    for b in range(count):
        assert torch.equal(trained[b][-new:], torch.stack(served)[:, b])
    torch.cat(trained).mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
