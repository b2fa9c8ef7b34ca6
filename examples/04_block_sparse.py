# %% [markdown]
# # Block-sparse masks and FlexAttention's BlockMask
#
# A `BlockMask` takes any pattern. It divides the matrix of scores into tiles that are empty, full
# or partial; empty tiles are skipped, and only partial tiles are read element by element. A mask
# that was made for FlexAttention works without conversion, and trains on a CPU too.

# %%
import time

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from flashtile import BlockMask, attention
from flashtile.testing import assert_close

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 2048

# %% [markdown]
# Four documents in one sequence: a token sees the earlier tokens of its own document, and the first
# 16 tokens, which all of them share.

# %%
document = torch.repeat_interleave(torch.arange(4), torch.tensor([300, 900, 148, 700])).to(device)
i, j = torch.arange(LENGTH, device=device)[:, None], torch.arange(LENGTH, device=device)
visible = (i >= j) & ((document[:, None] == document) | (j < 16))

mask = BlockMask.from_dense(visible, tile_size=(128, 128))
kinds = mask.kinds[0, 0]
for name, kind in (("empty", 0), ("full", 1), ("partial", 2)):
    print(f"{name:>7}: {int((kinds == kind).sum()):3} of {kinds.numel()} tiles")
for row in kinds.tolist():
    print("  " + "".join(".#+"[kind] for kind in row))

# %% [markdown]
# Output and gradients are compared with PyTorch's attention with the dense mask.

# %%
q, k, v = (
    torch.randn(1, LENGTH, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3)
)
dout = torch.randn_like(q)


def with_gradients(attend, *inputs):
    """Output and gradients of a function of q, k and v."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def plain(q, k, v):
    """PyTorch's attention, whose layout is (batch, heads, seq, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)


ours = with_gradients(lambda q, k, v: attention(q, k, v, block_mask=mask), q, k, v)
rounded = with_gradients(plain, q, k, v)
truth = with_gradients(plain, q.double(), k.double(), v.double())
for name, *results in zip(("out", "dq", "dk", "dv"), ours, truth, rounded, strict=True):
    assert_close(name, *results)
print("output and gradients agree with the dense mask")

# %% [markdown]
# The same mask as a function for FlexAttention. flashtile accepts FlexAttention's `BlockMask`
# directly.


# %%
def document_mask(batch, head, q_index, kv_index):
    """The pattern above, for one pair of positions."""
    same = document[q_index] == document[kv_index]
    return (q_index >= kv_index) & (same | (kv_index < 16))


flex_mask = create_block_mask(document_mask, None, None, LENGTH, LENGTH, device=device)
for name, *results in zip(
    ("out", "dq", "dk", "dv"),
    with_gradients(lambda q, k, v: attention(q, k, v, block_mask=flex_mask), q, k, v),
    truth,
    rounded,
    strict=True,
):
    assert_close(name, *results)
print("FlexAttention's mask gives the same")

# %% [markdown]
# This is the time of one forward. Times on a busy machine vary, so nothing is asserted.

# %%
for name, attend in (
    ("dense mask, PyTorch", plain),
    ("block mask", lambda q, k, v: attention(q, k, v, block_mask=mask)),
):
    with torch.no_grad():
        attend(q, k, v)
        start = time.perf_counter()
        attend(q, k, v).sum().item()
    print(f"{name}: {1000 * (time.perf_counter() - start):.1f} ms")
