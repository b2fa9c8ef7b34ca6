"""Sphinx settings. `make docs` runs the examples, draws the pictures and tolerates no warning."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / ".ci")]  # for the modules there

import address
import context_figures
import figures
import gallery
import gpu_figures
import lesson_figures
import notebooks
import plan_figures
import snippets
import span_figures
import timeline_figures
import traces

import flashtile

project = "flashtile"
author = "The flashtile authors"
copyright = "2026, the flashtile authors"
release = flashtile.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "formulas",
    "wide_pictures",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "svg"

# Links into other manuals. The build reads the few names it needs from committed inventories (text,
# Sphinx's version 1), so it needs no network and no link appears or vanishes with a server.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.txt"),
}
copybutton_exclude = ".linenos, .gp, .go"  # neither the prompt of a console nor its output

autodoc_member_order = "bysource"
autodoc_typehints = "signature"  # the docstrings add shapes, dtypes and units
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"

html_theme = "furo"
if address.current():  # a link from each page to its source
    html_theme_options = {
        "source_repository": address.current(),
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_title = f"flashtile {release}"
html_static_path = ["_static", "traces"]
html_css_files = ["pages.css"]
html_show_sphinx = False
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"


def run_examples(app: Sphinx, page: str, source: list[str]) -> None:
    """Execute the code of a page as it is read."""
    source[0] = snippets.with_output(source[0], page)


# What signatures say in the code, and what readers can look up.
READABLE = {
    r"\bBackendName\b": "Literal['cpu', 'hopper', 'triton']",
    r"\bResult\b": "Tensor | tuple[Tensor, ...]",
    r"\bWindowSize\b": "Sequence[int | None] | None",
    r",\s*\*\*unknown: [~\w.]*Never": "",  # which only gives unknown keywords a better message
    r"<(?:built-in )?function (\w+)>": r"\1",
    r"<class '(?:\w+\.)*(\w+)'>": r"\1",
}


def readable(
    app: Sphinx,
    kind: str,
    name: str,
    object_: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Spell out the aliases of types, and show functions as defaults by their names."""
    for pattern, text in READABLE.items():
        signature = signature and re.sub(pattern, text, signature)
        returns = returns and re.sub(pattern, text, returns)
    return signature, returns


def skip_unexplained(
    app: Sphinx, kind: str, name: str, object_: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of a tuple: its signature has their types, its text explains them."""
    is_field = (getattr(object_, "__doc__", None) or "").startswith("Alias for field number")
    return True if is_field else None


def setup(app: Sphinx) -> None:
    """Connect the functions above; write the pictures, the examples' pages and the traces."""
    app.connect("source-read", run_examples)
    app.connect("autodoc-process-signature", readable)
    app.connect("autodoc-skip-member", skip_unexplained)
    figures.draw_all(DOCS / "figures")
    drawn = (span_figures, lesson_figures, gpu_figures, context_figures, plan_figures, gallery)
    for page in drawn:
        figures.draw_all(DOCS / "figures", page.FIGURES)
    timeline_figures.write_all(DOCS / "figures")
    notebooks.write_all(DOCS / "examples")
    traces.write_all(DOCS / "traces")
