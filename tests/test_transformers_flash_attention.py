"""Transformers' own flash_attention_2, 3 and 4 with flashtile instead of flash_attn, on any device.

The program runs in a new process, because `install` changes how transformers is imported.
"""

from __future__ import annotations

from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

IMPORTED_FIRST = "import transformers, transformers.modeling_utils\n"
INSTALL = """
from flashtile.integrations import flash_attn, xformers

installed = flash_attn.install()
xformers.install()  # which has no name of transformers
"""
EQUAL = """
import torch
from tiny_models import assert_same, build, padding, run, tokens

torch.set_num_threads(1)

def compare(model, name, real=None, **inputs):
    want = run(model, "eager", **inputs)
    model.set_attn_implementation(name)
    assert_same(model(**inputs).logits, want, real)
    assert model.config._attn_implementation == name

def check(name):
    model = build("llama")
    compare(model, name, input_ids=tokens())
    for side in ("left", "right"):
        compare(model, name, padding(side), input_ids=tokens(), attention_mask=padding(side))
    for family in ("mistral", "gpt_oss"):  # a window; sinks
        compare(
            build(family), name, padding("left"), input_ids=tokens(), attention_mask=padding("left")
        )
    positions = torch.cat([torch.arange(n) for n in (5, 1, 10, 8)])[None]
    compare(model, name, input_ids=tokens(1), position_ids=positions, use_cache=False)
    written = []
    for chosen in ("eager", name):
        model.set_attn_implementation(chosen)
        written.append(
            model.generate(
                tokens(), attention_mask=padding("left"), max_new_tokens=8, do_sample=False
            )
        )
    assert torch.equal(*written)

with torch.no_grad():
    for version in (2, 3, 4):
        check(f"flash_attention_{version}")
"""
CLOSED = """
from tiny_models import build

model = build("llama")
model.set_attn_implementation("flash_attention_2")
installed.uninstall()
try:
    build("llama").set_attn_implementation("flash_attention_2")
except ImportError:
    pass
else:
    raise AssertionError("transformers still takes the name")
with flash_attn.install():  # again
    build("llama").set_attn_implementation("flash_attention_3")

import warnings
import transformers.modeling_flash_attention_utils as loader

del loader._lazy_imports
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    flash_attn.install().uninstall()
assert "its loader has changed" in str(caught[0].message), caught
"""


HOOK = "from flashtile.integrations import flash_attn_hook; flash_attn_hook.start('flash_attn')\n"
OPEN = """
from transformers import AttentionInterface  # asks for flash_attn in the middle of modeling_utils
from tiny_models import build, tokens

model = build("llama")
model.set_attn_implementation("flash_attention_2")
model(tokens())
"""


def run_program(program: str) -> None:
    done = processes.python("-c", program, folder=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


def test_logits_and_generation_are_as_in_eager_attention():
    run_program(INSTALL + EQUAL)


def test_transformers_itself_may_ask_for_flash_attn_first():
    run_program(HOOK + OPEN)


def test_names_open_in_an_imported_transformers_and_close_again():
    run_program(IMPORTED_FIRST + INSTALL + CLOSED)
