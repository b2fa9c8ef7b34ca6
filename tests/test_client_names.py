"""The names of flash_attn that public repositories import (`client_names.json`) are there under
`install()`, or it is said here why not.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import pytest
from client_names import NAMES

from flashtile.integrations import flash_attn

pytestmark = pytest.mark.slow

CLIENTS = json.loads(NAMES.read_text())
# What stays missing, and why. Repositories that need such a name have copied the code around it.
COMPILED = "a compiled library; flashtile has the functions of flash_attn that call it"
KERNEL = "the class of a kernel"
NOT_THERE = "no release has it"
REASONS = {
    "dropout_layer_norm": COMPILED,
    "flash_attn.cute.flash_fwd_sm100_fp4:FlashAttentionForwardSm100": KERNEL,
    "flash_attn.cute:flash_attn_with_kvcache": NOT_THERE,
    "flash_attn.ops.layer_norm:DropoutAddLayerNormFn": KERNEL,
    "flash_attn.ops.layer_norm:DropoutAddLayerNormParallelResidualFn": KERNEL,
    "flash_attn.ops.layer_norm:DropoutAddLayerNormSubsetFn": KERNEL,
    "flash_attn_cuda": COMPILED,
    "fused_dense_lib": COMPILED,
    "rotary_emb": COMPILED,
    "xentropy_cuda_lib": COMPILED,
}
WHOLE, BLOCKED = 86, 3  # of the repositories: find every name; have a file that cannot be imported


def find(name: str) -> None:
    """Import what a name of the file stands for."""
    module, _, attribute = name.partition(":")
    if attribute:
        exec(f"from {module} import {attribute}", {})
        return
    first, *others = module.split(".")
    found = importlib.import_module(first)
    for path in others:
        first = f"{first}.{path}"
        found = getattr(found, path, None) or importlib.import_module(first)


@pytest.fixture(scope="module")
def missing():
    """The error of each name that is missing."""
    names = {name for x in CLIENTS.values() for name in (*x["needed"], *x["optional"])}
    errors = {}
    with pytest.MonkeyPatch.context() as patch, flash_attn.install():
        if importlib.util.find_spec("einops") is None:  # who installs flash-attn has it
            einops = types.ModuleType("einops")
            vars(einops).update(rearrange=len, repeat=len)
            patch.setitem(sys.modules, "einops", einops)
        for name in sorted(names):
            try:
                find(name)
            except ImportError as error:
                errors[name] = str(error)
    return errors


def test_what_is_missing_has_a_reason(missing):
    assert missing.keys() == REASONS.keys()
    for name, error in missing.items():
        assert error.startswith("flashtile has no ")
        assert " has; use " in error or name.startswith("flash_attn.cute")


def test_most_repositories_find_every_name(missing):
    """A name that no release of FlashAttention has is not counted."""
    lost = {name for name in missing if REASONS[name] != NOT_THERE}
    needed = [repository for repository, x in CLIENTS.items() if lost & {*x["needed"]}]
    optional = [repository for repository, x in CLIENTS.items() if lost & {*x["optional"]}]
    assert len(CLIENTS) - len({*needed, *optional}) == WHOLE
    assert len(needed) == BLOCKED
