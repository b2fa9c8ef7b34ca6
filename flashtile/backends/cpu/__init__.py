"""The CPU backend: always available, with every option."""

from __future__ import annotations

from .launch import backward, forward, probabilities
from .plan import describe_plan, unsupported_reasons

HINTS = ()

__all__ = ["HINTS", "backward", "describe_plan", "forward", "probabilities", "unsupported_reasons"]
