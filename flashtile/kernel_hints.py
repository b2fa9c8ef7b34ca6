"""Arguments of flash_attn that select a kernel or what is kept for the backward.

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
        _logger.info("%s: ignored %s, which selects a kernel of flash_attn", owner, given)
