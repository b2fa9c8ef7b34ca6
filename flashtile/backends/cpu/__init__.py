"""The CPU backend: always there, every option, exact."""

from __future__ import annotations

from .launch import backward, forward, probabilities
from .plan import describe_plan, unsupported_reasons

__all__ = ["backward", "describe_plan", "forward", "probabilities", "unsupported_reasons"]
