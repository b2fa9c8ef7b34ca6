"""Sphinx settings. `make docs` runs the examples, draws the pictures and tolerates no warning."""

from __future__ import annotations

import sys
from pathlib import Path

import docutils.nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))  # for the two modules beside this file

# E402: these can only be found after the path has been set.
import figures  # noqa: E402
import snippets  # noqa: E402

import flashtile  # noqa: E402

project = "flashtile"
author = "The flashtile authors"
copyright = "2026, the flashtile authors"
release = flashtile.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# The equations become MathML when the site is built, so pages need no script and no network.
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and dtypes, which say more
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"

html_theme = "furo"
html_title = f"flashtile {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def visit_inline_math(writer: HTML5Translator, node: docutils.nodes.math) -> None:
    """Write $...$ as MathML."""
    writer.body.append(tex2mathml(node.astext()))
    raise docutils.nodes.SkipNode


def visit_display_math(writer: HTML5Translator, node: docutils.nodes.math_block) -> None:
    """Write $$...$$ as MathML."""
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise docutils.nodes.SkipNode


def run_examples(app: Sphinx, page: str, source: list[str]) -> None:
    """Execute the code of a page as it is read."""
    source[0] = snippets.with_output(source[0], page)


def setup(app: Sphinx) -> None:
    """Draw the pictures, register the runner of examples and the writer of equations."""
    app.connect("source-read", run_examples)
    app.add_html_math_renderer("mathml", (visit_inline_math, None), (visit_display_math, None))
    figures.draw_all(DOCS / "figures")
