# %% [markdown]
# # Train on packed sequences (varlen)
#
# Sentences differ in length. Packed back to back they need no padding: `attention_varlen` takes the
# cumulative lengths, and each sentence sees only itself. This example trains a small model on
# sequences of 8 to 120 tokens, and checks its loss and gradients against a padded batch with
# PyTorch's own attention.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from flashtile import attention_varlen
from flashtile.testing import assert_close

torch.manual_seed(0)
VOCABULARY, WIDTH, HEADS = 16, 64, 4

# %% [markdown]
# The task is to predict the next token: a sequence repeats a random pattern of four tokens. The
# model has to look four tokens back.


# %%
def sequences(lengths):
    """One tensor of tokens for each length."""
    patterns = torch.randint(VOCABULARY, (len(lengths), 4))
    return [
        pattern.repeat(length)[:length] for pattern, length in zip(patterns, lengths, strict=True)
    ]


# %% [markdown]
# The model does not depend on the layout of its tokens; only `attend` does.


# %%
class Model(nn.Module):
    """Two layers of causal attention over token and position embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(128, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, positions, attend):
        x = self.tokens(tokens) + self.positions(positions)
        for qkv, project in zip(self.qkv, self.project, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
            x = x + project(attend(q, k, v).flatten(-2))
        return self.logits(x)


def packed_loss(model, batch):
    """Mean loss of a batch without padding: (total,) tokens and cumulative lengths."""
    lengths = torch.tensor([len(tokens) - 1 for tokens in batch])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())

    def attend(q, k, v):
        return attention_varlen(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )

    positions = torch.cat([torch.arange(length) for length in lengths])
    logits = model(torch.cat([tokens[:-1] for tokens in batch]), positions, attend)
    return F.cross_entropy(logits, torch.cat([tokens[1:] for tokens in batch]))


def padded_loss(model, batch):
    """The same with PyTorch's attention: (batch, longest) tokens, the padding ignored."""
    tokens = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
    inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:]

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    logits = model(inputs, torch.arange(inputs.shape[1]), attend)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# %% [markdown]
# Loss and gradients of both are compared in float64, where only rounding errors may differ.

# %%
model = Model().double()
batch = sequences([8, 31, 120, 57])
parameters = list(model.parameters())
for loss in (packed_loss, padded_loss):
    print(f"{loss.__name__}: {loss(model, batch).item():.12f}")
packed = torch.autograd.grad(packed_loss(model, batch), parameters)
padded = torch.autograd.grad(padded_loss(model, batch), parameters)
single = [x.double() for x in torch.autograd.grad(padded_loss(model.float(), batch), parameters)]
for (name, _), ours, truth, plain in zip(
    model.named_parameters(), packed, padded, single, strict=True
):
    assert_close(name, ours, truth, plain, dtype=torch.float32)
print(f"{len(packed)} gradients agree")
real = sum(len(tokens) for tokens in batch)
print(f"tokens computed: {real} packed, {len(batch) * max(len(tokens) for tokens in batch)} padded")

# %% [markdown]
# Now train on packed batches. A model that cannot look back stays at log 16 = 2.77.

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(151):
    loss = packed_loss(model, sequences(torch.randint(8, 121, (16,)).tolist()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3}: loss {loss.item():.2f}")
assert loss.item() < 1.0
