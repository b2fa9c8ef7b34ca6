"""Write the package as a folder that Hugging Face's ``kernels`` library loads.

    python .ci/kernel_hub.py FOLDER

``kernels.get_local_kernel(FOLDER)`` imports it, and a repository of the Kernel Hub has the same
files. They are the sources of the package, for every device, and ``metadata.json``, whose `id` is
the name under which `kernels` imports them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "flashtile"


def write(folder: Path, package: Path = PACKAGE) -> Path:
    """Write `package` below `folder`; return the folder that is imported."""
    variant = folder / "build" / "torch-universal"
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(package, variant, ignore=shutil.ignore_patterns("__pycache__"))
    content = hashlib.sha256()
    for file in sorted(variant.rglob("*.py")):
        content.update(file.read_bytes())
    release = re.search(r'__version__ = "(\d+)', (variant / "__init__.py").read_text())
    metadata = {
        "name": "flashtile",
        "id": f"_flashtile_{content.hexdigest()[:12]}",
        "version": int(release[1]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},  # the one that every machine has
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
