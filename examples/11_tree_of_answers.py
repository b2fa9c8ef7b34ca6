# %% [markdown]
# # Train on a tree of answers to one prompt
#
# Reinforcement learning and tree search sample many answers that share their first part: a prompt,
# and then steps that several answers have in common. `flashtile.fold` makes a tree in which
# every shared token occurs once, and a mask that lets each token see only its own answer. This
# example compares loss and gradients with those of separate sequences on PyTorch's own attention,
# in float64, where only rounding errors may differ.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from flashtile import attention, fold
from flashtile.testing import assert_close

torch.manual_seed(0)
VOCABULARY, WIDTH, HEADS = 32, 64, 4

# %% [markdown]
# A prompt of 40 tokens has two first steps; the first step has three continuations, the second has
# two. The rollouts are ordinary sequences of tokens; `fold` finds what they share.

# %%
prompt, A, B = (torch.randint(VOCABULARY, (length,)) for length in (40, 12, 20))
steps = [A, A, A, B, B]
rollouts = [
    torch.cat((prompt, step, torch.randint(VOCABULARY, (length,))))
    for step, length in zip(steps, (9, 15, 7, 11, 6), strict=True)
]
folded = fold(rollouts)
print(
    f"{len(rollouts)} answers: {len(folded.tokens)} tokens as a tree, "
    f"{sum(map(len, rollouts))} as separate sequences"
)

# %% [markdown]
# Each answer has a weight, its advantage in reinforcement learning. The prompt is not trained on.

# %%
weights = torch.randn(len(rollouts), dtype=torch.float64)


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
    """The weighted log-probabilities of the answers, with each token computed once."""
    mask = folded.spans()
    logits = model(
        folded.tokens[None], folded.positions[None], lambda q, k, v: attention(q, k, v, mask=mask)
    )
    log_probs = folded.unfold(folded.log_probs(logits[0]))  # (answers, longest)
    return -(weights @ log_probs[:, len(prompt) :].sum(1).double())


# %% [markdown]
# The same from separate sequences.


# %%
def separate_loss(model):
    """The weighted log-probabilities, with the shared tokens computed several times."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    total = 0.0
    for weight, text in zip(weights, rollouts, strict=True):
        logits = model(text[None, :-1], torch.arange(len(text) - 1)[None], attend)[0]
        losses = F.cross_entropy(logits, text[1:], reduction="none")
        total = total + weight * losses[len(prompt) - 1 :].sum().double()
    return total


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
