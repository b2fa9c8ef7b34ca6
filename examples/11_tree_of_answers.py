# %% [markdown]
# # Train on a tree of answers to one prompt
#
# Reinforcement learning and tree search sample many answers that share their first part: a prompt,
# and then steps that several answers have in common. In a tree, every shared token is computed
# once. `Spans.tree` lets each token see its ancestors. This example compares loss and gradients
# with those of separate sequences on PyTorch's own attention, in float64, where only rounding
# errors may differ.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from flashtile import Spans, attention
from flashtile.testing import assert_close

torch.manual_seed(0)
VOCABULARY, WIDTH, HEADS = 32, 64, 4

# %% [markdown]
# A prompt of 40 tokens has two first steps; the first step has three continuations, the second has
# two. Each segment names the one that it continues.

# %%
segments = {  # name: (the segment before, tokens)
    "prompt": (None, 40),
    "A": ("prompt", 12),
    "A1": ("A", 9),
    "A2": ("A", 15),
    "A3": ("A", 7),
    "B": ("prompt", 20),
    "B1": ("B", 11),
    "B2": ("B", 6),
}
tokens = {name: torch.randint(VOCABULARY, (length,)) for name, (_, length) in segments.items()}

# %% [markdown]
# The tree lists the number of each token's parent, in depth-first order. A token's position is its
# depth, and its parent predicts it.

# %%
last, parents, positions = {None: -1}, [], []
for name, (before, length) in segments.items():
    parent = last[before]
    for _ in range(length):
        positions.append(positions[parent] + 1 if parent >= 0 else 0)
        parents.append(parent)
        parent = len(parents) - 1
    last[name] = parent
parents, positions = torch.tensor(parents), torch.tensor(positions)
tree = Spans.tree(parents)
answers = range(segments["prompt"][1], len(parents))  # the tokens that are trained on


# %%
class Model(nn.Module):
    """Two layers of attention over token and position embeddings; `attend` gets q, k and v."""

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


def tree_loss(model):
    """The mean loss of the answers' tokens, each computed once."""
    everything = torch.cat(list(tokens.values()))
    logits = model(everything[None], positions, lambda q, k, v: attention(q, k, v, mask=tree))[0]
    return F.cross_entropy(logits[parents[answers]], everything[answers])


# %% [markdown]
# Now the same from separate sequences, one for each leaf. A token that several sequences share
# counts only in the first.


# %%
def separate_loss(model):
    """The mean loss of the answers' tokens, with the shared ones computed several times."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    total, counted = 0.0, {"prompt"}
    for path in paths:
        text = torch.cat([tokens[name] for name in path])
        logits = model(text[None, :-1], torch.arange(len(text) - 1), attend)[0]
        losses = F.cross_entropy(logits, text[1:], reduction="none")
        end = -1
        for name in path:
            begin, end = end, end + len(tokens[name])
            if name not in counted:
                total = total + losses[begin:end].sum()
                counted.add(name)
    return total / len(answers)


def path_of(name):
    """The segments from the prompt to `name`."""
    before = segments[name][0]
    return [*(path_of(before) if before else []), name]


inner = {before for before, _ in segments.values()}
paths = [path_of(name) for name in segments if name not in inner]
separate = sum(len(tokens[name]) for path in paths for name in path)
print(f"{len(paths)} answers: {len(parents)} tokens as a tree, {separate} as separate sequences")

# %%
model = Model()


def gradients(loss, dtype):
    """The loss, and the gradient of each parameter, computed in one precision."""
    value = loss(model.to(dtype))
    return value.item(), torch.autograd.grad(value, list(model.parameters()))


(true_loss, truth), (_, plain) = (
    gradients(separate_loss, dtype) for dtype in (torch.float64, torch.float32)
)
ours_loss, ours = gradients(tree_loss, torch.float64)
for (name, _), ours_, truth_, plain_ in zip(
    model.named_parameters(), ours, truth, plain, strict=True
):
    assert_close(name, ours_, truth_, plain_, dtype=torch.float32)
print(f"loss {ours_loss:.6f} as a tree, {true_loss:.6f} separately")
print(f"{len(ours)} gradients agree")
