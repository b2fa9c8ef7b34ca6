"""help() of FlashAttention-2's functions: every argument is described, and the same everywhere."""

from __future__ import annotations

import inspect
import re

import pytest

import flashtile

NAMES = [name for name in flashtile.__all__ if re.fullmatch(r"flash_attn_\w*(func|kvcache)", name)]


def described(name: str) -> dict[str, str]:
    """The text of each argument in a docstring."""
    text = inspect.getdoc(getattr(flashtile, name)) or ""
    arguments = text.split("Args:\n")[1].split("\nReturns:")[0]
    found = {}
    for entry in re.split(r"\n(?=    \w)", arguments.rstrip()):
        names, _, meaning = entry.strip().partition(":")
        found.update(dict.fromkeys(names.split(", "), " ".join(meaning.split())))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_described(name):
    assert set(inspect.signature(getattr(flashtile, name)).parameters) == set(described(name))
    for section in ("Returns:", "Raises:"):
        assert section in (getattr(flashtile, name).__doc__ or "")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["softmax_scale", "causal", "window_size", "softcap"])
def test_an_option_is_described_alike_everywhere(name, option):
    assert described(name)[option] == described("flash_attn_func")[option]
