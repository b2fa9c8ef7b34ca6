"""``flashtile xformers``: `flash_attn` for another package."""

from __future__ import annotations

import argparse

from ..integrations.flash_attn_modules import XFORMERS
from .flash_attn import act, add_action

add_arguments = add_action


def run(args: argparse.Namespace) -> int:
    """Do it, and print which files were written or removed."""
    return act(args, XFORMERS, {})
