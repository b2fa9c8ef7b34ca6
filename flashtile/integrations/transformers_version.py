"""Which transformers the integration needs, in one sentence."""

from __future__ import annotations

import importlib

MINIMUM_VERSION = (5, 17)
_WANTED = ".".join(map(str, MINIMUM_VERSION))


class TransformersRequired(ImportError):
    """transformers is absent, or older than the integration needs."""


def requirement() -> TransformersRequired | None:
    """What is wrong with the transformers that ``import`` finds; None if nothing is."""
    try:
        return too_old(importlib.import_module("transformers").__version__)
    except ImportError:
        return TransformersRequired(
            f"flashtile.integrations.transformers needs transformers {_WANTED} or newer: "
            f"pip install 'transformers>={_WANTED}'"
        )


def too_old(version: str) -> TransformersRequired | None:
    """What is wrong with that version of transformers; None if nothing is."""
    if tuple(int(part) for part in version.split(".")[:2]) >= MINIMUM_VERSION:
        return None
    return TransformersRequired(
        f"transformers: got {version}, want {_WANTED} or newer: "
        f"pip install --upgrade 'transformers>={_WANTED}'"
    )
