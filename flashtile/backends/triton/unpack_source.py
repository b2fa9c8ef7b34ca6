"""Write how the rows of a cache format are unpacked as the source of Triton functions.

Pure Python. Where two elements share a byte, one function makes the tile of the even elements and
that of the odd ones, so that every byte is loaded once and neighbouring threads load neighbouring
bytes. `cache.load_keys` calls it.
"""

from __future__ import annotations

import torch

from ...gpu.score_source import TYPES, Untranslatable, Writer, module_of
from ...lru import memoised
from ...score_mod.program import ELEMENT, INTEGERS, Line, Name, Program, parsed
from ...score_mod.rows import BLOCKS, blocked, specialised


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
    lines, results = list[Line](), list[Name]()
    for n in range(pair):
        elements = range(first + n, first + head_dim, pair)
        program = blocked(specialised(parsed(text), elements, f"x{n}_"), len(elements))
        lines += program.lines
        results.append(program.result)
    writer = _RowWriter(Program(tuple(lines), results[-1]), head_dim // pair, padded)
    tiles = (writer.tile(x, dtype) for x in results)
    statements = writer.statements()
    return module_of(
        [*statements, f"return {', '.join(tiles)}"], (ELEMENT, "inside", "integers_ptr")
    )


def untranslatable_unpack(text: str, head_dim: int) -> str:
    """What the kernels do not have of a format; "" if they have all."""
    try:
        unpack_source(text, 0, head_dim, 1, torch.float32, head_dim)
    except Untranslatable as error:
        return str(error)
    return ""


class _RowWriter(Writer):
    """The statements of a program that reads rows. All its indices are inside of the row."""

    NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

    def __init__(self, program: Program, count: int, padded: int) -> None:
        missing = [line.dtype for line in program.lines if line.dtype not in TYPES]
        if missing:
            raise Untranslatable(str(missing[0]))
        super().__init__(program, is_branching=False)
        self._count, self._padded = count, padded
        self._inside = {ELEMENT: "inside"}  # the mask of what depends on an index of elements
        for line in program.lines:
            masks = [self._inside[x] for x in line.names if x in self._inside]
            if line.op == BLOCKS:
                self._inside[line.name] = f"{line.name} * {line.arguments[0]} < {count}"
            elif masks:
                self._inside[line.name] = masks[0]

    def tile(self, name: Name, dtype: torch.dtype) -> str:
        """A result in `dtype`; 0 in the padding of the row, where q has zeros, too."""
        x = self._as(name, torch.float32)
        found = f"tl.where(inside, {x}, 0.0)" if self._padded > self._count else x
        return f"({found}).to({TYPES[dtype]})"

    def _read(self, line: Line) -> list[str]:
        _, (size,), index = line.arguments
        number = self._constants.get(index, index)
        if not isinstance(number, Name):
            read = f"tl.load({INTEGERS}_ptr + {number % size})"
        else:
            is_masked = self._padded > self._count
            mask = f", mask={self._inside[number]}, other=0" if is_masked else ""
            read = f"tl.load({INTEGERS}_ptr + {self._as(number, torch.int32)}{mask})"
        return [f"{line.name} = {read}"]

    def _blocks_(self, line: Line) -> str:
        return f"tl.arange(0, {self._padded // line.arguments[0]})[None, :]"

    def _repeated_(self, line: Line) -> str:
        x, size = line.arguments
        # (BLOCK, blocks) -> (BLOCK, blocks, size) -> (BLOCK, padded)
        shape = f"{x}.shape[0], {self._padded // size}"
        wide = f"tl.broadcast_to({x}[:, :, None], [{shape}, {size}])"
        return f"tl.reshape({wide}, [{x}.shape[0], {self._padded}])"

    def _view_(self, line: Line) -> str:
        """The bits of a number as another dtype of the same size."""
        return f"{self._plain(line.arguments[0])}.to({TYPES[line.dtype]}, bitcast=True)"
