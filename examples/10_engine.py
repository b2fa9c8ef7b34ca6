# %% [markdown]
# # The steps of an engine: prefill beside decoding, and a CUDA graph
#
# An engine mixes requests in a step: some decode one token, others compute a chunk of their prompt.
# The new tokens of all requests are packed into one row. One call rotates them, appends their keys
# and values to the pages of their requests, and attends. Once all requests decode, every step has
# the same shapes, so a CUDA graph can capture one step and repeat it. This example runs such steps
# and checks them against plain PyTorch without a cache. On a CPU they run without the graph.

# %%
import torch
import torch.nn.functional as F

from flashtile import attention_with_kvcache
from flashtile.testing import assert_close

on_gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
torch.manual_seed(0)
HEADS, KV_HEADS, DIM, PAGE_SIZE, STEPS = 4, 2, 32, 8, 3

# %% [markdown]
# Of four requests, two decode, one computes the second chunk of its prompt, and one begins.
# `cached` tokens are already in the pages; the mixed step adds `new` tokens. `STEPS` steps with one
# token of each request follow.

# %%
cached, new = [21, 8, 16, 0], [1, 1, 12, 19]
mixed = [before + more for before, more in zip(cached, new, strict=True)]  # after that step
ends = [length + STEPS for length in mixed]
q = [torch.randn(n, HEADS, DIM, dtype=dtype, device=device) for n in ends]
k = [torch.randn(n, KV_HEADS, DIM, dtype=dtype, device=device) for n in ends]
v = [torch.randn(n, KV_HEADS, DIM, dtype=dtype, device=device) for n in ends]
angles = torch.outer(
    torch.arange(max(ends), device=device),
    10_000.0 ** (-torch.arange(0, DIM, 2, device=device) / DIM),
)
cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x, first):
    """`x`, (tokens, heads, DIM), rotated as the tokens from position `first` on."""
    c, s = (table[first : first + len(x), None].to(x.dtype) for table in (cos, sin))
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * c - right * s, left * s + right * c), dim=-1)


# %% [markdown]
# Each request gets the pages that it will need, in any order. They contain its first `cached`
# tokens. Keys in a cache are rotated.

# %%
pages = [-(n // -PAGE_SIZE) for n in ends]
page_table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
for row, own in zip(
    page_table, torch.randperm(sum(pages), device=device).split(pages), strict=True
):
    row[: len(own)] = own
k_pages, v_pages = torch.zeros(2, sum(pages), PAGE_SIZE, KV_HEADS, DIM, dtype=dtype, device=device)


def slots(request, first, end):
    """Where the pages have the tokens from `first` to `end` of a request."""
    positions = torch.arange(first, end, device=device)
    return page_table[request, positions // PAGE_SIZE], positions % PAGE_SIZE


for request, before in enumerate(cached):
    k_pages[slots(request, 0, before)] = rotated(k[request][:before], 0)
    v_pages[slots(request, 0, before)] = v[request][:before]

# %% [markdown]
# This is the mixed step. `cu_seqlens` says where each request's tokens begin.

# %%
lengths = torch.tensor(cached, dtype=torch.int32, device=device)
cu_seqlens = F.pad(torch.tensor(new, device=device).cumsum(0), (1, 0)).int()


def in_pages(queries, keys, values, **packing):
    """Rotate, append to the pages, and attend."""
    return attention_with_kvcache(
        queries,
        k_pages,
        v_pages,
        keys,
        values,
        cache_seqlens=lengths,
        page_table=page_table,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=False,
        causal=True,
        **packing,
    )


packed = [
    torch.cat([tokens[a:b] for tokens, a, b in zip(x, cached, mixed, strict=True)])
    for x in (q, k, v)
]
out = in_pages(*packed, cu_seqlens_q=cu_seqlens, max_seqlen_q=max(new), cu_seqlens_k_new=cu_seqlens)
lengths += torch.tensor(new, dtype=torch.int32, device=device)
print(f"{sum(new)} new tokens of {len(new)} requests in one call: {new}")

# %% [markdown]
# The check computes each request separately, from all its keys, with a causal mask.


# %%
def alone(request, first, end, dtype):
    """(end - first, HEADS, DIM) for the queries of these positions, computed in one precision."""
    queries = rotated(q[request][first:end].to(dtype), first).transpose(0, 1)
    keys, values = rotated(k[request][:end].to(dtype), 0), v[request][:end].to(dtype)
    keys, values = (
        x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (keys, values)
    )
    hidden = torch.ones(end - first, end, dtype=torch.bool, device=device).triu(first + 1)
    scores = (queries @ keys.mT / DIM**0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


for request, part in enumerate(out.split(new)):
    first, end = cached[request], mixed[request]
    truth, plain = (alone(request, first, end, x) for x in (torch.float64, dtype))
    assert_close("out", part, truth, plain)
    new_keys = k[request][first:end]
    truth, plain = (rotated(new_keys.to(x), first) for x in (torch.float64, dtype))
    assert_close("new keys", k_pages[slots(request, first, end)], truth, plain)
print("outputs and the new keys in the pages are right")

# %% [markdown]
# The decoding step reads tensors that stay at the same addresses, and updates the lengths itself,
# as a CUDA graph requires. Its first run, without a graph, also compiles the kernels.

# %%
token = [
    torch.empty(len(new), 1, x[0].shape[1], DIM, dtype=dtype, device=device) for x in (q, k, v)
]
result = torch.empty_like(token[0])


def step():
    """One token of each request: (requests, 1, HEADS, DIM), written to `result`."""
    result.copy_(in_pages(*token))
    lengths.add_(1)


def decode(step):
    """The results of all steps, from the state after the mixed step."""
    for tensor, saved in zip((k_pages, v_pages, lengths), after_mixed, strict=True):
        tensor.copy_(saved)
    results = []
    for number in range(STEPS):
        for tensor, x in zip(token, (q, k, v), strict=True):
            chosen = [tokens[n + number] for tokens, n in zip(x, mixed, strict=True)]
            tensor.copy_(torch.stack(chosen)[:, None])
        step()
        results.append(result.clone())
    return torch.cat(results, 1)


after_mixed = [tensor.clone() for tensor in (k_pages, v_pages, lengths)]
decoded = decode(step)
for request, (part, first, end) in enumerate(zip(decoded, mixed, ends, strict=True)):
    truth, plain = (alone(request, first, end, x) for x in (torch.float64, dtype))
    assert_close("decoded", part, truth, plain)
print(f"{STEPS} decoding steps are right")

# %%
if on_gpu:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert torch.equal(decode(graph.replay), decoded)
    print("the captured step, replayed, gives the same bits")
else:
    print("no GPU: no graph")
