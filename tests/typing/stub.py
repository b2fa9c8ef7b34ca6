"""Writes flashtile/__init__.pyi: what type checkers and editors see of ``import flashtile``.

``python tests/typing/stub.py`` rewrites it; with ``--check`` it only says whether it is current.
The signatures are those of the functions themselves. The stub adds overloads for the arguments that
decide how many results come back, and spells out ``**extras``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any

import flashtile
from flashtile import flash_attn_interface
from flashtile.call.options import type_text

STUB = Path(flashtile.__file__).with_suffix(".pyi")

HEADER = '''\
"""Written by tests/typing/stub.py from the signatures of the functions; do not edit."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

'''

# Arguments that decide how many results come back: (name, tensors returned when True).
LSE, SOFTMAX_LSE, PROBS = ("return_lse", 2), ("return_softmax_lse", 2), ("return_attn_probs", 3)
STATS, SOME_STATS = "return_stats", "Sequence[str]"  # one more result, behind the others
TENSORS = {1: "Tensor", 2: "tuple[Tensor, Tensor]", 3: "tuple[Tensor, Tensor, Tensor]"}


def parameters(function: Any) -> list[Parameter]:
    """The parameters of a function, with the options of ``**extras`` as keywords of their own."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not Parameter.VAR_KEYWORD:
            found.append(parameter)
        elif parameter.annotation.startswith("Unpack["):
            extras = getattr(flash_attn_interface, parameter.annotation[len("Unpack[") : -1])
            for name, annotation in extras.__annotations__.items():
                text = type_text(annotation)
                found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=text))
    return found


def with_flags(given: list[Parameter], flags: dict[str, str]) -> list[Parameter]:
    """The parameters with other types for `flags`.

    A flag whose type excludes its default becomes a keyword that must be given, and so all that
    follow it become keywords.
    """
    changed: list[Parameter] = []
    for parameter in given:
        annotation = flags.get(parameter.name)
        if annotation:
            parameter = parameter.replace(annotation=annotation)
        if annotation in (f"Literal[{parameter.default is not True}]", SOME_STATS):
            parameter = parameter.replace(kind=Parameter.KEYWORD_ONLY, default=Parameter.empty)
        if changed and changed[-1].kind is Parameter.KEYWORD_ONLY:
            parameter = parameter.replace(kind=Parameter.KEYWORD_ONLY)
        changed.append(parameter)
    return changed


def written(name: str, given: list[Parameter], result: str) -> str:
    """One overload."""
    lines = []
    for parameter in given:
        keyword = parameter.kind is Parameter.KEYWORD_ONLY
        if keyword and "    *," not in lines:
            lines.append("    *,")
        default = "..." if parameter.default is ... else repr(parameter.default).replace("'", '"')
        end = "" if parameter.default is Parameter.empty else f" = {default}"
        lines.append(f"    {parameter.name}: {parameter.annotation}{end},")
    return "\n".join(["@overload", f"def {name}(", *lines, f") -> {result}: ..."])


def overloads(name: str) -> Iterator[str]:
    """A function once for each number of results, and once for flags only known when it runs."""
    given = parameters(getattr(flashtile, name))
    names = [parameter.name for parameter in given]
    flags = [(flag, count) for flag, count in (LSE, SOFTMAX_LSE, PROBS) if flag in names]
    off = {flag: "Literal[False]" for flag, _ in flags}
    if STATS in names:
        off[STATS] = "None"
    yield written(name, with_flags(given, off), TENSORS[1])
    for flag, count in flags:
        # The probabilities come with the log-sum-exp, whether it was asked for or not.
        others = off | dict.fromkeys(dict(flags), "bool") if flag == PROBS[0] else off
        types = {**others, flag: "Literal[True]"}
        yield written(name, with_flags(given, types), TENSORS[count])
    if STATS in names:
        yield written(name, with_flags(given, {STATS: SOME_STATS}), "tuple[Any, ...]")
    counts = sorted({1, *(count for _, count in flags)})
    yield written(name, given, " | ".join(TENSORS[count] for count in counts))


def stub() -> str:
    """The text of the file."""
    imported, functions = [], []
    for name in flashtile.__all__:
        thing = getattr(flashtile, name)
        if inspect.isfunction(thing) and {LSE[0], SOFTMAX_LSE[0], PROBS[0]} & {
            parameter.name for parameter in parameters(thing)
        }:
            functions += overloads(name)
        else:
            imported.append(f"from {relative(thing)} import {name} as {name}")
    lines = [f"from . import {name} as {name}" for name in flashtile._SUBMODULES]
    lines += sorted(
        [
            *imported,
            "from .call.dispatch import BackendName",
            "from .call.options import WindowSize",
            "from .score_mod import ScoreFunction",
        ]
    )
    names = "".join(f'    "{name}",\n' for name in flashtile.__all__)
    body = "\n".join(lines) + f"\n\n__version__: str\n\n__all__ = [\n{names}]\n\n"
    return HEADER + body + "\n".join(functions) + "\n"


def relative(thing: Any) -> str:
    """The module of a class or function, as seen from the package."""
    return "." + thing.__module__.partition(".")[2]


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(STUB.read_text(encoding="utf-8") != stub())
    STUB.write_text(stub(), encoding="utf-8")
