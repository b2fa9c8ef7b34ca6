# %% [markdown]
# # Fine-tune with TRL: SFTTrainer and packing
#
# `SFTTrainer` with `packing=True` puts several texts into each row of `max_length` tokens, and a
# batch of such rows into one row without padding. The `position_ids` say where each text begins,
# and flashtile keeps the texts apart. This example trains a tiny Llama with random weights, so it
# downloads nothing; with your model, `from_config` becomes
# `from_pretrained(path, attn_implementation=name)`. Needs Python 3.11 and
# `pip install ".[examples]"` in a copy of the repository.

# %%
import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from flashtile.integrations import transformers as flashtile_transformers
from flashtile.testing import assert_close

name = flashtile_transformers.register()

# %% [markdown]
# Each text has 7 to 39 words and an end, and repeats a pattern of four random words.

# %%
WORDS = ["every", "tile", "of", "a", "row", "has", "one", "maximum", "and", "its", "own", "sum"]
draw = random.Random(0)
texts = []
for _ in range(480):
    pattern = draw.sample(WORDS, 4)
    texts.append(" ".join((pattern * 10)[: draw.randint(7, 39)]))

vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *WORDS])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")

# %%
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
folder = tempfile.TemporaryDirectory()
trainer = SFTTrainer(
    AutoModelForCausalLM.from_config(config, attn_implementation=name),
    SFTConfig(
        output_dir=folder.name,
        packing=True,
        max_length=64,
        per_device_train_batch_size=4,
        num_train_epochs=4,
        learning_rate=3e-3,
        logging_steps=40,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
)

# %% [markdown]
# The trainer makes batches like this one: four rows of at most 64 tokens, one after the other.

# %%
batch = next(iter(trainer.get_train_dataloader()))
rows, positions = batch["input_ids"], batch["position_ids"]
starts = (positions[0] == 0).nonzero().flatten().tolist()
print(f"a batch: {len(starts)} texts, {tuple(rows.shape)} tokens, no padding")

# %% [markdown]
# Its loss and gradients equal those of the separate texts, with transformers' own attention
# ("eager"). In float64 only rounding errors may differ.

# %%
model = trainer.model
separate = rows.tensor_split(starts[1:], dim=1)


def packed_loss():
    """The mean loss of the batch as the model computes it."""
    return model(**batch).loss


def separate_loss():
    """The same from one text at a time: the mean over all tokens but the first of each text."""
    total = sum(model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) for ids in separate)
    return total / sum(ids.shape[1] - 1 for ids in separate)


def gradients(loss, implementation, dtype):
    """The gradient of each parameter, computed in one precision."""
    model.to(dtype).set_attn_implementation(implementation)
    return torch.autograd.grad(loss(), list(model.parameters()))


truth = gradients(separate_loss, "eager", torch.float64)
plain = gradients(separate_loss, "eager", torch.float32)
ours = gradients(packed_loss, name, torch.float64)
for (parameter, _), ours_, truth_, plain_ in zip(
    model.named_parameters(), ours, truth, plain, strict=True
):
    assert_close(parameter, ours_, truth_, plain_, dtype=torch.float32)
print(f"{len(ours)} gradients are those of the texts by themselves")

# %% [markdown]
# Now train. A model that cannot look back stays near log 12 = 2.48.

# %%
model.float()
trainer.train()
folder.cleanup()
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print("mean loss of 40 steps at a time:", [f"{loss:.2f}" for loss in losses])
assert losses[-1] < 2.0
