"""Formulas as SVG, drawn by ziamath when the site is built.

A reader needs no script, no network and no math font. MathML looks wrong without the font. MathJax
and KaTeX need a script, and a copy of it with its fonts for a site that works offline: no package
that is still maintained has one (2026-11: sphinx-mathjax-offline ended in 2022, sphinxcontrib-katex
has no fonts and draws in advance only with Node). This file is shorter than such a copy.
"""

from __future__ import annotations

from html import escape
from typing import Any

import docutils.nodes
import ziamath
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

SIZE = 17  # pixels, for text of 16

ziamath.config.svg2 = False  # outlines in every formula: readers disagree about shared symbols
ziamath.config.precision = 2  # digits of a pixel


def drawn(latex: str, *, inline: bool) -> str:
    """A formula as an SVG that has the colour and stands on the baseline of the text around it."""
    formula = ziamath.Latex(latex, inline=inline, size=SIZE, color="currentColor")
    below = formula.getyofst() - 1  # the margin that the SVG adds
    label = f'<svg role="img" aria-label="{escape(latex)}" style="vertical-align: {below:.2f}px"'
    return formula.svg().replace("<svg", label, 1)


def write_inline(writer: HTML5Translator, node: docutils.nodes.math) -> None:
    """Write $...$."""
    writer.body.append(drawn(node.astext(), inline=True))
    raise docutils.nodes.SkipNode


def write_display(writer: HTML5Translator, node: docutils.nodes.math_block) -> None:
    """Write $$...$$."""
    writer.body.append(f'<div class="math">{drawn(node.astext(), inline=False)}</div>')
    raise docutils.nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer `svg`."""
    app.add_html_math_renderer("svg", (write_inline, None), (write_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
