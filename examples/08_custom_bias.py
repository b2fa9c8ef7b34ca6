# %% [markdown]
# # A learned bias, softcap and attention sinks
#
# `bias` is added to the scores and has a gradient, so it can be learned: T5's relative positions,
# graph distances, the pair representation of AlphaFold. It broadcasts, and so does its gradient.
# This example learns a table of relative positions together with an attention sink and a softcap,
# and checks every gradient against plain PyTorch.

# %%
import torch

from flashtile import attention
from flashtile.testing import assert_close

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, HEADS, DIM, REACH = 2, 400, 4, 64, 32

# %% [markdown]
# The table has a bias for each head and each distance up to 32 in both directions; larger distances
# use the bias of distance 32. Indexing it makes a tensor of (1, heads, seq, seq), which all
# sequences share.

# %%
positions = torch.arange(LENGTH, device=device)
distance = (positions - positions[:, None]).clamp(-REACH, REACH) + REACH


def bias_of(table):
    """(heads, distances) -> (1, heads, seq, seq)."""
    return table[:, distance][None]


def tiled(q, k, v, table, sink):
    """With flashtile: no matrix of scores, though the bias itself has the size of one."""
    return attention(q, k, v, bias=bias_of(table), sink=sink, softcap=3.0)


def plain(q, k, v, table, sink):
    """Written out: the sink is one more logit in the softmax, whose value is 0."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / DIM**0.5
    scores = 3.0 * torch.tanh(scores / 3.0) + bias_of(table)
    extra = sink[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


# %%
dtype = torch.bfloat16
gradients = ("dq", "dk", "dv", "dtable", "dsink")
shapes = [(BATCH, LENGTH, HEADS, DIM)] * 3 + [(HEADS, 2 * REACH + 1), (HEADS,)]
inputs = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
dout = torch.randn(shapes[0], device=device, dtype=dtype)


def with_gradients(attend, dtype):
    """Output and gradients of a function of the inputs, computed in one precision."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout.to(dtype))


truth = with_gradients(plain, torch.float64)
got, rounded = with_gradients(tiled, dtype), with_gradients(plain, dtype)
for name, ours, exact, rounding in zip(("out", *gradients), got, truth, rounded, strict=True):
    assert_close(name, ours, exact, rounding)
    errors = [(x.double() - exact).abs().max().item() for x in (ours, rounding)]
    print(f"{name:>6}: largest error {errors[0]:.1e}, of plain bfloat16 {errors[1]:.1e}")

# %% [markdown]
# A bias that is the same for all queries costs less: give it the shape (1, heads, 1, seq). A bias
# that is linear in the distance needs no matrix: pass `alibi_slopes`.

# %%
q, k, v = (x.float() for x in inputs[:3])
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
lines = -slopes[:, None, None] * (positions - positions[:, None]).abs()
as_bias = attention(q, k, v, bias=lines[None])
as_slopes = attention(q, k, v, alibi_slopes=slopes)
exact = torch.softmax(
    torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / DIM**0.5 + lines.double(), dim=-1
)
truth = torch.einsum("bhij,bjhd->bihd", exact, v.double())
assert_close("ALiBi", as_slopes, truth, as_bias)
print(f"ALiBi as slopes and as a bias differ by {(as_slopes - as_bias).abs().max():.1e}")
