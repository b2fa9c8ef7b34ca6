# %% [markdown]
# # A drop-in for flash_attn
#
# Code that uses `flash_attn` changes one word, and then runs on a CPU too. This example calls
# `flash_attn_func` with a causal sliding window and grouped-query heads (GQA), and compares the
# output and all gradients with attention written out in plain PyTorch.

# %%
import torch

from flashtile import explain, flash_attn_func  # was: from flash_attn import flash_attn_func
from flashtile.testing import assert_close

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# Tensors are (batch, seq, heads, head_dim). Eight query heads share two key heads. Each query sees
# itself and the 255 tokens before it.

# %%
q = torch.randn(2, 700, 8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
k = torch.randn(2, 700, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
v = torch.randn(2, 700, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

out = flash_attn_func(q, k, v, causal=True, window_size=(255, 0))
dout = torch.randn_like(out)
gradients = torch.autograd.grad(out, (q, k, v), dout)

# %% [markdown]
# The same in plain PyTorch, which builds the whole matrix of scores.


# %%
def plain_attention(q, k, v, window):
    """Softmax of all scores; keys after the query or too far before it are hidden."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    i = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)
    scores = scores.masked_fill((j > i) | (j < i - window), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def with_gradients(dtype):
    """Output and gradients of plain attention in one precision."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    result = plain_attention(*inputs, window=255)
    return result, *torch.autograd.grad(result, inputs, dout.to(dtype))


# %% [markdown]
# `assert_close` has no fixed tolerance. It compares with the result in float64, and allows twice
# the error that plain PyTorch makes in the precision of the inputs.

# %%
truth, plain = with_gradients(torch.float64), with_gradients(torch.bfloat16)
for name, ours, exact, rounded in zip(
    ("out", "dq", "dk", "dv"), (out, *gradients), truth, plain, strict=True
):
    assert_close(name, ours, exact, rounded)
    errors = [(x.double() - exact).abs().max().item() for x in (ours, rounded)]
    print(f"{name:>3}: largest error {errors[0]:.1e}, of plain bfloat16 {errors[1]:.1e}")

# %% [markdown]
# `explain` says which backend runs a call, and why the others do not.

# %%
print(explain(q, k, v, causal=True, window_size=(255, 0)))
