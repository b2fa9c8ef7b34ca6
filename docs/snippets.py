"""Runs the examples of the documentation, and puts what they print below them.

The Python blocks of a page run in order and share their names. A block that raises ends the build,
so a page cannot show a call that does not work, nor a result that is out of date.

Some blocks need what a documentation build does not have, and are marked in the line before: those
with `no-run`, and those with `interpreter`, which need Triton. A test runs the latter in Triton's
interpreter and compares what they print with the block of text that the page has below them.
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from types import ModuleType

BLOCK = re.compile(
    r"(?:<!-- (?P<mark>no-run|interpreter) -->\n)?^```python\n(?P<code>.*?)^```\n", re.M | re.S
)


def with_output(text: str, page: str) -> str:
    """`text`, with a block of output after each Python block that prints.

    An error's traceback names the `page` and its line.
    """
    module = ModuleType(f"page {page}")
    sys.modules[module.__name__] = module  # Dynamo looks for the globals of a function there
    names = vars(module)

    def run(block: re.Match[str]) -> str:
        if block["mark"]:
            return block[0]
        printed = io.StringIO()
        first_line = text.count("\n", 0, block.start("code"))
        with redirect_stdout(printed):
            exec(compile("\n" * first_line + block["code"], f"{page}.md", "exec"), names)
        output = printed.getvalue()
        return block[0] + (f"\n```text\n{output}```\n" if output else "")

    return BLOCK.sub(run, text)
