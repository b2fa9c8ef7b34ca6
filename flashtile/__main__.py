"""``python -m flashtile`` is the command ``flashtile``."""

from __future__ import annotations

import sys

from flashtile_command import main

if __name__ == "__main__":
    sys.exit(main())
