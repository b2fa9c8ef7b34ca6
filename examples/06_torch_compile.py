# %% [markdown]
# # torch.compile and torch.export
#
# Every call is one registered operator, so `torch.compile(fullgraph=True)` captures a model with
# flashtile in a single graph, gradients included, and new lengths cause no new compilation.

# %%
import torch
from torch import nn

from flashtile import attention
from flashtile.testing import assert_close

torch.manual_seed(0)
# "inductor", the default of torch.compile, needs a C++ compiler or a GPU. This backend does not.
COMPILER = "aot_eager"


# %%
class Block(nn.Module):
    """A transformer block with grouped-query attention."""

    def __init__(self, width=128, heads=8, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim)
        self.project = nn.Linear(width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, self.dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        return x + self.project(attention(q, k, v, causal=True).flatten(-2))


block = Block()

# %% [markdown]
# A graph break raises an error because of `fullgraph=True`. So does another compilation after the
# first length.

# %%
compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=COMPILER)

for length, stance in ((100, "default"), (257, "fail_on_recompile"), (64, "fail_on_recompile")):
    x = torch.randn(2, length, 128, requires_grad=True)
    dout = torch.randn_like(x)
    with torch.compiler.set_stance(stance):
        out = compiled(x)
    eager = block(x)
    (dx,), (eager_dx,) = (torch.autograd.grad(y, x, dout) for y in (out, eager))
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(dx, eager_dx)
    print(f"length {length}: output and gradient are those of the eager block")

# %% [markdown]
# The same block in plain PyTorch.


# %%
def plain(block, x):
    """The block with a matrix of scores."""
    qkv = block.qkv(block.norm(x)).unflatten(-1, (-1, block.dim))
    q, k, v = qkv.split((block.heads, block.kv_heads, block.kv_heads), dim=-2)
    k, v = (y.repeat_interleave(block.heads // block.kv_heads, dim=2) for y in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / block.dim**0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return x + block.project(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))


with torch.no_grad():
    rounded = plain(block, x)
    truth = plain(block.double(), x.double())
    block.float()
    assert_close("compiled block", out, truth, rounded)
print("the compiled block agrees with plain PyTorch")

# %% [markdown]
# `torch.export` works too, with a dynamic length. The program calls flashtile's operators, so
# import flashtile in the process that loads it.

# %%
program = torch.export.export(
    block, (x,), dynamic_shapes={"x": {1: torch.export.Dim("length", min=2, max=4096)}}
)
longer = torch.randn(2, 333, 128)
assert torch.equal(program.module()(longer), block(longer))
print([str(node.target) for node in program.graph.nodes if "flashtile" in str(node.target)])
