"""Pictures whose text would be too small on a phone get a box that CSS lets scroll there."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

WIDEST = 1000  # pixels at 144 dpi; such a picture's text of 9 points has 7 pixels on a phone


def width(file: Path) -> float:
    """Of a PNG in pixels, of Matplotlib's SVG as the PNG would be."""
    start = file.read_bytes()[:2000]
    if points := re.search(rb'width="([\d.]+)pt"', start):
        return float(points[1]) * 144 / 72
    return struct.unpack(">I", start[16:20])[0]


def box(app: Sphinx, page: nodes.document, name: str) -> None:
    """Put wide pictures into boxes."""
    for image in list(page.findall(nodes.image)):
        if width(Path(app.srcdir, image["uri"])) > WIDEST:
            inside = image.parent if isinstance(image.parent, nodes.paragraph) else image
            inside.replace_self(nodes.container("", image.deepcopy(), classes=["wide-picture"]))


def setup(app: Sphinx) -> None:
    """Connect the function above."""
    app.connect("doctree-resolved", box)
