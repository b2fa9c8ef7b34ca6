"""The code blocks of the manual run, and what they print appears below them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = """\
```python
x = 2
print(x + 1)
```

<!-- no-run -->
```python
raise RuntimeError
```

<!-- interpreter -->
```python
import no_such_package
```

```text
shown as it is
```

```python
def twice():
    return 2 * x
```
"""


@pytest.fixture
def snippets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("snippets")


def test_output_stands_below_its_block(snippets: ModuleType):
    printed = PAGE.replace("print(x + 1)\n```\n", "print(x + 1)\n```\n\n```text\n3\n```\n")
    assert snippets.with_output(PAGE, "learn/page") == printed


def test_a_page_is_a_module(snippets: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """Dynamo imports the module of a function to find its globals."""
    snippets.with_output(PAGE, "learn/page")
    module = importlib.import_module("page learn/page")
    monkeypatch.delitem(sys.modules, module.__name__)
    assert module.twice() == 4 and module.twice.__module__ == module.__name__


def test_an_error_names_page_and_line(snippets: ModuleType):
    with pytest.raises(ZeroDivisionError) as error:
        snippets.with_output("text\n\n```python\n1 / 0\n```\n", "page")
    last = error.traceback[-1]
    assert (Path(str(last.path)).name, last.lineno + 1) == ("page.md", 4)
