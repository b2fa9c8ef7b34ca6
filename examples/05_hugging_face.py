# %% [markdown]
# # Hugging Face transformers
#
# One call registers flashtile, and `attn_implementation` selects it. This example uses a tiny
# Gemma 2 with random weights, so it downloads nothing. Its layers alternate between a sliding
# window and full attention, and cap their scores (softcap). With a real model, `from_pretrained`
# takes the same argument. Needs `pip install "flashtile[transformers]"`.

# %%
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from flashtile.integrations import transformers as flashtile_transformers
from flashtile.testing import assert_close

name = flashtile_transformers.register()
print("attn_implementation =", name)

# %%
torch.manual_seed(0)
config = Gemma2Config(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    query_pre_attn_scalar=16,
    sliding_window=7,
    attn_logit_softcapping=5.0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()

# %% [markdown]
# A batch of two prompts, the shorter one padded on the left. The logits are those of transformers'
# own attention ("eager") on each prompt by itself.

# %%
prompts = [torch.randint(3, 97, (1, 20)), torch.randint(3, 97, (1, 12))]
tokens = torch.cat([torch.nn.functional.pad(x, (20 - x.shape[1], 0)) for x in prompts])
attention_mask = (tokens != 0).long()


@torch.no_grad()
def eager_logits(dtype):
    """One row for each token of both prompts, computed in one precision."""
    model.to(dtype).set_attn_implementation("eager")
    return torch.cat([model(prompt).logits[0] for prompt in prompts])


plain, truth = eager_logits(torch.float32), eager_logits(torch.float64)
model.float().set_attn_implementation(name)
with torch.no_grad():
    ours = model(tokens, attention_mask=attention_mask).logits[attention_mask.bool()]
assert_close("logits", ours, truth, plain)
print(f"largest error {(ours - truth).abs().max():.1e}, eager {(plain - truth).abs().max():.1e}")

# %% [markdown]
# Generation uses the model's cache as usual.

# %%
texts = {}
for implementation in (name, "eager"):
    model.set_attn_implementation(implementation)
    texts[implementation] = model.generate(
        tokens, attention_mask=attention_mask, max_new_tokens=12, do_sample=False
    )
    print(f"{implementation:>9}:", texts[implementation][:, 20:].tolist())
assert torch.equal(texts[name], texts["eager"])
