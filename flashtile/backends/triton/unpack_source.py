"""Write how the rows of a cache format are unpacked as the source of Triton functions.

Pure Python. Where two elements share a byte, one function makes the tile of the even elements and
that of the odd ones, so that every byte is loaded once and neighbouring threads load neighbouring
bytes. `cache.load_unpacked` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...gpu.score_source import TYPES, Untranslatable, Writer, module_of
from ...lru import memoised
from ...score_mod.program import ELEMENT, INTEGERS, Line, Name, Program, parsed
from ...score_mod.rows import specialised


@memoised(256)
def unpack_source(
    text: str, first: int, head_dim: int, pair: int, dtype: torch.dtype, padded: int
) -> str:
    """The source of a module with the function ``score`` of the index ``d`` (1, padded), whether it
    is ``inside`` of the row, and pointers to rows (BLOCK, 1).

    It returns the elements `first` to `first` + `head_dim` of each row in `dtype`, a tile
    (BLOCK, padded), or with a `pair` of 2 the tiles of the even and the odd elements.

    Raises:
        Untranslatable: the kernels do not have an operation or a dtype.
    """
    parts = (range(first + n, first + head_dim, pair) for n in range(pair))
    lines, results = _merged(specialised(parsed(text), part) for part in parts)
    is_padded = padded * pair != head_dim
    writer = _RowWriter(Program(tuple(lines), results[-1]), is_padded)
    tiles = (writer.tile(x, dtype) for x in results)
    statements = writer.statements()
    return module_of(
        [*statements, f"return {', '.join(tiles)}"], (ELEMENT, "inside", "integers_ptr")
    )


def untranslatable_unpack(text: str) -> str:
    """What of a format the kernels do not have; "" if they have all."""
    try:
        unpack_source(text, 0, 1, 1, torch.float32, 1)
    except Untranslatable as error:
        return str(error)
    return ""


def _merged(programs: Iterable[Program]) -> tuple[list[Line], list[Name]]:
    """The lines of all programs, each computation once, and the results."""
    known: dict[Any, Name] = {}
    lines: list[Line] = []
    results = []
    for program in programs:
        names: dict[Any, Name] = {}
        for line in program.lines:
            arguments = tuple(names.get(x, x) for x in line.arguments)
            options = tuple((key, names.get(x, x)) for key, x in line.options)
            key = line.dtype, line.op, *map(repr, (arguments, options))
            if key not in known:
                known[key] = Name(f"t{len(lines)}")
                lines.append(Line(known[key], line.dtype, line.op, arguments, options))
            names[line.name] = known[key]
        results.append(names[program.result])
    return lines, results


class _RowWriter(Writer):
    """The statements of a program that reads rows. All its indices are inside of the row."""

    NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

    def __init__(self, program: Program, is_padded: bool) -> None:
        missing = [line.dtype for line in program.lines if line.dtype not in TYPES]
        if missing:
            raise Untranslatable(str(missing[0]))
        super().__init__(program, is_branching=False)
        self._is_padded = is_padded

    def tile(self, name: Name, dtype: torch.dtype) -> str:
        """A result in `dtype`; 0 in the padding of the row, where q has zeros, too."""
        x = self._as(name, torch.float32)
        found = f"tl.where(inside, {x}, 0.0)" if self._is_padded else x
        return f"({found}).to({TYPES[dtype]})"

    def _read(self, line: Line) -> list[str]:
        _, (size,), index = line.arguments
        number = self._constants.get(index, index)
        if not isinstance(number, Name):
            read = f"tl.load({INTEGERS}_ptr + {number % size})"
        else:
            mask = ", mask=inside, other=0" if self._is_padded else ""
            read = f"tl.load({INTEGERS}_ptr + {self._as(number, torch.int32)}{mask})"
        return [f"{line.name} = {read}"]

    def _view_(self, line: Line) -> str:
        """The bits of a number as another dtype of the same size."""
        return f"{self._plain(line.arguments[0])}.to({TYPES[line.dtype]}, bitcast=True)"
