"""``flashtile xformers``: `flash_attn` for another package."""

from .flash_attn import add_action as add_arguments
from .flash_attn import run

__all__ = ["add_arguments", "run"]
