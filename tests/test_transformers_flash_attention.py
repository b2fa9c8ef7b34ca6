"""Transformers' own flash_attention_2 and flash_attention_3, with flashtile instead of flash_attn.

Transformers requires a CUDA device before it uses flash_attn, but its calls also run on a CPU. So
the model runs in a new process, where `torch.cuda` reports a device during that check.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

PROGRAM = """
from unittest import mock

import torch

from flashtile.integrations import flash_attn

flash_attn.install()

import transformers.modeling_flash_attention_utils as loader
from transformers.utils import import_utils

from tiny_models import assert_same, build, padding, run, tokens

torch.set_num_threads(1)
MODULES = {
    "flash_attention_2": "flashtile.flash_attn_interface.",
    "flash_attention_3": "flashtile.flash_attn_3_interface",
}


def choose(model, name):
    device = {"is_available": lambda: True, "get_device_capability": lambda device=None: (9, 0)}
    with mock.patch.multiple(torch.cuda, **device):
        for question in dir(import_utils):  # the answers it gave before, when it was imported
            getattr(getattr(import_utils, question), "cache_clear", lambda: None)()
        model.set_attn_implementation(name)
    return model


def check(name):
    def compare(model, real=None, **inputs):
        want = run(model, "eager", **inputs)
        got = choose(model, name)(**inputs).logits
        assert_same(got, want, real)

    model = build("llama")
    compare(model, input_ids=tokens())
    for side in ("left", "right"):
        compare(model, padding(side), input_ids=tokens(), attention_mask=padding(side))
    compare(build("mistral"), padding("left"), input_ids=tokens(), attention_mask=padding("left"))
    positions = torch.cat([torch.arange(n) for n in (5, 1, 10, 8)])[None]
    compare(model, input_ids=tokens(1), position_ids=positions, use_cache=False)
    written = []
    for select in (lambda: model.set_attn_implementation("eager"), lambda: choose(model, name)):
        select()
        written.append(
            model.generate(
                tokens(), attention_mask=padding("left"), max_new_tokens=8, do_sample=False
            )
        )
    assert torch.equal(*written)
    functions = loader._flash_fn, loader._flash_varlen_fn
    assert all(f.__module__.startswith(MODULES[name]) for f in functions), functions


with torch.no_grad():
    for name in MODULES:
        check(name)
"""


def test_logits_and_generation_are_as_in_eager_attention():
    tests = Path(__file__).parent
    program = f"import sys; sys.path.insert(0, {str(tests)!r})\n{PROGRAM}"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tests.parent
    )
    assert run.returncode == 0, run.stderr
