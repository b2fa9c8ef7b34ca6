"""Write how the rows of a cache format are unpacked as the source of Triton functions.

Pure Python. `cache.load_packed_rows` calls these functions. What makes them fast:

- Where words of two bytes hold two or four neighbouring elements, one function makes a tile of each
  of them. So threads load words side by side, and tensor cores can read them transposed.
- A factor that a whole row shares, such as a scale for each token, is not multiplied to elements
  but returned: it is one of a column of scores, and of weights.
- `lanes` converts codes of a few bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...gpu.score_source import TYPES, Untranslatable, Writer, module_of
from ...lru import memoised
from ...score_mod.program import ELEMENT, INTEGERS, Line, Name, Program, parsed
from ...score_mod.rows import BLOCKS, blocked, is_within, specialised, split_scale, steps
from .lanes import Bits, with_lanes


@memoised(256)
def unpack_source(
    text: str, elements: range, pair: int, dtype: torch.dtype, padded: int, alignment: int,
    has_lanes: bool, is_scaled: bool,
) -> str:  # fmt: skip
    """The source of a module with the function ``score`` of the index ``d`` (1, padded), whether it
    is ``inside`` of the row, and pointers to rows (BLOCK, 1), which are at multiples of `alignment`
    bytes.

    It returns `pair` tiles (BLOCK, padded) in `dtype`, each of every such one of the `elements`,
    and, if `is_scaled` and they have one, the common factor of each row in float32 (BLOCK, 1).

    Args:
        has_lanes: the function may contain PTX.

    Raises:
        Untranslatable: the kernels do not have an operation or a dtype.
    """
    count = len(elements)
    program, scale = specialised(parsed(text), elements, "w"), None
    if is_scaled:
        first, common = split_scale(program, count)
        limits = torch.finfo(dtype)
        # Without the factor, an element may be outside of float16's range.
        if dtype != torch.float16 or is_within(first, count, limits.tiny, limits.max):
            program, scale = first, common
    lines, results = list[Line](), list[Name]()
    for n in range(pair):
        own = range(n, count, pair)
        part = specialised(program, own, f"x{n}_")
        part = with_lanes(part, len(own), dtype) if has_lanes and alignment % 2 == 0 else part
        part = blocked(part, len(own))
        lines += part.lines
        results.append(part.result)
    if scale is not None:
        lines += specialised(scale, range(count), "scale_").lines
    writer = _RowWriter(Program(tuple(lines), results[-1]), count // pair, padded, alignment)
    statements = writer.statements()
    tiles = [writer.tile(x, dtype) for x in results]
    if scale is not None:
        tiles.append(writer.scale(lines[-1].name))
    statements.append(f"return ({', '.join(tiles)},)")
    return module_of(statements, (ELEMENT, "inside", "integers_ptr"))


def untranslatable_unpack(text: str, head_dim: int) -> str:
    """What the kernels do not have of a format; "" if they have all."""
    try:
        unpack_source(text, range(head_dim), 1, torch.float32, head_dim, 1, False, True)
    except Untranslatable as error:
        return str(error)
    return ""


class _RowWriter(Writer):
    """The statements of a program that reads rows. All its indices are inside of the row."""

    NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

    def __init__(self, program: Program, count: int, padded: int, alignment: int) -> None:
        missing = [line.dtype for line in program.lines if line.dtype not in TYPES]
        if missing:
            raise Untranslatable(str(missing[0]))
        super().__init__(program, is_branching=False)
        self._count, self._padded, self._alignment = count, padded, alignment
        self._indices = steps(program, count)
        self._bytes: dict[Name, str] = {}  # of words, as int32
        # The index on which a line depends, of elements or blocks, and the mask of the index
        self._index = {ELEMENT: (ELEMENT, "inside")}
        for line in program.lines:
            found = [self._index[x] for x in line.names if x in self._index]
            if line.op == BLOCKS:
                inside = f"{line.name} * {line.arguments[0]} < {count}"
                self._index[line.name] = line.name, inside
            elif found:
                self._index[line.name] = found[0]

    def tile(self, name: Name, dtype: torch.dtype) -> str:
        """A result in `dtype`; 0 in the padding of the row, where q has zeros, too."""
        x = self._plain(name) if self._dtypes.get(name) == dtype else self._as(name, torch.float32)
        found = f"tl.where(inside, {x}, 0.0)" if self._padded > self._count else x
        return f"({found}).to({TYPES[dtype]})"

    def scale(self, name: Name) -> str:
        """A number of each row, (BLOCK, 1)."""
        found = self._as(name, torch.float32)
        is_tile = name not in self._constants
        return found if is_tile else f"tl.full({INTEGERS}_ptr.shape, {found}, tl.float32)"

    def _read(self, line: Line) -> list[str]:
        _, (size,), given = line.arguments
        number = self._constants.get(given, given)
        unit = math.gcd(self._alignment, size, 4)
        if not isinstance(number, Name):
            at = number % size
            if unit == 4:
                read = self._byte(line.name, self._word(at // 4, 32), at % 4)
            else:
                read = f"tl.load({INTEGERS}_ptr + {at})"
        else:
            index, inside = self._index[number]
            first, step = self._indices.get(number, (0, 0))
            if step == 2 and unit > 1:
                read = self._byte(line.name, self._word(first // 2, 16, index), first % 2)
            else:
                at = self._as(number, torch.int32)
                read = f"tl.load({INTEGERS}_ptr + {at}{self._mask(inside)})"
        return [f"{line.name} = {read}"]

    def _mask(self, inside: str) -> str:
        return f", mask={inside}, other=0" if self._padded > self._count else ""

    def _word(self, first: int, bits: int, index: Name | None = None) -> str:
        """A word of a row, or with the index of elements or blocks a word for each."""
        pointers = f"{INTEGERS}_ptr.to(tl.pointer_type(tl.uint{bits})) + {first}"
        more = "" if index is None else f" + {index}{self._mask(self._index[index][1])}"
        return f"tl.load({pointers}{more})"

    def _byte(self, name: Name, word: str, number: int) -> str:
        """A byte of words. Integers are made of the words: LLVM finds out which bytes they keep."""
        self._bytes[name] = f"({word}.to(tl.int32) >> {8 * number} & 255)"
        return f"{self._bytes[name]}.to(tl.uint8)"

    def _cast(self, x: Any, dtype: torch.dtype) -> str:
        return (
            self._bytes[x] if x in self._bytes and dtype == torch.int32 else super()._cast(x, dtype)
        )

    def _lanes_(self, line: Line) -> str:
        index, first, made, *scales = line.arguments
        word = self._word(first, 16, index)

        def moved(x: Bits) -> str:
            how = f"[{word}], dtype={TYPES[x.dtype]}, is_pure=True, pack=2"
            return f'tl.inline_asm_elementwise("{x.assembly}", "=r,r", {how})'

        found = moved(made.first)
        if isinstance(made.second, Bits):
            found += f" {made.operation} {moved(made.second)}"
        elif made.operation:  # a number by itself would be one of float32
            found += f" {made.operation} tl.full([], {made.second}, {TYPES[line.dtype]})"
        return " * ".join([f"({found})", *scales])

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
