# %% [markdown]
# # Serve from a paged KV cache
#
# An inference engine keeps keys and values of many requests in one pool of pages (PagedAttention),
# and computes one token for every request in each step (continuous batching). A request that ends
# returns its pages, and the next one takes its slot while the others continue.
#
# `attention_with_kvcache` does three things in one call: it rotates the new queries and keys
# (RoPE), writes the new keys and values into the pages, and attends to them. This example serves
# five requests in two slots, and checks every logit against plain PyTorch without a cache.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from flashtile import attention_with_kvcache
from flashtile.testing import assert_close

torch.manual_seed(0)
VOCABULARY, HEADS, KV_HEADS, DIM = 50, 4, 2, 32
PAGE_SIZE, PAGES, SLOTS, COLUMNS = 8, 13, 2, 6  # COLUMNS: the most pages that one request may have

# %% [markdown]
# One layer is enough here: token embeddings, attention, logits.


# %%
class Model(nn.Module):
    """A decoder with one layer; `attend` gets q, k and v."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HEADS * DIM)
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM)
        self.logits = nn.Linear(HEADS * DIM, VOCABULARY)

    def forward(self, tokens, attend):
        x = self.tokens(tokens)
        qkv = self.qkv(x).unflatten(-1, (-1, DIM))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
        return self.logits(x + attend(q, k, v).flatten(-2))


model = Model().requires_grad_(False)
positions = torch.arange(PAGE_SIZE * COLUMNS)
angles = torch.outer(positions, 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM))
cos, sin = angles.cos(), angles.sin()

# %% [markdown]
# This is the pool, and for each slot the list of its pages. Page 0 is a dummy: slots without a
# request write to it.

# %%
k_pages = torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, DIM)
v_pages = torch.zeros_like(k_pages)
page_table = torch.zeros(SLOTS, COLUMNS, dtype=torch.int32)
lengths = torch.zeros(SLOTS, dtype=torch.int32)
free_pages = list(range(1, PAGES))


def step(tokens, rows):
    """Logits for (rows, new tokens): the new tokens are appended to the cache of their slots."""

    def attend(q, k, v):
        return attention_with_kvcache(
            q,
            k_pages,
            v_pages,
            k,
            v,
            rotary_cos=cos,
            rotary_sin=sin,
            rotary_interleaved=False,
            cache_seqlens=lengths[rows],
            page_table=page_table[rows],
            causal=True,
        )

    logits = model(tokens, attend)
    lengths[rows] += tokens.shape[1]
    return logits


# %% [markdown]
# The server admits requests while there are slots and pages, runs a step for all of them, and
# removes those that are finished.

# %%
sizes = [(5, 9), (17, 4), (30, 12), (1, 6), (11, 11)]  # tokens of the prompt, and of the answer
waiting = [(torch.randint(VOCABULARY, (prompt,)).tolist(), answer) for prompt, answer in sizes]
served = []  # (tokens, length of the prompt, logits) of finished requests
running = {}  # slot -> (tokens, length of the prompt, length at the end, logits)

while waiting or running:
    for slot in set(range(SLOTS)) - set(running):
        if not waiting:
            break
        prompt, new = waiting[0]
        needed = -(-(len(prompt) + new) // PAGE_SIZE)
        if needed > len(free_pages):
            break
        waiting.pop(0)
        page_table[slot, :needed] = torch.tensor([free_pages.pop() for _ in range(needed)])
        logits = step(torch.tensor([prompt]), torch.tensor([slot]))[0, -1]
        running[slot] = ([*prompt, int(logits.argmax())], len(prompt), len(prompt) + new, [logits])
        print(f"slot {slot}: request of {len(prompt)} tokens in {needed} pages")

    newest = torch.zeros(SLOTS, 1, dtype=torch.long)
    for slot, (tokens, *_) in running.items():
        newest[slot] = tokens[-1]
    for slot, logits in enumerate(step(newest, torch.arange(SLOTS))[:, -1]):
        if slot not in running:
            lengths[slot] = 0
            continue
        tokens, prompt_length, end, all_logits = running[slot]
        tokens.append(int(logits.argmax()))
        all_logits.append(logits)
        if len(tokens) == end:
            served.append((tokens, prompt_length, all_logits))
            free_pages += page_table[slot][page_table[slot] > 0].tolist()
            page_table[slot], lengths[slot] = 0, 0
            del running[slot]

assert sorted(free_pages) == list(range(1, PAGES))

# %% [markdown]
# The check runs each finished text through plain PyTorch at once, with a causal mask and no cache.


# %%
def plain_attend(q, k, v):
    """Rotate, then PyTorch's attention."""

    def rotated(x):
        first, second = x.chunk(2, dim=-1)
        c, s = (table[: x.shape[0], None].to(x.dtype) for table in (cos, sin))
        return torch.cat((first * c - second * s, first * s + second * c), dim=-1)

    q, k, v = (x.transpose(0, 1)[None] for x in (rotated(q), rotated(k), v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def without_cache(dtype):
    """Logits of every served token, computed in one precision from the whole text before it."""
    model.to(dtype)
    return torch.cat(
        [
            model(torch.tensor(tokens[:-1]), plain_attend)[prompt_length - 1 :]
            for tokens, prompt_length, _ in served
        ]
    )


ours = torch.cat([torch.stack(logits) for _, _, logits in served])
plain, truth = without_cache(torch.float32), without_cache(torch.float64)
assert_close("logits", ours, truth, plain)
print(f"{len(ours)} tokens of {len(served)} requests: the logits are those without a cache")
print(f"largest error {(ours - truth).abs().max():.1e}, plain {(plain - truth).abs().max():.1e}")
