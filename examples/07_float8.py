# %% [markdown]
# # Float8 attention
#
# `attention_fp8` takes 16-bit tensors and computes both matrix products in float8 (e4m3). The
# inputs of language models have outliers, a few large numbers, which cost float8 most
# of its precision if a whole tensor has one scale. By default, flashtile rotates queries and
# keys (Hadamard) and gives each block of rows its own scale. The CPU rounds at the same steps as
# the GPU kernel, so the error can be studied anywhere.

# %%
import torch
import torch.nn.functional as F

from flashtile import attention, attention_fp8, quantize_qkv

torch.manual_seed(0)

# %% [markdown]
# The inputs are those of table 3 of FlashAttention-3: normal numbers, one in a thousand of which is
# about ten times as large.


# %%
def with_outliers():
    """(batch, seq, heads, head_dim)."""
    shape = (1, 1024, 4, 128)
    return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)


q, k, v = (with_outliers().to(torch.bfloat16) for _ in range(3))


def plain(q, k, v):
    """PyTorch's attention in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def rounded(x):
    """A tensor rounded to float8 with one scale."""
    scale = 448 / x.abs().max().float()
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


# %% [markdown]
# Root mean square errors against float64. The third line rounds only the inputs, in plain PyTorch;
# the second rounds the probabilities as well, and is still better.

# %%
truth = plain(q, k, v)
results = {
    "bfloat16": attention(q, k, v),
    "attention_fp8": attention_fp8(q, k, v),
    "inputs in float8, one scale each": plain(rounded(q), rounded(k), rounded(v)),
}
errors = {}
for name, out in results.items():
    error = errors[name] = (out.double() - truth).square().mean().sqrt().item()
    print(f"{name:>33}: {error:.1e}")
assert errors["bfloat16"] < errors["attention_fp8"]
assert 1.5 * errors["attention_fp8"] < errors["inputs in float8, one scale each"]

# %% [markdown]
# `attention_fp8` is `quantize_qkv`, then `attention` on float8 tensors with their scales.

# %%
small = quantize_qkv(q, k, v)
scales = {name: getattr(small, name) for name in ("q_descale", "k_descale", "v_descale")}
again = attention(small.q, small.k, small.v, **scales)
assert torch.equal(again, results["attention_fp8"])
print("q:", small.q.dtype, tuple(small.q.shape), "with scales", tuple(small.q_descale.shape))

# %% [markdown]
# It has gradients: those of attention on the rounded numbers, computed in bfloat16.

# %%
inputs = [x.clone().requires_grad_() for x in (q, k, v)]
exact = [x.double().requires_grad_() for x in (q, k, v)]
dout = torch.randn_like(v)
ours = torch.autograd.grad(attention_fp8(*inputs), inputs, dout)
theirs = torch.autograd.grad(plain(*exact), exact, dout.double())
for name, gradient, truth in zip(("dq", "dk", "dv"), ours, theirs, strict=True):
    error = ((gradient.double() - truth).norm() / truth.norm()).item()
    print(f"{name}: relative error {error:.1%}")
    assert error < 0.1
