"""Arguments of flash_attn and xFormers that select a kernel or what is kept for the backward.

They change no result, and nothing here reads them, so they are accepted and named in the log
``flashtile.hints``::

    logging.getLogger("flashtile.hints").setLevel(logging.INFO)
"""

from __future__ import annotations

import logging

_logger = logging.getLogger("flashtile.hints")


def ignored(owner: str, **arguments: object) -> None:
    """Name the arguments that were given, that is all but False, 0 and None."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value)
    if given:
        _logger.info("%s: ignored %s, which selects a kernel", owner, given)


class AttentionOpBase:
    """A kernel of xFormers, which ``op=`` selects."""


class AttentionFwOpBase(AttentionOpBase):
    """Of the forward."""


class AttentionBwOpBase(AttentionOpBase):
    """Of the backward."""


OPERATOR_BASES = {
    base.__name__: base for base in (AttentionOpBase, AttentionFwOpBase, AttentionBwOpBase)
}
_FAMILIES = ("ck", "ck_splitk", "cutlass", "cutlass_blackwell", "flash", "flash3", "triton_splitk")
OPERATORS = {
    family: {
        "FwOp": type(f"{family}.FwOp", (AttentionFwOpBase,), {}),
        "BwOp": type(f"{family}.BwOp", (AttentionBwOpBase,), {}),
    }
    for family in _FAMILIES
}
_PAIRS = {
    "Ck": ("ck", "ck"),
    "Cutlass": ("cutlass", "cutlass"),
    "CutlassBlackwell": ("cutlass_blackwell", "cutlass_blackwell"),
    "CutlassFwdFlashBw": ("cutlass", "flash"),
    "FlashAttention": ("flash", "flash"),
    "SplitKCk": ("ck_splitk", "ck"),
}
OPERATOR_PAIRS = {
    "AttentionOp": tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None],
    **{
        f"MemoryEfficientAttention{name}Op": (OPERATORS[fw]["FwOp"], OPERATORS[bw]["BwOp"])
        for name, (fw, bw) in _PAIRS.items()
    },
}
