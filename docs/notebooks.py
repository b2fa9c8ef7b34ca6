"""The examples as pages of the manual and as Jupyter notebooks: `python docs/notebooks.py`.

An example is a script whose cells begin with `# %%`. Editors run it cell by cell, Python runs it as
a whole, and this module writes docs/examples/*.md, whose code the build executes, and
docs/examples/*.ipynb, which the pages offer for download.

jupytext does the work. MyST-NB would start a Jupyter kernel, and import PyTorch, for each page, and
reads only scripts inside docs; sphinx-gallery takes the text of cells as reStructuredText.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jupytext

ROOT = Path(__file__).resolve().parents[1]


def page(cells: list[dict[str, str]], name: str) -> str:
    """The cells of an example as Markdown, with its links below the title."""
    parts = [
        cell["source"] if cell["cell_type"] == "markdown" else f"```python\n{cell['source']}\n```"
        for cell in cells
    ]
    links = f"`examples/{name}.py`, also {{download}}`as a notebook <{name}.ipynb>`."
    title, newline, text = parts[0].partition("\n")
    return "\n\n".join([title, links, text.lstrip(newline), *parts[1:]]) + "\n"


def write_all(folder: Path) -> None:
    """One page and one notebook for each numbered example."""
    shutil.rmtree(folder, ignore_errors=True)  # examples may have other names now
    folder.mkdir()
    for script in sorted((ROOT / "examples").glob("[0-9][0-9]_*.py")):
        notebook = jupytext.read(script)
        (folder / f"{script.stem}.md").write_text(page(notebook.cells, script.stem), "utf-8")
        jupytext.write(notebook, folder / f"{script.stem}.ipynb")


if __name__ == "__main__":
    write_all(ROOT / "docs" / "examples")
