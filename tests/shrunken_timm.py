"""timm's models as parts of transformers' families, also where torchvision is missing."""

from __future__ import annotations

import importlib.util
from unittest import mock

import vision_models
from transformers.utils import import_utils


def offer_timm() -> bool:
    """Make transformers find timm; whether it is installed.

    Transformers asks for torchvision, too, of which timm's models use nothing. It looks once, so
    the answer is stored in place of the one that it found when it was imported.
    """
    if importlib.util.find_spec("timm") is None:
        return False
    vision_models.timm()
    with mock.patch.object(import_utils, "is_torchvision_available", return_value=True):
        import_utils.is_timm_available.cache_clear()
        return import_utils.is_timm_available()
