"""How an error is planted: a text in one function of the package becomes another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Planted(NamedTuple):
    name: str
    symbol: str  # "function", "Class" or "Class.method"
    right: str
    wrong: str
    tests: str  # arguments of pytest
    interpreted: bool = False  # by Triton's interpreter


def definitions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions and classes of a file, with their names in the classes around them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield outer + node.name, node
            inside = f"{outer}{node.name}." if isinstance(node, ast.ClassDef) else outer
            yield from definitions(node, inside)
        else:
            yield from definitions(node, outer)


@cache
def sources(root: Path) -> dict[Path, str]:
    """The files of a tree's package, without an error."""
    files = sorted((root / "flashtile").rglob("*.py"))
    return {path: path.read_text(encoding="utf-8") for path in files}


def planted_source(error: Planted, root: Path = ROOT) -> tuple[Path, str]:
    """The file that the error changes, and its text with the error."""
    places = []
    for path, text in sources(root).items():
        if error.right not in text:
            continue
        lines = text.splitlines(keepends=True)
        for name, node in definitions(ast.parse(text)):
            body = "".join(lines[node.lineno - 1 : node.end_lineno])
            if name == error.symbol and error.right in body:
                places.append((path, text, sum(map(len, lines[: node.lineno - 1])), body))
    if len(places) != 1 or places[0][3].count(error.right) != 1:
        found = [
            (str(path.relative_to(root)), body.count(error.right)) for path, _, _, body in places
        ]
        raise LookupError(
            f"{error.name}: {error.right!r} must occur once in one {error.symbol}: {found}"
        )
    path, text, start, body = places[0]
    wrong = body.replace(error.right, error.wrong)
    return path, text[:start] + wrong + text[start + len(body) :]
