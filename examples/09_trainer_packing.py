# %% [markdown]
# # Fine-tune with packed batches: Trainer and the flattening collator
#
# `DataCollatorWithFlattening` of transformers puts the texts of a batch into one row, without
# padding; the `position_ids` say where each text begins, and flashtile keeps the texts apart. This
# example trains a tiny Llama with random weights, so it downloads nothing. With your model, only
# the line with `from_config` changes, to `from_pretrained(path, attn_implementation=name)`. Needs
# `pip install ".[examples]"` in a copy of the repository.

# %%
import tempfile

import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from flashtile.integrations import transformers as flashtile_transformers
from flashtile.testing import assert_close

name = flashtile_transformers.register()

# %%
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=16,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation=name)

# %% [markdown]
# Each text has 8 to 60 tokens and repeats a pattern of four random tokens.

# %%
lengths = torch.randint(8, 61, (320,)).tolist()
texts = [{"input_ids": torch.randint(1, 16, (4,)).repeat(15)[:n].tolist()} for n in lengths]
collator = DataCollatorWithFlattening()
batch = collator(texts[:8])
padded = 8 * max(lengths[:8])
print(f"a batch of 8 texts: {batch['input_ids'].numel()} tokens packed, {padded} padded")

# %% [markdown]
# Loss and gradients of the packed batch equal those of the eight separate texts, with
# transformers' own attention ("eager"). In float64 only rounding errors may differ.


# %%
def packed_loss(model):
    """The mean loss of the batch as Trainer computes it."""
    return model(**batch).loss


def separate_loss(model):
    """The same from one text at a time: the mean over all tokens but the first of each text."""
    total = sum(
        model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1)
        for ids in (torch.tensor([text["input_ids"]]) for text in texts[:8])
    )
    return total / sum(n - 1 for n in lengths[:8])


def gradients(loss, implementation, dtype):
    """The gradient of each parameter, computed in one precision."""
    model.to(dtype).set_attn_implementation(implementation)
    return torch.autograd.grad(loss(model), list(model.parameters()))


truth = gradients(separate_loss, "eager", torch.float64)
plain = gradients(separate_loss, "eager", torch.float32)
ours = gradients(packed_loss, name, torch.float64)
for (parameter, _), ours_, truth_, plain_ in zip(
    model.named_parameters(), ours, truth, plain, strict=True
):
    assert_close(parameter, ours_, truth_, plain_, dtype=torch.float32)
print(f"{len(ours)} gradients are those of the texts by themselves")

# %% [markdown]
# Now train. A model that cannot look back stays at log 15 = 2.71.

# %%
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        num_train_epochs=4,
        learning_rate=3e-3,
        logging_steps=40,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = Trainer(
        model=model.float(), args=settings, train_dataset=texts, data_collator=collator
    )
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("mean loss of 40 steps at a time:", [f"{float(loss):.2f}" for loss in losses])
assert float(losses[-1]) < 2.0
