"""Writes tests/public_api.txt: every public name with its signature, for comparison.

``python tests/public_api.py`` rewrites it; with ``--check`` it prints what would change. Public
modules are those that docs/api shows; the registered operators, which exported programs name,
follow them. A path that is in the file stays there as long as it leads to something, wherever that
is defined. Lines of what has no docstring say so.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin, is_typeddict

import torch

import flashtile

TESTS = Path(__file__).parent
SNAPSHOT = TESTS / "public_api.txt"
PAGES = sorted((TESTS.parent / "docs" / "api").glob("*.md"))
# What flash_attn's users import from any of its modules, although some of it is private.
FLASH_ATTN = ("flash_attn", "_flash_attn", "_wrapped_flash_attn")
METHODS = (classmethod, staticmethod, property)


def public_modules() -> list[str]:
    """The modules that the pages of the API show."""
    shown = "\n".join(page.read_text() for page in PAGES)
    named = re.findall(r"^\.\. (?:automodule|currentmodule):: (\S+)", shown, re.M)
    named += re.findall(r"^\.\. auto\w+:: (flashtile\S*)\.\w+$", shown, re.M)
    return sorted(set(named))


def public_names(module: ModuleType) -> Iterator[str]:
    """What a module lists in `__all__`, or else the functions and classes that it defines; and
    flash_attn's functions.
    """
    for name, value in vars(module).items():
        if hasattr(module, "__all__"):
            is_public = name in module.__all__
        elif inspect.isfunction(value) or inspect.isclass(value):
            is_public = value.__module__ == module.__name__ and not name.startswith("_")
        else:
            is_public = False
        if is_public or (name.startswith(FLASH_ATTN) and callable(value)):
            yield name


def members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A public object under its path, and the methods and properties of a class; its fields are in
    its signature.
    """
    yield name, value
    if inspect.isclass(value):
        ours = [base for base in value.__mro__ if base.__module__.startswith(flashtile.__name__)]
        for attribute in {attribute for base in ours for attribute in vars(base)}:
            member = inspect.getattr_static(value, attribute)
            if not attribute.startswith("_") and (
                inspect.isfunction(member) or isinstance(member, METHODS)
            ):
                yield f"{name}.{attribute}", member


def line(path: str, value: Any) -> str:
    """One line of the file."""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if isinstance(value, property):
        text, value = f"{path}: property", value.fget
    elif is_typeddict(value):
        text = f"{path}: {', '.join(value.__annotations__)}"
    elif callable(value) and get_origin(value) is None:
        text = path + signature(value)
    else:
        return f"{path}: constant"
    return text if value.__doc__ else f"{text}  # no docstring"


def signature(value: Any) -> str:
    """The parameters and the result of a function or class, without quotes and addresses."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    return re.sub(r"(?<=: |> )'([^']*)'", r"\1", text)


def operators() -> dict[str, str]:
    """The lines of the registered operators by their paths."""
    prefix, found = "flashtile::", {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(prefix):
            path = "torch.ops.flashtile." + name.removeprefix(prefix)
            schema = str(torch._C._get_schema(*name.partition(".")[::2]))
            found[path] = path + schema[schema.index("(") :]
    return found


def resolved(path: str) -> Any:
    """The object at a path.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, name = path.rpartition(".")
    if module in public_modules():
        return getattr(importlib.import_module(module), name)
    if not module:
        raise ImportError(f"{name} is no public module")
    return inspect.getattr_static(resolved(module), name)


def recorded() -> dict[str, str]:
    """The lines of the file by their paths."""
    if not SNAPSHOT.exists():
        return {}
    lines = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    return {re.split(r"[(: ]", entry)[0]: entry for entry in lines}


def current() -> dict[str, str]:
    """The lines that the file should have."""
    found = {}
    for name in public_modules():
        module = importlib.import_module(name)
        for own in public_names(module):
            for path, value in members(f"{name}.{own}", getattr(module, own)):
                found[path] = line(path, value)
    found |= operators()
    for path in recorded().keys() - found.keys():
        try:
            found[path] = line(path, resolved(path))
        except (ImportError, AttributeError):
            continue
    return {path: found[path] for path in sorted(found)}


def text(lines: dict[str, str]) -> list[str]:
    """Lines of a file."""
    return [f"{entry}\n" for entry in lines.values()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="print what would change")
    is_check = parser.parse_args().check
    old, new = text(recorded()), text(current())
    if is_check:
        print(*difflib.unified_diff(old, new, "recorded", "current", n=0), sep="", end="")
        sys.exit(old != new)
    SNAPSHOT.write_text("".join(new), encoding="utf-8")
