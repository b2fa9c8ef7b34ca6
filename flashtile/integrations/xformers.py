"""Run code written for xFormers without changing it: ``import xformers.ops`` finds flashtile.

::

    from flashtile.integrations import xformers

    xformers.install()  # before the code looks for xformers

    with xformers.install():  # or inside a block only
        from xformers.ops import memory_efficient_attention

``flashtile xformers install`` does it for every process of an environment. `flash_attn_modules`
lists the modules; importing any other module of xformers raises an ImportError that names it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from .flash_attn import OWN_NAME, Installation
from .flash_attn_modules import XFORMERS, RealPackageError


def install() -> Installation:
    """Let ``import xformers`` find flashtile, from now on or in a ``with`` block.

    Returns:
        The installation: a context manager with a method `uninstall`, as that of
        `flash_attn.install`.

    Raises:
        RealPackageError: xFormers is installed or already imported, and it is not flashtile's.
    """
    module = sys.modules.get("xformers")
    spec = find_spec("xformers") if module is None else getattr(module, "__spec__", None)
    if (module or spec) and getattr(spec, "origin", None) != OWN_NAME:
        origin = getattr(spec, "origin", None) or "unknown file"
        raise RealPackageError(
            f"xformers: the real one is {'imported' if module else 'installed'} ({origin}); "
            "uninstall it first (pip uninstall xformers)"
        )
    return Installation((XFORMERS,))
