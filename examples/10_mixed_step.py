# %% [markdown]
# # One step of an engine: prefill and decoding together
#
# An engine mixes requests in a step: some decode one token, others compute a chunk of their prompt.
# The new tokens of all of them are packed into one row. One call rotates them, appends their keys
# and values to the pages of their requests, and attends. This example takes such a step, and checks
# it against plain PyTorch without a cache.

# %%
import torch
import torch.nn.functional as F

from flashtile import attention_with_kvcache
from flashtile.testing import assert_close

torch.manual_seed(0)
HEADS, KV_HEADS, DIM, PAGE_SIZE = 4, 2, 32, 8

# %% [markdown]
# Four requests: two decode, one computes the second chunk of its prompt, one begins. `cached`
# tokens are in the pages already; `new` tokens come in this step.

# %%
cached = torch.tensor([21, 8, 16, 0], dtype=torch.int32)
new = torch.tensor([1, 1, 12, 19], dtype=torch.int32)
# (requests + 1,): where each request's tokens begin.
cu_seqlens = F.pad(new.cumsum(0), (1, 0)).int()
total, longest = int(new.sum()), int(new.max())
pages = -((cached + new) // -PAGE_SIZE)  # of each request
page_table = torch.zeros(len(new), int(pages.max()), dtype=torch.int32)
free = torch.randperm(int(pages.sum())).int()
for row, own in zip(page_table, free.split(pages.tolist()), strict=True):
    row[: len(own)] = own

# %% [markdown]
# The keys and values of whole requests, of which the pages hold the first `cached` tokens. Keys in
# a cache are rotated.

# %%
lengths = (cached + new).tolist()
k = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
v = [torch.randn(n, KV_HEADS, DIM) for n in lengths]
q = torch.randn(total, HEADS, DIM)
angles = torch.outer(torch.arange(max(lengths)), 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM))
cos, sin = angles.cos(), angles.sin()


def rotated(x, first):
    """`x`, (tokens, heads, DIM), rotated as the tokens from position `first` on."""
    c, s = (table[first : first + len(x), None].to(x.dtype) for table in (cos, sin))
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * c - right * s, left * s + right * c), dim=-1)


k_pages, v_pages = torch.zeros(2, len(free), PAGE_SIZE, KV_HEADS, DIM)
for row, before, keys, values in zip(page_table, cached.tolist(), k, v, strict=True):
    slots = torch.arange(before)
    k_pages[row[slots // PAGE_SIZE], slots % PAGE_SIZE] = rotated(keys[:before], 0)
    v_pages[row[slots // PAGE_SIZE], slots % PAGE_SIZE] = values[:before]

# %% [markdown]
# The step.

# %%
out = attention_with_kvcache(
    q,
    k_pages,
    v_pages,
    torch.cat([x[n:] for x, n in zip(k, cached.tolist(), strict=True)]),
    torch.cat([x[n:] for x, n in zip(v, cached.tolist(), strict=True)]),
    cu_seqlens_q=cu_seqlens,
    max_seqlen_q=longest,
    cu_seqlens_k_new=cu_seqlens,
    cache_seqlens=cached,
    page_table=page_table,
    rotary_cos=cos,
    rotary_sin=sin,
    rotary_interleaved=False,
    causal=True,
)
print(f"{total} new tokens of {len(new)} requests in one call: {new.tolist()}")

# %% [markdown]
# The check: each request by itself, from all its keys, with a causal mask.


# %%
def without_cache(dtype):
    """(total, HEADS, DIM), computed in one precision."""
    outs = []
    for queries, before, keys, values in zip(
        q.split(new.tolist()), cached.tolist(), k, v, strict=True
    ):
        queries = rotated(queries.to(dtype), before).transpose(0, 1)
        keys, values = rotated(keys.to(dtype), 0).transpose(0, 1), values.to(dtype).transpose(0, 1)
        mask = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril(before)
        attended = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )
        outs.append(attended[0].transpose(0, 1))
    return torch.cat(outs)


plain, truth = without_cache(torch.float32), without_cache(torch.float64)
assert_close("out", out, truth, plain)
print(f"largest error {(out - truth).abs().max():.1e}, plain {(plain - truth).abs().max():.1e}")
for row, before, length, keys in zip(page_table, cached.tolist(), lengths, k, strict=True):
    slots = torch.arange(before, length)
    appended = k_pages[row[slots // PAGE_SIZE], slots % PAGE_SIZE]
    plain, truth = (rotated(keys[before:].to(x), before) for x in (torch.float32, torch.float64))
    assert_close("new keys", appended, truth, plain)
print("the new keys are in their pages")
