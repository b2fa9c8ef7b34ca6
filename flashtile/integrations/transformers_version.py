"""Check the version of transformers."""

from __future__ import annotations

import importlib

MINIMUM_VERSION = (5, 17)
_WANTED = ".".join(map(str, MINIMUM_VERSION))


class TransformersRequired(ImportError):
    """transformers is not installed, or too old for the integration."""


def requirement() -> TransformersRequired | None:
    """The error to raise if transformers is missing or too old; None if it is fine."""
    try:
        return too_old(importlib.import_module("transformers").__version__)
    except ImportError:
        return TransformersRequired(
            f"flashtile.integrations.transformers needs transformers {_WANTED} or newer: "
            f"pip install 'transformers>={_WANTED}'"
        )


def too_old(version: str) -> TransformersRequired | None:
    """The error to raise if this version of transformers is too old; else None."""
    if tuple(int(part) for part in version.split(".")[:2]) >= MINIMUM_VERSION:
        return None
    return TransformersRequired(
        f"transformers: got {version}, want {_WANTED} or newer: "
        f"pip install --upgrade 'transformers>={_WANTED}'"
    )
