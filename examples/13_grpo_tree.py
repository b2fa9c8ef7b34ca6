# %% [markdown]
# # GRPO on a tree of answers, with TRL
#
# `GRPOTrainer` samples several answers to each prompt and computes the prompt again with every
# answer. `flashtile.fold` puts the batch into one row in which each shared token occurs once, and
# the model gets the tree as `rollouts=`. Loss and gradients equal those of separate sequences.
# This example trains a tiny Llama with random weights, so it downloads nothing. Needs Python 3.11
# and `pip install ".[examples]"` in a copy of the repository.

# %%
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from flashtile import fold
from flashtile.integrations import transformers as flashtile_transformers
from flashtile.testing import assert_close

name = flashtile_transformers.register()

# %% [markdown]
# The trainer asks one method for the log-probabilities of a batch: prompts with padding on the
# left, and answers with padding on the right. The method below gets them from the folded batch.


# %%
class TreeGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` that computes the shared tokens of a batch once."""

    separately = False  # as TRL does it, to compare
    computed = 0  # tokens of the last batch

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **options
    ):
        if self.separately:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **options
            )
        is_token = attention_mask.bool()
        folded = fold([ids[mask] for ids, mask in zip(input_ids, is_token, strict=True)])
        self.computed = len(folded.tokens)
        with self.accelerator.autocast():
            row = {"input_ids": folded.tokens[None], "position_ids": folded.positions[None]}
            logits = model(**row, rollouts=folded).logits[0] / self.temperature
        entropies = torch.distributions.Categorical(logits=logits.detach().float()).entropy()
        predicted_by = folded.parents.clamp(min=0)
        values = torch.stack((folded.log_probs(logits), entropies[predicted_by]), dim=-1)
        # (batch, tokens, 2): back to the places of the padded batch.
        padded = values.new_zeros(*input_ids.shape, 2)
        padded[is_token] = folded.unfold(values)[folded.rows >= 0]
        log_probs, entropies = padded[:, -logits_to_keep:].unbind(-1)
        return log_probs, entropies.detach(), None


# %% [markdown]
# This task suits a model with random weights: answers with more "tile" are better.

# %%
WORDS = ["every", "tile", "of", "a", "row", "has", "one", "maximum", "and", "its", "own", "sum"]
vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *WORDS])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def reward(completions, **_):
    """The share of the answer's words that are "tile"."""
    return [text.split().count("tile") / max(len(text.split()), 1) for text in completions]


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
folder = tempfile.TemporaryDirectory()
prompts = [" ".join((WORDS * 4)[start : start + 40 - start]) for start in range(8)]
trainer = TreeGRPOTrainer(
    AutoModelForCausalLM.from_config(config, attn_implementation=name),
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir=folder.name,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=12,
        max_steps=24,
        learning_rate=1e-2,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": prompts * 8}),
    processing_class=tokenizer,
)

# %% [markdown]
# Loss and gradients of a batch of 16 answers are compared with those that TRL computes from the 16
# sequences with PyTorch's own attention ("sdpa"). In float64 only rounding errors may differ.

# %%
model = trainer.model
draw = torch.Generator().manual_seed(1)
two_prompts = torch.randint(2, len(vocabulary), (2, 30), generator=draw).repeat_interleave(8, 0)
two_prompts[8:, :10] = 0
lengths = torch.randint(1, 13, (16, 1), generator=draw)
batch = {
    "prompt_ids": two_prompts,
    "prompt_mask": (two_prompts > 0).int(),
    "completion_ids": torch.randint(2, len(vocabulary), (16, 12), generator=draw),
    "completion_mask": (torch.arange(12) < lengths).int(),
    "advantages": torch.randn(16, generator=draw),
    "num_items_in_batch": lengths.sum(),
}


def gradients(separately, implementation, dtype):
    """The gradient of each parameter, computed in one precision."""
    model.to(dtype).set_attn_implementation(implementation)
    trainer.separately = separately
    return torch.autograd.grad(trainer._compute_loss(model, batch), list(model.parameters()))


model.train()
trainer.current_gradient_accumulation_steps = 1
truth = gradients(True, "sdpa", torch.float64)
plain = gradients(True, "sdpa", torch.float32)
ours = gradients(False, name, torch.float64)
for (parameter, _), ours_, truth_, plain_ in zip(
    model.named_parameters(), ours, truth, plain, strict=True
):
    assert_close(parameter, ours_, truth_, plain_, dtype=torch.float32)
padded = two_prompts.numel() + batch["completion_ids"].numel()
print(f"16 answers to 2 prompts: {padded} tokens with padding, {trainer.computed} as trees")
print(f"{len(ours)} gradients are those of the separate sequences")

# %% [markdown]
# Now train. Random answers have a reward of 1/14.

# %%
model.float()
trainer.train()
folder.cleanup()
rewards = [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]
print("mean reward of 8 steps at a time:", [f"{x:.2f}" for x in rewards])
assert rewards[-1] > 0.3
