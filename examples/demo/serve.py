"""Serve many requests at once from one paged cache: continuous batching, in a small file.

    python -m examples.demo.serve --quick

Every slot of a fixed batch holds one request. All slots take a step together: one token each, whose
key and value are rotated and written into pages by the same call that attends to them. A request
that ends returns its pages, and the next one takes its slot while the others continue. On a GPU the
step is captured once as a CUDA graph and replayed: lengths and page tables are tensors that are
never read on the host.

The model is SmolLM2-135M as `make demo` fetches it, with the weights and layers of transformers;
it is compared with a plain loop: `generate` over padded batches of as many requests. Both
pick the likeliest token, so the text should be the same.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile import attention_with_kvcache

from .inputs import MissingInputError, find_model, find_play, load

PAGE_SIZE = 16
CHUNK = 512  # tokens of a prompt that one call takes in


@dataclass
class Request:
    """A prompt and the model's answer."""

    prompt: list[int]
    new_tokens: int  # at most
    made: list[int] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens, prompt and answer together, at most."""
        return len(self.prompt) + self.new_tokens

    def has_ended(self, end: int | None) -> bool:
        """Whether the answer is as long as it may be, or ends with the token `end`."""
        return len(self.made) >= self.new_tokens or self.made[-1] == end


class Pages:
    """Which pages of the cache are free."""

    def __init__(self, first: int, count: int):
        self.count = count
        self.free = deque(range(first, first + count))

    def take(self, tokens: int) -> list[int] | None:
        """Pages for `tokens` tokens, or None while there are not enough."""
        count = -(-tokens // PAGE_SIZE)
        if count > len(self.free):
            return None
        return [self.free.popleft() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Take back the pages of a request that has ended."""
        self.free.extend(pages)


class Layer:
    """A layer of the model. Weights that multiply the same tokens are one matrix, and a norm is one
    operation: the step of a few requests takes as long as its operations take to launch.
    """

    def __init__(self, layer: Any):
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        attention, mlp = self.attention, self.mlp
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_and_up = joined(mlp.gate_proj, mlp.up_proj)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of the tokens `x` (batch, seq, width)."""
        attention, (batch, seq, _) = self.attention, x.shape
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        counts = [y.out_features // attention.head_dim for y in projections]
        found = F.linear(normed(self.norms[0], x), *self.qkv)
        return found.view(batch, seq, -1, attention.head_dim).split(counts, dim=2)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output for its tokens `x`, which have `attended` to values."""
        x = x + self.attention.o_proj(attended.flatten(2))
        gate, up = F.linear(normed(self.norms[1], x), *self.gate_and_up).chunk(2, dim=-1)
        return x + self.mlp.down_proj(self.mlp.act_fn(gate) * up)


def joined(*layers: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several layers as one; their own weights become parts of it."""
    weight = torch.cat([x.weight.detach() for x in layers])
    for x, part in zip(layers, weight.split([x.out_features for x in layers]), strict=True):
        x.weight.data = part
    if layers[0].bias is None:
        return weight, None
    return weight, torch.cat([x.bias.detach() for x in layers])


def normed(norm: Any, x: Tensor) -> Tensor:
    """RMSNorm of the last dimension."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


class Server:
    """A Llama model of transformers over a paged cache, `slots` requests at a time.

    Args:
        model: `LlamaForCausalLM`.
        longest: tokens that one request may have, prompt and answer together.
        pages: pages for requests; by default enough for every slot at its longest.
    """

    def __init__(self, model: Any, slots: int, longest: int, pages: int | None = None):
        self.model, config, device = model, model.config, model.device
        self.layers = [Layer(layer) for layer in model.model.layers]
        columns = -(-longest // PAGE_SIZE)
        pages = pages or slots * columns
        head_dim = model.model.layers[0].self_attn.head_dim
        # A slot without a request writes to a page of its own, the one with the slot's number.
        shape = (
            config.num_hidden_layers,
            slots + pages,
            PAGE_SIZE,
            config.num_key_value_heads,
            head_dim,
        )
        # Zeros: unwritten parts of a page are masked, but must not be NaN.
        self.k_cache = torch.zeros(shape, dtype=model.dtype, device=device)
        self.v_cache = torch.zeros_like(self.k_cache)
        rotary = model.model.rotary_emb
        angles = torch.outer(torch.arange(longest, device=device), rotary.inv_freq.float())
        self.cos = (angles.cos() * rotary.attention_scaling).to(model.dtype)
        self.sin = (angles.sin() * rotary.attention_scaling).to(model.dtype)
        # A step reads and writes these in place: the next token and the length of every slot.
        self.tokens = torch.zeros(slots, 1, dtype=torch.long, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self.is_live = torch.zeros(slots, dtype=torch.int32, device=device)
        own = torch.arange(slots, dtype=torch.int32, device=device)
        self.page_table = own[:, None].repeat(1, columns)
        self.free_pages = Pages(slots, pages)
        self.slots: list[tuple[Request, list[int]] | None] = [None] * slots
        self.graph: torch.cuda.CUDAGraph | None = None

    def forward(self, tokens: Tensor, lengths: Tensor, page_table: Tensor) -> Tensor:
        """The likeliest next token after `tokens` (batch, seq), which are appended to the `lengths`
        tokens of each sequence: (batch, 1)."""
        x = self.model.model.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            q, k, v = layer.heads(x)
            attended = attention_with_kvcache(
                q,
                self.k_cache[i],
                self.v_cache[i],
                k,
                v,
                rotary_cos=self.cos,
                rotary_sin=self.sin,
                rotary_interleaved=False,
                cache_seqlens=lengths,
                page_table=page_table,
                softmax_scale=layer.attention.scaling,
                causal=True,
            )
            x = layer.after(x, attended)
        logits = self.model.lm_head(normed(self.model.model.norm, x[:, -1:]))
        return logits.argmax(-1)

    def step(self) -> None:
        """One token for every slot."""
        self.tokens.copy_(self.forward(self.tokens, self.lengths, self.page_table))
        self.lengths.add_(self.is_live)

    def capture(self) -> None:
        """Record a step while no slot has a request, so that its writes do not matter."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.graph = graph

    def admit(self, request: Request, slot: int) -> bool:
        """Read the prompt into new pages; False while there are not enough."""
        pages = self.free_pages.take(request.longest)
        if pages is None:
            return False
        row = self.page_table[slot : slot + 1]
        row.fill_(slot)
        row[0, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        prompt = torch.tensor([request.prompt], device=self.tokens.device)
        length = torch.zeros(1, dtype=torch.int32, device=prompt.device)
        for part in prompt.split(CHUNK, dim=1):
            token = self.forward(part, length, row)
            length += part.shape[1]
        self.tokens[slot], self.lengths[slot], self.is_live[slot] = token[0], length[0], 1
        self.slots[slot] = (request, pages)
        request.made.append(int(token))
        return True

    def dismiss(self, slot: int) -> None:
        """Free a slot whose request has ended."""
        busy = self.slots[slot]
        assert busy is not None, f"slot {slot} has no request"
        self.free_pages.give_back(busy[1])
        self.page_table[slot] = slot
        self.lengths[slot] = self.is_live[slot] = 0
        self.slots[slot] = None

    @torch.inference_mode()
    def run(self, requests: list[Request], end: int | None = None) -> None:
        """Answer all requests; `end` is the token that ends an answer early.

        Raises:
            ValueError: a request could have more tokens than its slot, or the whole cache, holds.
        """
        longest = min(len(self.cos), self.free_pages.count * PAGE_SIZE)
        if any(request.longest > longest for request in requests):
            raise ValueError(f"a request may become longer than {longest} tokens")
        waiting = deque(requests)
        if self.tokens.is_cuda and self.graph is None:
            self.capture()
        take_step = self.step if self.graph is None else self.graph.replay
        while waiting or any(self.slots):
            for slot, busy in enumerate(self.slots):
                if busy and busy[0].has_ended(end):
                    self.dismiss(slot)
                while self.slots[slot] is None and waiting and self.admit(waiting[0], slot):
                    if waiting.popleft().has_ended(end):
                        self.dismiss(slot)
            if any(self.slots):
                take_step()
                for busy, token in zip(self.slots, self.tokens[:, 0].tolist(), strict=True):
                    if busy:
                        busy[0].made.append(token)


@torch.inference_mode()
def plain(model: Any, requests: list[Request], batch: int, end: int | None = None) -> None:
    """The same answers with transformers' own loop, `batch` padded prompts at a time."""
    for start in range(0, len(requests), batch):
        group = requests[start : start + batch]
        longest = max(len(request.prompt) for request in group)
        rows = [[0] * (longest - len(r.prompt)) + r.prompt for r in group]
        masks = [[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in group]
        ids = model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(masks, device=model.device),
            max_new_tokens=max(request.new_tokens for request in group),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=end,
        )
        for request, row in zip(group, ids[:, longest:].tolist(), strict=True):
            made = row[: request.new_tokens]
            request.made = made[: made.index(end) + 1] if end in made else made


def requests_from(text: str, tokenizer: Any, count: int, new_tokens: int) -> list[Request]:
    """Requests with speeches of a play as prompts; the lengths of the answers differ."""
    speeches = [part for part in text.split("\n\n") if len(part) > 200][:count]
    return [
        Request(tokenizer(speech).input_ids, new_tokens // 2 + (17 * i) % (new_tokens // 2 + 1))
        for i, speech in enumerate(speeches)
    ]


def timed(function: Any) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="6 requests, 16 tokens, 3 slots")
    for name, default, meaning in (
        ("--requests", 64, "requests to answer"),
        ("--new-tokens", 128, "tokens of the longest answer; the shortest has half as many"),
        ("--slots", 16, "requests answered at the same time"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)"
        )
    parser.add_argument("--model", type=Path, help="a GGUF file (default: what make demo fetched)")
    parser.add_argument(
        "--data", type=Path, help="a text, or the folder of make demo's plays (default: .data)"
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda (default: a GPU if there is one)",
    )
    args = parser.parse_args()
    if args.quick:
        args.requests, args.new_tokens, args.slots = 6, 16, 3
    return args


def main() -> int:
    """Both loops over the same requests: tokens per second, and whether the text is the same."""
    args = parse()
    try:
        model, tokenizer = load(find_model(args.model), args.device)
        text = find_play(args.data).read_text(encoding="utf-8", errors="replace")
    except MissingInputError as error:
        print(error)
        return 2
    if args.device == "cuda":
        frequencies = model.model.rotary_emb.inv_freq
        model = model.to(torch.bfloat16)
        model.model.rotary_emb.inv_freq = frequencies  # bfloat16 would change the rotation angles
    end = tokenizer.eos_token_id

    def fresh() -> list[Request]:
        return requests_from(text, tokenizer, args.requests, args.new_tokens)

    ours, theirs = fresh(), fresh()
    longest = max(len(request.prompt) + request.new_tokens for request in ours)
    server = Server(model, args.slots, longest)
    server.run(fresh()[:2], end)  # compiles kernels, captures the step
    plain(model, fresh()[:2], 2, end)
    rates = []
    for name, requests, run in (
        ("flashtile", ours, lambda: server.run(ours, end)),
        ("transformers", theirs, lambda: plain(model, theirs, args.slots, end)),
    ):
        seconds = timed(run)
        tokens = sum(len(request.made) for request in requests)
        rates.append(tokens / seconds)
        print(f"{name}: {tokens} tokens in {seconds:.1f} s, {rates[-1]:.1f} tokens per second")
    same = sum(mine.made == other.made for mine, other in zip(ours, theirs, strict=True))
    print(f"{rates[0] / rates[1]:.2f} times as fast; {same} of {len(ours)} answers are the same")
    print("the first goes on:", repr(tokenizer.decode(ours[0].made)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
